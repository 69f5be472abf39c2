"""Pulls jobs and prepares them in threads.

The first stop of the request path in the worker: Pull -> here -> `batcher.py` -> `runner.py` -> `finisher.py` -> Complete.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from google.protobuf.message import DecodeError
from shoal.v1 import worker_pb2

from libs.errors import DeadlinePassed, InternalError, ShoalError
from libs.models import GoOn, Prepared
from libs.telemetry import metrics
from libs.telemetry.logs import fields
from libs.versions import WIRE_VERSION
from services.worker.jobs import spans
from services.worker.jobs.delivery import Delivery
from services.worker.jobs.finisher import Finisher
from services.worker.jobs.held import HeldJob, Lease
from services.worker.jobs.preparing import HELD_SECONDS, SMALL_BYTES, GiveWay, Preparation, Preparers, estimated_tokens, read_bytes
from services.worker.jobs.pulls import LaneName, LaneState, Lead, Pull, Situation, plan_pulls
from services.worker.jobs.runner import Runner
from services.worker.memory.adapters import AdapterLoader
from services.worker.memory.residency import Residency
from services.worker.memory.resident import Resident
from services.worker.mesh import codec
from services.worker.mesh.clock import MeshClock
from services.worker.mesh.link import Backoff, Link
from services.worker.scheduling.batcher import Flow, Limits
from services.worker.scheduling.meter import whole_texts

log = logging.getLogger(__name__)

_MAX_PULLED_JOBS: Final = 256
_LAST_PULLS_SECONDS: Final = 1.0
"""How long pulls in flight may take to end once the worker shuts down. Routers end them when its heartbeat says that it drains;
routers of wire version 0 do not."""

_PARTIAL_WAIT_SECONDS: Final = 1.0
"""How long a pull waits at the router if it does not ask for all lanes: it is soon replaced by one that does."""

_QUICK_SECONDS: Final = 0.05
"""An empty answer that comes sooner means that the router does not long-poll for us."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The worker's identity in calls to routers. `epoch` is new at each start of the process."""

    worker_id: str
    epoch: str
    pool: str


class Intake:
    """`run` pulls until `stop`; `wake` is set whenever something changes that decides what to pull.

    `beat` asks for an early heartbeat, because a router says that orders or cancellations wait.
    """

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        pull_wait_seconds: float,
        link: Link,
        residency: Residency,
        adapters: AdapterLoader,
        delivery: Delivery,
        runner: Runner,
        finisher: Finisher,
        *,
        preparers: Preparers,
        wake: asyncio.Event,
        beat: Callable[[], None],
        clock: MeshClock,
        stop: asyncio.Event,
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._pull_wait_seconds = pull_wait_seconds
        self._link = link
        self._residency = residency
        self._adapters = adapters
        self._delivery = delivery
        self._runner = runner
        self._finisher = finisher
        self._preparation = Preparation(preparers, self._prepare, clock=time.monotonic)
        self._wake = wake
        self._beat = beat
        self._clock = clock
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._batch_numbers = itertools.count(1)
        self._backoff = Backoff()
        # Mutable state, of the event loop.
        self._flying: dict[asyncio.Task[bool], Pull] = {}
        self._lead = Lead()
        self._pause_until = 0.0
        self._relieving: asyncio.TimerHandle | None = None
        self._unanswered: list[str] = []  # batch ids of pulls that failed without an answer

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while not self._stop.is_set():
                self._wake.clear()
                look_again = self._start_pulls(tasks)
                timer = None if look_again is None else self._loop.call_later(look_again, self._wake.set)
                await self._wake.wait()
                if timer is not None:
                    timer.cancel()
            await self._end_pulls()

    def stop(self) -> None:
        """Sends no more pulls, as if `stop` was set; `run` returns when the pulls in flight have ended."""
        self._stop.set()
        self._wake.set()

    # Pulling

    def _start_pulls(self, tasks: asyncio.TaskGroup) -> float | None:
        """Starts the pulls that are due. Returns after how many seconds to plan again, or None."""
        pause = self._pause_until - time.monotonic()
        if pause > 0:
            return pause
        preparing = self._preparation.waiting()
        lanes = self._lanes(preparing)
        situation = Situation(
            lanes=lanes,
            can_load=self._residency.can_load(),
            flying=tuple(self._flying.values()),
            waiting_tokens=sum(sum(flows.values()) for flows in preparing.values()) + self._runner.waiting_tokens,
            busy_seconds=self._runner.busy_seconds,
            lead_seconds=self._lead.seconds,
        )
        plan = plan_pulls(situation, self._limits.tokens)
        for pull in plan.pulls:
            task = tasks.create_task(self._pull(pull, [lane for lane in lanes if lane in pull.lanes], len(lanes)))
            self._flying[task] = pull
            task.add_done_callback(self._landed)
        return plan.look_again

    def _lanes(self, preparing: Mapping[LaneName, Mapping[Flow, int]]) -> dict[LaneName, LaneState]:
        """The lanes of every serving model and each of its adapters, least-served models first."""
        residents = [one for model in self._residency.lanes() if (one := self._residency.serving(model)) is not None]
        self._adapters.settle(residents)
        waiting, most = self._runner.waiting(), self._runner.batch_tokens(resident.name for resident in residents)
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
        """A pull has ended. If it brought small jobs, the next one waits until the device has them: sending it now would delay the
        preparing thread. If it brought none, or large ones, the next is planned at once: other jobs would wait in the lane for as
        long as preparation takes.
        """
        del self._flying[task]
        if task.cancelled() or task.exception() or not task.result():
            self._wake.set()

    async def _pull(self, pull: Pull, lanes: list[LaneName], of: int) -> bool:
        """Returns whether the pull brought jobs that are soon prepared. `lanes`: its lanes in order; `of`: the number of all."""
        wait_seconds = self._pull_wait_seconds
        if len(lanes) < of:
            wait_seconds = min(wait_seconds, _PARTIAL_WAIT_SECONDS)
        is_again = bool(self._unanswered)
        request = worker_pb2.PullRequest(
            worker_id=self._identity.worker_id,
            epoch=self._identity.epoch,
            pool=self._identity.pool,
            lanes=[worker_pb2.Lane(pool=self._identity.pool, model=model, adapter=adapter) for model, adapter in lanes],
            budget_tokens=pull.tokens,
            budget_jobs=min(_MAX_PULLED_JOBS, self._limits.items),
            wait_seconds=wait_seconds,
            can_load=pull.can_load,
            wire_version=WIRE_VERSION,
            batch_id=self._unanswered.pop() if is_again else f"{self._identity.epoch}-{next(self._batch_numbers)}",
            asked_again=is_again,
            except_tenants=sorted(pull.except_tenants),
        )
        if self._stop.is_set():  # since this task was made
            return False
        started = time.monotonic()
        try:
            response = await self._link.pull(request)
        except ShoalError as error:
            log.debug("pull failed", extra=fields({"reason": error.message}))
            self._unanswered.append(request.batch_id)
            self._pause_until = time.monotonic() + self._backoff.next()
            return False
        self._clock.hear(response.now_unix_ms, started, time.monotonic())
        if response.beat:
            self._beat()
        is_empty = not (response.batch_id or response.load_model or response.beat)
        if is_empty and self._is_replaced(pull):
            return False
        if is_empty and time.monotonic() - started < min(_QUICK_SECONDS, wait_seconds / 2):
            if time.monotonic() >= self._pause_until:  # the other pull in flight may have come back empty as well
                self._link.try_next()
            self._pause_until = time.monotonic() + self._backoff.next()
            return False
        self._backoff.reset()
        if response.load_model:
            self._load(response.load_model, response.load_adapter)
        return bool(response.batch_id) and self._accept(response, started)

    def _is_replaced(self, pull: Pull) -> bool:
        """Whether a newer pull for the same lane that excludes tenants is in flight: the router has ended this one for it."""
        return (
            bool(pull.except_tenants)
            and sum(bool(one.except_tenants) and one.lanes == pull.lanes for one in self._flying.values()) > 1
        )

    def _load(self, model: str, adapter: str) -> None:
        """Loads the model if it is not resident, and the adapter now or as soon as the model is."""
        resident = self._residency.serving(model)
        if resident is None:
            self._residency.load(model)
            if adapter:
                self._adapters.want(model, adapter)
        elif adapter:
            self._adapters.load(resident, adapter)

    async def _end_pulls(self) -> None:
        """Waits for pulls in flight: if one were cancelled while it brings a batch, the lease would have to expire first."""
        if self._flying:
            await asyncio.wait(list(self._flying), timeout=_LAST_PULLS_SECONDS)
        for task in self._flying:
            task.cancel()

    # Preparing

    def _accept(self, response: worker_pb2.PullResponse, asked_at: float) -> bool:
        lease = Lease(response.lane, response.batch_id, response.lease_ms / 1000, asked_at=asked_at)
        resident = self._residency.serving(response.lane.model)
        adapter = response.lane.adapter
        if resident and not resident.adapters.serves(adapter):
            resident = None  # the adapter was evicted since the pull was sent: the batch is handed back
        jobs = self._read(lease, resident, response.jobs) if resident and not self._stop.is_set() else []
        if resident:
            self._residency.hold(resident, len(jobs), sum(held.estimated_tokens for held in jobs))
            resident.adapters.hold(adapter, len(jobs), time.monotonic())
        self._delivery.open(lease)
        if jobs:
            self._preparation.add(jobs)
            self._relieve_in_time()
        return bool(jobs) and sum(held.read_bytes for held in jobs) <= SMALL_BYTES

    def _relieve_in_time(self) -> None:
        """Schedules a check for preparing threads that are blocked by one long text while other callers wait."""
        if self._relieving is None:
            self._relieving = self._loop.call_later(HELD_SECONDS, self._relieve)

    def _relieve(self) -> None:
        self._relieving = None
        if self._preparation.relieve():
            self._relieve_in_time()

    def _read(self, lease: Lease, resident: Resident, payloads: Collection[bytes]) -> list[HeldJob]:
        now, unix = time.monotonic(), self._clock.now()
        for payload in payloads:
            try:
                job = codec.read_job(payload)
            except DecodeError:
                log.error("a payload is no job", extra=fields({"model": resident.name}))
                lease.unreadable += 1
                continue
            queued = max(0.0, unix - job.queued_unix_ms / 1000)
            held = HeldJob(next(self._numbers), job, lease, resident, received_at=now, queue_seconds=queued)
            held.read_bytes = read_bytes(job, len(payload))
            held.estimated_tokens = estimated_tokens(job, held.read_bytes, resident.model.card.max_tokens)
            held.span = spans.begin(job, lease.lane, self._identity.worker_id, waited=queued)
            metrics.QUEUE_SECONDS.labels(resident.name).observe(queued)
            lease.jobs[held.number] = held
            lease.until_unix = max(lease.until_unix, held.deadline_unix)
        return list(lease.jobs.values())

    def _prepare(self, jobs: list[HeldJob], give_way: GiveWay) -> None:
        """Prepares jobs; runs on a preparing thread."""
        ready: list[HeldJob] = []
        failures: list[tuple[HeldJob, bytes]] = []
        for held in jobs:
            try:
                error = self._prepare_one(held, partial(self._go_on, held, give_way))
            except _Unwanted:
                continue
            if error is None:
                ready.append(held)
            else:
                held.span.failed(error)
                failures.append((held, codec.failed(error, first_item=held.job.first_item)))
        self._runner.add([held for held in ready if not held.is_complete])
        self._finisher.finished([held for held in ready if held.is_complete], is_idle=True)
        self._loop.call_soon_threadsafe(self._prepared, jobs[0].lease, ready, failures)

    def _go_on(self, held: HeldJob, give_way: GiveWay) -> None:
        """Called between two slices of a job: yields to other callers; raises if the job was cancelled or is past its deadline."""
        give_way()
        if held.unwanted:
            raise _Unwanted
        if held.deadline_unix <= self._clock.now():
            raise DeadlinePassed("the deadline passed before the job was tokenised")

    def _prepare_one(self, held: HeldJob, go_on: GoOn) -> ShoalError | None:
        started = time.monotonic()
        try:
            go_on()
            work = codec.to_work(held.job)
            held.drop_operation()
            held.prepared = _adapted(held.resident.model.prepare(work, go_on), held.lease.lane.adapter)
            held.learnt = whole_texts(work, held.prepared, held.resident.model.card)
        except _Unwanted:
            raise
        except ShoalError as error:
            return error
        except Exception as error:
            log.exception("prepare failed", extra=fields({"model": held.resident.name}))
            return InternalError(f"the input could not be prepared: {type(error).__name__}")
        ended = time.monotonic()
        held.prepare_seconds = ended - started
        metrics.PREPARE_SECONDS.labels(held.resident.name).observe(held.prepare_seconds)
        held.span.stage("prepare", started, ended)
        return None

    def _prepared(self, lease: Lease, ready: list[HeldJob], failures: list[tuple[HeldJob, bytes]]) -> None:
        self._lead.heard(time.monotonic() - lease.asked_at)
        for held in ready:
            held.resident.meter.add_texts(*held.learnt)
        self._delivery.answer(failures)
        if not ready or self._runner.is_running:  # else the device takes them at once, and sets `wake` then
            self._wake.set()


class _Unwanted(Exception):
    """Nobody waits for the job's answer: it is not prepared any further."""


def _adapted(prepared: Prepared, adapter: str) -> Prepared:
    """The prepared job with each sequence assigned to the adapter, if it is not empty."""
    if not adapter:
        return prepared
    return replace(prepared, sequences=[replace(sequence, adapter=adapter) for sequence in prepared.sequences])
