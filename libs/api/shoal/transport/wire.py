"""The interface between the logic of a call (`shoal.calls`) and the two ways of sending it
(`blocking.py`, `aio.py`).

The client's logic is written once, as coroutines over these protocols. Over grpc.aio they are
awaited. Over blocking gRPC nothing in them ever suspends, and `blocking.finish` runs them to
completion in the caller's thread, without an event loop or another thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from shoal.transport.methods import Method

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]


class Wire(Protocol):
    """Sends requests and waits between them."""

    async def send(
        self, address: str, method: Method[Q, R], request: Q, *, timeout: float, metadata: Metadata
    ) -> R:
        """Return the reply. Raises ShoalError."""

    async def receive(
        self,
        address: str,
        method: Method[Q, R],
        request: Q,
        take: Callable[[R], None],
        *,
        timeout: float,
        metadata: Metadata,
    ) -> None:
        """Pass each reply of a server-streaming method to `take`, in order. Raises ShoalError."""

    async def sleep(self, seconds: float) -> None: ...


class Transport(Wire, Protocol):
    """A Wire with its own channels to routers, opened on first use."""

    async def receive(
        self,
        address: str,
        method: Method[Q, R],
        request: Q,
        take: Callable[[R], None],
        *,
        timeout: float,
        metadata: Metadata,
    ) -> None:
        async with aclosing(
            self.stream(address, method, request, timeout=timeout, metadata=metadata)
        ) as replies:
            async for reply in replies:
                take(reply)

    def stream(
        self,
        address: str,
        method: Method[Q, R],
        request: Q,
        *,
        timeout: float | None = None,
        metadata: Metadata,
    ) -> AsyncGenerator[R]:
        """Yield the replies of a server-streaming method; closing the generator cancels the call.
        Raises ShoalError.
        """

    async def gather(
        self,
        jobs: Sequence[Callable[[Wire], Awaitable[T]]],
        *,
        limit: int,
        on_done: Callable[[int], None],
    ) -> list[T]:
        """Return the results of `jobs` in their order. At most `limit` run at a time;
        `on_done(index)` is called after each, in the caller's thread. The first failure cancels the
        other jobs and is raised.
        """
