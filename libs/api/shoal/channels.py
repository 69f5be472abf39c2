"""The channels of one caller, a current one for each router: opened on first use, and anew when certificates have changed.

Decides only; whoever calls it opens and closes. The client's two transports and the worker's link differ in the kind of channel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc

from shoal.transport import Method
from shoal.trust import Pem, Tls

C = TypeVar("C")


@dataclass(slots=True, eq=False)
class Line(Generic[C]):
    """A channel and the calls that it carries."""

    channel: C
    calls: int = 0
    _methods: dict[str, Any] = field(default_factory=dict)

    def method(self, method: Method[Any, Any]) -> Any:
        """gRPC's callable for a unary method; its message types are those of the Method."""
        found = self._methods.get(method.path)
        if found is None:
            channel: Any = self.channel
            found = self._methods[method.path] = channel.unary_unary(
                method.path, request_serializer=method.serialize, response_deserializer=method.parse
            )
        return found

    def stream(self, method: Method[Any, Any]) -> Any:
        """The same for a method with many replies."""
        channel: Any = self.channel
        return channel.unary_stream(method.path, request_serializer=method.serialize, response_deserializer=method.parse)


class Channels(Generic[C]):
    """`open` makes a channel to an address, with credentials or (None) without TLS. Threads may share one.

    Each call is between a `take` and a `give_back`; the latter answers channels that nobody uses any more, for the caller to close.
    """

    def __init__(self, open: Callable[[str, grpc.ChannelCredentials | None], C], tls: Tls | None) -> None:
        self._open, self._tls = open, tls
        self._watched = tls.watched() if tls is not None else None
        self._lock = threading.Lock()
        # The state: what channels are opened with; the current ones by address, earlier ones that still have calls, those to close.
        self._pem: Pem | None = None
        self._lines: dict[str, Line[C]] = {}
        self._retired: set[Line[C]] = set()
        self._unused: list[C] = []
        self._closed = False

    def take(self, address: str) -> Line[C]:
        """The line to use for one call to `address`. RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            self._renew()
            line = self._lines.get(address)
            if line is None:
                line = self._lines[address] = Line(self._open(address, self._credentials()))
            line.calls += 1
            return line

    def give_back(self, line: Line[C]) -> list[C]:
        """After a call."""
        with self._lock:
            line.calls -= 1
            if line.calls == 0 and line in self._retired:
                self._retired.discard(line)
                self._unused.append(line.channel)
            unused, self._unused = self._unused, []
            return unused

    def lost(self, line: Line[C]) -> None:
        """The next call to the line's address gets another line: this one cannot connect."""
        with self._lock:
            for address, current in self._lines.items():
                if current is line:
                    del self._lines[address]
                    self._retire(line)
                    return

    def close(self) -> list[C]:
        """Every channel, for the caller to close; calls in flight end by that."""
        with self._lock:
            self._closed = True
            channels = [*self._unused, *(line.channel for line in (*self._lines.values(), *self._retired))]
            self._unused, self._lines, self._retired = [], {}, set()
            return channels

    def _renew(self) -> None:
        """Retires all lines when the certificates have changed: their calls in flight end there, new ones find new lines."""
        pem = self._watched.get() if self._watched is not None else None
        if pem == self._pem:
            return
        self._pem = pem
        for line in self._lines.values():
            self._retire(line)
        self._lines = {}

    def _retire(self, line: Line[C]) -> None:
        if line.calls:
            self._retired.add(line)
        else:
            self._unused.append(line.channel)

    def _credentials(self) -> grpc.ChannelCredentials | None:
        if self._pem is None:
            return None
        return grpc.ssl_channel_credentials(*self._pem)
