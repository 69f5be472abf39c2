"""A submitted job on a whole mesh, of which every process can be killed while it runs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow
from pyarrow import parquet

from tests.bulk.jobs import parts, read_manifest
from tests.edge.jobs.parts import STOPPED
from tests.edge.parts import Http
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

JOB: Final = "job"
"""The name of the process of the job, among those that can be killed."""
VICTIMS: Final = (JOB, "edge-0", "router-0", "worker-0", "redis", "router-1", "worker-1")


def mesh_of_jobs(root: Path, models: str) -> Cluster:
    """Return a mesh of two routers, two workers and an edge that reads and writes `root`/data."""
    for name in ("data", "mesh"):
        (root / name).mkdir()
    settings = {
        "SHOAL_BATCHES_URL": str(root / "files"),
        "SHOAL_JOBS_ROOTS": str(root / "data"),
    }
    return Cluster(
        root / "mesh",
        models=models,
        routers=2,
        workers=2,
        edges=1,
        durable=True,
        environment=settings,
    )


class SubmittedJob:
    """A job that encodes texts from a Parquet file.

    Attributes:
        out: The folder of its output.
    """

    def __init__(
        self, cluster: Cluster, data: Path, texts: Sequence[str], model: str, chunk_rows: int
    ) -> None:
        self._cluster, self._count = cluster, len(texts)
        self._http = Http(cluster.http_addresses[0])
        self.out = data / "out"
        parquet.write_table(pyarrow.table({"text": texts}), data / "in.parquet")
        self._body = {
            "recipe": {"verb": "encode", "model": model, "chunk_rows": chunk_rows},
            "input": str(data / "in.parquet"),
            "output": str(self.out),
        }
        self._id = ""

    def submit(self) -> None:
        wait_until(lambda: self._get("/readyz") is not None, 120)
        reply = asyncio.run(self._http.post("/v1/jobs", self._body))
        assert reply.status == 200, reply.body
        self._id = reply.json["id"]

    def state(self) -> dict[str, Any] | None:
        """Return the job as the edge reports it; None while the edge does not answer."""
        found: dict[str, Any] | None = self._get(f"/v1/jobs/{self._id}")
        return found

    def is_stopped(self) -> bool:
        found = self.state()
        return found is not None and found["status"] in STOPPED

    def kill(self, victim: str) -> None:
        """Kill a process with SIGKILL. All but that of the job are started again here; the edge
        starts the job's.
        """
        if victim != JOB:
            self._cluster.kill(victim)
            self._cluster.start(victim)
            return
        wait_until(lambda: bool(list(self.processes())) or self.is_stopped(), 120)
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def processes(self) -> Iterator[int]:
        """Yield the processes of jobs of the edge."""
        edge = self._cluster.processes["edge-0"].pid
        try:
            children = Path(f"/proc/{edge}/task/{edge}/children").read_text().split()
        except OSError:
            return
        yield from map(int, children)

    def check(self) -> str:
        """Check that the job completed, with each row once and none failed. Return the embedding
        id. Raises AssertionError.
        """
        wait_until(self.is_stopped, 120, "the end of the job")
        found = self.state() or {}
        counts = found.get("counts", {})
        _check(found.get("status") == "completed", f"the job is {found}")
        _check(counts["rows"] == counts["total_rows"] == self._count, f"the job has {counts}")
        first = 0
        for part in parts(self.out):
            table = parquet.read_table(part, columns=["row", "error"])
            rows = table["row"].to_pylist()
            _check(rows == list(range(first, first + len(rows))), f"{part.name} has rows {rows}")
            _check(table["error"].null_count == len(rows), f"{part.name} has failed rows")
            first += len(rows)
        _check(first == self._count, f"the parts have {first:,} of {self._count:,} rows")
        embedding_id = read_manifest(self.out).embedding_id
        _check(embedding_id == found["embedding_id"], f"the parts have {embedding_id}: {found}")
        return embedding_id

    def vectors(self, rows: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the vectors of these rows, [rows, dimensions]."""
        wanted, found = set(rows), {}
        for part in parts(self.out):
            table = parquet.read_table(part)
            for place, row in enumerate(table["row"].to_pylist()):
                if row in wanted:
                    found[row] = table["dense"][place].as_py()
        return np.array([found[row] for row in rows])

    def _get(self, path: str) -> Any:
        """Return the answer of the edge; None if it does not answer."""
        try:
            reply = asyncio.run(self._http.get(path))
        except (OSError, asyncio.IncompleteReadError):
            return None
        return reply.json if reply.status == 200 else None


def _check(is_true: bool, otherwise: str) -> None:
    """Raises AssertionError with a message, for a benchmark without pytest, too."""
    if not is_true:
        raise AssertionError(otherwise[:2000])
