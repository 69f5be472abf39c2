"""The worker as a process: settings, signals, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.worker.fakes import (
    HANG_SECONDS,
    SLOW,
    FakeLanes,
    FakeRouter,
    checkpoint,
    encode_job,
    routers,
    until,
    vector,
    vectors,
)
from tests.worker.running import MODEL


@asynccontextmanager
async def process(
    root: Path, running: list[FakeRouter], module: str = "tests.worker.running", **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    checkpoint(root, MODEL)
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        env=os.environ
        | {
            "SHOAL_ROUTERS": ",".join(router.address for router in running),
            "SHOAL_MODELS": str(root),
            "SHOAL_WORKER_ID": "w1",
            "SHOAL_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            **environment,
        },
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.communicate()


async def test_sigterm_finishes_or_returns_jobs_and_exits_with_0(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with (
        routers(lanes) as running,
        process(tmp_path, running, SHOAL_GRACE_SECONDS="0.5") as worker,
    ):
        lanes.put(MODEL, encode_job("quick", "quick"))
        await until(lambda: "quick" in lanes.answers)
        assert vectors(lanes.answer_of("quick")) == [vector("quick")]
        lanes.put(MODEL, encode_job("endless", SLOW))
        await until(lambda: any("endless" in jobs for jobs in lanes.leased.values()))
        worker.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(worker.communicate(), HANG_SECONDS)
        assert worker.returncode == 0
        assert lanes.handed_back == ["endless"]
        assert lanes.heartbeats[-1].leaving
        lines = [json.loads(line) for line in errors.splitlines()]
        assert [line["message"] for line in lines].count("worker starts") == 1


async def test_second_signal_exits_immediately(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, process(tmp_path, running) as worker:
        lanes.put(MODEL, encode_job("endless", SLOW))
        await until(lambda: any("endless" in jobs for jobs in lanes.leased.values()))
        worker.send_signal(signal.SIGTERM)
        await until(lambda: lanes.heartbeats[-1].draining)
        worker.send_signal(signal.SIGINT)
        await asyncio.wait_for(worker.communicate(), HANG_SECONDS)
        assert worker.returncode == 128 + signal.SIGINT


async def test_invalid_settings_are_explained(tmp_path: Path) -> None:
    async with process(
        tmp_path, [], "services.worker", SHOAL_ROUTERS="127.0.0.1:1", SHOAL_THREADS="none"
    ) as worker:
        _, errors = await asyncio.wait_for(worker.communicate(), HANG_SECONDS)
        assert worker.returncode == 2
        assert (
            errors.decode().strip()
            == "worker: SHOAL_THREADS must be a whole number of threads, at least 1, not 'none'"
        )
