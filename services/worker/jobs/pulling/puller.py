"""Keeps pulls in flight and passes on the pulled batches.

The first step of the request path in the worker: Pull -> here -> `intake.py` -> `batcher.py` ->
`runner.py` -> `finisher.py` -> Complete. `pulls.py` decides which pulls to send.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from shoal.v1 import worker_pb2

from libs.errors import ShoalError
from libs.telemetry.logs import fields
from libs.versions import WIRE_VERSION
from services.worker.jobs.execution.runner import DeviceRunner
from services.worker.jobs.pulling.intake import JobIntake
from services.worker.jobs.pulling.pulls import LaneName, LaneState, Pull, Situation, plan_pulls
from services.worker.memory.residency import Residency
from services.worker.mesh.link import Backoff, Link
from services.worker.scheduling.batcher import Flow

log = logging.getLogger(__name__)

_MAX_PULLED_JOBS: Final = 256
_LAST_PULLS_SECONDS: Final = 1.0
"""Time to wait for pulls in flight at shutdown. Routers end them on the heartbeat that reports
draining.
"""

_PARTIAL_WAIT_SECONDS: Final = 1.0
"""Time for which a pull for only some lanes waits at the router. A pull for all lanes soon replaces
it.
"""

_SHORT_POLL_SECONDS: Final = 0.05
"""An empty reply that arrives sooner shows that the router does not long-poll for this worker."""


class Puller:
    """Pulls jobs from `run` until `stop`.

    Args:
        wake: Set whenever the choice of pulls may change.
        request_heartbeat: Sends a heartbeat early, when a router has orders or cancellations.
    """

    def __init__(
        self,
        link: Link,
        residency: Residency,
        runner: DeviceRunner,
        intake: JobIntake,
        *,
        pull_wait_seconds: float,
        wake: asyncio.Event,
        request_heartbeat: Callable[[], None],
        stop: asyncio.Event,
    ) -> None:
        self._link = link
        self._identity = link.identity
        self._residency = residency
        self._runner = runner
        self._intake = intake
        self._pull_wait_seconds = pull_wait_seconds
        self._wake = wake
        self._request_heartbeat = request_heartbeat
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._batch_numbers = itertools.count(1)
        self._backoff = Backoff()
        # Mutable state, of the event loop.
        self._in_flight: dict[asyncio.Task[bool], Pull] = {}
        self._pause_until = 0.0
        # Batch IDs and lanes of pulls that failed without an answer.
        self._unanswered: list[tuple[str, list[worker_pb2.Lane]]] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while not self._stop.is_set():
                self._wake.clear()
                replan_seconds = self._start_pulls(tasks)
                timer = (
                    None
                    if replan_seconds is None
                    else self._loop.call_later(replan_seconds, self._wake.set)
                )
                await self._wake.wait()
                if timer is not None:
                    timer.cancel()
            await self._end_pulls()

    def stop(self) -> None:
        """Send no more pulls. `run` returns when the pulls in flight have ended."""
        self._stop.set()
        self._wake.set()

    # Planning

    def _start_pulls(self, tasks: asyncio.TaskGroup) -> float | None:
        """Start the pulls that are due. Return after how many seconds to plan again, if any."""
        pause = self._pause_until - time.monotonic()
        if pause > 0:
            return pause
        preparing = self._intake.waiting()
        lanes = self._lanes(preparing)
        situation = Situation(
            lanes=lanes,
            can_load=self._residency.can_load(),
            in_flight=tuple(self._in_flight.values()),
            waiting_tokens=sum(sum(flows.values()) for flows in preparing.values())
            + self._runner.waiting_tokens,
            busy_seconds=self._runner.busy_seconds,
            lead_seconds=self._intake.lead.seconds,
        )
        plan = plan_pulls(situation, self._runner.limits.tokens)
        for pull in plan.pulls:
            task = tasks.create_task(
                self._pull(pull, [lane for lane in lanes if lane in pull.lanes], len(lanes))
            )
            self._in_flight[task] = pull
            task.add_done_callback(self._pull_done)
        return plan.replan_seconds

    def _lanes(self, preparing: Mapping[LaneName, Mapping[Flow, int]]) -> dict[LaneName, LaneState]:
        """Return the lanes of every serving model and its adapters, least-served models first."""
        residents = [
            one
            for model in self._residency.lanes()
            if (one := self._residency.serving(model)) is not None
        ]
        waiting, most = self._runner.waiting(), self._runner.batch_tokens(residents)
        lanes: dict[LaneName, LaneState] = {}
        for resident in residents:
            tokens = most[resident.name]
            seconds = resident.meter.expected_seconds(tokens)
            for adapter in resident.adapters.lanes():
                name = (resident.name, adapter)
                flows = Counter(waiting.get(name, {})) + Counter(preparing.get(name, {}))
                tenants = {flow.tenant: count for flow, count in flows.items() if not flow.is_bulk}
                lanes[name] = LaneState(flows.total(), tokens, seconds, tenants)
        return lanes

    def _pull_done(self, task: asyncio.Task[bool]) -> None:
        """Plan again after a pull, except if it brought small jobs.

        1. Small jobs: the next pull waits until the device has them, since sending it now would
           delay the preparing thread.
        2. No jobs or large ones: plan now, or jobs in the lane would wait for the whole
           preparation.
        """
        del self._in_flight[task]
        if task.cancelled() or task.exception() or not task.result():
            self._wake.set()

    # Pulling

    async def _pull(self, pull: Pull, lanes: list[LaneName], num_lanes: int) -> bool:
        """Send a pull. Return whether it brought jobs that will soon be prepared.

        Args:
            lanes: Its lanes, in order.
            num_lanes: The number of all lanes.
        """
        wait_seconds = self._pull_wait_seconds
        if len(lanes) < num_lanes:
            wait_seconds = min(wait_seconds, _PARTIAL_WAIT_SECONDS)
        request = self._request(pull, lanes, wait_seconds)
        if self._stop.is_set():  # stopped since this task was created
            return False
        sent_at = time.monotonic()
        try:
            response = await self._link.pull(request)
        except ShoalError as error:
            log.debug(
                "a pull failed; retrying its batch ID after a pause",
                extra=fields({"reason": error.message}),
            )
            self._unanswered.append((request.batch_id, list(request.lanes)))
            self._pause_until = time.monotonic() + self._backoff.next()
            return False
        if response.heartbeat_now:
            self._request_heartbeat()
        if not (
            response.batch_id or response.load_model or response.heartbeat_now
        ) and self._handle_early_return(pull, sent_at, wait_seconds):
            return False
        self._backoff.reset()
        if response.load_model:
            self._residency.take_offer(response.load_model, response.load_adapter)
        if not response.batch_id:
            return False
        if self._stop.is_set():
            self._intake.hand_back(response)
            return False
        return self._intake.accept(response, sent_at)

    def _request(
        self, pull: Pull, lanes: list[LaneName], wait_seconds: float
    ) -> worker_pb2.PullRequest:
        """Build the request, or repeat a failed pull, if any, which may have leased a batch: with
        its batch ID and its lanes, at one of which a lease of that name may be.
        """
        identity, is_again = self._identity, bool(self._unanswered)
        if is_again:
            batch_id, named = self._unanswered.pop()
        else:
            batch_id = f"{identity.epoch}-{next(self._batch_numbers)}"
            named = [
                worker_pb2.Lane(pool=identity.pool, model=model, adapter=adapter)
                for model, adapter in lanes
            ]
        return worker_pb2.PullRequest(
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            pool=identity.pool,
            lanes=named,
            budget_tokens=pull.tokens,
            budget_jobs=min(_MAX_PULLED_JOBS, self._runner.limits.items),
            wait_seconds=wait_seconds,
            can_load=pull.can_load,
            wire_version=WIRE_VERSION,
            batch_id=batch_id,
            asked_again=is_again,
            except_tenants=sorted(pull.except_tenants),
        )

    def _handle_early_return(self, pull: Pull, sent_at: float, wait_seconds: float) -> bool:
        """Handle a pull that ended empty before its wait was over. Return whether it was one.

        1. A newer pull replaced it: do nothing.
        2. The router does not long-poll: try the next router after a pause.
        """
        if self._is_replaced(pull):
            return True
        if time.monotonic() - sent_at >= min(_SHORT_POLL_SECONDS, wait_seconds / 2):
            return False
        if (
            time.monotonic() >= self._pause_until
        ):  # the other pull in flight may have moved on already
            self._link.try_next()
        self._pause_until = time.monotonic() + self._backoff.next()
        return True

    def _is_replaced(self, pull: Pull) -> bool:
        """Return whether a newer pull for this lane that excludes tenants made the router end this
        one.
        """
        return (
            bool(pull.except_tenants)
            and sum(
                bool(one.except_tenants) and one.lanes == pull.lanes
                for one in self._in_flight.values()
            )
            > 1
        )

    async def _end_pulls(self) -> None:
        """Wait for pulls in flight. Cancelling one that brings a batch would leave its lease to
        expire.
        """
        if self._in_flight:
            await asyncio.wait(list(self._in_flight), timeout=_LAST_PULLS_SECONDS)
        for task in self._in_flight:
            task.cancel()
