"""A submitted job on a whole mesh, of which every process is killed while it runs.

`SHOAL_BULK_ROWS=1000000 SHOAL_BULK_KILL_SECONDS=20` runs a long job, with a kill each 20 seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import shoal
from pyarrow import parquet

from tests.bulk.jobs import parts, read_manifest, table
from tests.edge.jobs.parts import STOPPED
from tests.edge.parts import Http
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

MODEL = "org/base"
ROWS = int(os.environ.get("SHOAL_BULK_ROWS", "3000"))
KILL_SECONDS = float(os.environ.get("SHOAL_BULK_KILL_SECONDS", "0"))
"""The time between two kills; 0: each process is killed once, after some more parts."""
CHUNK_ROWS = 20 if not KILL_SECONDS else 256
VICTIMS = ("job", "edge-0", "router-0", "worker-0", "redis", "router-1", "worker-1")
SAMPLE = 500


async def test_job_survives_kills_of_every_process(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path / "shelf" / MODEL, sentence=SentenceFiles())
    texts = [f"{number} small boats" for number in range(ROWS)]
    data, directory = tmp_path / "data", tmp_path / "mesh"
    data.mkdir()
    directory.mkdir()
    parquet.write_table(pyarrow.table({"text": texts}), data / "in.parquet")
    settings = {
        "SHOAL_BATCHES_URL": str(tmp_path / "files"),
        "SHOAL_JOBS_ROOTS": str(data),
    }
    with Cluster(
        directory,
        models=str(tmp_path / "shelf"),
        routers=2,
        workers=2,
        edges=1,
        durable=True,
        environment=settings,
    ) as cluster:
        http = Http(cluster.http_addresses[0])
        body = {
            "recipe": {"verb": "encode", "model": MODEL, "chunk_rows": CHUNK_ROWS},
            "input": str(data / "in.parquet"),
            "output": str(data / "out"),
        }
        await asyncio.to_thread(wait_until, lambda: _get(http, "/readyz") is not None, 120)
        job = (await http.post("/v1/jobs", body)).json
        peak = await asyncio.to_thread(_kill, cluster, http, job, data / "out")
        found = await asyncio.to_thread(_ended, http, job)
        assert (found["status"], found["error"]) == ("completed", None)
        assert found["counts"]["rows"] == found["counts"]["total_rows"] == ROWS
        sample = np.random.default_rng(1).choice(ROWS, min(SAMPLE, ROWS), replace=False)
        with shoal.Client(cluster.address) as client:
            expected = client.encode(MODEL, [texts[row] for row in sample], timeout=300)
    result = table(data / "out")
    assert result["row"].to_pylist() == list(range(ROWS))
    assert result["error"].null_count == ROWS
    assert (
        read_manifest(data / "out").embedding_id == expected.embedding_id == found["embedding_id"]
    )
    vectors = np.array(result["dense"].take(pyarrow.array(sample)).to_pylist())
    np.testing.assert_allclose(vectors, expected.dense, atol=1e-5)
    print(f"{ROWS:,} rows, peak of the job's process {peak:,} KiB")


def _kill(cluster: Cluster, http: Http, job: dict[str, Any], out: Path) -> int:
    """Kill processes with SIGKILL while a job runs, and start them again. Return the most memory of
    the job's process, in KiB.
    """
    killed: Counter[str] = Counter()
    peak = 0
    victims = cycle(VICTIMS) if KILL_SECONDS else iter(VICTIMS)
    for victim in victims:
        before = len(parts(out))
        if KILL_SECONDS:
            end = time.monotonic() + KILL_SECONDS
            while time.monotonic() < end:
                time.sleep(0.5)
                peak = max([peak, *map(_peak, _processes(cluster))])
        else:
            wait_until(lambda before=before: len(parts(out)) >= before + 5, 180)  # type: ignore[misc]
        found = _get(http, f"/v1/jobs/{job['id']}")
        if found is not None and found["status"] in STOPPED:
            break
        if victim == "job":
            wait_until(lambda: bool(list(_processes(cluster))), 120)
            for pid in _processes(cluster):
                os.kill(pid, signal.SIGKILL)
        else:
            cluster.kill(victim)
            cluster.start(victim)
        killed[victim] += 1
    print(f"killed: {dict(killed)}")
    assert set(killed) == set(VICTIMS), killed
    return peak


def _processes(cluster: Cluster) -> Iterator[int]:
    """Yield the processes of jobs of the edge."""
    edge = cluster.processes["edge-0"].pid
    try:
        children = Path(f"/proc/{edge}/task/{edge}/children").read_text().split()
    except OSError:
        return
    yield from map(int, children)


def _peak(pid: int) -> int:
    """Return the most memory that a process had, in KiB; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line), 0)


def _get(http: Http, path: str) -> Any:
    """Return the answer of the edge; None if it does not answer."""
    try:
        reply = asyncio.run(http.get(path))
    except (OSError, asyncio.IncompleteReadError):
        return None
    return reply.json if reply.status == 200 else None


def _ended(http: Http, job: dict[str, Any]) -> Any:
    """Return the job once it has stopped."""
    found: Any = None

    def is_ended() -> bool:
        nonlocal found
        found = _get(http, f"/v1/jobs/{job['id']}")
        return found is not None and found["status"] in STOPPED

    wait_until(is_ended, 7200 if KILL_SECONDS else 300)
    return found
