"""Memory that unauthenticated callers and compressed requests can make a server use, measured on
separate processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from shoal.v1 import inference_pb2

from libs.serving.calls.public import REQUEST_BYTES
from tests.router.parts import refused, until
from tests.serving.parts import GET_MESH, HEALTH, Calls, connected, running_server
from tests.support.cluster import Cluster, lasting_port
from tests.support.peak import Peak, resident_bytes

pytestmark = pytest.mark.alone

MIB = 1024 * 1024
MAX_GROWTH = 192 * MIB
"""Maximum growth of a process that is sent 1.1 GiB. Cutting off takes milliseconds, and longer on a
busy machine.
"""
MAX_GROWTH_BYTES = 64 * MIB
"""Maximum growth of a process that is sent one request by an unauthenticated caller."""
ATTEMPTS = 10
"""Maximum number of attacks. A call is cut off by the process's event loop, and a busy machine can
keep that from running while tens of MiB arrive over loopback: 80 MiB in three attacks in a row at
a load of 15, usually 10 to 30.
"""
IS_ACTIVE = "/externalscaler.ExternalScaler/IsActive"
EMBED = "/tei.v1.Embed/Embed"
EMBED_STREAM = "/tei.v1.Embed/EmbedStream"
ENCODE = "/shoal.v1.InferenceService/Encode"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
CHECKED = b"\x08\x01"


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return {
        name: lasting_port() for name in ("router-0", "worker-0", "scheduler-0", "edge-0", "tei")
    }


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, ports: dict[str, int]) -> Iterator[Cluster]:
    """Run a router, a scheduler, a worker and an edge with TEI's gRPC API, each with its health
    port.
    """
    each = {
        name: {"SHOAL_HEALTH_ADDRESS": f"127.0.0.1:{port}"}
        for name, port in ports.items()
        if name != "tei"
    }
    each["edge-0"]["SHOAL_TEI_GRPC_ADDRESSES"] = f"127.0.0.1:{ports['tei']}"
    with Cluster(
        tmp_path_factory.mktemp("bombed"), models="", schedulers=1, edges=1, each=each
    ) as cluster:
        yield cluster


async def attack(
    address: str, method: str, size: int, *, calls: int = 1, gzip: bool = False
) -> set[grpc.StatusCode]:
    """Send concurrent calls with requests of `size` bytes on one connection, and return their
    statuses.
    """
    body, form = bytes(size), grpc.Compression.Gzip if gzip else None

    async def one(caller: Any) -> grpc.StatusCode:
        return (await refused(caller.call(method, body, 300.0, compression=form))).code

    async with connected(address) as caller:
        return set(await asyncio.gather(*(one(caller) for _ in range(calls))))


async def answered(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return the answer to a small request, retried for as long as the server says so: until the
    memory of an attack is returned, any request that takes long to arrive may be cut off.
    """
    async with asyncio.timeout(120):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if "retry later" not in (error.details() or ""):
                    raise
                await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("port", "method"),
    [
        ("tei", HEALTH),
        ("tei", EMBED),
        ("tei", EMBED_STREAM),
        ("tei", REFLECTION),
        ("edge-0", HEALTH),
        ("worker-0", HEALTH),
        ("scheduler-0", HEALTH),
        ("router-0", HEALTH),
        ("scheduler", HEALTH),
        ("scheduler", IS_ACTIVE),
        ("router", HEALTH),
        ("router", GET_MESH),
    ],
)
async def test_message_far_beyond_its_methods_limit_uses_no_memory(
    port: str, method: str, mesh: Cluster, ports: dict[str, int]
) -> None:
    main = {"router": mesh.addresses[0], "scheduler": mesh.scheduler_addresses[0]}
    address = main.get(port) or f"127.0.0.1:{ports[port]}"
    process = {"tei": "edge-0", "router": "router-0", "scheduler": "scheduler-0"}.get(port, port)
    async with connected(address) as caller:
        await answered(partial(caller.call, HEALTH, wait_for_ready=True))

    async def once() -> None:
        assert await attack(address, method, 300 * MIB) <= {
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        }

    grown = await least_growth(mesh.processes[process].pid, once, MAX_GROWTH_BYTES)
    assert grown < MAX_GROWTH_BYTES


async def least_growth(pid: int, attack_once: Callable[[], Awaitable[None]], allowed: int) -> int:
    """Attack until a process grows by less than `allowed`, at most ATTEMPTS times, and return the
    least growth. Memory that is not returned between attacks counts as growth.
    """
    before = resident_bytes(pid)
    grown: list[int] = []
    while len(grown) < ATTEMPTS and min(grown, default=allowed) >= allowed:
        with suppress(AssertionError):
            await until(lambda: resident_bytes(pid) < before + MIB, "freed memory", 5.0)
        peak = Peak(pid)
        await attack_once()
        grown.append(peak.bytes - before)
    print(f"{', '.join(f'{each / MIB:.0f}' for each in grown)} MiB more")
    return min(grown)


@pytest.mark.parametrize("kind", ["router-0", "router's health port", "scheduler-0", "worker-0"])
async def test_unauthenticated_callers_use_little_memory(
    kind: str, mesh: Cluster, ports: dict[str, int]
) -> None:
    address, name = {
        "router-0": (mesh.addresses[0], "router-0"),
        "router's health port": (f"127.0.0.1:{ports['router-0']}", "router-0"),
        "scheduler-0": (mesh.scheduler_addresses[0], "scheduler-0"),
        "worker-0": (f"127.0.0.1:{ports['worker-0']}", "worker-0"),
    }[kind]
    peak = Peak(mesh.processes[name].pid)
    assert await attack(address, HEALTH, 300 * MIB, gzip=True) == {grpc.StatusCode.UNIMPLEMENTED}
    for size, calls in ((140 * MIB, 3), (300 * MIB, 1), (140 * MIB, 3)):
        codes = await attack(address, HEALTH, size, calls=calls)
        assert codes <= {
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        }
    print(f"{kind}: {peak.grown / MIB:.0f} MiB more")
    assert peak.grown < MAX_GROWTH
    async with connected(address) as caller:
        assert await answered(partial(caller.call, HEALTH)) in (CHECKED, b"\x08\x02")


async def test_compressed_requests_are_not_decompressed(mesh: Cluster) -> None:
    peak = Peak(mesh.processes["router-0"].pid)
    assert await attack(mesh.addresses[0], ENCODE, 300 * MIB, calls=2, gzip=True) == {
        grpc.StatusCode.UNIMPLEMENTED
    }
    print(f"{peak.grown / MIB:.0f} MiB more")
    assert peak.grown < MAX_GROWTH
    async with connected(mesh.addresses[0]) as caller:
        await answered(partial(caller.call, GET_MESH))
        request = inference_pb2.EncodeRequest(model="no/such", items=[inference_pb2.Item(text="a")])
        refusal = await refused(answered(partial(caller.call, ENCODE, request)))
        assert refusal.code == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("method", [REFLECTION, REFLECTION.replace("v1alpha", "v1")])
async def test_reflection_uses_little_memory(method: str, mesh: Cluster) -> None:
    peak = Peak(mesh.processes["router-0"].pid)
    async with connected(mesh.addresses[0]) as caller:
        call = caller.stream(method, bytes(300 * MIB), 300.0)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        assert peak.grown < MAX_GROWTH
        listed = await answered(lambda: caller.stream(method, b"\x3a\x00").read())
        assert b"shoal.v1.InferenceService" in listed


async def test_invalid_health_request_is_refused_with_a_message() -> None:
    async with running_server(Calls()) as server, connected(server.address) as caller:
        for method in (HEALTH, "/grpc.health.v1.Health/Watch"):
            for body in (b"\xff\xff", b"\x0a\x02\xff\xfe", bytes(REQUEST_BYTES + 1)):
                refusal = await refused(caller.call(method, body))
                assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
                assert "class" not in refusal.message
                assert "Error" not in refusal.message
        assert (
            await refused(caller.call(HEALTH, health_pb2.HealthCheckRequest(service="x")))
        ).code == grpc.StatusCode.NOT_FOUND
        assert await caller.call(HEALTH) == CHECKED


async def test_services_without_texts_have_a_small_request_limit(mesh: Cluster) -> None:
    async with connected(mesh.addresses[0]) as caller:
        refusal = await refused(answered(partial(caller.call, GET_MESH, bytes(65 * 1024))))
        assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
        assert "65,536" in refusal.message
