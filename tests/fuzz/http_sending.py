"""Send the recipes of `http_products.py` to an edge, and measure its response time."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Final

import grpc

from tests.fuzz.http_products import HttpRecipe

_SOCKET_SECONDS: Final = 5.0
_PROBE_SECONDS: Final = 0.02
_SENDERS: Final = 8
_LIVEZ: Final = b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def send(recipe: HttpRecipe, address: str, tei_address: str, token: str) -> list[int]:
    """Send all connections of a recipe; return the HTTP or gRPC statuses received (0 for none)."""
    one = (
        (lambda: _call(recipe, tei_address, token))
        if recipe.is_grpc
        else (lambda: _post(recipe, address, token))
    )
    with ThreadPoolExecutor(_SENDERS) as senders:
        return list(senders.map(lambda _: one(), range(recipe.connections)))


def _post(recipe: HttpRecipe, address: str, token: str) -> int:
    host, _, port = address.rpartition(":")
    data = recipe.request(token)
    with (
        suppress(OSError),
        socket.create_connection((host, int(port)), timeout=_SOCKET_SECONDS) as connection,
    ):
        with suppress(OSError):  # an edge that refuses closes before it has read everything
            connection.sendall(data[:-1] if recipe.ending == "unfinished" else data)
        if recipe.ending != "closed":
            connection.settimeout(1.0 if recipe.ending == "unfinished" else _SOCKET_SECONDS)
            answer = connection.recv(1 << 16)
            return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
    return 0


def _call(recipe: HttpRecipe, address: str, token: str) -> int:
    metadata = (
        ()
        if recipe.credential == "none"
        else (("authorization", f"Bearer {token if recipe.credential == 'valid' else 'no'}"),)
    )
    limits = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, limits) as channel:
        call = channel.unary_unary(recipe.path, bytes, bytes).future(
            recipe.content(), timeout=_SOCKET_SECONDS, metadata=metadata
        )
        if recipe.ending == "closed":
            call.cancel()
        return int(call.code().value[0])


class Liveness:
    """Requests `/livez` repeatedly; `worst_seconds` is the longest response time within the
    context.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._place = host, int(port)
        # The state: whether to continue, the longest wait, and the start of the current one (0 for
        # none).
        self._ends = threading.Event()
        self._worst = 0.0
        self._begun = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def worst_seconds(self) -> float:
        begun = self._begun
        return max(self._worst, time.monotonic() - begun if begun else 0.0)

    def __enter__(self) -> Liveness:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.set()
        self._thread.join(2 * _SOCKET_SECONDS)

    def _run(self) -> None:
        with (
            suppress(OSError),
            socket.create_connection(self._place, timeout=10 * _SOCKET_SECONDS) as connection,
        ):
            while not self._ends.wait(_PROBE_SECONDS):
                self._begun = time.monotonic()
                connection.sendall(_LIVEZ)
                if not connection.recv(1 << 12):
                    return
                self._worst, self._begun = max(self._worst, time.monotonic() - self._begun), 0.0
