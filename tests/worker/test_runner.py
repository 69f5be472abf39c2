"""The device thread with a small model: batches, failures, deadlines, cancellation, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shoal.v1 import inference_pb2, tensor_pb2, worker_pb2

from libs.errors import DeadlinePassed, InternalError, OutOfMemory, ShoalError
from libs.models import (
    EncodeResult,
    InputSequence,
    Output,
    Prepared,
    Result,
    StoredArray,
    YieldPoint,
    load_model,
    never_yield,
)
from services.worker.jobs.execution.oom_recovery import OomRecovery
from services.worker.jobs.execution.runner import DeviceRunner, IdleWork
from services.worker.jobs.held import HeldJob, Lease
from services.worker.jobs.waste import Waste
from services.worker.memory.resident import Resident
from services.worker.mesh import job_codec
from services.worker.scheduling.batcher import NO_CALLER, Batch, BatchGroup, BatchLimits, Flow
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.waiting import wait_until
from tests.worker.fakes import HANG_SECONDS, LAYERED, POISON, SLOW, FakeModel, encode_job, vector


class RecordedOutcomes:
    """Records outcomes."""

    def __init__(self) -> None:
        self.done: list[HeldJob] = []
        self.broken: dict[HeldJob, ShoalError] = {}

    def finished(self, jobs: list[HeldJob], *, is_idle: bool) -> None:
        self.done.extend(jobs)

    def failed(self, job: HeldJob, error: ShoalError) -> None:
        self.broken[job] = error

    def computed(self, job: HeldJob) -> None:
        """Ignored."""

    def stream(self, job: HeldJob, index: int, ids: list[int]) -> None:
        raise NotImplementedError("no job of these tests is read along")

    def device_changed(self) -> None:
        return


class Bench:
    """A runner, its model and the recorded outcomes.

    The runner's clock moves by `pass_seconds` in each forward pass, and next to nothing otherwise:
    the sizes of batches and the order of callers depend on the speed of passes, which must not be
    that of the machine.

    Args:
        batch_seconds: Maximum expected duration of a batch while the device is shared.
    """

    def __init__(
        self,
        *,
        batch_tokens: int = 1000,
        batch_seconds: float = 0.05,
        pass_seconds: float = 0.001,
        idle_work: IdleWork | None = None,
    ) -> None:
        self.now = 1000.0
        self.pass_seconds = pass_seconds
        self.model = FakeModel()
        self.resident = Resident(
            "org/fake", self.model, load_seconds=0.0, loaded_at=0.0, last_used=0.0
        )
        self.outcomes = RecordedOutcomes()
        self.waste = Waste()
        self.recovered = 0
        self.lost = False
        self.idle: list[str] = []
        """Names of models that can be evicted."""
        self.relieved: list[str] = []
        self.capacity = 10**9
        """Tokens from which a forward pass runs out of memory."""
        run = self.model.forward

        def forward(
            head: str, sequences: list[InputSequence], yield_point: YieldPoint = never_yield
        ) -> list[Output]:
            outputs = run(head, sequences, yield_point)
            self.now += self.pass_seconds
            if sum(sequence.tokens for sequence in sequences) > self.capacity:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return outputs

        self.model.forward = forward  # type: ignore[method-assign]
        self.runner = DeviceRunner(
            BatchLimits(batch_tokens, 256, 1.0, batch_seconds),
            self.outcomes,
            clock=self._clock,
            unix_time=time.time,
            oom_recovery=OomRecovery(self._recover, lambda: None, self._relieve),
            enter=lambda: None,
            waste=self.waste,
            idle_work=idle_work,
        )

    def _clock(self) -> float:
        """Return the time, which also passes between two readings."""
        self.now += 1e-6
        return self.now

    def _recover(self) -> None:
        self.recovered += 1
        if self.lost:
            raise RuntimeError("device lost")

    def _relieve(self, keep: str) -> bool:
        assert keep == "org/fake"
        self.relieved += self.idle[:1]
        return bool(self.idle) and bool(self.idle.pop(0))

    def held(self, *texts: str, seconds: float = 600.0, tenant: str = "") -> HeldJob:
        job = encode_job("job", *texts, seconds=seconds)
        job.tenant = tenant
        held = HeldJob(
            id(job),
            job,
            Lease(worker_pb2.Lane(), "1", 15.0),
            self.resident,
            received_at=0.0,
            queue_seconds=0.0,
        )
        held.prepared = self.model.prepare(job_codec.to_work(job))
        return held

    def ended(self) -> bool:
        return self.runner.ended.done()


@contextmanager
def bench(**options: Any) -> Iterator[Bench]:
    made = Bench(**options)
    made.runner.start()
    try:
        yield made
    finally:
        made.model.gate.set()
        made.runner.stop()
        wait_until(made.ended)


def charge(b: Bench, tenant: str, seconds: float) -> None:
    """Charge the tenant for past device time."""
    b.runner._waiting_room.ran(
        Batch(BatchGroup("org/fake", "dense"), (), 1, {Flow(tenant=tenant): 1.0}),
        seconds,
        b.now,
    )


def outputs(held: HeldJob) -> list[list[float]]:
    return [np.asarray(held.outputs[index]).tolist() for index in range(len(held.ready.sequences))]


def test_jobs_of_one_batch_get_their_outputs() -> None:
    with bench() as b:
        jobs = [b.held("a", "bcd"), b.held("xyz")]
        b.runner.add(jobs)
        wait_until(lambda: len(b.outcomes.done) == 2)
        assert outputs(jobs[0]) == [vector("a"), vector("bcd")]
        assert outputs(jobs[1]) == [vector("xyz")]
        assert len(b.model.batches) == 1
        assert jobs[0].forward_seconds == jobs[1].forward_seconds > 0
        assert b.resident.meter.tokens_per_second > 0


def beginning(prepared: Prepared, count: int) -> Prepared:
    """Return a job of which the first sequences are prepared."""
    return replace(prepared, sequences=prepared.sequences[:count])


def test_growing_job_is_complete_when_its_last_sequences_were_added() -> None:
    with bench() as b:
        held = b.held("a", "bcd", "xyz")
        whole = held.ready
        for count in (1, 3):
            b.runner.grow(held, beginning(whole, count))
            wait_until(lambda count=count: len(held.outputs) == count)  # type: ignore[misc]
        wait_until(lambda: not b.runner.is_running)
        assert not b.outcomes.done
        assert b.runner.add([held]) == [held], "the caller finishes it"
        assert outputs(held) == [vector("a"), vector("bcd"), vector("xyz")]
        assert not b.outcomes.done
        assert sum(map(len, b.model.batches)) == 3


def test_growing_job_is_finished_once_by_its_last_batch() -> None:
    with bench() as b:
        held, later = b.held(SLOW, "bcd"), b.held("xyz")
        b.runner.grow(held, beginning(held.ready, 1))
        wait_until(lambda: b.runner.is_running)
        held.prepared = b.model.prepare(job_codec.to_work(held.job))
        assert b.runner.add([held]) == []
        b.model.gate.set()
        b.runner.add([later])
        wait_until(lambda: len(b.outcomes.done) == 2)
        assert b.outcomes.done.count(held) == 1
        assert outputs(held) == [vector(SLOW), vector("bcd")]


def test_growing_job_that_failed_is_not_computed_further() -> None:
    with bench() as b:
        held, other = b.held(POISON, "bcd"), b.held("xyz")
        b.runner.grow(held, beginning(held.ready, 1))
        wait_until(lambda: held in b.outcomes.broken)
        assert held.unwanted, "its preparation ends"
        b.runner.grow(held, b.model.prepare(job_codec.to_work(held.job)))
        assert b.runner.add([held]) == []
        b.runner.add([other])
        wait_until(lambda: b.outcomes.done == [other])
        assert not held.outputs


def test_jobs_of_all_dimensions_and_data_types_share_a_forward_pass(tmp_path: Path) -> None:
    """A full vector, a short one and a binary one of a real model share one pass, and each is as
    requested.
    """
    model = load_model(
        write_checkpoint("bert", tmp_path, sentence=SentenceFiles()),
        "org/real",
        torch.device("cpu"),
        torch.float32,
    )
    passes: list[int] = []
    run = model.forward

    def forward(
        head: str, sequences: Sequence[InputSequence], yield_point: YieldPoint = never_yield
    ) -> list[Output]:
        passes.append(len(sequences))
        return run(head, sequences, yield_point)

    model.forward = forward  # type: ignore[method-assign]
    wishes: tuple[dict[str, Any], ...] = (
        {},
        {"dimensions": 16},
        {"data_type": tensor_pb2.DATA_TYPE_BINARY},
        {"data_type": tensor_pb2.DATA_TYPE_INT8, "dimensions": 8},
    )
    with bench() as b:
        b.resident = Resident("org/real", model, load_seconds=0.0, loaded_at=0.0, last_used=0.0)
        jobs = []
        for number, wish in enumerate(wishes):
            job = encode_job(f"job-{number}", "A shoal of fish turns as one.")
            job.encode.MergeFrom(inference_pb2.EncodeRequest(**wish))
            held = HeldJob(
                number,
                job,
                Lease(worker_pb2.Lane(), "1", 15.0),
                b.resident,
                received_at=0.0,
                queue_seconds=0.0,
            )
            held.prepared = model.prepare(job_codec.to_work(job))
            jobs.append(held)
        b.runner.add(jobs)
        wait_until(lambda: len(b.outcomes.done) == len(wishes))
    assert passes == [len(wishes)]
    full, short, binary, small = (
        dense(model.finish(held.ready, [held.outputs[0]])) for held in jobs
    )
    assert [one.shape for one in (full, short, binary, small)] == [
        (1, 64),
        (1, 16),
        (1, 64),
        (1, 8),
    ]
    whole = full.values[0].astype(np.float32)
    assert np.allclose(short.values[0], whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)
    assert np.array_equal(np.unpackbits(binary.values[0].astype(np.uint8))[:64], whole > 0)
    assert small.scale is not None
    assert np.allclose(
        small.values[0] * small.scale, whole[:8] / np.linalg.norm(whole[:8]), atol=0.01
    )


def dense(result: Result) -> StoredArray:
    assert isinstance(result, EncodeResult)
    assert result.dense is not None
    return result.dense


def test_jobs_arriving_during_a_pass_are_in_the_next_one() -> None:
    with bench() as b:
        b.runner.add([b.held(SLOW)])
        wait_until(b.model.started.is_set)
        for text in ("a", "bb", "ccc"):
            b.runner.add([b.held(text)])
        assert b.runner.waiting_tokens == 6
        b.model.gate.set()
        wait_until(lambda: len(b.outcomes.done) == 4)
        assert b.model.batches == [[1], [1, 2, 3]]


class FakeIdleWork:
    """`left` counts pieces, `done` lists the threads that did one, `gate` blocks each."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.done: list[str] = []
        self.started, self.gate = threading.Event(), threading.Event()

    @property
    def is_pending(self) -> bool:
        return self.left > 0

    def run(self) -> None:
        self.started.set()
        self.gate.wait(HANG_SECONDS)
        self.left -= 1
        self.done.append(threading.current_thread().name)


def test_idle_work_is_done_on_the_device_thread_while_no_batch_waits() -> None:
    work = FakeIdleWork(2)
    with bench(idle_work=work) as b:
        wait_until(work.started.is_set)
        b.runner.add([b.held("a")])  # does not wait for the lock
        assert b.model.batches == []
        work.gate.set()
        wait_until(lambda: len(b.outcomes.done) == 1 and work.left == 0)
        assert work.done == ["device", "device"]
        work.left = 1
        b.runner.wake()
        wait_until(lambda: work.left == 0)


def test_batches_precede_idle_work() -> None:
    work = FakeIdleWork(0)
    work.gate.set()
    with bench(idle_work=work) as b:
        b.runner.add([b.held(SLOW)])
        wait_until(b.model.started.is_set)
        work.left = 1
        b.runner.add([b.held("a")])
        b.runner.wake()
        assert work.done == []
        b.model.gate.set()
        wait_until(lambda: len(b.outcomes.done) == 2 and work.left == 0)


def test_device_that_waits_for_a_queued_job_is_starved() -> None:
    with bench() as b:
        first, second = b.held("a"), b.held("b")
        first.received_at = second.received_at = b.now
        first.queue_seconds = 2.0
        b.runner.add([first])
        wait_until(lambda: b.outcomes.done == [first])
        starved = b.runner.device_time.starved_seconds
        assert starved >= 2.0
        second.queue_seconds = 100.0  # mostly during the first batch, or before it
        b.runner.add([second])
        wait_until(lambda: b.outcomes.done == [first, second])
        assert starved < b.runner.device_time.starved_seconds < starved + 50.0
        assert b.runner.device_time.turnaround_seconds > 0
        assert b.runner.device_time.cpu_seconds > 0


def test_job_larger_than_a_batch_finishes_with_its_last_part() -> None:
    with bench(batch_tokens=10) as b:
        job = b.held(*["abcd"] * 7)
        b.runner.add([job])
        wait_until(lambda: b.outcomes.done == [job])
        assert outputs(job) == [vector("abcd")] * 7
        assert sorted(map(len, b.model.batches)) == [1, 2, 2, 2]


def test_poisoned_sequence_fails_only_its_job() -> None:
    with bench() as b:
        good = [b.held(f"good {number}") for number in range(20)]
        bad = b.held("fine", POISON)
        b.runner.add([*good[:7], bad, *good[7:]])
        wait_until(lambda: len(b.outcomes.done) == 20 and bool(b.outcomes.broken))
        assert list(b.outcomes.broken) == [bad]
        assert isinstance(b.outcomes.broken[bad], InternalError)
        assert [outputs(job) for job in good] == [
            [vector(f"good {number}")] for number in range(20)
        ]
        assert b.recovered > 0
        after = b.held("after")
        b.runner.add([after])
        wait_until(lambda: after in b.outcomes.done)


def test_waiting_parts_of_a_failed_job_are_dropped() -> None:
    with bench(batch_tokens=4) as b:
        bad = b.held(POISON * 4, "aaaa", "bbbb")
        b.runner.add([bad])
        wait_until(lambda: bad in b.outcomes.broken)
        wait_until(lambda: b.runner.waiting_tokens == 0)
        assert b.model.batches == [[4]]


def test_expired_and_cancelled_jobs_never_reach_the_device() -> None:
    with bench() as b:
        b.runner.add([b.held(SLOW)])
        wait_until(b.model.started.is_set)
        late, unwanted, good = b.held("late", seconds=0.0), b.held("unwanted"), b.held("good")
        b.runner.add([late, unwanted, good])
        unwanted.unwanted = True
        b.model.gate.set()
        wait_until(lambda: good in b.outcomes.done)
        assert isinstance(b.outcomes.broken.pop(late), DeadlinePassed)
        assert not b.outcomes.broken
        assert unwanted not in b.outcomes.done
        assert b.model.batches == [[1], [4]]


def test_lost_device_ends_the_thread_with_its_error() -> None:
    with bench() as b:
        b.lost = True
        b.runner.add([b.held(POISON)])
        with pytest.raises(RuntimeError, match="device lost"):
            b.runner.ended.result(HANG_SECONDS)


def test_no_forward_pass_overlaps_another() -> None:
    with bench() as b:
        running = threading.Semaphore(1)
        real = b.model.forward
        overlaps: list[int] = []

        def watched(head: str, sequences: list[object], yield_point: YieldPoint) -> list[Output]:
            if not running.acquire(blocking=False):
                overlaps.append(1)
            try:
                return real(head, sequences, yield_point)  # type: ignore[arg-type]
            finally:
                running.release()

        b.model.forward = watched  # type: ignore[method-assign, assignment]
        jobs = [b.held(f"text {number}") for number in range(200)]
        adders = [
            threading.Thread(target=b.runner.add, args=(jobs[start::4],)) for start in range(4)
        ]
        for adder in adders:
            adder.start()
        for adder in adders:
            adder.join()
        wait_until(lambda: len(b.outcomes.done) == 200)
        assert not overlaps


def test_sequence_that_does_not_fit_fails_only_its_job_with_its_path() -> None:
    with bench() as b:
        b.capacity = 20
        good = [b.held("a" * (number + 1)) for number in range(20)]
        bad = b.held("fine", "x" * 21)
        b.runner.add([*good[:9], bad, *good[9:]])
        wait_until(lambda: len(b.outcomes.done) == 20 and bool(b.outcomes.broken))
        error = b.outcomes.broken.pop(bad)
        assert isinstance(error, OutOfMemory)
        assert error.field == "items[1].text"
        assert not b.outcomes.broken
        assert [outputs(job) for job in good] == [
            [vector("a" * (number + 1))] for number in range(20)
        ]


def test_idle_models_are_evicted_before_a_batch_is_halved() -> None:
    with bench() as b:
        b.capacity, b.idle = 5, ["org/x", "org/y"]
        job = b.held("abc", "def")
        b.runner.add([job])
        wait_until(lambda: b.outcomes.done == [job])
        assert outputs(job) == [vector("abc"), vector("def")]
        assert b.relieved == ["org/x", "org/y"]
        assert b.model.batches == [[3, 3]] * 4 + [[3], [3]]


def test_batches_stay_small_after_one_did_not_fit() -> None:
    with bench(batch_tokens=100) as b:
        b.capacity = 30
        first = b.held(*["x" * 10] * 10)
        b.runner.add([first])
        wait_until(lambda: b.outcomes.done == [first])
        tried = len(b.model.batches)
        assert b.resident.meter.tokens_per_second == 0  # recovered batches are not measured
        second = b.held(*["y" * 10] * 10)
        b.runner.add([second])
        wait_until(lambda: b.outcomes.done == [first, second])
        assert b.model.batches[tried:] == [[10, 10, 10]] * 3 + [[10]]
        assert b.resident.meter.tokens_per_second > 0


def test_batches_are_short_while_the_device_is_shared() -> None:
    b = Bench(batch_tokens=1000)
    assert b.runner.batch_tokens([b.resident]) == {"org/fake": 1000}  # unmeasured
    b.resident.meter.add_forward(1000, 1.0)
    b.runner.add([b.held("a")])
    assert b.runner.batch_tokens([b.resident]) == {"org/fake": 150}
    other = b.held("a", tenant="other")
    b.runner.add([other])
    unknown = Resident("org/unknown", b.model, load_seconds=0.0, loaded_at=0.0, last_used=0.0)
    assert b.runner.batch_tokens([b.resident, unknown]) == {
        "org/fake": 100,
        "org/unknown": 1000,
    }
    assert b.runner.waiting() == {("org/fake", ""): {NO_CALLER: 1, Flow(tenant="other"): 1}}


def test_batch_is_not_filled_with_work_of_a_just_served_tenant() -> None:
    with bench(batch_tokens=10, batch_seconds=1000.0, pass_seconds=1.0) as b:
        heavy = b.held(SLOW, *["aaaaa"] * 6)
        light = b.held("bb", tenant="light")
        b.runner.add([heavy])
        wait_until(b.model.started.is_set)
        b.runner.add([light])
        b.model.gate.set()
        wait_until(lambda: len(b.outcomes.done) == 2)
        assert b.model.batches[1] == [2]
        assert b.outcomes.done == [light, heavy]
        assert b.resident.turn > 0


def test_less_served_caller_preempts_a_pass_between_two_layers() -> None:
    with bench(batch_tokens=100) as b:
        heavy, rest = b.held(LAYERED, tenant="heavy"), b.held("y" * 50, tenant="heavy")
        charge(b, "heavy", 1.0)
        b.runner.add([heavy])
        wait_until(lambda: b.runner.is_running)
        light, unwanted, late = (b.held(text, tenant="light") for text in ("abc", "bcd", "cde"))
        unwanted.unwanted = True
        late.job.deadline_unix_ms = 1
        b.runner.add([rest, unwanted, late, light])
        wait_until(lambda: b.outcomes.done == [light])
        assert b.runner.is_running
        time.sleep(0.05)
        assert b.outcomes.done == [light]
        b.model.gate.set()
        wait_until(lambda: len(b.outcomes.done) == 3)
        assert b.outcomes.done == [light, heavy, rest]
        assert list(b.outcomes.broken) == [late]
        assert outputs(light) == [vector("abc")]
        assert outputs(heavy) == [vector(LAYERED)]
        assert b.model.batches == [[1], [3], [50]]


def test_time_of_a_preempting_batch_is_not_charged_to_the_other() -> None:
    with bench(batch_tokens=100) as b:
        heavy, light = b.held(LAYERED, tenant="heavy"), b.held(SLOW, tenant="light")
        run = b.model.forward

        def slowly(
            head: str, sequences: list[InputSequence], yield_point: YieldPoint = never_yield
        ) -> list[Output]:
            if chr(sequences[0].ids[0]) == SLOW:
                b.now += 0.3
                b.model.gate.set()
            return run(head, sequences, yield_point)

        b.model.forward = slowly  # type: ignore[method-assign]
        charge(b, "heavy", 1.0)
        b.runner.add([heavy])
        wait_until(lambda: b.runner.is_running)
        b.runner.add([light])
        wait_until(lambda: len(b.outcomes.done) == 2)
        assert b.outcomes.done == [light, heavy]
        assert light.forward_seconds >= 0.3
        assert 0 < heavy.forward_seconds < 0.1
        assert b.waste.device_seconds == pytest.approx(
            light.forward_seconds + heavy.forward_seconds
        )
        assert b.runner.device_time.cpu_seconds > 0


@pytest.mark.parametrize("text", [POISON, "a" * 30])
def test_failing_preempting_batch_does_not_affect_others(text: str) -> None:
    with bench(batch_tokens=100) as b:
        b.capacity = 20
        heavy, light = b.held(LAYERED, tenant="heavy"), b.held(text, tenant="light")
        charge(b, "heavy", 1.0)
        b.runner.add([heavy])
        wait_until(lambda: b.runner.is_running)
        b.runner.add([light])
        wait_until(lambda: light in b.outcomes.broken)
        b.model.gate.set()
        wait_until(lambda: b.outcomes.done == [heavy])
        assert outputs(heavy) == [vector(LAYERED)]
