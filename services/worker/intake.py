"""Pulls jobs and prepares them in threads.

On the way of a request the first stop in the worker: Pull -> here -> `batcher.py` -> `runner.py` -> `finisher.py` -> Complete.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from google.protobuf.message import DecodeError
from shoal.v1 import worker_pb2

from libs.errors import DeadlinePassed, InternalError, ShoalError
from libs.telemetry import metrics
from libs.telemetry.logs import fields
from libs.versions import WIRE_VERSION
from services.worker import codec, spans
from services.worker.adapters import AdapterLoader
from services.worker.batcher import Limits
from services.worker.clock import MeshClock
from services.worker.delivery import Delivery
from services.worker.finisher import Finisher, must_succeed
from services.worker.held import HeldJob, Lease, Resident
from services.worker.link import Backoff, Link
from services.worker.meter import whole_texts
from services.worker.models import Prepared
from services.worker.pulls import LaneName, LaneState, Lead, Pull, Situation, plan_pulls
from services.worker.residency import Residency
from services.worker.runner import Runner

log = logging.getLogger(__name__)

_MAX_PULLED_JOBS: Final = 256
_BYTES_A_TOKEN: Final = 4
"""Of a job that was not tokenised yet; only for the flow of pulls."""

_LAST_PULLS_SECONDS: Final = 1.0
"""How long pulls in flight may take to end once the worker stops. Routers end them when its heartbeat says that it drains; those of
wire version 0 do not."""

_PARTIAL_WAIT_SECONDS: Final = 1.0
"""How long a pull waits that does not ask for all lanes: soon one that does takes its place."""

_QUICK_SECONDS: Final = 0.05
"""An empty answer that comes sooner means that its router does not wait for work."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker is called: `epoch` is new at each start of the process."""

    worker_id: str
    epoch: str
    pool: str


class Intake:
    """`run` pulls until `stop`; `wake` is set by whoever changes what could be pulled.

    `beat` sends a heartbeat at once, where a router says that orders wait.
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
        preparers: ThreadPoolExecutor,
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
        self._preparers = preparers
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
        self._preparing: Counter[LaneName] = Counter()  # estimated tokens
        self._pause_until = 0.0
        self._unanswered: list[str] = []  # batch ids of pulls of which no router's answer came

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
        """Pull no more, as from when `stop` was set; `run` returns when what was pulled last has arrived."""
        self._stop.set()
        self._wake.set()

    # Pulling

    def _start_pulls(self, tasks: asyncio.TaskGroup) -> float | None:
        """Returns after how many seconds to look again, or None."""
        pause = self._pause_until - time.monotonic()
        if pause > 0:
            return pause
        lanes = self._lanes()
        situation = Situation(
            lanes=lanes,
            can_load=self._residency.can_load(),
            flying=tuple(self._flying.values()),
            waiting_tokens=self._preparing.total() + self._runner.waiting_tokens,
            busy_seconds=self._runner.busy_seconds,
            lead_seconds=self._lead.seconds,
        )
        plan = plan_pulls(situation, self._limits.tokens)
        for pull in plan.pulls:
            task = tasks.create_task(self._pull(pull, [lane for lane in lanes if lane in pull.lanes], len(lanes)))
            self._flying[task] = pull
            task.add_done_callback(self._landed)
        return plan.look_again

    def _lanes(self) -> dict[LaneName, LaneState]:
        """Of every model with each of its adapters, in the order of who is to be served first."""
        residents = [one for model in self._residency.lanes() if (one := self._residency.serving(model)) is not None]
        self._adapters.settle(residents)
        waiting, most = self._runner.waiting(), self._runner.batch_tokens(resident.name for resident in residents)
        lanes: dict[LaneName, LaneState] = {}
        for resident in residents:
            tokens = most[resident.name]
            seconds = resident.meter.expected_seconds(tokens)
            for adapter in resident.adapters.lanes():
                name = (resident.name, adapter)
                flows = waiting.get(name, {})
                tenants = {flow.tenant: count for flow, count in flows.items() if not flow.is_bulk}
                lanes[name] = LaneState(sum(flows.values()) + self._preparing[name], tokens, seconds, tenants)
        return lanes

    def _landed(self, task: asyncio.Task[bool]) -> None:
        """The next pull can wait until the device has what this one brought: sending it now would delay the preparing thread."""
        del self._flying[task]
        if task.cancelled() or task.exception() or not task.result():
            self._wake.set()

    async def _pull(self, pull: Pull, lanes: list[LaneName], of: int) -> bool:
        """Whether it brought jobs to prepare. `lanes`: its own in order, out of so many."""
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
        """Whether a newer one that leaves tenants of its lane out is in flight: the router has ended this one for it."""
        return (
            bool(pull.except_tenants)
            and sum(bool(one.except_tenants) and one.lanes == pull.lanes for one in self._flying.values()) > 1
        )

    def _load(self, model: str, adapter: str) -> None:
        """The model, if it is not resident; the adapter into it, now or as soon as it is."""
        resident = self._residency.serving(model)
        if resident is None:
            self._residency.load(model)
            if adapter:
                self._adapters.want(model, adapter)
        elif adapter:
            self._adapters.load(resident, adapter)

    async def _end_pulls(self) -> None:
        """Wait for them: of a pull that is cancelled while it brings a batch, the lease would have to run out."""
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
            resident = None  # it has gone since the pull was sent: the batch goes back
        jobs = self._read(lease, resident, response.jobs) if resident and not self._stop.is_set() else []
        if resident:
            self._residency.hold(resident, len(jobs), sum(map(len, response.jobs)) / _BYTES_A_TOKEN)
            resident.adapters.hold(adapter, len(jobs), time.monotonic())
        self._delivery.open(lease)
        if jobs:
            tokens = sum(map(len, response.jobs)) // _BYTES_A_TOKEN + 1
            self._preparing[lease.lane.model, adapter] += tokens
            self._preparers.submit(self._prepare, jobs, tokens).add_done_callback(must_succeed)
        return bool(jobs)

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
            held.span = spans.begin(job, lease.lane, self._identity.worker_id, waited=queued)
            metrics.QUEUE_SECONDS.labels(resident.name).observe(queued)
            lease.jobs[held.number] = held
            lease.until_unix = max(lease.until_unix, held.deadline_unix)
        return list(lease.jobs.values())

    def _prepare(self, jobs: list[HeldJob], estimated_tokens: int) -> None:
        """On a preparing thread."""
        ready: list[HeldJob] = []
        failures: list[tuple[HeldJob, bytes]] = []
        for held in jobs:
            if held.unwanted:
                continue
            error = self._prepare_one(held)
            if error is None:
                ready.append(held)
            else:
                held.span.failed(error)
                failures.append((held, codec.failed(error, first_item=held.job.first_item)))
        self._runner.add([held for held in ready if not held.is_complete])
        self._finisher.finished([held for held in ready if held.is_complete], is_idle=True)
        self._loop.call_soon_threadsafe(self._prepared, jobs[0].lease, ready, failures, estimated_tokens)

    def _prepare_one(self, held: HeldJob) -> ShoalError | None:
        started = time.monotonic()
        try:
            if held.deadline_unix <= self._clock.now():
                raise DeadlinePassed("the deadline passed before the job was tokenised")
            work = codec.to_work(held.job)
            held.prepared = _adapted(held.resident.model.prepare(work), held.lease.lane.adapter)
            held.learnt = whole_texts(work, held.prepared, held.resident.model.card)
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

    def _prepared(self, lease: Lease, ready: list[HeldJob], failures: list[tuple[HeldJob, bytes]], estimated_tokens: int) -> None:
        self._lead.heard(time.monotonic() - lease.asked_at)
        lane = (lease.lane.model, lease.lane.adapter)
        self._preparing[lane] -= estimated_tokens
        if not self._preparing[lane]:
            del self._preparing[lane]
        for held in ready:
            held.resident.meter.add_texts(*held.learnt)
        self._delivery.answer(failures)
        if not ready or self._runner.is_running:  # else the device takes them now, and wakes us then
            self._wake.set()


def _adapted(prepared: Prepared, adapter: str) -> Prepared:
    """The same for an adapter; empty: none."""
    if not adapter:
        return prepared
    return replace(prepared, sequences=[replace(sequence, adapter=adapter) for sequence in prepared.sequences])
