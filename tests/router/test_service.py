"""Requests through real routers, a real Redis and a worker that answers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import grpc
import pytest
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import mesh_pb2, models_pb2, worker_pb2

from libs.fleet.versions import WIRE_VERSION
from services.router import service
from services.router.lanes.pending_pulls import PendingPulls
from tests.router.parts import (
    MODEL,
    Client,
    FakeWorker,
    card,
    encode_request,
    refused,
    router,
    until,
    vector,
    worker_stub,
)


async def test_request_is_answered(redis_url: str) -> None:
    async with router(redis_url) as client, FakeWorker(client.address, models=[card()]).working():
        response = await client.encode("hello", "you")
        assert response.dense.data == vector("hello") + vector("you")
        assert list(response.dense.shape) == [2, 4]
        assert response.model_revision == "r1"
        assert response.timings.total_seconds > 0


async def test_worker_and_client_may_use_different_routers(redis_url: str) -> None:
    async with (
        router(redis_url, "a") as a,
        router(redis_url, "b") as b,
        FakeWorker(a.address, models=[card()]).working(),
    ):
        await b.sees("w1")
        for text in ("one", "two", "three"):
            assert (await b.encode(text)).dense.data == vector(text)


async def test_ten_thousand_items_are_returned_in_order(redis_url: str) -> None:
    texts = [f"{number} {'x' * (number % 97)}" for number in range(10_000)]
    async with router(redis_url, "a") as a, router(redis_url, "b") as b:
        first = FakeWorker(a.address, "w1", models=[card()], budget_tokens=5000)
        second = FakeWorker(b.address, "w2", models=[card()], budget_tokens=5000)
        first.hold()
        second.hold()
        async with first.working(), second.working():
            await a.sees("w1", "w2")
            call = asyncio.create_task(a.encode(*texts, timeout=120))
            await until(lambda: first.jobs and second.jobs, "both workers to have work")
            first.resume()
            second.resume()
            response = await call
            assert response.dense.data == b"".join(map(vector, texts))
            assert response.usage.input_tokens == 10_000
            lane = await settled(a)
            assert lane.done_jobs == lane.enqueued_jobs == len(first.jobs) + len(second.jobs)


async def settled(client: Client) -> mesh_pb2.LaneStatus:
    """The lane once it is idle."""

    async def idle() -> bool:
        lane = await client.lane()
        return lane.enqueued_jobs > 0 and not (
            lane.queued_jobs or lane.queued_tokens or lane.leased_tokens
        )

    await until(idle, "the lane to be idle")
    return await client.lane()


async def test_scores_are_ranked_over_all_jobs(redis_url: str) -> None:
    texts = ["x" * (1 + number * 7 % 2000) for number in range(300)]
    request = pb.ScoreRequest(
        model=MODEL,
        query=pb.Item(text="what"),
        documents=[pb.Item(text=text) for text in texts],
        top_n=5,
    )
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card()]).working() as worker,
    ):
        response = await client.inference.Score(request)
        assert struct.unpack("<300f", response.scores.data) == tuple(map(len, texts))
        assert (
            list(response.ranking) == sorted(range(300), key=lambda index: -len(texts[index]))[:5]
        )
        assert len(worker.jobs) > 1
        assert all(job.score.query.text == "what" for job in worker.jobs)


async def test_extractions_are_joined_in_order(redis_url: str) -> None:
    texts = [f"{number} {'y' * 300}" for number in range(200)]
    request = pb.ExtractRequest(
        model="tests/labels",
        items=[pb.Item(text=text) for text in texts],
        classify=pb.ClassifyTask(labels=["a"]),
    )
    made = card("tests/labels", labels=["a", "b"], tasks=[models_pb2.TASK_CLASSIFY])
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[made]).working() as worker,
    ):
        response = await client.inference.Extract(request)
        assert [result.labels[0].label for result in response.results] == texts
        assert [job.first_item for job in worker.jobs] == sorted(
            job.first_item for job in worker.jobs
        )
        assert len(worker.jobs) > 1


async def test_cold_model_is_loaded_by_a_worker_with_room(redis_url: str) -> None:
    async with (
        router(redis_url, "a") as a,
        router(redis_url, "b") as b,
        FakeWorker(a.address, on_disk=[card()], can_load=True).working(),
    ):
        await b.sees("w1")
        assert (await b.encode("cold")).dense.data == vector("cold")


async def test_cold_request_waits_for_the_first_worker(redis_url: str) -> None:
    async with router(redis_url) as client:
        waiting = asyncio.create_task(client.encode("early"))
        await until(lambda: is_queued(client, 1), "the job to be queued")
        async with FakeWorker(client.address, on_disk=[card()], can_load=True).working():
            assert (await waiting).dense.data == vector("early")


async def is_queued(client: Client, jobs: int) -> bool:
    return (await client.lane()).queued_jobs == jobs


def test_router_answers_before_the_clients_deadline() -> None:
    assert service._deadline_seconds(1.0, 60.0) == pytest.approx(0.95)
    assert service._deadline_seconds(0.1, 60.0) == pytest.approx(0.09)


async def test_deadline_without_worker_names_missing_worker(
    redis_url: str,
) -> None:
    async with router(redis_url, default_deadline_seconds=3.0) as client:
        refusal = await refused(client.inference.Encode(encode_request("late")))
        assert (refusal.code, refusal.reason) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "DEADLINE_PASSED",
        )
        assert "no worker" in refusal.message
        assert (await settled(client)).cancelled_jobs == 1


async def test_job_that_kills_its_workers_is_given_up(redis_url: str) -> None:
    async with router(redis_url, lease_ms=1000, max_attempts=1) as client:
        dying = FakeWorker(client.address, "w1", models=[card()])
        dying.hold()
        async with dying.working():
            call = asyncio.create_task(refused(client.encode("poison")))
            await until(lambda: dying.jobs, "the worker to hold the job")
        async with FakeWorker(client.address, "w2", models=[card()]).working() as healthy:
            refusal = await call
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
            assert not healthy.jobs


@pytest.mark.parametrize("routers", [1, 2])
async def test_pull_excluding_a_tenant_waits_for_others(
    redis_url: str, routers: int, pending_pulls: list[PendingPulls]
) -> None:
    """Whatever that tenant has in the lane, and also if the other one asks another router. A newer
    pull takes its place.
    """
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(router(redis_url, router_id=f"r{number}"))
            for number in range(routers)
        ]
        calls: list[asyncio.Future[object]] = []

        def ask(tenant: str, text: str) -> None:
            metadata = (("x-shoal-tenant", tenant),)
            calls.append(
                asyncio.ensure_future(
                    clients[0].inference.Encode(
                        encode_request(text), timeout=120, metadata=metadata
                    )
                )
            )

        async def queued() -> int:
            return (await clients[0].lane()).enqueued_jobs

        def pulls(*left_out: str) -> asyncio.Future[worker_pb2.PullResponse]:
            request = worker_pb2.PullRequest(
                worker_id="w", epoch="e", pool="cpu",
                lanes=[worker_pb2.Lane(pool="cpu", model=MODEL)], budget_tokens=1000,
                budget_jobs=10, wait_seconds=120, wire_version=WIRE_VERSION,
                except_tenants=left_out,
            )  # fmt: skip
            return asyncio.ensure_future(worker_stub(clients[-1].channel).Pull(request))

        for number in range(5):
            ask("heavy", f"heavy {number}")
        await until(lambda: _is_at_least(queued, 5), "the backlog")
        older = pulls("heavy")
        await until(lambda: len(pending_pulls[-1]) == 1, "the pull to wait")
        await asyncio.sleep(0.3)
        assert not older.done()
        newer = pulls("heavy", "other")
        assert not (await asyncio.wait_for(older, 60)).batch_id
        ask("heavy", "one more")
        ask("other", "of another")
        await until(lambda: _is_at_least(queued, 7), "both")
        assert not newer.done()
        ask("light", "light")
        found = await asyncio.wait_for(newer, 60)
        assert [worker_pb2.Job.FromString(job).encode.items[0].text for job in found.jobs] == [
            "light"
        ]
        for call in calls:
            call.cancel()


async def _is_at_least(count: Callable[[], Awaitable[int]], wanted: int) -> bool:
    return await count() >= wanted
