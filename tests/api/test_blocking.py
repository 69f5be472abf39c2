"""Test what differs between the blocking and the asyncio client: loops, threads, processes,
interrupts, encryption, and the package itself.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import shoal
from shoal import errors
from shoal.transport import methods as rpc
from shoal.v1 import aliases_pb2, caller_pb2, inference_pb2, mesh_pb2, models_pb2

from services.local.settings import free_port
from tests.api.fake_router import MODEL, FakeRouter, serving
from tests.support.waiting import wait_until

STREAMS = ("encode_stream", "extract_stream", "watch")


def test_clients_have_the_same_verbs() -> None:
    for blocking, awaited in (
        (shoal.Client, shoal.AsyncClient),
        (shoal.client.Models, shoal.client.AsyncModels),
        (shoal.client.Aliases, shoal.client.AsyncAliases),
    ):
        others = ("aliases", "close", "models", *STREAMS)
        for name in (
            name for name in vars(awaited) if not name.startswith("_") and name not in others
        ):
            mine, theirs = getattr(blocking, name), getattr(awaited, name)
            assert inspect.signature(mine) == inspect.signature(theirs)
            assert mine.__doc__ == theirs.__doc__
            assert inspect.iscoroutinefunction(theirs)
            assert not inspect.iscoroutinefunction(mine)
    for name in STREAMS:
        mine, theirs = getattr(shoal.Client, name), getattr(shoal.AsyncClient, name)
        declared = inspect.signature(theirs)
        assert inspect.signature(mine).parameters == declared.parameters
        assert f"Async{inspect.signature(mine).return_annotation}" == declared.return_annotation
        assert mine.__doc__ == theirs.__doc__


def test_paths_are_those_of_the_protos() -> None:
    services = [
        *aliases_pb2.DESCRIPTOR.services_by_name.values(),
        *caller_pb2.DESCRIPTOR.services_by_name.values(),
        *inference_pb2.DESCRIPTOR.services_by_name.values(),
        *models_pb2.DESCRIPTOR.services_by_name.values(),
        *mesh_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    paths = {
        f"/{service.full_name}/{method.name}" for service in services for method in service.methods
    }
    methods = [value for value in vars(rpc).values() if isinstance(value, rpc.Method)]
    assert len(methods) == 21
    assert {method.path for method in methods} - paths == {"/grpc.health.v1.Health/Check"}


def test_every_public_name_is_there() -> None:
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    assert dir(shoal) == shoal.__all__
    with pytest.raises(AttributeError, match="nothing"):
        shoal.nothing  # noqa: B018


def test_importing_costs_nothing_and_no_command_line() -> None:
    code = (
        "import sys, shoal; early = [m for m in ('grpc', 'numpy', 'rich', 'typer') if m in "
        "sys.modules];"
        "shoal.Client; late = [m for m in ('torch', 'rich', 'typer', 'scipy') if m in sys.modules];"
        "print(early, late)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment()
    )
    assert done.stdout.strip() == "[] []"


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": str(Path(shoal.__file__).parents[1])}


async def test_blocking_client_works_inside_a_running_loop(router: FakeRouter) -> None:
    with shoal.Client(router.address, request_items=1) as client:
        assert client.encode(MODEL, ["a", "b", "c"]).dequantize().shape == (3, 12)


def test_threads_share_a_client(router: FakeRouter) -> None:
    with shoal.Client(router.address) as client, ThreadPoolExecutor(8) as threads:
        results = list(
            threads.map(lambda number: client.encode(MODEL, "x" * (number + 1)), range(64))
        )
    assert [int(result.dequantize()[0, 0]) for result in results] == list(range(1, 65))


def test_interrupt_ends_the_parts_in_flight(router: FakeRouter) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    seen = 0

    def hold_after_first(number: int) -> str:
        nonlocal seen
        seen += 1
        if seen == 2:
            router.gate.clear()
        return "r1"

    router.revision = hold_after_first
    with shoal.Client(router.address, request_items=1, concurrency=2) as client:
        with pytest.raises(KeyboardInterrupt):
            client.encode(MODEL, ["a"] * 30, on_progress=interrupt)
        wait_until(lambda: router.active == 0)
    assert len(router.calls) < 30


def test_no_thread_is_left(router: FakeRouter) -> None:
    with shoal.Client(router.address, request_items=1) as client:
        client.encode(MODEL, ["a"] * 20)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("shoal")]


def test_client_made_before_a_fork_works_after_it_if_unused(router: FakeRouter) -> None:
    code = f"""
import os, shoal
unused = shoal.Client({router.address!r})
child = os.fork()
if child == 0:
    ok = unused.encode({MODEL!r}, "x").dense.shape == (1, 12)
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
unused.encode({MODEL!r}, "x")
if os.fork() == 0:
    try:
        unused.encode({MODEL!r}, "x")
    except RuntimeError as error:
        os._exit(0 if "forked" in str(error) else 2)
    os._exit(3)
_, status = os.wait()
assert status == 0, status
"""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120, env=_environment()
    )
    assert len(router.calls) == 2


def test_async_client_belongs_to_one_loop(
    router: FakeRouter, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    client = shoal.AsyncClient(router.address)

    async def use_and_keep() -> None:
        await client.encode(MODEL, "x")

    async def use_again() -> None:
        with pytest.raises(RuntimeError, match="event loop"):
            await client.encode(MODEL, "x")

    async def main() -> None:
        await use_and_keep()
        await asyncio.to_thread(asyncio.run, use_again())
        await client.close()

    asyncio.run(main())
    assert (capfd.readouterr().err, caplog.records) == ("", []), "no traceback of grpc's"


def test_arguments_that_cannot_work_are_refused_at_once() -> None:
    for wrong in ({"timeout": 0}, {"concurrency": 0}, {"request_items": 0}, {"address": "a:1,"}):
        with pytest.raises(ValueError, match=r"positive|empty part"):
            shoal.Client(**wrong)
    with pytest.raises(ValueError, match="unencrypted"):
        shoal.Client("10.0.0.1:50051", token="secret")
    shoal.Client("10.0.0.1:50051", token="secret", tls=True)
    shoal.Client("10.0.0.1:50051", token="secret", token_without_tls=True)
    with pytest.raises(ValueError, match="private_key"):
        shoal.Tls(certificate_chain=b"x")


def test_address_is_read_from_the_environment(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_ADDRESS", router.address)
    with shoal.Client() as client:
        client.encode(MODEL, "x")
    monkeypatch.delenv("SHOAL_ADDRESS")
    assert shoal.Client().address == "127.0.0.1:50051"


def test_client_connects_once_the_router_starts() -> None:
    port = free_port()
    with shoal.Client(f"127.0.0.1:{port}") as client:
        with pytest.raises((errors.CannotConnect, errors.DeadlinePassed)) as caught:
            client.healthy(timeout=4.0)
        # The last try may have had too little time to be refused.
        reason = getattr(caught.value, "earlier", None) or caught.value
        assert isinstance(reason, errors.CannotConnect)
        # In a separate process: a server in this one would share gRPC's threads, and with them the
        # client's connection.
        command = [sys.executable, "-m", "tests.api.fake_router", str(port)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": "libs/api:."}
        ) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                end = time.monotonic() + 60
                while time.monotonic() < end:  # tries that are short, as failing over is
                    with suppress(errors.ShoalError):
                        assert client.healthy(timeout=0.2)
                        return
                pytest.fail("it never connected")
            finally:
                process.kill()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a server's and a client's certificate signed by it."""
    directory = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req",
        "-x509",
        *curve,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-subj",
        "/CN=test authority",
        "-days",
        "2",
    )
    (directory / "names").write_text("subjectAltName=DNS:router.shoal.test")
    for name in ("server", "client"):
        openssl(
            "req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"
        )
        signing = (
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-days",
            "2",
            "-extfile",
            "names",
        )
        openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    return directory


def test_mutual_tls(certificates: Path) -> None:
    pair = ((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())
    credentials = grpc.ssl_server_credentials(
        [pair], (certificates / "ca.pem").read_bytes(), require_client_auth=True
    )
    tls = shoal.Tls(
        certificates / "ca.pem",
        certificates / "client.pem",
        (certificates / "client.key").read_bytes(),
        "router.shoal.test",
    )
    with serving(FakeRouter(), credentials=credentials) as router:
        with shoal.Client(router.address, tls=tls, token="secret") as client:
            client.encode(MODEL, "x")
        assert router.calls[0].metadata["authorization"] == "Bearer secret"

        async def awaited() -> None:
            async with shoal.AsyncClient(router.address, tls=tls) as client:
                await client.encode(MODEL, "x")

        asyncio.run(awaited())
        nameless = shoal.Tls(certificates / "ca.pem", server_name="router.shoal.test")
        once = shoal.RetryPolicy(attempts=1)
        for wrong in (nameless, False):
            with (
                shoal.Client(router.address, tls=wrong, retry=once) as client,
                pytest.raises(errors.CannotConnect),
            ):
                client.encode(MODEL, "x")
        assert len(router.calls) == 2
