"""A bulk job on a whole mesh, of which the worker, the router and the job itself are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import shoal
from pyarrow import parquet

from tests.bulk.jobs import parts, read_manifest, table
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

MODEL = "org/base"
CHUNK_ROWS = 20
ROWS = 150 * CHUNK_ROWS
"""Seconds of work: the job must not end while this test, on a busy machine, is late to look at it.
"""


def test_job_survives_kills_of_worker_router_and_itself(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path / "shelf" / MODEL, sentence=SentenceFiles())
    texts = [f"{number} small boats in one harbour" for number in range(ROWS)]
    source, out = tmp_path / "in.parquet", tmp_path / "out"
    parquet.write_table(pyarrow.table({"text": texts}), source)
    directory = tmp_path / "mesh"
    directory.mkdir()
    with Cluster(
        directory, models=str(tmp_path / "shelf"), routers=2, workers=2, durable=True
    ) as cluster:
        files = ["-i", str(source), "-o", str(out), "--timeout", "60"]
        files += ["--chunk-rows", str(CHUNK_ROWS)]
        connection = ["--address", cluster.address]
        shoal_job = [sys.executable, "-m", "shoal", "job"]
        run = [*shoal_job, "run", "encode", MODEL, *files, *connection]
        with subprocess.Popen(run) as job:
            wait_until(lambda: len(parts(out)) >= 4, 180)
            cluster.kill("worker-0")
            cluster.kill("router-0")
            before = len(parts(out))
            wait_until(lambda: len(parts(out)) >= before + 4, 180)
            job.kill()
        assert len(parts(out)) < ROWS // CHUNK_ROWS
        subprocess.run([*shoal_job, "resume", str(out), *connection], check=True)
        with shoal.Client(cluster.address) as client:
            expected = client.encode(MODEL, texts, timeout=300)
    found = table(out)
    assert found["row"].to_pylist() == list(range(ROWS))
    assert found["error"].null_count == ROWS
    assert read_manifest(out).embedding_id == expected.embedding_id
    np.testing.assert_allclose(np.array(found["dense"].to_pylist()), expected.dense, atol=1e-5)
