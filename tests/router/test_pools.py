"""Two pools behind a router: preference, overflow, failures, names, and reports to operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from shoal.v1 import mesh_pb2, models_pb2, worker_pb2

from libs.catalog.overrides import Catalog, Overrides
from libs.catalog.pools import Pools, PoolSpec
from tests.router.parts import MODEL, Client, FakeWorker, card, refused, router, until, vector

POOLS = Pools("cpu", {name: PoolSpec(name) for name in ("cpu", "l4", "a100")})
CATALOG = Catalog({MODEL: Overrides("cards.yaml:1", pools=("l4", "a100"))})


@asynccontextmanager
async def mesh(redis_url: str) -> AsyncIterator[Client]:
    async with router(redis_url, pools=POOLS, catalog=CATALOG) as client:
        yield client


def in_pool(client: Client, pool: str, **values: object) -> FakeWorker:
    return FakeWorker(client.address, pool, pool=pool, **values)  # type: ignore[arg-type]  # of FakeWorker


async def test_model_is_loaded_in_its_first_pool(redis_url: str) -> None:
    async with mesh(redis_url) as client:
        able = {"on_disk": [card()], "can_load": True}
        async with (
            in_pool(client, "l4", **able).working() as first,
            in_pool(client, "a100", **able).working() as second,
        ):
            await client.sees("l4", "a100")
            assert (await client.encode("a")).dense.data == vector("a")
            assert (len(first.jobs), len(second.jobs)) == (1, 0)


async def test_next_pool_serves_models_that_first_cannot(redis_url: str) -> None:
    broken = worker_pb2.Failure(reason="MODEL_LOAD_FAILED", message="it can never fit")
    async with (
        mesh(redis_url) as client,
        in_pool(client, "l4", can_load=True, failure=broken).working() as small,
    ):
        waiting = asyncio.create_task(client.encode("a", timeout=120))
        await until(
            lambda: _queued(client, "a100"), "the request to wait for a worker of the second pool"
        )
        assert small.claims == [(MODEL, "")]
        async with in_pool(client, "a100", on_disk=[card()], can_load=True).working():
            assert (await waiting).dense.data == vector("a")
            assert (await client.encode("b")).dense.data == vector("b")
            assert (await refused(client.encode("b", pool="l4"))).message == "it can never fit"


async def test_request_is_tried_in_the_next_pool_when_the_first_gives_it_up(redis_url: str) -> None:
    """It was queued before anybody knew that the first pool cannot serve it."""
    broken = worker_pb2.Failure(reason="MODEL_LOAD_FAILED", message="it can never fit")
    async with mesh(redis_url) as client:
        waiting = asyncio.create_task(client.encode("a"))
        await until(lambda: _queued(client, "l4"), "the request to wait for the first pool")
        async with (
            in_pool(client, "a100", on_disk=[card()], can_load=True).working() as large,
            in_pool(client, "l4", can_load=True, failure=broken).working() as small,
        ):
            assert (await waiting).dense.data == vector("a")
            assert (len(large.jobs), len(small.claims)) == (1, 1)


async def _queued(client: Client, pool: str) -> bool:
    return (await client.lane(pool=pool)).queued_jobs > 0


async def test_late_requests_overflow_to_next_pool(redis_url: str) -> None:
    async with (
        mesh(redis_url) as client,
        in_pool(client, "l4", models=[card()], tokens_per_second=1.0).working() as first,
        in_pool(client, "a100", models=[card()], tokens_per_second=1.0).working() as second,
    ):
        await client.sees("l4", "a100")
        first.hold()
        waiting = asyncio.create_task(client.encode("x" * 400, timeout=300))
        await until(lambda: first.batches, "the first worker to be busy")
        await until(lambda: _leased(client, "l4"), "the router to know")
        assert (await client.encode("in a hurry", timeout=60)).dense.data == vector("in a hurry")
        assert (len(first.jobs), len(second.jobs)) == (1, 1)
        first.resume()
        assert (await waiting).dense.data == vector("x" * 400)


async def _leased(client: Client, pool: str) -> bool:
    return (await client.lane(pool=pool)).leased_tokens > 0


async def test_request_may_name_its_pool(redis_url: str) -> None:
    async with (
        mesh(redis_url) as client,
        in_pool(client, "l4", models=[card()]).working() as first,
        in_pool(client, "cpu", models=[card()]).working() as named,
    ):
        await client.sees("l4", "cpu")
        await client.encode("a", pool="cpu")
        assert (len(first.jobs), len(named.jobs)) == (0, 1)
        refusal = await refused(client.encode("a", pool="v100"))
        assert (refusal.code.name, refusal.reason, refusal.field) == (
            "INVALID_ARGUMENT",
            "INVALID_INPUT",
            "pool",
        )
        assert refusal.message == "pool 'v100' does not exist; pools: cpu, l4, a100"


@pytest.mark.parametrize("named", ["", "a100"])
async def test_model_is_loaded_by_order_in_its_first_pool_or_the_named_one(
    redis_url: str, named: str
) -> None:
    async with (
        mesh(redis_url) as client,
        in_pool(client, "l4", on_disk=[card()]).working() as first,
        in_pool(client, "a100", on_disk=[card()]).working() as second,
    ):
        await client.sees("l4", "a100")
        await client.models.LoadModel(
            models_pb2.LoadModelRequest(model=MODEL, pool=named), timeout=60
        )
        ordered, other = (second, first) if named else (first, second)
        assert [directive.load_model for directive in ordered.directives] == [MODEL]
        assert other.directives == []
        unknown = models_pb2.LoadModelRequest(model=MODEL, pool="v100")
        assert (await refused(client.models.LoadModel(unknown, timeout=60))).field == "pool"


async def test_placement_is_explained_for_all_of_a_models_pools(redis_url: str) -> None:
    async with (
        mesh(redis_url) as client,
        in_pool(client, "cpu", on_disk=[card()]).working(),
        in_pool(client, "l4", models=[card()]).working() as leaving,
        in_pool(client, "a100", on_disk=[card()]).working(),
    ):
        leaving.preempted_in_seconds = 25.0
        await leaving.beat()
        await client.sees("cpu", "l4", "a100")

        async def is_noticed() -> bool:
            """A heartbeat from before the notice may arrive after the one with it."""
            mesh_now = (await client.mesh.GetMesh(mesh_pb2.GetMeshRequest())).mesh
            return any(one.HasField("preempted_in_seconds") for one in mesh_now.workers)

        await until(is_noticed, "the notice")
        explained = await client.mesh.ExplainPlacement(
            mesh_pb2.ExplainPlacementRequest(model=MODEL)
        )
        reasons = {one.pool: (one.eligible, one.score) for one in explained.workers}
        assert reasons == {"cpu": (False, 0.3), "l4": (True, 1.0), "a100": (True, 0.3)}
        assert "Its pools are l4, then a100; requests go to a100 now." in explained.summary
        assert explained.scheduler.scheduler_id == ""
        mesh_now = (await client.mesh.GetMesh(mesh_pb2.GetMeshRequest())).mesh
        notices = {
            one.pool: one.preempted_in_seconds
            for one in mesh_now.workers
            if one.HasField("preempted_in_seconds")
        }
        assert notices.keys() == {"l4"}
        assert 0 < notices["l4"] <= 25.0  # less the time since the notice
