"""Keeps pulls in flight, and passes on what they bring.

The first step of the request path in the worker: Pull -> here -> `intake.py` -> `batcher.py` ->
`runner.py` -> `finisher.py` -> Complete. Which pulls to send is decided in `pulls.py`.
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
from services.worker.jobs.execution.runner import Runner
from services.worker.jobs.pulling.intake import Intake
from services.worker.jobs.pulling.pulls import LaneName, LaneState, Pull, Situation, plan_pulls
from services.worker.memory.residency import Residency
from services.worker.mesh.link import Backoff, Link
from services.worker.scheduling.batcher import Flow

log = logging.getLogger(__name__)

_MAX_PULLED_JOBS: Final = 256
_LAST_PULLS_SECONDS: Final = 1.0
"""How long pulls in flight may take to end once the worker shuts down. Routers end them when its
heartbeat says that it drains; routers of wire version 0 do not."""

_PARTIAL_WAIT_SECONDS: Final = 1.0
"""How long a pull waits at the router if it does not ask for all lanes: it is soon replaced by one
that does.
"""

_QUICK_SECONDS: Final = 0.05
"""An empty answer that comes sooner means that the router does not long-poll for us."""


class Puller:
    """`run` pulls until `stop`; `wake` is set whenever something changes that decides what to pull.

    `beat` requests an early heartbeat, because a router says that orders or cancellations wait.
    """

    def __init__(
        self,
        link: Link,
        residency: Residency,
        runner: Runner,
        intake: Intake,
        *,
        pull_wait_seconds: float,
        wake: asyncio.Event,
        beat: Callable[[], None],
        stop: asyncio.Event,
    ) -> None:
        self._link = link
        self._identity = link.identity
        self._residency = residency
        self._runner = runner
        self._intake = intake
        self._pull_wait_seconds = pull_wait_seconds
        self._wake = wake
        self._beat = beat
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._batch_numbers = itertools.count(1)
        self._backoff = Backoff()
        # Mutable state, of the event loop.
        self._flying: dict[asyncio.Task[bool], Pull] = {}
        self._pause_until = 0.0
        self._unanswered: list[str] = []  # batch ids of pulls that failed without an answer

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while not self._stop.is_set():
                self._wake.clear()
                look_again = self._start_pulls(tasks)
                timer = (
                    None
                    if look_again is None
                    else self._loop.call_later(look_again, self._wake.set)
                )
                await self._wake.wait()
                if timer is not None:
                    timer.cancel()
            await self._end_pulls()

    def stop(self) -> None:
        """Sends no more pulls, as if `stop` was set; `run` returns when the pulls in flight have
        ended.
        """
        self._stop.set()
        self._wake.set()

    # Planning

    def _start_pulls(self, tasks: asyncio.TaskGroup) -> float | None:
        """Starts the pulls that are due. Returns after how many seconds to plan again, or None."""
        pause = self._pause_until - time.monotonic()
        if pause > 0:
            return pause
        preparing = self._intake.waiting()
        lanes = self._lanes(preparing)
        situation = Situation(
            lanes=lanes,
            can_load=self._residency.can_load(),
            flying=tuple(self._flying.values()),
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
            self._flying[task] = pull
            task.add_done_callback(self._landed)
        return plan.look_again

    def _lanes(self, preparing: Mapping[LaneName, Mapping[Flow, int]]) -> dict[LaneName, LaneState]:
        """The lanes of every serving model and each of its adapters, least-served models first."""
        residents = [
            one
            for model in self._residency.lanes()
            if (one := self._residency.serving(model)) is not None
        ]
        waiting, most = (
            self._runner.waiting(),
            self._runner.batch_tokens(resident.name for resident in residents),
        )
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

    def _landed(self, task: asyncio.Task[bool]) -> None:
        """A pull has ended. If it brought small jobs, the next one waits until the device has them:
        sending it now would delay the preparing thread. If it brought none, or large ones, the next
        is planned at once: other jobs would wait in the lane for as long as preparation takes.
        """
        del self._flying[task]
        if task.cancelled() or task.exception() or not task.result():
            self._wake.set()

    # Pulling

    async def _pull(self, pull: Pull, lanes: list[LaneName], of: int) -> bool:
        """Returns whether the pull brought jobs that are soon prepared. `lanes`: its lanes in
        order; `of`: the number of all.
        """
        wait_seconds = self._pull_wait_seconds
        if len(lanes) < of:
            wait_seconds = min(wait_seconds, _PARTIAL_WAIT_SECONDS)
        request = self._request(pull, lanes, wait_seconds)
        if self._stop.is_set():  # since this task was made
            return False
        sent_at = time.monotonic()
        try:
            response = await self._link.pull(request)
        except ShoalError as error:
            log.debug(
                "a pull failed; its batch id is pulled again after a pause",
                extra=fields({"reason": error.message}),
            )
            self._unanswered.append(request.batch_id)
            self._pause_until = time.monotonic() + self._backoff.next()
            return False
        if response.beat:
            self._beat()
        if not (
            response.batch_id or response.load_model or response.beat
        ) and self._came_back_early(pull, sent_at, wait_seconds):
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
        """Pulls again by the batch id of a pull that failed without an answer, if there is one: it
        may have leased a batch.
        """
        identity, is_again = self._identity, bool(self._unanswered)
        return worker_pb2.PullRequest(
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            pool=identity.pool,
            lanes=[
                worker_pb2.Lane(pool=identity.pool, model=model, adapter=adapter)
                for model, adapter in lanes
            ],
            budget_tokens=pull.tokens,
            budget_jobs=min(_MAX_PULLED_JOBS, self._runner.limits.items),
            wait_seconds=wait_seconds,
            can_load=pull.can_load,
            wire_version=WIRE_VERSION,
            batch_id=self._unanswered.pop()
            if is_again
            else f"{identity.epoch}-{next(self._batch_numbers)}",
            asked_again=is_again,
            except_tenants=sorted(pull.except_tenants),
        )

    def _came_back_early(self, pull: Pull, sent_at: float, wait_seconds: float) -> bool:
        """Whether a pull came back empty before its time: replaced by a newer one, or from a router
        that does not long-poll, in whose place the next router is pulled from after a pause."""
        if self._is_replaced(pull):
            return True
        if time.monotonic() - sent_at >= min(_QUICK_SECONDS, wait_seconds / 2):
            return False
        if (
            time.monotonic() >= self._pause_until
        ):  # the other pull in flight may have come back empty as well
            self._link.try_next()
        self._pause_until = time.monotonic() + self._backoff.next()
        return True

    def _is_replaced(self, pull: Pull) -> bool:
        """Whether a newer pull for the same lane that excludes tenants is in flight: the router has
        ended this one for it.
        """
        return (
            bool(pull.except_tenants)
            and sum(
                bool(one.except_tenants) and one.lanes == pull.lanes
                for one in self._flying.values()
            )
            > 1
        )

    async def _end_pulls(self) -> None:
        """Waits for pulls in flight: if one were cancelled while it brings a batch, the lease would
        have to expire first.
        """
        if self._flying:
            await asyncio.wait(list(self._flying), timeout=_LAST_PULLS_SECONDS)
        for task in self._flying:
            task.cancel()
