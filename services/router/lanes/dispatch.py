"""Enqueue jobs, wait for their answers, cancel them: a request's third step, between `splitting.py`
and the lanes.

A request is kept until it is answered, so that its jobs can be queued again if Redis loses them.
Enqueueing batches without timers: while one call to Redis is in flight for a lane, new requests
wait and go together in the next call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol

from shoal.v1 import worker_pb2

from libs.errors import DeadlinePassed, Draining, InternalError, ShoalError
from libs.queue import LaneKey, Lanes, QueuedJob
from libs.serving import Deadline
from libs.telemetry import metrics
from libs.telemetry.logs import fields
from services.router.admission.rules import deadline_message, queue_full
from services.router.lanes import codec
from services.router.lanes.codec import Response
from services.router.lanes.wakeups import Wakeups
from services.router.state.background import Background
from services.router.state.outstanding import Outstanding
from services.router.state.throughput import Throughput
from services.router.state.view import RouterView

log = logging.getLogger(__name__)

MISSING_AGE_SECONDS: Final = 1.0
"""Younger jobs are not looked up in Redis: their answer may be in transit."""
NO_LIMIT: Final = -1
DRAINING_MESSAGE: Final = "this router stopped before the answer arrived; retry at another router"


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """An admitted request."""

    lane: LaneKey
    jobs: Sequence[QueuedJob]
    """All its jobs, in order."""
    throughput: Throughput = field(default_factory=Throughput)
    is_unknown: bool = False
    """No worker knows its model."""
    first_items: Sequence[int] = ()
    """The first item of each job."""

    @property
    def tokens(self) -> int:
        return sum(job.tokens for job in self.jobs)


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """The answer to one job."""

    response: Response
    size: int
    """Bytes in which it arrived."""
    is_last: bool
    """It answers the last job of its request."""


class Streamed(Protocol):
    """Receives parts of a request's answers, to stream them to its client."""

    def add(self, job: int, part: worker_pb2.JobDelta) -> None:
        """Add a part of the answer to the request's job `job`. It may be lost or repeated."""


class _Request:
    """One waiting request: the answers received, and the event that signals the awaited one or the
    first failure.
    """

    def __init__(
        self, jobs: int, on_answer: Callable[[int], None], streamed: Streamed | None
    ) -> None:
        self._on_answer = on_answer
        self.streamed = streamed
        # The state: answers not taken yet, the number of first jobs answered without a gap, and the
        # number awaited.
        self._answers: list[JobAnswer | None] = [None] * jobs
        self._failure: ShoalError | None = None
        self._ready = 0
        self._awaited = 0
        self._news = asyncio.Event()

    def accept(self, index: int, outcome: Response | ShoalError, size: int) -> None:
        if self._failure is not None:
            return
        if isinstance(outcome, ShoalError):
            self._fail(outcome)
            return
        try:
            self._on_answer(size)
        except ShoalError as error:
            self._fail(error)
            return
        self._answers[index] = JobAnswer(outcome, size, index == len(self._answers) - 1)
        while self._ready < len(self._answers) and self._answers[self._ready] is not None:
            self._ready += 1
        if self._ready >= self._awaited:
            self._news.set()

    def _fail(self, failure: ShoalError) -> None:
        """Fail the request, and drop the answers that it holds."""
        self._failure = failure
        self._answers.clear()
        self._news.set()

    async def wait_for_first(self, jobs: int) -> None:
        """Return once the first `jobs` are answered. Raises the first failure of any job."""
        self._awaited = jobs
        while self._failure is None and self._ready < jobs:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure

    def is_ready(self, index: int) -> bool:
        return self._failure is None and index < self._ready

    def take(self, index: int) -> JobAnswer:
        """Remove and return the answer to an answered job."""
        take_answer, self._answers[index] = self._answers[index], None
        if take_answer is None:
            raise InternalError(f"the answer to job {index} was taken before it arrived")
        return take_answer


@dataclass(slots=True, eq=False)
class _Pending:
    """A job without an answer, and the requests waiting for it. Requests with the same content and
    id share jobs (single-flight).
    """

    lane: LaneKey
    job: QueuedJob
    since: float
    waiting: list[tuple[_Request, int]] = field(default_factory=list)
    is_queued: bool = False
    was_missing: bool = False


_Group = tuple[Sequence[QueuedJob], "asyncio.Future[bool]"]


class Dispatcher:
    """All waiting requests of this router. As an async context it finishes the cancellations in
    progress on exit.
    """

    def __init__(
        self,
        lanes: Lanes,
        wakeups: Wakeups,
        view: RouterView,
        background: Background,
        outstanding: Outstanding,
        *,
        max_queued_tokens: int,
    ) -> None:
        self._lanes = lanes
        self._wakeups = wakeups
        self._view = view
        self._background = background
        self._outstanding = outstanding
        self._max_queued_tokens = max_queued_tokens
        # The state: jobs without an answer; requests that wait for the next enqueueing call, by
        # lane; lanes with such a call in flight.
        self._pending: dict[str, _Pending] = {}
        self._outbox: dict[LaneKey, list[_Group]] = {}
        self._sending: set[LaneKey] = set()
        self._is_leaving = False

    async def __aenter__(self) -> Dispatcher:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._background.finished()

    async def begin(
        self,
        plan: DispatchPlan,
        deadline: Deadline,
        on_answer: Callable[[int], None] = lambda size: None,
        *,
        awaited: int,
        streamed: Streamed | None = None,
    ) -> PendingRequest:
        """Enqueue the plan's jobs, and return when the first `awaited` of them are answered.

        Raises QueueFull, NoCapacity, DeadlinePassed, Draining, or the first failing job's error. No
        job is left behind then, nor after leaving the returned context.

        Args:
            on_answer: Called with the size in bytes of each answer when it arrives. A ShoalError
                that it raises fails the request, and the jobs without an answer are cancelled.
            streamed: Receives parts of the answers before these.
        """
        if self._is_leaving:
            raise Draining(DRAINING_MESSAGE)
        request = _Request(len(plan.jobs), on_answer, streamed)
        self._register(plan, request)
        try:
            await self.within_deadline(deadline, plan.lane, self._begin(plan, request, awaited))
        except BaseException:
            self.leave(plan, request)
            raise
        return PendingRequest(self, plan, deadline, request)

    async def _begin(self, plan: DispatchPlan, request: _Request, jobs: int) -> None:
        """Return when the first `jobs` are answered."""
        await self._enqueue(plan)
        await request.wait_for_first(jobs)

    async def within_deadline(
        self, deadline: Deadline, lane: LaneKey, work: Awaitable[None]
    ) -> None:
        """Raise DeadlinePassed if the work is not done by the deadline."""
        try:
            async with asyncio.timeout_at(deadline.at):
                await work
        except TimeoutError:
            raise DeadlinePassed(deadline_message(lane, self._view.snapshot)) from None

    def hand_over(self) -> None:
        """Fail requests that still wait with Draining, so that clients retry at another router.

        Part of graceful shutdown. The jobs stay in the lanes, where a retry finds them with their
        progress.
        """
        self._is_leaving = True
        for pending in list(self._pending.values()):
            for request, index in pending.waiting:
                request.accept(index, Draining(DRAINING_MESSAGE), 0)

    def deliver(self, job_id: str, result: bytes) -> None:
        """Hand a job's answer (a serialised JobResult) to the requests that wait for it; drop it
        without any.
        """
        pending = self._pop(job_id)
        if pending is None:
            return
        outcome: Response | ShoalError
        try:
            outcome = codec.job_result(result)
        except ShoalError as error:
            outcome = error
        for request, index in pending.waiting:
            request.accept(index, outcome, len(result))

    def streamed(self, part: worker_pb2.JobDelta) -> None:
        """Hand a part of a job's answer to the requests that stream it."""
        pending = self._pending.get(part.job_id)
        for request, index in () if pending is None else pending.waiting:
            if request.streamed is not None:
                request.streamed.add(index, part)

    def oldest_seconds(self) -> dict[LaneKey, float]:
        """Return how long the oldest job of each lane has waited for its answer."""
        now, oldest = asyncio.get_running_loop().time(), dict[LaneKey, float]()
        for pending in self._pending.values():  # in order of arrival
            oldest.setdefault(pending.lane, now - pending.since)
        return oldest

    async def reconcile(self) -> None:
        """Queue jobs again that Redis has lost.

        A job must be missing twice in a row, because an answered job is missing too while its
        answer is in transit.
        """
        ripe = asyncio.get_running_loop().time() - MISSING_AGE_SECONDS
        by_lane: dict[LaneKey, list[str]] = defaultdict(list)
        for job_id, pending in self._pending.items():
            if pending.is_queued and pending.since < ripe:
                by_lane[pending.lane].append(job_id)
        await self._lanes.masters.for_each_lane(
            by_lane, lambda lane: self._reconcile(lane, by_lane[lane])
        )

    async def _reconcile(self, lane: LaneKey, ids: Sequence[str]) -> None:
        missing = set(await self._lanes.missing(lane, ids))
        again = [
            job
            for job_id in ids
            if (job := self._still_missing(job_id, job_id in missing)) is not None
        ]
        if again:
            await self._lanes.enqueue(
                lane, [[job] for job in again], max_tokens=NO_LIMIT, notify=True, everywhere=True
            )
            self._wakeups.notify(lane, len(again))
            metrics.JOBS_QUEUED_AGAIN.inc(len(again))
            log.warning("jobs queued again", extra=fields({"lane": lane.name, "jobs": len(again)}))

    def _still_missing(self, job_id: str, is_missing: bool) -> QueuedJob | None:
        pending = self._pending.get(job_id)
        if pending is None:
            return None
        again = is_missing and pending.was_missing
        pending.was_missing = is_missing and not again
        return pending.job if again else None

    def _register(self, plan: DispatchPlan, request: _Request) -> None:
        now = asyncio.get_running_loop().time()
        self._outstanding.open(plan.lane, is_unknown=plan.is_unknown)
        for index, job in enumerate(plan.jobs):
            pending = self._pending.get(job.job_id)
            if pending is None:
                pending = self._pending[job.job_id] = _Pending(plan.lane, job, now)
                self._outstanding.add(plan.lane, job.tenant, job.tokens)
            pending.waiting.append((request, index))

    def leave(self, plan: DispatchPlan, request: _Request) -> None:
        """Stop waiting: cancel the jobs without an answer, unless another request waits for them
        too.
        """
        abandoned = []
        for index, job in enumerate(plan.jobs):
            pending = self._pending.get(job.job_id)
            if pending is None or (request, index) not in pending.waiting:
                continue
            pending.waiting.remove((request, index))
            if not pending.waiting:
                self._pop(job.job_id)
                abandoned.append(job)
        if abandoned and not self._is_leaving:
            self._background.spawn(self._cancel(plan.lane, abandoned))

    def _pop(self, job_id: str) -> _Pending | None:
        pending = self._pending.pop(job_id, None)
        if pending is not None:
            self._outstanding.add(pending.lane, pending.job.tenant, -pending.job.tokens)
        return pending

    async def _enqueue(self, plan: DispatchPlan) -> None:
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._outbox.setdefault(plan.lane, []).append((plan.jobs, admitted))
        if plan.lane not in self._sending:
            self._sending.add(plan.lane)
            self._background.spawn(self._send(plan.lane))
        if not await admitted:
            queued = self._view.lane_gauges(plan.lane).queued_tokens
            raise queue_full(
                plan.lane, queued, self._max_queued_tokens, plan.tokens, plan.throughput
            )

    async def _send(self, lane: LaneKey) -> None:
        try:
            while groups := [group for group in self._outbox.pop(lane, []) if not group[1].done()]:
                await self._send_groups(lane, groups)
        finally:
            self._sending.discard(lane)

    async def _send_groups(self, lane: LaneKey, groups: Sequence[_Group]) -> None:
        jobs = sum(len(group) for group, _ in groups)
        notify = self._wakeups.needs_others(lane, jobs)
        early = self._wakeups.pending_pulls.wake_early(lane, jobs, groups[0][0][0].job_id)
        refusal: ShoalError | None = InternalError("enqueueing the request failed")
        try:
            admitted = await self._lanes.enqueue(
                lane,
                [group for group, _ in groups],
                max_tokens=self._max_queued_tokens,
                notify=notify,
                everywhere=notify and self._wakeups.needs_loading(lane),
            )
            refusal = None
        except ShoalError as error:
            refusal = error
            return
        finally:
            if refusal is not None:
                _refuse(groups, refusal)
        self._wakeups.notify(lane, jobs, early)
        for (group, future), flag in zip(groups, admitted, strict=True):
            self._sent(lane, group, future, flag)

    def _sent(
        self,
        lane: LaneKey,
        group: Sequence[QueuedJob],
        future: asyncio.Future[bool],
        admitted: bool,
    ) -> None:
        if not future.done():
            future.set_result(admitted)
            if not admitted:
                return
        orphans = []
        for job in group:
            pending = self._pending.get(job.job_id)
            if pending is None:
                orphans.append(job)
            else:
                pending.is_queued = True
        if future.cancelled() and orphans:
            # The client left during the call, so the cancellation may have reached Redis before the
            # jobs.
            self._background.spawn(self._cancel(lane, orphans))

    async def _cancel(self, lane: LaneKey, jobs: Sequence[QueuedJob]) -> None:
        # A retry may have registered the same jobs again.
        gone = [job for job in jobs if job.job_id not in self._pending]
        if gone:
            await self._lanes.cancel(lane, gone)


class PendingRequest:
    """A request with enqueued jobs. Leaving the context cancels those without an answer, unless
    another request waits for them too.
    """

    def __init__(
        self, dispatcher: Dispatcher, plan: DispatchPlan, deadline: Deadline, request: _Request
    ) -> None:
        self.jobs = len(plan.jobs)
        self._dispatcher = dispatcher
        self._plan = plan
        self._deadline = deadline
        self._request = request

    def __enter__(self) -> PendingRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self._dispatcher.leave(self._plan, self._request)

    async def take_answer(self, index: int) -> JobAnswer:
        """Remove and return the answer to a job once it and all before it have arrived. Raises
        DeadlinePassed, Draining, or the first failing job's error.
        """
        if not self._request.is_ready(index):
            await self._dispatcher.within_deadline(
                self._deadline, self._plan.lane, self._request.wait_for_first(index + 1)
            )
        return self._request.take(index)


def _refuse(groups: Sequence[_Group], error: ShoalError) -> None:
    for _, future in groups:
        if not future.done():
            future.set_exception(error)
