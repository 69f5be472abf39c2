"""Errors, health and drain of a server over loopback, with MeshService as the example."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import NoReturn

import grpc
import pytest
from shoal.v1 import mesh_pb2, mesh_pb2_grpc, worker_pb2, worker_pb2_grpc

from libs import errors
from libs.serving import Deadline, GrpcServer, Service, current_call, serving
from libs.telemetry.logs import REQUEST_ID, JsonFormatter, fields
from tests.router.parts import Refusal, health, mesh_stub, refused, until, worker_stub

Action = Callable[[], Awaitable[None]]


class Mesh(mesh_pb2_grpc.MeshServiceServicer):
    """Runs `action` in each call."""

    def __init__(self) -> None:
        self.action: Action = self.nothing

    async def nothing(self) -> None: ...

    async def GetMesh(
        self, request: mesh_pb2.GetMeshRequest, context: object
    ) -> mesh_pb2.GetMeshResponse:
        await self.action()
        return mesh_pb2.GetMeshResponse(mesh=mesh_pb2.Mesh(router_id=current_call().request_id))

    async def WatchMesh(
        self, request: mesh_pb2.WatchMeshRequest, context: object
    ) -> AsyncIterator[mesh_pb2.WatchMeshResponse]:
        yield mesh_pb2.WatchMeshResponse()
        await self.action()

    async def ExplainPlacement(
        self, request: mesh_pb2.ExplainPlacementRequest, context: object
    ) -> mesh_pb2.ExplainPlacementResponse:
        return mesh_pb2.ExplainPlacementResponse()


class Workers(worker_pb2_grpc.WorkerServiceServicer):
    """Accepts every call."""

    async def Heartbeat(
        self, request: worker_pb2.HeartbeatRequest, context: object
    ) -> worker_pb2.HeartbeatResponse:
        return worker_pb2.HeartbeatResponse()

    async def Connect(
        self, request: worker_pb2.ConnectRequest, context: object
    ) -> AsyncIterator[worker_pb2.ConnectResponse]:
        yield worker_pb2.ConnectResponse()

    def Multiplex(self, request_iterator: object, context: object) -> NoReturn:
        raise NotImplementedError


@asynccontextmanager
async def mesh_server(
    mesh: Mesh, grace_seconds: float = 5.0
) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    workers = partial(worker_pb2_grpc.add_WorkerServiceServicer_to_server, Workers())
    services = [
        Service(
            "shoal.v1.MeshService", partial(mesh_pb2_grpc.add_MeshServiceServicer_to_server, mesh)
        ),
        Service("shoal.v1.WorkerService", workers, is_internal=True),
    ]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            serving("127.0.0.1:0", services, health=["extra"], grace_seconds=grace_seconds)
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
        yield server, channel


async def get_mesh(channel: grpc.aio.Channel) -> mesh_pb2.GetMeshResponse:
    return await mesh_stub(channel).GetMesh(mesh_pb2.GetMeshRequest())


def raising(error: BaseException) -> Action:
    async def action() -> None:
        raise error

    return action


def every_error() -> list[tuple[errors.ShoalError, str, str, float]]:
    # New for each test: a raised error keeps all objects of its traceback alive.
    return [
        (errors.InvalidInput("m", field="f"), "INVALID_ARGUMENT", "INVALID_INPUT", 0.0),
        (errors.InputTooLong("m", field="f"), "INVALID_ARGUMENT", "INPUT_TOO_LONG", 0.0),
        (errors.TaskNotSupported("m", field="f"), "INVALID_ARGUMENT", "TASK_NOT_SUPPORTED", 0.0),
        (errors.Unauthenticated("m"), "UNAUTHENTICATED", "UNAUTHENTICATED", 0.0),
        (errors.PermissionDenied("m"), "PERMISSION_DENIED", "PERMISSION_DENIED", 0.0),
        (errors.ModelNotFound("m"), "NOT_FOUND", "MODEL_NOT_FOUND", 0.0),
        (errors.ModelBroken("m"), "FAILED_PRECONDITION", "MODEL_LOAD_FAILED", 0.0),
        (errors.QueueFull("m", retry_after=2.5), "RESOURCE_EXHAUSTED", "QUEUE_FULL", 2.5),
        (errors.OutOfMemory("m"), "RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", 0.0),
        (errors.RateLimited("m"), "RESOURCE_EXHAUSTED", "RATE_LIMITED", 1.0),
        (errors.NoCapacity("m"), "UNAVAILABLE", "NO_CAPACITY", 1.0),
        (errors.WorkerLost("m"), "UNAVAILABLE", "WORKER_LOST", 0.0),
        (errors.DeadlinePassed("m"), "DEADLINE_EXCEEDED", "DEADLINE_PASSED", 0.0),
    ]


async def test_every_error_maps_to_its_status_with_one_error_info() -> None:
    mesh = Mesh()
    async with mesh_server(mesh) as (_, channel):
        for method in (get_mesh, watch_mesh):
            for error, code, reason, retry_seconds in every_error():
                mesh.action = raising(error)
                refusal = await refused(method(channel))
                assert refusal.code == grpc.StatusCode[code]
                assert (refusal.reason, refusal.message) == (reason, "m")
                assert [info.domain for info in refusal.infos] == ["shoal"]
                assert refusal.infos[0].metadata["request_id"] == refusal.request_id
                assert refusal.field == error.field
                assert refusal.retry_seconds == retry_seconds


async def watch_mesh(channel: grpc.aio.Channel) -> None:
    async for _ in mesh_stub(channel).WatchMesh(mesh_pb2.WatchMeshRequest()):
        pass


async def test_generated_request_id_is_also_a_header() -> None:
    mesh = Mesh()
    async with mesh_server(mesh) as (_, channel):
        for metadata in ((), (("x-request-id", "mine"),)):
            call = mesh_stub(channel).GetMesh(
                mesh_pb2.GetMeshRequest(), metadata=metadata, timeout=60
            )
            reported = (await call).mesh.router_id
            assert dict(list(await call.trailing_metadata()))["x-request-id"] == reported
            assert dict(list(await call.initial_metadata())).get("x-request-id") == (
                None if metadata else reported
            )
        mesh.action = raising(errors.InvalidInput("no"))
        refusal = await refused(get_mesh(channel))
        assert (refusal.code, bool(refusal.request_id)) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_client_that_disconnects_immediately_is_not_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with mesh_server(Mesh()) as (_, channel):
        for number in range(200):
            call = mesh_stub(channel).GetMesh(mesh_pb2.GetMeshRequest(), timeout=60)
            if number % 2:
                await asyncio.sleep(0)
            call.cancel()
        assert (await get_mesh(channel)).mesh.router_id
    assert not [record for record in caplog.records if record.message == "call failed"]


async def test_internal_error_reveals_only_the_request_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mesh = Mesh()
    async with mesh_server(mesh) as (_, channel):
        for error in (KeyError("secret"), errors.InternalError("secret")):
            caplog.clear()
            mesh.action = raising(error)
            refusal: Refusal = await refused(get_mesh(channel))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
            assert refusal.message == f"internal error; request {refusal.request_id}"
            assert any(record.exc_info for record in caplog.records)
        mesh.action = mesh.nothing
        assert (await get_mesh(channel)).mesh.router_id


async def test_error_with_a_long_text_is_delivered() -> None:
    mesh = Mesh()
    mesh.action = raising(errors.InvalidInput("é" * 100_000, field="f" * 100_000))
    async with mesh_server(mesh) as (_, channel):
        refusal = await refused(get_mesh(channel))
        assert refusal.reason == "INVALID_INPUT"
        assert len(refusal.message) <= 1000


async def test_health_is_reported_by_name_and_overall() -> None:
    async with mesh_server(Mesh()) as (server, channel):

        async def serves(name: str) -> bool:
            return await health(channel, name) == "SERVING"

        assert not await serves("")
        await server.set_health(True, "shoal.v1.MeshService", "extra")
        assert await serves("extra")
        assert not await serves("")
        await server.set_health(True)
        assert await serves("")
        await server.set_health(False, "extra")
        assert not await serves("")
        assert await serves("shoal.v1.MeshService")


async def test_drain_finishes_calls_and_keeps_internal_services() -> None:
    mesh = Mesh()
    go = asyncio.Event()
    entered = asyncio.Event()

    async def action() -> None:
        entered.set()
        await go.wait()

    mesh.action = action
    async with mesh_server(mesh) as (server, channel):
        in_flight = asyncio.create_task(get_mesh(channel))
        await entered.wait()
        draining = asyncio.create_task(server.drain(120.0))
        refusal = await refused_until_draining(channel)
        assert refusal.retry_seconds > 0
        await worker_stub(channel).Heartbeat(worker_pb2.HeartbeatRequest())
        assert not draining.done()
        go.set()
        await in_flight
        await draining


async def refused_until_draining(channel: grpc.aio.Channel) -> Refusal:
    async def not_serving() -> bool:
        return await health(channel) == "NOT_SERVING"

    await until(not_serving)
    refusal = await refused(get_mesh(channel))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    return refusal


async def test_calls_beyond_the_grace_period_are_cut_off() -> None:
    mesh = Mesh()
    entered = asyncio.Event()

    async def action() -> None:
        entered.set()
        await asyncio.Event().wait()

    mesh.action = action
    async with mesh_server(mesh, grace_seconds=0.1) as (_, channel):
        call = asyncio.create_task(get_mesh(channel))
        await entered.wait()
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await call


async def test_client_disconnect_cancels_its_handler() -> None:
    mesh = Mesh()
    entered, left = asyncio.Event(), asyncio.Event()

    async def action() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    mesh.action = action
    async with mesh_server(mesh) as (_, channel):
        call = mesh_stub(channel).GetMesh(mesh_pb2.GetMeshRequest())
        waiting = asyncio.ensure_future(call)
        await entered.wait()
        call.cancel()
        await asyncio.wait_for(left.wait(), 60)
        await asyncio.wait({waiting})


async def test_two_servers_cannot_share_a_port() -> None:
    async with mesh_server(Mesh()) as (server, _):
        with pytest.raises(errors.NoCapacity, match=server.address):
            async with serving(server.address, []):
                pass


def test_deadline_reports_the_remaining_time() -> None:
    deadline = Deadline.after(2.0, now=10.0)
    assert deadline.remaining(11.5) == 0.5
    assert deadline.remaining(99.0) == 0.0


def test_log_line_is_json_with_request_id_and_fields() -> None:
    token = REQUEST_ID.set("r-1")
    try:
        record = logging.makeLogRecord(
            {"name": "x", "levelname": "INFO", "msg": "model loaded", **fields({"model": "a/b"})}
        )
        line = json.loads(JsonFormatter("router").format(record))
    finally:
        REQUEST_ID.reset(token)
    assert (line["message"], line["request_id"], line["model"], line["service"]) == (
        "model loaded",
        "r-1",
        "a/b",
        "router",
    )
