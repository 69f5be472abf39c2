"""The processes that are measured, as the benchmark sees them: started once, idle until asked,
stopped at the end.

`LineProcess` is a process that obeys lines; `LocalModel` is one or more of
`benchmarks.peers.engine`; `OpenAi` is a client of a server's OpenAI endpoint. (The mesh itself is
started by `services.local`, as `shoal up` starts it.)
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import tempfile
from asyncio import StreamReader, StreamWriter
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.peers.install import PEERS, peer_python
from services.local.supervision.child import Child

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 180.0
_TICKS = os.sysconf("SC_CLK_TCK")
_LISTENS = "0A"
Vectors = NDArray[np.float32]


class LineProcess:
    """A process of a module of this package that is idle until it is asked: each line of JSON on
    its input is answered by one on its output. `ready`: the line that it says first."""

    def __init__(self, process: asyncio.subprocess.Process, module: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._module = process, module
        self._orders, self._answers = process.stdin, process.stdout
        self.ready: dict[str, Any] = {}

    @classmethod
    @asynccontextmanager
    async def started(
        cls,
        module: str,
        arguments: Sequence[str],
        *,
        python: str = sys.executable,
        threads: int = 1,
    ) -> AsyncIterator[LineProcess]:
        """`threads`: of its OpenMP. Raises RuntimeError if it ends instead of getting ready,
        TimeoutError after 180 s.
        """
        quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        process = await asyncio.create_subprocess_exec(
            *(python, "-m", module, *arguments),
            cwd=ROOT,
            env=dict(os.environ) | quiet | {"OMP_NUM_THREADS": str(threads)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 22,
            # Ctrl-C reaches only this process, which then stops the others.
            start_new_session=True,
        )
        started = cls(process, module)
        try:
            async with asyncio.timeout(START_SECONDS):
                started.ready = await started._read_answer()
            yield started
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        self._orders.write(json.dumps(order).encode() + b"\n")
        return await self._read_answer()

    async def _read_answer(self) -> dict[str, Any]:
        line = await self._answers.readline()
        if not line:
            raise RuntimeError(
                f"{self._module} ended with status {await self._process.wait()}; see its words "
                "above"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


class LocalModel:
    """A model without a server, its texts shared out over processes that start together. `way`: the
    data type, and for OpenVINO maybe " arrival" (`engine.py`)."""

    def __init__(self, engines: list[LineProcess]) -> None:
        self.engines = engines

    async def run(self, way: str) -> None:
        await asyncio.gather(*(engine.ask({"way": way, "save": ""}) for engine in self.engines))

    async def vectors(self, way: str) -> Vectors:
        """Run once more and return the vectors, in the order of the texts."""
        with tempfile.TemporaryDirectory() as directory:
            files = [Path(directory) / f"{number}.npy" for number in range(len(self.engines))]
            orders = zip(self.engines, files, strict=True)
            await asyncio.gather(
                *(engine.ask({"way": way, "save": str(file)}) for engine, file in orders)
            )
            parts = np.concatenate([np.load(file) for file in files])
        rows = [row for engine in self.engines for row in engine.ready["rows"]]
        ordered = np.empty_like(parts)
        ordered[rows] = parts
        return ordered


@asynccontextmanager
async def local_model(
    kind: str, processes: int, threads: int, texts: int, seed: int
) -> AsyncIterator[LocalModel]:
    async with AsyncExitStack() as stack:
        engines = []
        for number in range(processes):
            arguments = [kind, str(threads), f"{number}/{processes}", str(texts), str(seed)]
            python = str(peer_python(kind)) if kind in PEERS else sys.executable
            starting = LineProcess.started(
                "benchmarks.peers.engine", arguments, python=python, threads=threads
            )
            engines.append(await stack.enter_async_context(starting))
        yield LocalModel(engines)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def pin(pid: int, core: int) -> None:
    """Keep a process, all its present threads included, on one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def listening_port(pid: int) -> int:
    """The lowest port of 127.0.0.1 that a process listens on. Raises LookupError if there is
    none.
    """
    sockets = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    ports = [
        int(line[1].split(":")[1], 16)
        for line in lines
        if line[3] == _LISTENS and f"socket:[{line[9]}]" in sockets
    ]
    if not ports:
        raise LookupError(f"process {pid} listens on no port")
    return min(ports)


def scraped(port: int) -> dict[str, float]:
    """The sums over all labels but `cause` of a process' series: `name` or `name/cause`."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    sums: dict[str, float] = defaultdict(float)
    for sample in (sample for family in families for sample in family.samples):
        cause = sample.labels.get("cause")
        sums[f"{sample.name}/{cause}" if cause else sample.name] += sample.value
    return sums


class HttpPool:
    """Keep-alive HTTP/1.1 connections to one server on loopback: a light client, so that the server
    dominates the measurement.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[StreamReader, StreamWriter]] = []

    async def post(self, path: str, body: bytes) -> bytes:
        """The answer's body. Raises RuntimeError on any status but 200."""
        reader, writer = await self._connection()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: "
            f"application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        lengths = [
            int(field.partition(":")[2])
            for field in fields
            if field.lower().startswith("content-length:")
        ]
        answer = await reader.readexactly(lengths[0]) if lengths else await _chunked(reader)
        if " 200 " not in status:
            raise RuntimeError(f"{path}: {status}: {answer[:200].decode(errors='replace')}")
        self._idle.append((reader, writer))
        return answer

    async def _connection(self) -> tuple[StreamReader, StreamWriter]:
        """Return an idle connection that the server has not closed, or a new one."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
            await writer.wait_closed()


async def _chunked(reader: StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)


class OpenAi:
    """A client of a server's OpenAI endpoint. Vectors travel in base64, the fastest form.

    Args:
        further: Fields of the request that only this server has.
    """

    def __init__(
        self, pool: HttpPool, path: str, model: str, further: Mapping[str, Any] | None = None
    ) -> None:
        self._pool, self._path, self._model = pool, path, model
        self._further = further or {}

    async def encode(self, texts: list[str]) -> Vectors:
        body = json.dumps(
            {"model": self._model, "input": texts, "encoding_format": "base64", **self._further}
        ).encode()
        answer = json.loads(await self._pool.post(self._path, body))
        return np.stack(
            [
                np.frombuffer(base64.b64decode(row["embedding"]), np.float32)
                for row in answer["data"]
            ]
        )


async def listening(child: Child, port: int) -> None:
    """Return when the process takes connections at a port of loopback. Raises RuntimeError with
    its last words if it ends, TimeoutError after 180 s."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            if child.status is not None:
                raise RuntimeError(
                    f"{child.name} ended with status {child.status}:\n{child.log_end()}"
                )
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.2)
                continue
            writer.close()
            return await writer.wait_closed()
