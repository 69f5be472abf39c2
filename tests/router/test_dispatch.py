"""Requests between admission and the lanes: coalesced calls, shared and repeated jobs, cancellation
and deadlines, through real routers and a real Redis.
"""

from __future__ import annotations

import asyncio
import time

import grpc
from shoal.v1 import worker_pb2

from libs.queue import connect
from tests.router.parts import (
    Client,
    FakeWorker,
    card,
    encode_request,
    refused,
    router,
    until,
    vector,
)
from tests.router.test_service import settled


async def test_concurrent_requests_are_coalesced_and_all_answered(redis_url: str) -> None:
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        texts = [f"text {number}" for number in range(300)]
        responses = await asyncio.gather(*(client.encode(text) for text in texts))
        assert [response.dense.data for response in responses] == [vector(text) for text in texts]
        assert len(worker.batches) < len(texts)


async def test_single_request_costs_three_scripts(redis_url: str) -> None:
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        await client.encode("first")
        await worker.hold_beats()
        before, begin = await scripts_run(redis_url), time.monotonic()
        for number in range(100):
            await client.encode(f"text {number}")
        found = await scripts_run(redis_url) - before
        # Enqueue, pull, complete. In addition only the router's upkeep, a few times a second.
        assert found < 320 + 10 * (time.monotonic() - begin)


async def scripts_run(redis_url: str) -> int:
    redis = connect(redis_url)
    statistics = await redis.info("commandstats")
    await redis.aclose()
    return sum(
        int(entry["calls"]) for name, entry in statistics.items() if name.startswith("cmdstat_eval")
    )


async def test_retry_with_same_request_id_finds_its_job(redis_url: str) -> None:
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        worker.hold()
        twice = [asyncio.create_task(client.encode("same", request_id="r-1")) for _ in range(2)]
        other = asyncio.create_task(client.encode("other", request_id="r-1"))
        await until(lambda: is_queued_or_held(client, 2), "two jobs")
        worker.resume()
        assert {(await task).dense.data for task in twice} == {vector("same")}
        assert (await other).dense.data == vector("other")
        assert len({job.job_id for job in worker.jobs}) == 2


async def is_queued_or_held(client: Client, jobs: int) -> bool:
    return (await client.lane()).enqueued_jobs == jobs


async def test_retry_at_another_router_takes_the_answer_along(redis_url: str) -> None:
    async with (
        router(redis_url, "a") as a,
        router(redis_url, "b") as b,
        FakeWorker(a.address, models=[card()]).working() as worker,
    ):
        worker.hold()
        first = asyncio.create_task(a.encode("same", request_id="r-1"))
        await until(lambda: worker.jobs, "the worker to hold the job")
        second = asyncio.create_task(b.encode("same", request_id="r-1"))
        first.cancel()
        await asyncio.wait({first})
        worker.resume()
        assert (await second).dense.data == vector("same")


async def test_one_failing_job_fails_the_request_and_cancels_the_others(redis_url: str) -> None:
    def fails(job: worker_pb2.Job) -> worker_pb2.JobResult:
        worker.hold()  # it must not have failed all jobs before the router hears of the first
        failure = worker_pb2.Failure(
            reason="INPUT_TOO_LONG",
            message="600 tokens, 512 fit",
            field=f"items[{job.first_item}].text",
        )
        return worker_pb2.JobResult(failure=failure)

    async with router(redis_url) as client:
        worker = FakeWorker(client.address, models=[card()], budget_tokens=1)
        worker.answer = fails
        async with worker.working():
            refusal = await refused(client.encode(*["z" * 5000] * 40))
            assert (refusal.code, refusal.reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "INPUT_TOO_LONG",
            )
            assert refusal.field == "items[0].text"
            worker.resume()
            lane = await settled(client)
            assert lane.done_jobs + lane.cancelled_jobs == lane.enqueued_jobs
            assert lane.cancelled_jobs > 0


async def test_client_disconnect_cancels_its_jobs(redis_url: str) -> None:
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card()], budget_tokens=1).working() as worker,
    ):
        worker.hold()
        call = client.inference.Encode(encode_request(*["z" * 5000] * 20))
        await until(lambda: worker.jobs, "the worker to hold a job")
        call.cancel()

        async def all_cancelled() -> bool:
            lane = await client.lane()
            return lane.queued_jobs == 0 and lane.cancelled_jobs == lane.enqueued_jobs > 1

        await until(all_cancelled, "all jobs to be cancelled")
        held = {job.job_id for job in worker.jobs}
        await until(lambda: held <= worker.cancelled, "the worker to hear of it")
        worker.resume()
        await settled(client)
        assert (await client.encode("next")).dense.data == vector("next")


async def test_deadline_that_passes_says_so_and_cancels(redis_url: str) -> None:
    async with (
        router(redis_url, default_deadline_seconds=3.0) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        await client.sees("w1")
        worker.hold()
        # Not the client's deadline: on a busy machine that may pass at the client first.
        refusal = await refused(client.inference.Encode(encode_request("late")))
        assert (refusal.code, refusal.reason) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "DEADLINE_PASSED",
        )
        assert "no worker" not in refusal.message
        worker.resume()
        assert (await settled(client)).cancelled_jobs == 1


async def test_expired_lease_of_dead_worker_requeues_jobs(redis_url: str) -> None:
    # The second worker may be slower than a lease lasts too.
    async with router(redis_url, lease_ms=1000, max_attempts=100) as client:
        dying = FakeWorker(client.address, "w1", models=[card()])
        dying.hold()
        async with dying.working():
            call = asyncio.create_task(client.encode("again"))
            await until(lambda: dying.jobs, "the worker to hold the job")
        async with FakeWorker(client.address, "w2", models=[card()]).working():
            assert (await call).dense.data == vector("again")
