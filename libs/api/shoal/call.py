"""One call on its way: split into requests, each sent with its deadline, retried where that is right, and merged again.

Written once for both clients, over the seam of `shoal.transport`.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from shoal.addresses import Addresses
from shoal.errors import CannotConnect, DeadlinePassed, Draining, InvalidInput, ShoalError
from shoal.parts import spans
from shoal.results import Skipped
from shoal.retry import Attempts, RetryBudgets, RetryPolicy
from shoal.traces import CallSpan, calling
from shoal.transport import Metadata, Method, Transport, Wire

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A", contravariant=True)
B = TypeVar("B", covariant=True)
Progress = Callable[[int, int], None]
# One try of a request: over this wire, to this address, within so many seconds.
Send = Callable[[Wire, str, float, Metadata], Awaitable[T]]

MOST_REPEATED: Final = 192 << 20
"""Bytes: routers let a request make a worker read 256 MiB, of which its items are 64 MiB at most."""
MOST_ANSWERED: Final = 8 << 20
"""Bytes: routers let an answer repeat so much of the labels of its request, each with its score."""


class Sink(Protocol[A, B]):
    """Takes the replies to one try of a request, in order: one, or those of a stream."""

    def take(self, reply: A) -> None: ...

    def finish(self) -> B:
        """The answer, after the last of them."""


class One(Generic[R, T]):
    """Of a request with one reply."""

    def __init__(self, decode: Callable[[R], T]) -> None:
        self._decode = decode
        self._answers: list[T] = []

    def take(self, reply: R) -> None:
        self._answers.append(self._decode(reply))

    def finish(self) -> T:
        return self._answers[-1]


@dataclass(frozen=True, slots=True)
class Plan(Generic[Q, R, T]):
    """A verb with its arguments, ready to be sent in parts of `lengths` (characters of each item of the list called `name`).

    `build`: the request for the items at these places of the list; `sink`: what takes their answer. `merge`: the answers of the
    parts in order; there may be none. `left_out` None: an invalid item fails the call; else those that are known to be invalid
    already, and others will be left out, too: `spread` makes the answer to the kept ones one to all. `repeated`: bytes that a model
    may read with each item, the query and labels; `answered`: those that its answer may repeat for each item, labels with their
    scores. `stream`: the method for an answer that is expected to be large, as `is_large` says of items of such lengths; a router
    without it is asked by `method`.
    """

    method: Method[Q, R]
    name: str
    lengths: Sequence[int]
    build: Callable[[Sequence[int]], Q]
    sink: Callable[[Sequence[int]], Sink[R, T]]
    merge: Callable[[Sequence[T]], T]
    spread: Callable[[T, Sequence[int], Sequence[Skipped]], T]
    left_out: Sequence[Skipped] | None = None
    repeated: int = 0
    answered: int = 0
    stream: Method[Q, R] | None = None
    is_large: Callable[[Sequence[int]], bool] = lambda lengths: False

    @property
    def most_items(self) -> int:
        """Of one request, so that a router lets it in."""
        return max(1, min(MOST_REPEATED // max(1, self.repeated), MOST_ANSWERED // max(1, self.answered)))

    def places(self) -> Sequence[int]:
        """Of the items to send."""
        without = {skipped.index for skipped in self.left_out or ()}
        every = range(len(self.lengths))
        return [index for index in every if index not in without] if without else every


@dataclass(frozen=True, slots=True)
class _Answered(Generic[T]):
    """What became of some items: answers to those at `kept`, in order."""

    answers: Sequence[T] = ()
    kept: Sequence[int] = ()
    skipped: Sequence[Skipped] = ()


def _together(parts: Sequence[_Answered[T]]) -> _Answered[T]:
    return _Answered(
        [answer for part in parts for answer in part.answers],
        [index for part in parts for index in part.kept],
        [skipped for part in parts for skipped in part.skipped],
    )


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
        places = plan.places()
        lengths = [plan.lengths[index] for index in places]
        most_items = min(self._limits.items, plan.most_items)
        found = spans(lengths, most_items=most_items, most_characters=self._limits.characters)
        parts = [places[span.start : span.stop] for span in found]
        total = len(plan.lengths)
        done = total - len(places)

        def advance(index: int) -> None:
            nonlocal done
            done += len(parts[index])
            if on_progress is not None:
                on_progress(done, total)

        ask = self._part if plan.left_out is None else self._part_of_valid
        if len(parts) == 1:
            answered = [await ask(plan, timeout, parts[0], self._transport)]
            advance(0)
        else:
            jobs = [partial(ask, plan, timeout, part) for part in parts]
            answered = await self._transport.gather(jobs, limit=self._limits.concurrency, on_done=advance) if jobs else []
        return _whole(plan, _together(answered))

    async def ask(self, method: Method[Q, R], request: Q, *, timeout: float | None = None) -> R:
        """The reply to one request. Raises ShoalError."""

        async def send(wire: Wire, address: str, timeout: float, metadata: Metadata) -> R:
            return await wire.send(address, method, request, timeout=timeout, metadata=metadata)

        return await self._send(self._transport, method.path, send, timeout)

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

    async def _part(self, plan: Plan[Q, R, T], timeout: float | None, part: Sequence[int], wire: Wire) -> _Answered[T]:
        try:
            stream = plan.stream if plan.is_large([plan.lengths[index] for index in part]) else None
            send = partial(_ask, plan, part, plan.build(part), stream)
            answer = await self._send(wire, (stream or plan.method).path, send, timeout)
        except ShoalError as error:
            error.move(plan.name, part)
            raise
        return _Answered([answer], part)

    async def _part_of_valid(self, plan: Plan[Q, R, T], timeout: float | None, part: Sequence[int], wire: Wire) -> _Answered[T]:
        """Leaves out an item that is refused and sends the others again, in two halves.

        So n items, of which k are refused one after another, are at most 2 k + 1 requests, and no item is sent more than
        log2(n) + 1 times: what is sent again gets shorter, instead of being the whole part each time.
        """
        if not part:
            return _Answered()
        try:
            return await self._part(plan, timeout, part, wire)
        except InvalidInput as error:
            index = error.index(plan.name)
            if index is None or index not in part:
                raise
            refused: _Answered[T] = _Answered(skipped=[Skipped(index, error.reason, error.message)])
        rest = [other for other in part if other != index]
        halves = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        return _together([refused, *[await self._part_of_valid(plan, timeout, half, wire) for half in halves]])

    async def _send(self, wire: Wire, path: str, send: Send[T], timeout: float | None) -> T:
        request_id = uuid.uuid4().hex  # The same over all tries: the mesh then knows the work again.
        with calling(path, request_id) as span:
            metadata = (("x-request-id", request_id), *span.metadata, *self._metadata())
            return await self._try(wire, send, timeout, metadata, span)

    async def _try(self, wire: Wire, send: Send[T], timeout: float | None, metadata: Metadata, span: CallSpan) -> T:
        deadline = time.monotonic() + _positive(self._limits.timeout if timeout is None else timeout)
        attempts = Attempts(self._policy, deadline=deadline, addresses=len(self._addresses))
        last: ShoalError | None = None
        while True:
            address = self._addresses.current
            remaining = max(0.0, attempts.remaining(time.monotonic()))
            try:
                answer = await send(wire, address, remaining, metadata)
            except ShoalError as error:
                error.request_id = metadata[0][1]
                span.failed(error, address)
                last = _with_history(error, last)
                await wire.sleep(self._delay(last, address, attempts))
            else:
                self._budgets.succeeded()
                return answer

    def _delay(self, error: ShoalError, address: str, attempts: Attempts) -> float:
        """Seconds until the next try; raises `error` if there is none."""
        if isinstance(error, (CannotConnect, Draining)):
            self._addresses.failed(address)
        now = time.monotonic()
        delay = attempts.delay(error, jitter=random.random())  # noqa: S311
        if delay is None:
            raise error
        budget = self._budgets.of(error)
        if budget is not None:
            delay = max(delay, budget.wait(now))
        if delay >= attempts.remaining(now):
            raise error  # What went wrong says more than a deadline that would pass while waiting.
        if budget is not None:
            budget.take()
        return delay


async def _ask(
    plan: Plan[Q, R, T],
    part: Sequence[int],
    request: Q,
    stream: Method[Q, R] | None,
    wire: Wire,
    address: str,
    timeout: float,
    metadata: Metadata,
) -> T:
    """One try: what came of a stream that broke is dropped with it."""
    sink = plan.sink(part)
    try:
        if stream is not None:
            await wire.receive(address, stream, request, sink.take, timeout=timeout, metadata=metadata)
            return sink.finish()
    except ShoalError as error:
        if error.code != "UNIMPLEMENTED":  # as a router says that is older than the method
            raise
    sink.take(await wire.send(address, plan.method, request, timeout=timeout, metadata=metadata))
    return sink.finish()


def _whole(plan: Plan[Q, R, T], answered: _Answered[T]) -> T:
    merged = plan.merge(answered.answers)
    skipped = sorted((*(plan.left_out or ()), *answered.skipped), key=lambda one: one.index)
    return plan.spread(merged, answered.kept, skipped) if skipped else merged


def _with_history(error: ShoalError, before: ShoalError | None) -> ShoalError:
    """A deadline that passed in a later try tells less than why there was a later try."""
    if isinstance(error, DeadlinePassed) and before is not None:
        error.message = f"{error.message}; an earlier try failed: {before.message}"
        error.earlier = before
    return error


def _positive(timeout: float) -> float:
    if not timeout > 0:
        raise ValueError(f"the timeout must be above 0 seconds, not {timeout}")
    return timeout
