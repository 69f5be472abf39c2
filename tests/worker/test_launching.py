"""Two batches on an asynchronous device: when batches are launched, failures of either, and one
outcome per job.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as of_hypothesis
from hypothesis import strategies as st

from libs.errors import DeadlinePassed, InternalError, OutOfMemory
from services.worker.app import serve
from services.worker.jobs.held import HeldJob
from services.worker.machine.device import Device
from services.worker.memory.resident import Resident
from services.worker.settings import Settings, Shelf
from tests.support.asynchronous import FakeQueue
from tests.support.waiting import wait_until
from tests.worker.fakes import (
    POISON,
    FakeLanes,
    checkpoint,
    encode_job,
    routers,
    until,
    vector,
    vectors,
)
from tests.worker.launching import LaunchingModel, end_all, launch_bench, out_of_memory


def end_long(queue: FakeQueue) -> bool:
    """End the first batch once the device has had it for 10 ms: the next one is launched ahead of
    batches that take a millisecond or more. Return False.
    """
    if queue.first_seconds >= 0.01:
        queue.end_one()
    return False


def outputs(held: HeldJob) -> list[list[float]]:
    return [np.asarray(held.outputs[index]).tolist() for index in range(len(held.ready.sequences))]


def test_next_batch_is_launched_before_the_last_one_is_collected() -> None:
    with launch_bench() as b:
        jobs = [b.held(text) for text in ("aaaa", "bbbb", "cccc")]
        b.runner.add(jobs)
        b.runner.start()
        b.launched(2)
        assert b.queue.pending == 2
        assert not b.outcomes.of
        b.queue.end_one()
        b.wait_for_outcomes(jobs[0])
        b.launched(3)
        assert list(b.outcomes.of) == [jobs[0]]
        b.queue.end_one()
        b.queue.end_one()
        b.wait_for_outcomes(*jobs)
        assert b.queue.most_pending == 2
        assert b.log == ["launch a", "launch b", "collect a", "launch c", "collect b", "collect c"]
        assert [outputs(job) for job in jobs] == [
            [vector("aaaa")],
            [vector("bbbb")],
            [vector("cccc")],
        ]
        assert b.outcomes.was_idle == [False, False, True]
        assert all(job.forward_seconds > 0 for job in jobs)


@pytest.mark.parametrize("expected_seconds", [0.0, 0.0005])
def test_short_or_unmeasured_batch_is_collected_before_the_next(
    expected_seconds: float,
) -> None:
    with launch_bench(expected_seconds=expected_seconds) as b:
        first, second = b.held("aaaa"), b.held("bbbb")
        b.runner.add([first, second])
        b.runner.start()
        b.launched(1)
        wait_until(lambda: b.queue.submissions[0].is_awaited)
        assert b.log == ["launch a"]
        b.queue.end_one()
        b.wait_for_outcomes(first)
        b.launched(2)
        assert b.resident.meter.tokens_per_second > 0


def test_jobs_arriving_during_a_batch_share_the_next_one() -> None:
    with launch_bench(batch_tokens=10, expected_seconds=1000.0) as b:
        first, second, third = b.held("aaaaaaaaaa"), b.held("bb"), b.held("cc")
        b.runner.add([first])
        b.runner.start()
        b.launched(1)
        b.runner.add([second])
        assert b.runner.busy_seconds > 100.0
        b.runner.add([third])
        b.queue.end_one()  # earlier than expected
        b.wait_for_outcomes(first)
        b.launched(2)
        b.queue.end_one()
        b.wait_for_outcomes(second, third)
        assert [log for log in b.log if log.startswith("launch")] == ["launch a", "launch bc"]


def test_synchronous_model_runs_after_the_last_batch_is_collected() -> None:
    with launch_bench() as b:
        waits = LaunchingModel(b.queue, b.log, "org/waits")
        waits.is_launched = False
        other = Resident("org/waits", waits, load_seconds=0.0, loaded_at=0.0, last_used=0.0)
        first, second, third = b.held("aaaa"), b.held("bbbb", resident=other), b.held("cccc")
        b.runner.add([first, second, third])
        b.runner.start()
        b.launched(1)
        wait_until(lambda: b.queue.submissions[0].is_awaited)
        assert b.log == ["launch a"]
        b.queue.end_one()
        b.wait_for_outcomes(first, second)
        b.launched(2)
        b.queue.end_one()
        b.wait_for_outcomes(third)
        assert b.log == ["launch a", "collect a", "forward b", "launch c", "collect c"]


def test_out_of_memory_at_launch_is_recovered_after_the_previous_batch() -> None:
    with launch_bench() as b:
        failures = iter([None, out_of_memory(), None])
        b.model.at_launch = lambda name: next(failures)
        jobs = [b.held(text) for text in ("aaaa", "bbbb", "cccc")]
        b.runner.add(jobs)
        b.runner.start()
        wait_until(lambda: "launch b" in b.log)
        b.queue.end_one()
        b.wait_for_outcomes(*jobs[:2])
        b.launched(2)
        b.queue.end_one()
        b.wait_for_outcomes(*jobs)
        assert b.log[:6] == ["launch a", "launch b", "collect a", "recover", "trim", "forward b"]
        assert [outputs(job) for job in jobs] == [
            [vector("aaaa")],
            [vector("bbbb")],
            [vector("cccc")],
        ]


def test_out_of_memory_at_collection_is_recovered_after_the_next_batch() -> None:
    with launch_bench() as b:
        b.model.at_collect = lambda name: out_of_memory() if name == "a" else None
        jobs = [b.held(text) for text in ("aaaa", "bbbb")]
        b.runner.add(jobs)
        b.runner.start()
        b.launched(2)
        b.queue.end_one()
        b.queue.end_one()
        b.wait_for_outcomes(*jobs)
        assert b.log == [
            "launch a",
            "launch b",
            "failed a",
            "collect b",
            "recover",
            "trim",
            "forward a",
        ]
        assert [outputs(job) for job in jobs] == [[vector("aaaa")], [vector("bbbb")]]
        assert list(b.outcomes.of) == [jobs[1], jobs[0]]


def test_two_failed_batches_are_recovered_in_turn() -> None:
    with launch_bench() as b:
        b.model.at_collect = lambda name: out_of_memory()
        jobs = [b.held(text) for text in ("aaaa", "bbbb")]
        b.runner.add(jobs)
        b.runner.start()
        b.launched(2)
        b.queue.end_one()
        b.queue.end_one()
        b.wait_for_outcomes(*jobs)
        again = ["recover", "trim", "forward"]
        assert [log.split()[0] for log in b.log] == [
            "launch",
            "launch",
            "failed",
            "failed",
            *again,
            *again,
        ]
        assert [outputs(job) for job in jobs] == [[vector("aaaa")], [vector("bbbb")]]


def test_bad_input_fails_only_its_job() -> None:
    with launch_bench(is_manual=False, batch_tokens=8) as b:
        jobs = [b.held("aaa"), b.held(POISON * 3), b.held("ccc"), b.held("ddd")]
        b.runner.add(jobs)
        b.runner.start()
        b.wait_for_outcomes(*jobs)
        (error,) = b.outcomes.of[jobs[1]]
        assert isinstance(error, InternalError)
        assert (
            b.outcomes.done.count(jobs[0])
            == b.outcomes.done.count(jobs[2])
            == b.outcomes.done.count(jobs[3])
            == 1
        )


def test_input_that_does_not_fit_alone_fails_with_its_path() -> None:
    with launch_bench(is_manual=False) as b:
        run = b.model.forward

        def forward(head: str, sequences: list[object], yield_point: object = None) -> object:
            run(head, sequences)  # type: ignore[arg-type]
            raise out_of_memory()

        b.model.at_launch = lambda name: out_of_memory()
        b.model.forward = forward  # type: ignore[method-assign, assignment]
        job = b.held("aaaa")
        b.runner.add([job])
        b.runner.start()
        b.wait_for_outcomes(job)
        (error,) = b.outcomes.of[job]
        assert isinstance(error, OutOfMemory)
        assert error.field == "items[0].text"


def test_lost_device_ends_the_thread_with_its_error() -> None:
    with launch_bench() as b:
        b.is_lost = True
        b.runner.add([b.held("aaaa"), b.held("bbbb")])
        b.runner.start()
        b.launched(2)
        b.queue.end_one(RuntimeError("CUDA error: an illegal memory access was encountered"))
        b.queue.end_one(RuntimeError("CUDA error: an illegal memory access was encountered"))
        with pytest.raises(RuntimeError, match="device lost"):
            b.runner.ended.result(120)
        assert not b.outcomes.of


def test_failed_job_has_no_second_outcome() -> None:
    with launch_bench() as b:
        b.model.at_collect = lambda name: RuntimeError("broken") if name == "a" else None
        bad, good = b.held("aaaa", "bbbb"), b.held("cccc")
        b.runner.add([bad, good])
        b.runner.start()
        b.launched(2)
        b.run_until(bad, good)
        assert len(b.outcomes.of[bad]) == 1
        assert b.outcomes.of[good] == [None]
        assert b.runner.waiting_tokens == 0


def test_job_expiring_with_a_part_on_the_device_has_one_outcome() -> None:
    with launch_bench() as b:
        late, good = b.held("aaaa", "bbbb", "cccc"), b.held("dddd")
        b.runner.add([late, good])
        b.runner.start()
        b.launched(2)
        late.job.deadline_unix_ms = 1
        b.queue.end_one()
        b.wait_for_outcomes(late)
        b.run_until(good)
        (error,) = b.outcomes.of[late]
        assert isinstance(error, DeadlinePassed)
        assert "launch c" not in b.log
        assert b.waste.wasted_seconds == pytest.approx(
            sum(one.seconds for one in b.queue.submissions[:2])
        )


def test_job_wholly_on_the_device_is_finished_after_its_deadline() -> None:
    """Same as on a CPU, where no batch is cut during another. The finisher decides whether the
    answer is still sent.
    """
    with launch_bench() as b:
        first, second = b.held("aaaa"), b.held("bbbb")
        first.job.deadline_unix_ms = int((time.time() + 3600) * 1000)
        b.runner.add([first])
        b.runner.start()
        b.launched(1)
        first.job.deadline_unix_ms = 1
        b.runner.add([second])
        b.queue.end_one()
        b.wait_for_outcomes(first)
        assert b.outcomes.of[first] == [None]


def test_cancelled_job_is_not_launched_again() -> None:
    with launch_bench() as b:
        unwanted, good = b.held("aaaa", "bbbb", "cccc"), b.held("dddd")
        b.runner.add([unwanted, good])
        b.runner.start()
        b.launched(2)
        unwanted.unwanted = True
        b.run_until(good)
        assert unwanted not in b.outcomes.of
        assert "launch c" not in b.log


def test_stopping_runner_waits_for_the_device_and_reports_nothing() -> None:
    with launch_bench() as b:
        b.runner.add([b.held("aaaa"), b.held("bbbb"), b.held("cccc")])
        b.runner.start()
        b.launched(2)
        b.runner.stop()
        b.queue.end_one()
        wait_until(lambda: b.queue.submissions[1].is_awaited)
        assert not b.runner.ended.done()
        b.queue.end_one()
        b.runner.ended.result(120)
        assert not b.outcomes.of
        assert b.log == ["launch a", "launch b", "collect a", "collect b"]


def test_model_is_computing_until_its_batch_is_collected() -> None:
    with launch_bench() as b:
        job = b.held("aaaa")
        assert not b.runner.is_computing("org/fake")
        b.runner.add([job])
        b.runner.start()
        b.launched(1)
        assert b.runner.is_computing("org/fake")
        assert b.runner.serves_others(("other", False))
        assert not b.runner.serves_others(job.flow.caller)
        b.queue.end_one()
        b.wait_for_outcomes(job)
        assert not b.runner.is_computing("org/fake")
        assert not b.runner.is_computing("org/other")
        assert not b.runner.serves_others(("other", False))


def test_callers_are_charged_for_a_batch_when_it_is_launched() -> None:
    """Otherwise the next batch would be cut without counting this one."""
    with launch_bench() as b:
        b.runner.add(
            [b.held("aaaa", "bbbb", "cccc", tenant="heavy"), b.held("dddd", "eeee", tenant="light")]
        )
        b.runner.start()
        b.launched(2)
        assert b.queue.pending == 2
        assert b.log == ["launch a", "launch d"]


def test_batch_seconds_are_measured_on_the_device() -> None:
    with launch_bench(is_manual=False) as b:
        jobs = [b.held(4 * letter) for letter in "abcdefgh"]
        b.runner.add(jobs)
        b.runner.start()
        b.wait_for_outcomes(*jobs)
        wait_until(lambda: not b.runner.is_running)
        taken = sum(submission.seconds for submission in b.queue.submissions)
        assert b.waste.device_seconds == pytest.approx(taken)
        assert b.runner.device_time.turnaround_seconds > 0


_LETTERS = "abcdefgh"
_TEXTS = st.text(st.sampled_from(_LETTERS + POISON), min_size=1, max_size=5)
_JOBS = st.lists(st.lists(_TEXTS, min_size=1, max_size=4), min_size=1, max_size=8)
_PLACES = st.sets(st.integers(0, 7), max_size=3)


@of_hypothesis(max_examples=60, deadline=None)
@given(
    _JOBS,
    st.sets(st.integers(0, 12), max_size=4),
    st.sets(st.integers(0, 12), max_size=4),
    _PLACES,
    _PLACES,
    st.integers(1, 12),
    st.sampled_from([0.0, 0.001, 0.004]),
)
def test_every_job_has_exactly_one_outcome(
    texts: list[list[str]],
    fails_at_launch: set[int],
    fails_at_collect: set[int],
    late: set[int],
    unwanted: set[int],
    batch_tokens: int,
    expected_seconds: float,
) -> None:
    """Random launches and collections fail; jobs expire, are cancelled or have invalid inputs."""
    with launch_bench(
        is_manual=False, batch_tokens=batch_tokens, expected_seconds=expected_seconds
    ) as b:
        counts = {"launch": -1, "collect": -1}

        def failing(step: str, numbers: set[int]) -> Exception | None:
            counts[step] += 1
            return out_of_memory() if counts[step] in numbers else None

        b.model.at_launch = lambda name: failing("launch", fails_at_launch)
        b.model.at_collect = lambda name: failing("collect", fails_at_collect)
        jobs = [
            b.held(*some, seconds=0.0 if number in late else 600.0)
            for number, some in enumerate(texts)
        ]
        half = len(jobs) // 2
        b.runner.add(jobs[:half])
        b.runner.start()
        for number in unwanted & set(range(len(jobs))):
            jobs[number].unwanted = True
        b.runner.add(jobs[half:])
        wait_until(lambda: all(job in b.outcomes.of or job.unwanted for job in jobs))
        wait_until(lambda: not b.runner.is_running)
        assert not b.runner.is_computing("org/fake")
        assert b.queue.most_pending <= 2
        for number, job in enumerate(jobs):
            found = b.outcomes.of.get(job, [])
            assert len(found) == 1 or (job.unwanted and not found)
            if found == [None]:
                assert outputs(job) == [vector(text) for text in texts[number]]
            elif number not in late and not job.unwanted:
                assert any(POISON in text for text in texts[number]), found


async def test_worker_with_two_batches_in_flight_answers_every_job_and_drains(
    tmp_path: Path,
) -> None:
    """A whole worker: jobs of one caller in many batches, one that fails, and a shutdown with
    batches on the device.
    """
    queue, log = FakeQueue(is_manual=True), list[str]()
    models: list[LaunchingModel] = []

    def load(directory: Path, name: str, base: Path | None = None, /) -> LaunchingModel:
        models.append(LaunchingModel(queue, log, name))
        return models[-1]

    checkpoint(tmp_path, "org/fake")
    device = Device("fake", 1000, 8, 4, load, batches_in_flight=2)
    lanes, stop = FakeLanes(), asyncio.Event()
    texts = {f"job-{number}": f"{chr(97 + number)}bcd" for number in range(12)}
    late = {"late-1": "wxyz", "late-2": "xyzw", "late-3": "yzwx", "late-4": "zwxy"}
    async with routers(lanes) as running:
        settings = Settings(
            worker_id="w1",
            routers=tuple(router.address for router in running),
            models=(Shelf(tmp_path),),
            heartbeat_seconds=0.2,
            pull_wait_seconds=2.0,
        )
        serving = asyncio.create_task(serve(settings, device, stop))
        lanes.put(
            "org/fake",
            *(encode_job(name, text) for name, text in texts.items()),
            encode_job("bad", POISON),
        )
        await until(lambda: end_long(queue) or len(lanes.answers) == len(texts) + 1)
        lanes.put("org/fake", *(encode_job(name, text) for name, text in late.items()))
        await until(lambda: queue.pending == 2 and not any(lanes.queued.values()))
        stop.set()
        await until(lambda: any(beat.draining for beat in lanes.heartbeats))
        assert not late.keys() & lanes.answers.keys()
        await until(lambda: end_all(queue) or serving.done())
        await serving
    assert queue.most_pending == 2
    for name, text in (texts | late).items():
        assert vectors(lanes.answer_of(name)) == [vector(text)]
    assert lanes.answer_of("bad").WhichOneof("outcome") == "failure"
