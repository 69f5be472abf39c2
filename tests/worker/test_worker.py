"""A whole worker over real gRPC, from Pull to Complete, with failures in between."""

from __future__ import annotations

import asyncio
import threading
import zlib
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from shoal.v1 import inference_pb2, models_pb2, worker_pb2

from libs.errors import NoCapacity
from tests.worker.fakes import (
    ENDLESS,
    MAX_TOKENS,
    POISON,
    SLOW,
    FakeLanes,
    FakeRouter,
    encode_job,
    routers,
    until,
    vector,
    vectors,
)
from tests.worker.running import MODEL, worker


async def test_job_for_a_cold_model_loads_it_and_is_answered(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running):
        lanes.put(MODEL, encode_job("j1", "hello", "sea"))
        await until(lambda: "j1" in lanes.answers)
        result = lanes.answer_of("j1")
        assert vectors(result) == [vector("hello"), vector("sea")]
        assert result.encode.usage.input_tokens == 8
        assert result.encode.model_revision == "r1"
        assert result.encode.timings.forward_seconds > 0
        assert lanes.completes[-1].release
        await until(lambda: lanes.states().get(MODEL) == models_pb2.MODEL_STATE_RESIDENT)
        await until(lambda: lanes.heartbeats[-1].models[0].card.tokens_per_byte == 1.0)


async def test_first_heartbeat_lists_every_model_on_disk(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running, "org/other"):
        await until(lambda: bool(lanes.heartbeats))
        assert {model.model for model in lanes.heartbeats[0].on_disk} == {MODEL, "org/other"}


async def test_many_jobs_are_each_answered_once(tmp_path: Path) -> None:
    lanes = FakeLanes()
    names = [f"job {number}" for number in range(300)]
    async with routers(lanes, 2) as running, worker(tmp_path, running, "org/other"):
        for number, name in enumerate(names):
            lanes.put(
                MODEL if number % 3 else "org/other",
                encode_job(name, name, "x" * (number % 50 + 1)),
            )
        await until(lambda: len(lanes.answers) == 300)
        for number, name in enumerate(names):
            assert vectors(lanes.answer_of(name)) == [vector(name), vector("x" * (number % 50 + 1))]
        await until(lambda: not any(lanes.leased.values()))
        assert not lanes.handed_back


async def test_failing_item_fails_its_job_with_the_path_in_the_request(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running):
        lanes.put(
            MODEL,
            encode_job("long", "a", "b" * (MAX_TOKENS + 1), first_item=100),
            encode_job("poison", "a", POISON),
            encode_job("endless", "a", ENDLESS),
            encode_job("good", "a"),
        )
        other = encode_job("other", "a")
        other.score.CopyFrom(inference_pb2.ScoreRequest(query=inference_pb2.Item(text="q")))
        lanes.put(MODEL, other)
        await until(lambda: len(lanes.answers) == 5)
        failures = {job: lanes.answer_of(job).failure for job in lanes.answers}
        assert (failures["long"].reason, failures["long"].field) == (
            "INPUT_TOO_LONG",
            "items[101].text",
        )
        assert failures["poison"].reason == "INTERNAL"
        assert "not finite" in failures["endless"].message
        assert failures["other"].reason == "INVALID_INPUT"
        assert vectors(lanes.answer_of("good")) == [vector("a")]


async def test_jobs_past_their_deadline_are_not_computed(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        lanes.put(MODEL, encode_job("expired", "a", seconds=-1.0), encode_job("slow", SLOW))
        await until(lambda: "expired" in lanes.answers)
        assert lanes.answer_of("expired").failure.reason == "DEADLINE_PASSED"
        await until(lambda: bool(bay.models) and bay.model.started.is_set())
        lanes.put(MODEL, encode_job("late", "a", seconds=0.3))
        await until(lambda: not lanes.queued[MODEL])
        await asyncio.sleep(0.3)
        bay.model.gate.set()
        await until(lambda: "late" in lanes.answers)
        assert lanes.answer_of("late").failure.reason == "DEADLINE_PASSED"
        assert bay.model.batches == [[1]]


async def test_cancelled_job_is_skipped(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        lanes.put(MODEL, encode_job("slow", SLOW))
        await until(lambda: bool(bay.models) and bay.model.started.is_set())
        lanes.put(MODEL, encode_job("gone", "gone"), encode_job("kept", "kept"))
        await until(lambda: not lanes.queued[MODEL])
        batch_id = next(name for name, jobs in lanes.leased.items() if "gone" in jobs)
        reported = worker_pb2.HeartbeatResponse(
            cancelled=[worker_pb2.CancelledJobs(batch_id=batch_id, job_ids=["gone"])]
        )
        lanes.next_response = reported
        await until(lambda: lanes.next_response is not reported)
        beats_before = len(lanes.heartbeats)
        await until(
            lambda: len(lanes.heartbeats) > beats_before
        )  # the next is sent once the worker has received it
        bay.model.gate.set()
        await until(lambda: "kept" in lanes.answers)
        assert "gone" not in lanes.answers
        assert bay.model.batches == [[1], [4]]


async def test_lost_lease_is_dropped_and_no_longer_renewed(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        lanes.put(MODEL, encode_job("slow", SLOW))
        await until(lambda: bool(bay.models) and bay.model.started.is_set())
        await until(
            lambda: [batch.batch_id for batch in lanes.heartbeats[-1].batches] == list(lanes.leased)
        )
        (lost,) = lanes.leased
        lanes.next_response = worker_pb2.HeartbeatResponse(
            cancelled=[worker_pb2.CancelledJobs(batch_id=lost, lost=True)]
        )
        await until(lambda: not lanes.heartbeats[-1].batches)
        bay.model.gate.set()
        lanes.put(MODEL, encode_job("next", "next"))
        await until(lambda: "next" in lanes.answers)
        assert "slow" not in lanes.answers


async def test_orders_are_executed_once(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running, "org/b") as bay:
        orders = worker_pb2.HeartbeatResponse(
            directives=[
                worker_pb2.Directive(seq=1, load_model="org/b"),
                worker_pb2.Directive(seq=2, load_model="org/unknown"),
            ]
        )
        lanes.next_response = orders
        await until(lambda: lanes.states().get("org/b") == models_pb2.MODEL_STATE_RESIDENT)
        await until(lambda: lanes.states().get("org/unknown") == models_pb2.MODEL_STATE_FAILED)
        # The folder scan runs in parallel to heartbeats and may take longer than a load.
        await until(lambda: lanes.states().get(MODEL) == models_pb2.MODEL_STATE_COLD)
        assert lanes.heartbeats[-1].directive_seq == 2
        lanes.next_response = worker_pb2.HeartbeatResponse(
            directives=[worker_pb2.Directive(seq=3, evict_model="org/b")]
        )
        await until(lambda: lanes.states().get("org/b") == models_pb2.MODEL_STATE_COLD)
        lanes.next_response = orders
        await until(lambda: lanes.next_response is not orders)
        assert list(bay.models) == ["org/b"]
        assert lanes.states()["org/b"] == models_pb2.MODEL_STATE_COLD
        lanes.next_response = worker_pb2.HeartbeatResponse(
            directives=[worker_pb2.Directive(seq=4, drain=True)]
        )
        await until(lambda: lanes.heartbeats[-1].leaving)


async def test_worker_fails_over_to_another_router(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes, 2) as running, worker(tmp_path, running) as bay:
        lanes.put(MODEL, encode_job("slow", SLOW))
        await until(lambda: bool(bay.models) and bay.model.started.is_set())
        await running[0].stop()
        bay.model.gate.set()
        await until(lambda: "slow" in lanes.answers)
        lanes.put(MODEL, encode_job("next", "next"))
        await until(lambda: "next" in lanes.answers)


class DyingRouter(FakeRouter):
    """Leases one batch, and never sends the reply."""

    is_well = False

    async def Pull(
        self, request: worker_pb2.PullRequest, context: object
    ) -> worker_pb2.PullResponse:
        response = await super().Pull(request, context)
        if response.batch_id and not self.is_well:
            self.is_well = True
            raise NoCapacity("gone")
        return response


@pytest.mark.parametrize("others", [0, 1])
async def test_batch_lost_with_its_router_is_pulled_again(tmp_path: Path, others: int) -> None:
    """The retry goes to the other router, or to the same one after its restart."""
    lanes = FakeLanes()
    dying = DyingRouter(lanes)
    await dying.start()
    async with routers(lanes, others) as running, AsyncExitStack() as stack:
        asked: list[FakeRouter] = [*running]
        asked.insert(zlib.crc32(b"w1") % (1 + others), dying)  # is tried first
        await stack.enter_async_context(worker(tmp_path, asked))
        lanes.put(MODEL, *(encode_job(f"j{number}", "a") for number in range(3)))
        await until(lambda: dying.is_well)
        await until(lambda: set(lanes.answers) == {"j0", "j1", "j2"})
        assert all(len(answers) == 1 for answers in lanes.answers.values())
        await until(lambda: not any(lanes.leased.values()))
        assert {request.batch_id for request in lanes.pulls if request.asked_again} & set(
            lanes.leased
        )
    await dying.stop()


class UnavailableRouter(FakeRouter):
    """Refuses pulls while `is_unavailable`, and records the requests."""

    is_unavailable = True

    async def Pull(
        self, request: worker_pb2.PullRequest, context: object
    ) -> worker_pb2.PullResponse:
        if self.is_unavailable:
            self.lanes.pulls.append(request)
            raise NoCapacity("gone")
        return await super().Pull(request, context)


async def test_repeated_pull_names_the_lanes_where_its_batch_may_be(tmp_path: Path) -> None:
    """A model is loaded between a pull that failed and its repetition."""
    lanes = FakeLanes()
    router = UnavailableRouter(lanes)
    await router.start()

    async def load(number: int, model: str) -> None:
        directive = worker_pb2.Directive(seq=number, load_model=model)
        lanes.next_response = worker_pb2.HeartbeatResponse(directives=[directive])
        await until(lambda: lanes.states().get(model) == models_pb2.MODEL_STATE_RESIDENT)

    async with worker(tmp_path, [router], "org/b"):
        await load(1, MODEL)
        await until(lambda: any(request.lanes for request in lanes.pulls))
        await load(2, "org/b")
        router.is_unavailable = False
        await until(lambda: any(len(request.lanes) > 1 for request in lanes.pulls))
        asked: dict[str, list[str]] = {}
        for request in lanes.pulls:
            named = sorted(lane.model for lane in request.lanes)
            assert asked.setdefault(request.batch_id, named) == named
    await router.stop()


@pytest.mark.parametrize("stopping", [0, 1])
async def test_router_that_does_not_long_poll_is_abandoned(tmp_path: Path, stopping: int) -> None:
    lanes = FakeLanes()
    async with routers(lanes, 2) as running, worker(tmp_path, running):
        running[stopping].is_stopping = True
        lanes.put(MODEL, encode_job("j1", "a"))
        await until(lambda: "j1" in lanes.answers)


async def test_results_wait_until_a_router_accepts_them(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes, 2) as running, worker(tmp_path, running):
        for router in running:
            router.refuse_completes = True
        lanes.put(MODEL, encode_job("j1", "a"))
        await until(lambda: any(lanes.leased.values()))
        await asyncio.sleep(0.3)
        assert not lanes.answers
        running[1].refuse_completes = False
        await until(lambda: "j1" in lanes.answers)
        lanes.answer_of("j1")


async def test_worker_survives_loss_of_all_routers(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running):
        lanes.put(MODEL, encode_job("before", "a"))
        await until(lambda: "before" in lanes.answers)
        (router,) = running
        address = router.address
        await router.stop()
        async with routers(lanes):
            again = type(router)(lanes)
            await again.start(address)
            lanes.put(MODEL, encode_job("after", "a"))
            await until(lambda: "after" in lanes.answers)
            running.append(again)


async def test_lease_with_an_unparsable_payload_is_not_renewed(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running):
        lanes.put_payload(MODEL, "broken", b"\xff\xff")
        await until(lambda: bool(lanes.completes))
        assert not lanes.completes[-1].release
        lanes.put(MODEL, encode_job("good", "a"))
        await until(lambda: "good" in lanes.answers)
        await until(lambda: not lanes.heartbeats[-1].batches)


async def test_stopping_worker_finishes_held_jobs(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running) as bay:
        lanes.put(MODEL, encode_job("slow", SLOW))
        await until(lambda: bool(bay.models) and bay.model.started.is_set())
        lanes.put(MODEL, encode_job("waiting", "a"))
        await until(
            lambda: len(lanes.heartbeats[-1].batches) == 2
        )  # the worker holds both, not only the reply
        bay.stop.set()
        await until(lambda: lanes.heartbeats[-1].draining)
        lanes.put(MODEL, encode_job("too late", "a"))
        bay.model.gate.set()
        assert bay.done is not None
        await bay.done
        assert {"slow", "waiting"} <= set(lanes.answers)
        assert "too late" not in lanes.answers
        assert lanes.heartbeats[-1].leaving
        assert not lanes.heartbeats[-1].batches


async def test_stopping_worker_returns_unfinished_jobs(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running, grace_seconds=0.2) as bay:
        lanes.put(MODEL, encode_job("slow", SLOW), encode_job("waiting", "a" * 500))
        await until(lambda: bool(bay.models) and bay.model.started.is_set())
        bay.stop.set()
        assert bay.done is not None
        await bay.done
        assert sorted(lanes.handed_back) == ["slow", "waiting"]
        assert not lanes.answers


async def test_health_follows_the_worker_lifecycle(tmp_path: Path) -> None:
    lanes = FakeLanes()
    address = f"unix:{tmp_path}/health.sock"
    async with routers(lanes) as running, worker(tmp_path, running, health_address=address) as bay:  # type: ignore[arg-type]
        await until(lambda: bool(lanes.heartbeats))
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service="worker"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        bay.stop.set()


async def test_freed_memory_is_trimmed_in_a_thread_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, threads = 0, set[int]()

    def trim() -> None:
        nonlocal times
        times += 1
        threads.add(threading.get_ident())

    monkeypatch.setattr("libs.memory.TIDY_SECONDS", 0.01)
    monkeypatch.setattr("libs.memory.trim", trim)
    async with routers(FakeLanes()) as running:
        async with worker(tmp_path, running):
            await until(lambda: times >= 3)
        await asyncio.get_running_loop().shutdown_default_executor()  # one may be in progress
        ended_at = times
        await asyncio.sleep(0.1)
    assert times == ended_at
    assert threading.get_ident() not in threads


async def test_lost_device_ends_the_worker_and_returns_its_jobs(
    tmp_path: Path,
) -> None:
    lanes = FakeLanes()

    async def lose() -> None:
        async with worker(tmp_path, running) as bay:
            bay.is_lost = True
            lanes.put(MODEL, encode_job("poison", POISON))
            await until(lambda: lanes.handed_back == ["poison"])

    async with routers(lanes) as running:
        with pytest.raises(RuntimeError, match="device lost"):
            await lose()
