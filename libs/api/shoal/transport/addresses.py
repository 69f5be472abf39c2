"""The addresses of routers, and which of them the next request goes to. Pure.

Any router answers any request. A client stays with one until it fails and then moves to the next,
so that it waits for a dead router once.
"""

from __future__ import annotations

import re

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_PORT = 50051
_LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?|unix(-abstract)?:.*")


def parse(text: str) -> tuple[str, ...]:
    """Return the addresses of a comma-separated list. A bare host gets the default port; gRPC
    target names (`dns:///…`) are kept.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(
            f"the address {text!r} has an empty part; use host:port, or host:port,host:port"
        )
    for part in parts:
        _refuse_url(part)
    return tuple(
        f"{part}:{DEFAULT_PORT}" if re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", part) else part
        for part in parts
    )


def _refuse_url(part: str) -> None:
    """Raise ValueError for a URL: gRPC would read http://host as a host with the name http."""
    found = re.match(r"(https?|grpcs?)://([^/]*)", part, re.IGNORECASE)
    if found:
        tls = " with TLS (--tls, or tls=True)" if found[1].lower() in ("https", "grpcs") else ""
        raise ValueError(
            f"{part!r} is a URL; routers speak gRPC: use {found[2] or 'host:port'}{tls}"
        )


def is_local(address: str) -> bool:
    """Return True for a loopback address or a Unix socket of this machine."""
    return _LOOPBACK.fullmatch(address) is not None


class RouterAddresses:
    """The routers of one client, and the one in use. Threads may share an object: a lost update
    costs one more failed try.
    """

    def __init__(self, addresses: tuple[str, ...], *, start: int = 0) -> None:
        self._addresses = addresses
        self._current = start % len(addresses)

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def current(self) -> str:
        return self._addresses[self._current]

    def failed(self, address: str) -> None:
        """Move on to the next address, unless another request has already moved on from
        `address`.
        """
        if self.current == address:
            self._current = (self._current + 1) % len(self._addresses)
