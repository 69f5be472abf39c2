"""One call on its way: split into requests, each sent with its deadline, retried where that is right, and merged again.

Written once for both clients, over the seam of `shoal.transport`.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

from shoal.addresses import Addresses
from shoal.errors import CannotConnect, DeadlinePassed, Draining, ShoalError
from shoal.parts import spans
from shoal.retry import Attempts, RetryBudgets, RetryPolicy
from shoal.traces import CallSpan, calling
from shoal.transport import Metadata, Method, Transport, Wire

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")
Progress = Callable[[int, int], None]

MOST_REPEATED: Final = 192 << 20
"""Bytes: routers let a request make a worker read 256 MiB, of which its items are 64 MiB at most."""
MOST_ANSWERED: Final = 32 << 20
"""Bytes: routers let an answer repeat so much of the labels of its request."""


@dataclass(frozen=True, slots=True)
class Plan(Generic[Q, R, T]):
    """A verb with its arguments, ready to be sent in parts of `lengths` (characters of each item of the list called `name`).
    `repeated`: bytes that a model may read with each item, the query and labels; `answered`: those that its answer may repeat for
    each item, labels."""

    method: Method[Q, R]
    name: str
    lengths: Sequence[int]
    build: Callable[[range], Q]
    decode: Callable[[R], T]
    merge: Callable[[Sequence[T]], T]
    repeated: int = 0
    answered: int = 0

    @property
    def most_items(self) -> int:
        """Of one request, so that a router lets it in."""
        return max(1, min(MOST_REPEATED // max(1, self.repeated), MOST_ANSWERED // max(1, self.answered)))


@dataclass(frozen=True, slots=True)
class Limits:
    """`timeout` seconds a request; a call is split into requests of at most `items` and about `characters`, `concurrency` of them
    in flight."""

    timeout: float
    concurrency: int
    items: int
    characters: int

    def __post_init__(self) -> None:
        if not self.timeout > 0 or min(self.concurrency, self.items, self.characters) < 1:
            raise ValueError(f"timeout, concurrency, request_items and request_characters must be positive, not {self}")


class Caller:
    """Sends requests to whichever router answers."""

    def __init__(
        self,
        transport: Transport,
        addresses: Addresses,
        *,
        metadata: Callable[[], Metadata],
        limits: Limits,
        policy: RetryPolicy,
    ) -> None:
        self._transport, self._addresses, self._metadata = transport, addresses, metadata
        self._limits, self._policy, self._budgets = limits, policy, RetryBudgets()

    async def run(self, plan: Plan[Q, R, T], *, timeout: float | None = None, on_progress: Progress | None = None) -> T:
        """The answer to a plan. Raises ShoalError."""
        most_items = min(self._limits.items, plan.most_items)
        parts = spans(plan.lengths, most_items=most_items, most_characters=self._limits.characters)
        done, total = 0, len(plan.lengths)

        def advance(index: int) -> None:
            nonlocal done
            done += len(parts[index])
            if on_progress is not None:
                on_progress(done, total)

        if len(parts) == 1:
            result = await self._part(plan, timeout, parts[0], self._transport)
            advance(0)
            return result
        jobs = [partial(self._part, plan, timeout, part) for part in parts]
        return plan.merge(await self._transport.gather(jobs, limit=self._limits.concurrency, on_done=advance))

    async def ask(self, method: Method[Q, R], request: Q, *, timeout: float | None = None) -> R:
        """The reply to one request. Raises ShoalError."""
        return await self._send(self._transport, method, request, timeout)

    @contextmanager
    def following(self) -> Iterator[tuple[str, Metadata]]:
        """The router for a request with many replies, and what goes with it. If it is lost, the next such request asks another."""
        address, request_id = self._addresses.current, uuid.uuid4().hex
        try:
            yield address, (("x-request-id", request_id), *self._metadata())
        except ShoalError as error:
            error.request_id = request_id
            if isinstance(error, (CannotConnect, Draining)):
                self._addresses.failed(address)
            raise

    async def _part(self, plan: Plan[Q, R, T], timeout: float | None, part: range, wire: Wire) -> T:
        try:
            return plan.decode(await self._send(wire, plan.method, plan.build(part), timeout))
        except ShoalError as error:
            error.move(plan.name, part.start)
            raise

    async def _send(self, wire: Wire, method: Method[Q, R], request: Q, timeout: float | None) -> R:
        request_id = uuid.uuid4().hex  # The same over all tries: the mesh then knows the work again.
        with calling(method.path, request_id) as span:
            metadata = (("x-request-id", request_id), *span.metadata, *self._metadata())
            return await self._try(wire, method, request, timeout, metadata, span)

    async def _try(
        self, wire: Wire, method: Method[Q, R], request: Q, timeout: float | None, metadata: Metadata, span: CallSpan
    ) -> R:
        deadline = time.monotonic() + _positive(self._limits.timeout if timeout is None else timeout)
        attempts = Attempts(self._policy, deadline=deadline, addresses=len(self._addresses))
        last: ShoalError | None = None
        while True:
            address = self._addresses.current
            remaining = max(0.0, attempts.remaining(time.monotonic()))
            try:
                reply = await wire.send(address, method, request, timeout=remaining, metadata=metadata)
            except ShoalError as error:
                error.request_id = metadata[0][1]
                span.failed(error, address)
                last = _with_history(error, last)
                await wire.sleep(self._delay(last, address, attempts))
            else:
                self._budgets.succeeded()
                return reply

    def _delay(self, error: ShoalError, address: str, attempts: Attempts) -> float:
        """Seconds until the next try; raises `error` if there is none."""
        if isinstance(error, (CannotConnect, Draining)):
            self._addresses.failed(address)
        now = time.monotonic()
        delay = attempts.delay(error, jitter=random.random())  # noqa: S311
        if delay is None:
            raise error
        budget = self._budgets.of(error)
        delay = max(delay, budget.wait(now))
        if delay >= attempts.remaining(now):
            raise error  # What went wrong says more than a deadline that would pass while waiting.
        budget.take()
        return delay


def _with_history(error: ShoalError, before: ShoalError | None) -> ShoalError:
    """A deadline that passed in a later try tells less than why there was a later try."""
    if isinstance(error, DeadlinePassed) and before is not None:
        error.message = f"{error.message}; an earlier try failed: {before.message}"
    return error


def _positive(timeout: float) -> float:
    if not timeout > 0:
        raise ValueError(f"the timeout must be above 0 seconds, not {timeout}")
    return timeout
