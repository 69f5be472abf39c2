"""Executes a call: splits its plan into requests, sends each with its deadline and retries, and
merges their results.

Written once for both clients, over the protocols of `shoal.transport.wire`.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from shoal.calls.retry import Attempts, RetryBudgets, RetryPolicy
from shoal.calls.traces import CallSpan, call_span
from shoal.errors import CannotConnect, DeadlinePassed, Draining, InvalidInput, ShoalError
from shoal.options import CallOptions
from shoal.requests.plan import RequestPlan, spans
from shoal.results import Skipped
from shoal.transport.addresses import RouterAddresses
from shoal.transport.channels import ANY_ANSWER
from shoal.transport.methods import Method
from shoal.transport.wire import Metadata, Transport, Wire

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")
# Try a request once: over this wire, at this address, within this many seconds.
Send = Callable[[Wire, str, float, Metadata], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class _Partial(Generic[T]):
    """The results of some requests of a call: those for the items at `kept`, in order, and the
    items that were refused.
    """

    results: Sequence[T] = ()
    kept: Sequence[int] = ()
    skipped: Sequence[Skipped] = ()


def _concatenated(parts: Sequence[_Partial[T]]) -> _Partial[T]:
    return _Partial(
        [result for part in parts for result in part.results],
        [index for part in parts for index in part.kept],
        [skipped for part in parts for skipped in part.skipped],
    )


@dataclass(frozen=True, slots=True)
class CallLimits:
    """`timeout`: seconds for one request, retries included. A call is split into requests of at
    most `items` items and about `characters` characters, `concurrency` of them in flight. Raises
    ValueError unless all are positive."""

    timeout: float
    concurrency: int
    items: int
    characters: int

    def __post_init__(self) -> None:
        if not self.timeout > 0 or min(self.concurrency, self.items, self.characters) < 1:
            raise ValueError(
                "timeout, concurrency, request_items and request_characters must be positive, "
                f"not {self}"
            )


class Caller:
    """Sends the requests of one client, to whichever router answers. `metadata` returns the headers
    of every request.
    """

    def __init__(
        self,
        transport: Transport,
        addresses: RouterAddresses,
        *,
        metadata: Callable[[], Metadata],
        limits: CallLimits,
        policy: RetryPolicy,
    ) -> None:
        self._transport, self._addresses, self._metadata = transport, addresses, metadata
        self._limits, self._policy, self._budgets = limits, policy, RetryBudgets()

    async def run(self, plan: RequestPlan[Q, R, T], options: CallOptions) -> T:
        """Return the result of a plan. Raises ShoalError."""
        timeout, on_progress = options.get("timeout"), options.get("on_progress")
        places = plan.places()
        parts = self._split(plan, places)
        total = len(plan.lengths)
        done = total - len(places)

        def advance(index: int) -> None:
            nonlocal done
            done += len(parts[index])
            if on_progress is not None:
                on_progress(done, total)

        send = self._send_part if plan.invalid is None else self._send_valid
        if len(parts) == 1:
            sent = [await send(plan, timeout, parts[0], self._transport)]
            advance(0)
        else:
            jobs = [partial(send, plan, timeout, part) for part in parts]
            sent = (
                await self._transport.gather(jobs, limit=self._limits.concurrency, on_done=advance)
                if jobs
                else []
            )
        return _merged(plan, _concatenated(sent))

    async def unary(self, method: Method[Q, R], request: Q, *, timeout: float | None = None) -> R:
        """Return the reply to one request. Raises ShoalError."""

        async def send(wire: Wire, address: str, timeout: float, metadata: Metadata) -> R:
            return await wire.send(address, method, request, timeout=timeout, metadata=metadata)

        return await self._send(self._transport, method.path, send, timeout)

    async def stream(
        self,
        method: Method[Q, R],
        request: Q,
        take: Callable[[R], Iterable[T]],
        *,
        seconds: float | None = None,
    ) -> AsyncGenerator[T]:
        """Yield what `take` makes of each reply of a server-streaming method. The call is not
        retried. If the router is lost, the next stream asks another one. Raises ShoalError.

        Args:
            seconds: None for an endless stream.
        """
        with self._streaming() as (address, metadata):
            replies = self._transport.stream(
                address, method, request, timeout=seconds, metadata=metadata
            )
            async with aclosing(replies):
                async for reply in replies:
                    for part in take(reply):
                        yield part

    @contextmanager
    def _streaming(self) -> Iterator[tuple[str, Metadata]]:
        """Yield the router and the headers for one stream."""
        address, request_id = self._addresses.current, uuid.uuid4().hex
        try:
            yield address, (("x-request-id", request_id), *ANY_ANSWER, *self._metadata())
        except ShoalError as error:
            error.request_id = request_id
            if isinstance(error, (CannotConnect, Draining)):
                self._addresses.failed(address)
            raise

    def seconds(self, timeout: float | None) -> float:
        """Return the seconds for one request: the client's timeout where the call has none."""
        return _positive(self._limits.timeout if timeout is None else timeout)

    def _split(self, plan: RequestPlan[Q, R, T], places: Sequence[int]) -> list[Sequence[int]]:
        """Return the item indices of each request."""
        lengths = [plan.lengths[index] for index in places]
        max_items = min(self._limits.items, plan.max_items)
        found = spans(lengths, max_items=max_items, max_characters=self._limits.characters)
        return [places[span.start : span.stop] for span in found]

    async def _send_part(
        self, plan: RequestPlan[Q, R, T], timeout: float | None, part: Sequence[int], wire: Wire
    ) -> _Partial[T]:
        """Return one request, of which any invalid item fails the call."""
        try:
            stream = plan.stream if plan.is_large([plan.lengths[index] for index in part]) else None
            send = _Attempt(plan, part, stream)
            result = await self._send(wire, (stream or plan.method).path, send, timeout)
        except ShoalError as error:
            error.move(plan.name, part)
            raise
        return _Partial([result], part)

    async def _send_valid(
        self, plan: RequestPlan[Q, R, T], timeout: float | None, part: Sequence[int], wire: Wire
    ) -> _Partial[T]:
        """Skip an item that is refused and send the others again, in two halves.

        If k of n items are refused one after another, at most 2 k + 1 requests are sent, and no
        item is sent more than log2(n) + 1 times, because each retry sends a shorter part.
        """
        if not part:
            return _Partial()
        try:
            return await self._send_part(plan, timeout, part, wire)
        except InvalidInput as error:
            index = error.index(plan.name)
            if index is None or index not in part:
                raise
            refused: _Partial[T] = _Partial(skipped=[Skipped(index, error.reason, error.message)])
        rest = [other for other in part if other != index]
        halves = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        return _concatenated(
            [refused, *[await self._send_valid(plan, timeout, half, wire) for half in halves]]
        )

    async def _send(self, wire: Wire, path: str, send: Send[T], timeout: float | None) -> T:
        request_id = (
            uuid.uuid4().hex
        )  # The same for all tries, by which the mesh recognises the request.
        with call_span(path, request_id) as span:
            metadata = (
                ("x-request-id", request_id),
                *span.metadata,
                *ANY_ANSWER,
                *self._metadata(),
            )
            return await self._retry(wire, send, timeout, metadata, span)

    async def _retry(
        self, wire: Wire, send: Send[T], timeout: float | None, metadata: Metadata, span: CallSpan
    ) -> T:
        deadline = time.monotonic() + self.seconds(timeout)
        attempts = Attempts(self._policy, deadline=deadline, addresses=len(self._addresses))
        last: ShoalError | None = None
        while True:
            address = self._addresses.current
            remaining = max(0.0, attempts.remaining(time.monotonic()))
            try:
                result = await send(wire, address, remaining, metadata)
            except ShoalError as error:
                error.request_id = metadata[0][1]
                span.try_failed(error, address)
                last = _with_history(error, last)
                await wire.sleep(self._delay(last, address, attempts))
            else:
                self._budgets.succeeded()
                return result

    def _delay(self, error: ShoalError, address: str, attempts: Attempts) -> float:
        """Seconds until the next try; raises `error` if there is none."""
        if isinstance(error, (CannotConnect, Draining)):
            self._addresses.failed(address)
        now = time.monotonic()
        delay = attempts.delay(error, jitter=random.random())  # noqa: S311
        if delay is None:
            raise error
        budget = self._budgets.budget_for(error)
        if budget is not None:
            delay = max(delay, budget.wait(now))
        if delay >= attempts.remaining(now):
            raise error  # It says more than a deadline that would pass during the delay.
        if budget is not None:
            budget.take()
        return delay


class _Attempt(Generic[Q, R, T]):
    """Sends the request for a part of a plan, at each try with a new sink, so that replies of a
    broken stream are dropped.
    """

    def __init__(
        self, plan: RequestPlan[Q, R, T], part: Sequence[int], stream: Method[Q, R] | None
    ) -> None:
        self._plan, self._part, self._stream = plan, part, stream
        self._request = plan.build(part)

    async def __call__(self, wire: Wire, address: str, timeout: float, metadata: Metadata) -> T:
        sink = self._plan.sink(self._part)
        method, request = self._plan.method, self._request
        if self._stream is None:
            sink.take(await wire.send(address, method, request, timeout=timeout, metadata=metadata))
        else:
            await wire.receive(
                address, self._stream, request, sink.take, timeout=timeout, metadata=metadata
            )
        return sink.finish()


def _merged(plan: RequestPlan[Q, R, T], sent: _Partial[T]) -> T:
    result = plan.merge(sent.results)
    skipped = sorted((*(plan.invalid or ()), *sent.skipped), key=lambda skipped: skipped.index)
    return plan.insert_skipped(result, sent.kept, skipped) if skipped else result


def _with_history(error: ShoalError, before: ShoalError | None) -> ShoalError:
    """Add the error of the try before to a deadline that passed in a later try, since that is why
    there was one.
    """
    if isinstance(error, DeadlinePassed) and before is not None:
        error.message = f"{error.message}; an earlier try failed: {before.message}"
        error.earlier = before
    return error


def _positive(timeout: float) -> float:
    if not timeout > 0:
        raise ValueError(f"the timeout must be above 0 seconds, not {timeout}")
    return timeout
