"""Outages of Redis, routers that drain, health, reflection, and the services for operators."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest as ReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionResponse as ReflectionResponse
from redis.asyncio import Redis
from shoal.v1 import mesh_pb2, models_pb2, worker_pb2

from libs.fleet import Fleet
from libs.serving import LIVENESS
from libs.versions import WIRE_VERSION
from tests.router.parts import (
    MODEL,
    Client,
    FakeWorker,
    card,
    changed,
    health,
    refused,
    router,
    until,
    vector,
    worker_stub,
)
from tests.support.redis import RedisServer

ROOT = Path(__file__).parents[2]
SERVICES = [f"shoal.v1.{name}Service" for name in ("Inference", "Model", "Mesh", "Worker")]


async def is_serving(client: Client) -> bool:
    return await health(client.channel) == "SERVING"


@pytest.mark.parametrize("durable", [True, False])
async def test_router_survives_redis_restart(durable: bool) -> None:
    with RedisServer(durable=durable) as server:
        async with router(server.url) as client:
            waiting = asyncio.create_task(client.encode("before", timeout=120))
            await until(lambda: has_jobs(client), "the job to be queued")
            server.kill()
            await until(lambda: not_serving(client), "health to turn")
            assert await health(client.channel, LIVENESS) == "SERVING"  # or a probe would kill it
            refusal = await refused(client.encode("during"))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_CAPACITY")
            assert refusal.retry_seconds > 0
            server.start()
            await until(lambda: is_serving(client), "health to turn back")
            async with FakeWorker(client.address, models=[card()]).working():
                assert (await waiting).dense.data == vector("before")
                assert (await client.encode("after")).dense.data == vector("after")


async def has_jobs(client: Client) -> bool:
    return (await client.lane()).enqueued_jobs > 0


async def not_serving(client: Client) -> bool:
    return not await is_serving(client)


async def test_health_is_reported_for_each_service(redis_url: str) -> None:
    async with router(redis_url) as client:
        for service in ["", *SERVICES]:
            assert await health(client.channel, service) == "SERVING"
        refusal = await refused(health(client.channel, "shoal.v1.Nothing"))
        assert refusal.code == grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(redis_url: str) -> None:
    async with router(redis_url) as client:
        ask: grpc.aio.StreamStreamMultiCallable[ReflectionRequest, ReflectionResponse] = (
            client.channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                ReflectionRequest.SerializeToString,
                ReflectionResponse.FromString,
            )
        )
        call = ask(iter([ReflectionRequest(list_services="")]))
        listed = [
            service.name
            async for response in call
            for service in response.list_services_response.service
        ]
        assert set(SERVICES) | {"grpc.health.v1.Health"} <= set(listed)


async def test_drain_finishes_calls_in_flight_and_refuses_new_ones(redis_url: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'libs/api'}",
        "SHOAL_ADDRESS": "127.0.0.1:0",
        "SHOAL_REDIS_URL": redis_url,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.router",
        cwd=ROOT,
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    client: Client | None = None
    lines: list[dict[str, str]] = []
    try:
        async with asyncio.timeout(120):
            while not lines or lines[-1]["message"] != "listening":
                lines.append(json.loads(await process.stderr.readline()))
        client = Client(lines[-1]["address"])
        async with FakeWorker(client.address, models=[card()]).working() as worker:
            worker.hold()
            waiting = asyncio.create_task(client.encode("in flight"))
            await until(lambda: worker.jobs, "the worker to hold the job")
            process.terminate()
            await until(lambda: not_serving(client), "health to turn")
            refusal = await refused(client.encode("too late"))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert refusal.retry_seconds > 0
            worker.resume()
            assert (await waiting).dense.data == vector("in flight")
            _, log = await asyncio.wait_for(process.communicate(), 120)
            assert process.returncode == 0
            lines += [json.loads(line) for line in log.decode().splitlines()]
            assert [line["outcome"] for line in lines if line["message"] == "call"].count("OK") == 1
            assert "in flight" not in log.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if client is not None:
            await client.close()


async def test_taken_address_is_named(redis_url: str) -> None:
    async with router(redis_url) as client:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'libs/api'}",
            "SHOAL_ADDRESS": client.address,
            "SHOAL_REDIS_URL": redis_url,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.router",
            cwd=ROOT,
            env=environment,
            stderr=asyncio.subprocess.PIPE,
        )
        _, log = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 2
        assert client.address in log.decode().splitlines()[-1]


async def test_models_are_loaded_pinned_and_evicted_on_order(redis_url: str) -> None:
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, on_disk=[card()]).working() as worker,
    ):
        listed = (await client.models.ListModels(models_pb2.ListModelsRequest())).models
        assert [(model.model, model.state) for model in listed] == [
            (MODEL, models_pb2.MODEL_STATE_COLD)
        ]
        loaded = (
            await client.models.LoadModel(models_pb2.LoadModelRequest(model=MODEL), timeout=60)
        ).model
        assert loaded.state == models_pb2.MODEL_STATE_RESIDENT
        assert [place.worker_id for place in loaded.places] == ["w1"]
        assert loaded.card.dimensions == 4
        for pinned in (True, False):
            request = models_pb2.PinModelRequest(model=MODEL, pinned=pinned)
            (place,) = (await client.models.PinModel(request, timeout=60)).model.places
            assert place.pinned is pinned, "the answer is the state after the order, not before it"
        evicted = await client.models.EvictModel(models_pb2.EvictModelRequest(model=MODEL))
        assert list(evicted.worker_ids) == ["w1"]
        orders = ["load_model", "pin_model", "unpin_model", "evict_model"]
        await until(
            lambda: [directive.WhichOneof("order") for directive in worker.directives] == orders,
            "the orders",
        )

        async def is_cold() -> bool:
            return (
                await client.models.GetModel(models_pb2.GetModelRequest(model=MODEL))
            ).model.state == models_pb2.MODEL_STATE_COLD

        await until(is_cold, "the model to be cold")


async def test_operators_receive_load_errors(redis_url: str) -> None:
    failure = worker_pb2.Failure(reason="MODEL_LOAD_FAILED", message="no safetensors")
    async with router(redis_url) as client:
        refusal = await refused(client.models.LoadModel(models_pb2.LoadModelRequest(model=MODEL)))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_CAPACITY")
        refusal = await refused(client.models.GetModel(models_pb2.GetModelRequest(model=MODEL)))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        refusal = await refused(client.models.GetModel(models_pb2.GetModelRequest()))
        assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, "model")
        async with FakeWorker(client.address, on_disk=[card()], failure=failure).working():
            refusal = await refused(
                client.models.LoadModel(models_pb2.LoadModelRequest(model=MODEL), timeout=60)
            )
            assert (refusal.code, refusal.message) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "no safetensors",
            )


async def test_mesh_is_shown_and_explained(redis_url: str) -> None:
    async with router(redis_url) as client:
        explained = await client.mesh.ExplainPlacement(
            mesh_pb2.ExplainPlacementRequest(model=MODEL)
        )
        assert "no worker" in explained.summary
        async with FakeWorker(client.address, models=[card()]).working() as worker:
            mesh = (await client.mesh.GetMesh(mesh_pb2.GetMeshRequest())).mesh
            assert [(found.worker_id, list(found.resident)) for found in mesh.workers] == [
                ("w1", [MODEL])
            ]
            assert mesh.router_id == "a"
            explained = await client.mesh.ExplainPlacement(
                mesh_pb2.ExplainPlacementRequest(model=MODEL)
            )
            assert [(reason.worker_id, reason.eligible) for reason in explained.workers] == [
                ("w1", True)
            ]
            assert f"{MODEL} is resident on 1 worker of pool" in explained.summary
            watched = client.mesh.WatchMesh(mesh_pb2.WatchMeshRequest(interval_seconds=0.2))
            seen: list[str] = []
            async for response in watched:
                seen.append(response.mesh.router_id)
                if len(seen) == 2:
                    break
            assert seen == ["a", "a"]
            watched.cancel()
            await worker.beat(leaving=True)
        refusal = await refused(
            client.mesh.WatchMesh(mesh_pb2.WatchMeshRequest(interval_seconds=float("nan"))).read()
        )
        assert refusal.field == "interval_seconds"


async def test_mesh_shows_oldest_job_and_desired_workers(redis: Redis, redis_url: str) -> None:
    scheduler = Fleet(redis)
    fence = await scheduler.lead("s1", last_ms=60_000)
    assert fence is not None
    await scheduler.note_plan(fence, fence << 32, {}, desired={"cpu": 2})
    async with router(redis_url) as client:
        before = (await client.mesh.GetMesh(mesh_pb2.GetMeshRequest())).mesh
        assert [(pool.pool, pool.desired_workers) for pool in before.pools] == [("cpu", 2)]
        waiting = asyncio.create_task(client.encode("a text"))
        await until(lambda: waits(client), "the job's age")
        waiting.cancel()
        await until(lambda: waits_no_more(client), "the job to go")


async def waits(client: Client) -> bool:
    return (await client.lane()).oldest_seconds > 0


async def waits_no_more(client: Client) -> bool:
    return (await client.lane()).oldest_seconds == 0


async def test_download_is_shown(redis_url: str) -> None:
    async with router(redis_url) as client:
        loading = worker_pb2.WorkerModel(
            model=MODEL,
            state=models_pb2.MODEL_STATE_DOWNLOADING,
            downloaded_bytes=3000,
            download_bytes=4000,
        )
        await worker_stub(client.channel).Heartbeat(
            worker_pb2.HeartbeatRequest(
                wire_version=WIRE_VERSION, worker_id="w1", epoch="1", pool="cpu", models=[loading]
            )
        )
        listed = (await client.models.GetModel(models_pb2.GetModelRequest(model=MODEL))).model
        assert listed.state == models_pb2.MODEL_STATE_DOWNLOADING
        assert [(place.downloaded_bytes, place.download_bytes) for place in listed.places] == [
            (3000, 4000)
        ]
        explained = await client.mesh.ExplainPlacement(
            mesh_pb2.ExplainPlacementRequest(model=MODEL)
        )
        assert "3,000 of 4,000 bytes" in explained.workers[0].reason


async def test_worker_that_can_never_have_a_model_is_explained(redis_url: str) -> None:
    async with router(redis_url) as client:
        cold = worker_pb2.WorkerModel(model=MODEL, state=models_pb2.MODEL_STATE_COLD)
        for name, models in (("has", [cold]), ("lacks", [])):
            await worker_stub(client.channel).Heartbeat(
                worker_pb2.HeartbeatRequest(
                    wire_version=WIRE_VERSION,
                    worker_id=name,
                    epoch="1",
                    pool="cpu",
                    models=models,
                    local_models_only=True,
                )
            )
        explained = await client.mesh.ExplainPlacement(
            mesh_pb2.ExplainPlacementRequest(model=MODEL)
        )
        reasons = {
            one.worker_id: (one.eligible, "SHOAL_STORES" in one.reason) for one in explained.workers
        }
        assert reasons == {"has": (True, False), "lacks": (False, True)}


async def test_invalid_worker_calls_are_refused(redis_url: str) -> None:
    async with router(redis_url) as client:
        stub = worker_stub(client.channel)
        good = worker_pb2.PullRequest(
            wire_version=WIRE_VERSION, worker_id="w", pool="cpu", budget_tokens=1, budget_jobs=1
        )
        assert not (await stub.Pull(good)).batch_id
        wrong: dict[str, int | float | str] = {
            "worker_id": "",
            "pool": "",
            "budget_tokens": 0,
            "budget_jobs": 0,
            "wait_seconds": float("nan"),
        }
        for field, value in wrong.items():
            request = changed(
                worker_pb2.PullRequest.FromString(good.SerializeToString()), **{field: value}
            )
            refusal = await refused(stub.Pull(request))
            assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_long_pull_that_is_given_up_loses_no_job(redis_url: str) -> None:
    async with router(redis_url, lease_ms=600_000) as client:  # it is not the lease's end
        stub = worker_stub(client.channel)
        lane = worker_pb2.Lane(pool="cpu", model=MODEL)
        pull = worker_pb2.PullRequest(
            wire_version=WIRE_VERSION,
            worker_id="w",
            pool="cpu",
            budget_tokens=9,
            budget_jobs=9,
            lanes=[lane],
            wait_seconds=10,
        )
        given_up = [stub.Pull(pull) for _ in range(5)]
        call = asyncio.create_task(client.encode("a"))
        for pulled in given_up:
            pulled.cancel()
        async with FakeWorker(client.address, models=[card()]).working():
            assert (await call).dense.data == vector("a")
