"""Requests that the edge serves itself, such as those for files and batches, instead of passing
them to the mesh.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.transport.wire import Metadata

from services.edge.intake.reading import BodyIntake, Payer, Receive
from services.edge.messages.base import Answer, Headers

UNBUFFERED: Final[Headers] = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Headers that keep proxies from buffering a stream (the second one is for nginx)."""


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """An answer that is sent while it is produced. Compression would delay its pieces, so it is not
    compressed.
    """

    pieces: AsyncGenerator[bytes]
    media_type: bytes
    status: int = 200
    headers: Headers = UNBUFFERED


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request before its body is read.

    Attributes:
        parameter: The text that the parameter of the route's path matches.
        query: The query string, undecoded.
        metadata: The metadata of a router call for this caller, without a trace.
        receive: ASGI's function that returns the next part of the body.
        intake: Reads the body within the memory limit.
        payer: The account to which the memory of the request is charged.
        is_whole: Whether the whole body has arrived.
    """

    parameter: str
    query: str
    headers: Mapping[str, str]
    metadata: Metadata
    receive: Receive
    intake: BodyIntake
    payer: Payer
    is_whole: bool


Serve = Callable[[ServedRequest], Awaitable[Answer | StreamedAnswer]]
"""Serves a request. Raises HttpError."""


@dataclass(frozen=True, slots=True)
class Executed:
    """The answer to a request that the edge made for a client, whatever its status.

    Attributes:
        reason: The error's reason; empty for an answer.
        retry_after: Seconds; None if a retry would fail too.
        truncated_inputs: Texts, queries and labels of which tokens were cut.
    """

    status: int
    body: bytes
    reason: str = ""
    message: str = ""
    retry_after: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    truncated_inputs: int = 0
