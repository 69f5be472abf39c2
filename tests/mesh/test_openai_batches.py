"""A batch of embeddings on a whole mesh, of which the edge is killed: each request has one result.

`make interop` runs OpenAI's unmodified client on files and batches.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import shoal

from services.local.settings import MINILM, free_port
from tests.edge.batches.parts import line, results, retrieve, start, wait_for
from tests.edge.parts import Http
from tests.support.cluster import Cluster
from tests.support.waiting import end_tasks, wait_until

REQUESTS = 200
TEXTS = 8
"""Texts of a request, so that a chunk has 32 requests."""
BAD = REQUESTS // 2
"""The number of a request that the mesh refuses."""
ANSWER_BYTES = TEXTS * 384 * 4
"""Vectors of a request as the router sends them."""


class Held:
    """A link to a router that passes on a given number of bytes of its answers: a batch on it
    cannot be over before the test wants it, however late the test is.
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._left = 0
        self._has_more = asyncio.Event()
        self._passing: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.address = ""

    def allow(self, size: int) -> None:
        """Let this number of bytes pass from now on."""
        self._left = size
        self._has_more.set()

    async def __aenter__(self) -> Held:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await end_tasks(self._passing)
        for writer in self._writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, requests]
        for passing in (self._pass(reader, requests), self._pass(answers, writer, is_held=True)):
            self._passing.add(asyncio.create_task(passing))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_held: bool = False
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(16384):
                while is_held and self._left < len(data):
                    self._has_more.clear()
                    await self._has_more.wait()
                self._left -= len(data) if is_held else 0
                writer.write(data)
                await writer.drain()
        writer.close()


@contextmanager
def edge_process(router: str, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    environment = dict(os.environ) | {
        "SHOAL_ROUTERS": router,
        "SHOAL_HTTP_ADDRESS": f"127.0.0.1:{port}",
        "SHOAL_BATCHES_URL": str(folder / "files"),
        "SHOAL_BATCHES_IN_FLIGHT": "4",
    }
    with (
        (folder / "log").open("ab") as log,
        subprocess.Popen(
            [sys.executable, "-m", "services.edge"], env=environment, stderr=log
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def texts(number: int) -> list[str]:
    return [f"boat {number} of harbour {other}" for other in range(TEXTS)]


def requests() -> bytes:
    body = {"model": MINILM, "encoding_format": "float"}
    return b"".join(
        line(
            f"id-{number}",
            "",
            body=body | {"input": [""] if number == BAD else texts(number)},
        )
        for number in range(REQUESTS)
    )


def parts(folder: Path) -> dict[str, bytes]:
    """Return the results of chunks that are committed."""
    return {path.name: path.read_bytes() for path in folder.rglob("part-*")}


async def ready(http: Http) -> None:
    for _ in range(3000):
        try:
            if (await http.get("/readyz")).status == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError("the edge is not ready")


async def test_batch_survives_a_kill_of_the_edge(
    mesh: Cluster, client: shoal.Client, tmp_path: Path
) -> None:
    port = free_port()
    http = Http(f"127.0.0.1:{port}")
    async with Held(mesh.address) as held:
        held.allow(REQUESTS * 2 // 3 * ANSWER_BYTES)
        with edge_process(held.address, tmp_path, port) as process:
            await ready(http)
            batch = await start(http, requests())
            await asyncio.to_thread(wait_until, lambda: len(parts(tmp_path)) >= 2, 300)
            process.kill()
            process.wait()
        before = parts(tmp_path)
        assert len(before) < REQUESTS * TEXTS // 256
        held.allow(REQUESTS // 8 * ANSWER_BYTES)
        with edge_process(held.address, tmp_path, port):
            await ready(http)
            assert (await retrieve(http, batch))["status"] == "in_progress"
            other = await start(http, requests())
            assert (await http.post(f"/v1/batches/{other['id']}/cancel", b"")).status == 200
            held.allow(1 << 62)
            await check_results(http, batch, other, before, client, tmp_path)


async def check_results(
    http: Http,
    batch: dict[str, Any],
    other: dict[str, Any],
    before: dict[str, bytes],
    client: shoal.Client,
    folder: Path,
) -> None:
    """Check the results of the batch, of which `before` was there, and that the other is
    cancelled.
    """
    assert (await wait_for(http, other, ["cancelled"]))["cancelled_at"]
    found = await wait_for(http, batch, ["completed"])
    done = await results(http, found["output_file_id"])
    (failed,) = await results(http, found["error_file_id"])
    assert found["request_counts"] == {
        "total": REQUESTS,
        "completed": REQUESTS - 1,
        "failed": 1,
    }
    assert failed["custom_id"] == f"id-{BAD}"
    assert failed["response"]["status_code"] == 400
    ids = [one["custom_id"] for one in (*done, failed)]
    assert sorted(ids) == sorted(f"id-{number}" for number in range(REQUESTS))
    after = parts(folder)
    assert {name: after[name] for name in before} == before
    one = next(one for one in done if one["custom_id"] == "id-7")
    vectors = [entry["embedding"] for entry in one["response"]["body"]["data"]]
    np.testing.assert_allclose(vectors, client.encode(MINILM, texts(7)).dense, atol=1e-5)
