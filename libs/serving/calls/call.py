"""The call that the current task handles, as recorded by the interceptor."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from libs.errors import InvalidInput
from libs.serving.security.identity import ANONYMOUS, Identity, is_printable

REQUEST_ID_HEADER: Final = "x-request-id"
TENANT_HEADER: Final = "x-shoal-tenant"
ANSWER_HEADER: Final = "x-shoal-max-answer-bytes"
"""Metadata key of the maximum bytes of a message that the client accepts, which gRPC does not send;
-1: any size.
"""

DEFAULT_ANSWER_BYTES: Final = 4 << 20
"""Assumed for clients that do not send ANSWER_HEADER: gRPC's default of
`grpc.max_receive_message_length` in all languages.
"""

_ANY_BYTES: Final = 1 << 62
_MAX_DIGITS: Final = 18


@dataclass(frozen=True, slots=True)
class Call:
    """One authenticated RPC."""

    method: str
    """The full method name, `/package.Service/Method`."""
    request_id: str
    tenant: str
    """The authorised tenant, not just the requested one."""
    body: bytes
    """The serialised request as received."""
    identity: Identity = ANONYMOUS
    answer_bytes: int = DEFAULT_ANSWER_BYTES
    """Maximum bytes of a message that the caller accepts."""


_CURRENT: ContextVar[Call] = ContextVar("shoal_call")


def current_call() -> Call:
    """Return the call that this task handles. Raises LookupError outside of handlers that run
    behind the interceptor.
    """
    return _CURRENT.get()


def enter_call(call: Call) -> None:
    """Set the current call. gRPC runs each RPC in a separate task, so no reset is needed."""
    _CURRENT.set(call)


def first_values(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Return the first value of each metadata key as text."""
    headers: dict[str, str] = {}
    for key, value in metadata:
        headers.setdefault(key, str(value))
    return headers


def new_request_id() -> str:
    return secrets.token_hex(16)


def checked_id(value: str, default: str, name: str) -> str:
    """Return `value`, or `default` if empty. Raises InvalidInput unless it is 1..128 printable
    ASCII characters without spaces.
    """
    if not value:
        return default
    if not is_printable(value):
        raise InvalidInput(
            f"metadata {name} must be 1..128 printable ASCII characters without spaces", field=name
        )
    return value


def parse_answer_bytes(value: str) -> int:
    """Parse the value of ANSWER_HEADER: the maximum bytes of a message that a client accepts.
    Raises InvalidInput if it is not a number.
    """
    if not value:
        return DEFAULT_ANSWER_BYTES
    if value == "-1":
        return _ANY_BYTES
    if not (value.isascii() and value.isdigit()) or len(value) > _MAX_DIGITS:
        raise InvalidInput(
            f"metadata {ANSWER_HEADER} must be a number of bytes, or -1 for any",
            field=ANSWER_HEADER,
        )
    return int(value)
