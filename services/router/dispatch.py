"""From jobs to answers: enqueue, wait, cancel. Third stop of a request in the router, between `admission.py` and the lanes.

A request is kept until it is answered, so that its jobs can be queued again should Redis forget them. Enqueueing uses no timers:
while one call to Redis is under way for a lane, what comes in meanwhile waits for the next call, and goes with it together.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from google.protobuf.message import DecodeError

from libs.errors import DeadlinePassed, InternalError, QueueFull, ShoalError
from libs.queue import LaneKey, Lanes, Priority, QueuedJob
from libs.serving import Deadline
from libs.telemetry.logs import fields
from services.router import codec
from services.router.admission import Load, why_late
from services.router.background import Background
from services.router.bells import Bells
from services.router.codec import Response
from services.router.view import View

log = logging.getLogger(__name__)

MISSING_AGE_SECONDS: Final = 1.0
"""Younger jobs are not looked for: their answer may be on its way."""
NO_LIMIT: Final = -1


@dataclass(frozen=True, slots=True)
class Plan:
    """What admission decided for a request: all its jobs, in order, and their lane."""

    lane: LaneKey
    jobs: Sequence[QueuedJob]


class _Request:
    """One waiting request: the answers that came, and the future that ends with the last of them or with the first failure."""

    def __init__(self, jobs: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answers: list[Response | None] = [None] * jobs
        self._open = jobs

    def accept(self, index: int, outcome: Response | ShoalError) -> None:
        if self.done.done():
            return
        if isinstance(outcome, ShoalError):
            self.done.set_exception(outcome)
            return
        self.answers[index] = outcome
        self._open -= 1
        if not self._open:
            self.done.set_result(None)

    def close(self) -> None:
        """Nobody waits any more; an error that nobody saw must not be reported as forgotten."""
        if not self.done.cancel() and not self.done.cancelled():
            self.done.exception()


@dataclass(slots=True, eq=False)
class _Pending:
    """A job without an answer, and who waits for it: requests with the same content and id share their jobs."""

    lane: LaneKey
    job: QueuedJob
    since: float
    waiting: list[tuple[_Request, int]] = field(default_factory=list)
    is_queued: bool = False
    was_missing: bool = False


_Group = tuple[Sequence[QueuedJob], "asyncio.Future[bool]"]


class Dispatcher:
    """All waiting requests of this router. An async context: leaving it finishes the cancellations under way."""

    def __init__(self, lanes: Lanes, bells: Bells, view: View, background: Background, *, max_queued_tokens: int) -> None:
        self._lanes = lanes
        self._bells = bells
        self._view = view
        self._background = background
        self._max_queued_tokens = max_queued_tokens
        # The state: jobs without an answer; what waits for the call to Redis under way, by lane; tokens in lanes by tenant.
        self._pending: dict[str, _Pending] = {}
        self._outbox: dict[LaneKey, list[_Group]] = {}
        self._sending: set[LaneKey] = set()
        self._tokens: dict[LaneKey, dict[tuple[str, Priority], tuple[int, float]]] = defaultdict(dict)

    async def __aenter__(self) -> Dispatcher:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._background.finished()

    async def run(self, plan: Plan, deadline: Deadline) -> list[Response]:
        """The answers to the plan's jobs, in order. Raises QueueFull, NoCapacity, DeadlinePassed, or the first failing job's error.

        However it ends, no job is left behind: those without an answer are cancelled, unless another request waits for them too.
        """
        request = _Request(len(plan.jobs))
        self._register(plan, request)
        try:
            async with asyncio.timeout_at(deadline.at):
                await self._enqueue(plan)
                await request.done
        except TimeoutError:
            raise DeadlinePassed(why_late(plan.lane, self._view.snapshot)) from None
        finally:
            request.close()
            self._leave(plan, request)
        return [answer for answer in request.answers if answer is not None]

    def deliver(self, job_id: str, result: bytes) -> None:
        """A job's answer (a serialised JobResult) is here. One that nobody waits for is dropped."""
        pending = self._pop(job_id)
        if pending is None:
            return
        outcome: Response | ShoalError
        try:
            outcome = codec.job_result(result)
        except ShoalError as error:
            outcome = error
        except DecodeError:
            outcome = InternalError("a worker's result is no JobResult")
        for request, index in pending.waiting:
            request.accept(index, outcome)

    def load(self, lane: LaneKey, tenant: str, weight: float, priority: Priority) -> Load:
        """What competes with a request of that tenant: bulk gives way to interactive, so only bulk sees both."""
        seen = [
            (name, tokens, share)
            for (name, kind), (tokens, share) in self._tokens.get(lane, {}).items()
            if kind == "interactive" or priority == "bulk"
        ]
        others = {name: share for name, _, share in seen if name != tenant}
        return Load(sum(tokens for name, tokens, _ in seen if name == tenant), weight + sum(others.values()))

    async def reconcile(self) -> None:
        """Queues jobs again that Redis has forgotten. A job must be missing twice in a row: an answered one is missing too, for the
        moment that its answer is on the way."""
        ripe = asyncio.get_running_loop().time() - MISSING_AGE_SECONDS
        by_lane: dict[LaneKey, list[str]] = defaultdict(list)
        for job_id, pending in self._pending.items():
            if pending.is_queued and pending.since < ripe:
                by_lane[pending.lane].append(job_id)
        for lane, ids in by_lane.items():
            missing = set(await self._lanes.missing(lane, ids))
            again = [job for job_id in ids if (job := self._still_missing(job_id, job_id in missing)) is not None]
            if again:
                await self._lanes.enqueue(lane, [[job] for job in again], max_tokens=NO_LIMIT, ring=True)
                self._bells.ring(lane, len(again))
                log.warning("jobs queued again", extra=fields({"lane": lane.name, "jobs": len(again)}))

    def _still_missing(self, job_id: str, is_missing: bool) -> QueuedJob | None:
        pending = self._pending.get(job_id)
        if pending is None:
            return None
        again = is_missing and pending.was_missing
        pending.was_missing = is_missing and not again
        return pending.job if again else None

    def _register(self, plan: Plan, request: _Request) -> None:
        now = asyncio.get_running_loop().time()
        for index, job in enumerate(plan.jobs):
            pending = self._pending.get(job.job_id)
            if pending is None:
                pending = self._pending[job.job_id] = _Pending(plan.lane, job, now)
                self._count(plan.lane, job, job.tokens)
            pending.waiting.append((request, index))

    def _leave(self, plan: Plan, request: _Request) -> None:
        abandoned = []
        for index, job in enumerate(plan.jobs):
            pending = self._pending.get(job.job_id)
            if pending is None or (request, index) not in pending.waiting:
                continue
            pending.waiting.remove((request, index))
            if not pending.waiting:
                self._pop(job.job_id)
                abandoned.append(job)
        if abandoned:
            self._background.spawn(self._cancel(plan.lane, abandoned))

    def _pop(self, job_id: str) -> _Pending | None:
        pending = self._pending.pop(job_id, None)
        if pending is not None:
            self._count(pending.lane, pending.job, -pending.job.tokens)
        return pending

    def _count(self, lane: LaneKey, job: QueuedJob, tokens: int) -> None:
        at_lane = self._tokens[lane]
        key = (job.tenant, job.priority)
        total = at_lane.get(key, (0, 0.0))[0] + tokens
        if total > 0:
            at_lane[key] = (total, job.weight)
        else:
            at_lane.pop(key, None)
            if not at_lane:
                del self._tokens[lane]

    async def _enqueue(self, plan: Plan) -> None:
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._outbox.setdefault(plan.lane, []).append((plan.jobs, admitted))
        if plan.lane not in self._sending:
            self._sending.add(plan.lane)
            self._background.spawn(self._send(plan.lane))
        if not await admitted:
            queued = self._view.gauges_of(plan.lane).queued_tokens
            raise QueueFull(f"the lane of {plan.lane.model} is full: {queued:,} of {self._max_queued_tokens:,} tokens")

    async def _send(self, lane: LaneKey) -> None:
        try:
            while groups := [group for group in self._outbox.pop(lane, []) if not group[1].done()]:
                await self._send_groups(lane, groups)
        finally:
            self._sending.discard(lane)

    async def _send_groups(self, lane: LaneKey, groups: Sequence[_Group]) -> None:
        jobs = sum(len(group) for group, _ in groups)
        ring = self._bells.needs_others(lane, jobs)
        early = self._bells.waiters.ring_early(lane, jobs, groups[0][0][0].job_id)
        refusal: ShoalError | None = InternalError("a request could not be enqueued")
        try:
            admitted = await self._lanes.enqueue(
                lane, [group for group, _ in groups], max_tokens=self._max_queued_tokens, ring=ring
            )
            refusal = None
        except ShoalError as error:
            refusal = error
            return
        finally:
            if refusal is not None:
                _refuse(groups, refusal)
        self._bells.ring(lane, jobs, early)
        for (group, future), flag in zip(groups, admitted, strict=True):
            self._sent(lane, group, future, flag)

    def _sent(self, lane: LaneKey, group: Sequence[QueuedJob], future: asyncio.Future[bool], admitted: bool) -> None:
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
            # Its client left while the call was under way: the cancellation may have come before the jobs.
            self._background.spawn(self._cancel(lane, orphans))

    async def _cancel(self, lane: LaneKey, jobs: Sequence[QueuedJob]) -> None:
        # A client that asks again brings the same jobs back.
        gone = [job for job in jobs if job.job_id not in self._pending]
        if gone:
            await self._lanes.cancel(lane, gone)


def _refuse(groups: Sequence[_Group], error: ShoalError) -> None:
    for _, future in groups:
        if not future.done():
            future.set_exception(error)
