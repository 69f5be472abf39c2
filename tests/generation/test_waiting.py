"""Generations that wait for memory: their order, their tokens as waiting work, and the number that
a worker takes in.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from shoal.v1 import worker_pb2

from libs.kernels.attention.paged import pages_for
from libs.models import InputSequence, Unfinished
from libs.models.generation.model import GenerativeModel
from libs.models.interface.work import TextWork, never_cancelled
from libs.telemetry import metrics
from services.scheduler.demand import Goals, ModelWork, PoolInput, compute_need
from services.scheduler.rates import ArrivalRate
from services.worker.jobs.execution.oom_recovery import OomRecovery
from services.worker.jobs.execution.runner import DeviceRunner
from services.worker.jobs.held import HeldJob, Lease
from services.worker.jobs.pulling.puller import Puller
from services.worker.jobs.pulling.pulls import Situation, plan_pulls
from services.worker.jobs.waste import Waste
from services.worker.memory.resident import Resident
from services.worker.scheduling.batcher import BatchLimits, Flow
from services.worker.scheduling.meter import Meter
from tests.generation.served import write
from tests.generation.test_serving import load
from tests.worker.test_runner import RecordedOutcomes

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GenerativeModel:
    """A model of which a forward runs one step."""
    write("qwen3", tmp_path)
    monkeypatch.setattr("libs.models.generation.model.STEPS_SECONDS", 0.0)
    return load(tmp_path)


def prepared(model: GenerativeModel, most: int) -> InputSequence:
    (sequence,) = model.prepare(TextWork(["a"], max_tokens=most), never_cancelled).sequences
    return sequence


def test_long_answer_is_not_overtaken_for_ever(model: GenerativeModel) -> None:
    model.pages = 4
    long = prepared(model, 100)
    assert pages_for(long.tokens + 100) == model.pages
    waiting = [prepared(model, 2 + number) for number in range(3)]
    model.forward("generate", waiting)  # they end one after another
    waiting.append(long)
    for _ in range(20):
        waiting.append(prepared(model, 4))
        outcomes = dict(zip(map(id, waiting), model.forward("generate", waiting), strict=True))
        found = outcomes[id(long)]
        assert isinstance(found, Unfinished)
        if found.ids:
            return
        waiting = [each for each in waiting if isinstance(outcomes[id(each)], Unfinished)]
    pytest.fail("later answers took the memory that it waited for")


class RecordingMeter(Meter):
    """Adds up its measurements."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = self.unneeded = 0
        self.seconds = 0.0

    def add_steps(self, tokens: int, seconds: float, unneeded: int, occupied: float) -> None:
        super().add_steps(tokens, seconds, unneeded, occupied)
        self.tokens, self.unneeded = self.tokens + tokens, self.unneeded + unneeded
        self.seconds += seconds


class Device:
    """A worker's device thread, step by step, with a model that has memory for `texts`."""

    TEXTS = 4

    def __init__(self, model: GenerativeModel, texts: int = TEXTS) -> None:
        model.pages = 2 * texts
        self.model = model
        self.outcomes = RecordedOutcomes()
        self.meter = RecordingMeter()
        self.resident = Resident("org/m", model, load_seconds=0.0, loaded_at=0.0, last_used=0.0)
        self.resident.meter = self.meter
        self.now = 0.0
        self.runner = DeviceRunner(
            BatchLimits(2048, 256, 1.0),
            self.outcomes,
            clock=self._clock,
            unix_time=lambda: 0.0,
            oom_recovery=OomRecovery(lambda: None, lambda: None, lambda _: False),
            enter=lambda: None,
            waste=Waste(),
        )

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def add(self, number: int, most: int, tenant: str = "t") -> HeldJob:
        job = worker_pb2.Job(job_id=str(number), deadline_unix_ms=1, tenant=tenant)
        held = HeldJob(number, job, Lease(worker_pb2.Lane(), "1", 15.0), self.resident, 0.0, 0.0)
        work = TextWork(["a"], max_tokens=most)
        held.prepared = self.model.prepare(work, never_cancelled)
        self.runner.add([held])
        return held

    def forward(self) -> None:
        batch = self.runner._next()
        assert batch is not None
        self.runner._serve(batch, self.runner._sequence_jobs(batch))


def test_sequences_that_wait_for_memory_count_as_waiting_work(model: GenerativeModel) -> None:
    device = Device(model)
    jobs = [device.add(number, 20 - number % 3) for number in range(10)]
    prompt = jobs[0].ready.tokens
    prices = [prompt + 20 - number % 3 for number in range(10)]
    flow = Flow(tenant="t")
    assert device.runner.waiting() == {("org/m", ""): {flow: sum(prices)}}
    device.forward()
    assert device.runner.waiting() == {("org/m", ""): {flow: 4 + sum(prices[4:])}}
    assert device.meter.tokens == 4 * (prompt + 1)
    order = []
    while len(device.outcomes.done) < len(jobs):
        before = len(device.outcomes.done)
        device.forward()
        order += [held.number for held in device.outcomes.done[before:]]
    assert set(order[:4]) == {0, 1, 2, 3}, "those that began first"
    assert device.meter.tokens == sum(prices), "each prompt and each token of an answer, once"
    assert device.meter.unneeded == 0
    assert not device.runner.waiting()


@pytest.mark.parametrize(("texts", "load"), [(64, 8 / 64), (4, 1.0)])
def test_load_of_endless_generations_is_the_share_of_memory_that_they_occupy(
    model: GenerativeModel, texts: int, load: float
) -> None:
    device, streams = Device(model, texts), 8
    jobs = [device.add(number, 20) for number in range(streams)]
    while len(device.outcomes.done) < 6 * streams:
        device.forward()
        while len(jobs) < len(device.outcomes.done) + streams:
            jobs.append(device.add(len(jobs), 20))
    meter = device.meter
    arrivals = (meter.tokens + meter.unneeded) / meter.seconds
    held = streams * (jobs[0].ready.tokens + 20)
    rate = ArrivalRate(arrivals, arrivals)
    work = ModelWork("org/m", 0, held, rate, meter.tokens_per_second)
    assert work.offered_load == pytest.approx(load, rel=0.1)
    pool = PoolInput("cpu", 0.0, 60.0, 60.0, (work,), ready=1)
    need = compute_need(pool, Goals(target_utilization=0.75))
    assert need.workers == pytest.approx(load / 0.75, rel=0.1)


def test_generation_without_memory_does_not_preempt_again_at_once(model: GenerativeModel) -> None:
    device = Device(model)
    jobs = [device.add(number, 20) for number in range(Device.TEXTS)]
    device.forward()
    running = device.runner._next()
    assert running is not None
    jobs.append(device.add(Device.TEXTS, 20, tenant="light"))
    device.runner._waiting_room.ran(running, 1.0, device.now)
    batches = metrics.BATCH_PREEMPTIONS._value.get()
    device.runner._preempt(running)
    assert metrics.BATCH_PREEMPTIONS._value.get() == batches + 1
    device.runner._serve(running, device.runner._sequence_jobs(running))
    while len(device.outcomes.done) < len(jobs):
        device.forward()
    assert device.outcomes.done[-1] is jobs[-1]


def test_worker_takes_in_what_it_can_run_soon(model: GenerativeModel) -> None:
    device, most, lane = Device(model), 20, 60
    puller = cast(Any, Puller.__new__(Puller))
    puller._runner = device.runner
    puller._residency = SimpleNamespace(lanes=lambda: ["org/m"], serving=lambda _: device.resident)
    pulled = largest = 0
    while len(device.outcomes.done) < lane:
        while pulled < lane:
            situation = Situation(
                lanes=puller._lanes({}),
                can_load=False,
                in_flight=(),
                waiting_tokens=device.runner.waiting_tokens,
                busy_seconds=device.runner.busy_seconds,
                lead_seconds=0.01,
            )
            plan = plan_pulls(situation, device.runner.limits.tokens)
            pulls = [pull for pull in plan.pulls if not pull.except_tenants]
            if not pulls:
                break
            tokens = pulls[0].tokens
            while pulled < lane and tokens > 0:
                tokens -= device.add(pulled, most).ready.tokens + most
                pulled += 1
        largest = max(largest, pulled - len(device.outcomes.done))
        device.forward()
        if pulled < lane:
            assert model.generating + len(device.outcomes.done) >= min(Device.TEXTS, pulled)
    assert largest <= 4 * Device.TEXTS
