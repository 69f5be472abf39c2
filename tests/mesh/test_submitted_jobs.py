"""A submitted job on a whole mesh, of which every process is killed while it runs.
`benchmarks.bulk.kills` runs a long one, with a kill every 20 seconds.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import shoal

from tests.bulk.jobs import parts
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.submitted_job import VICTIMS, SubmittedJob, mesh_of_jobs
from tests.support.waiting import wait_until

MODEL = "org/base"
ROWS, CHUNK_ROWS, SAMPLE = 3000, 20, 500


async def test_job_survives_kills_of_every_process(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path / "shelf" / MODEL, sentence=SentenceFiles())
    texts = [f"{number} small boats" for number in range(ROWS)]
    with mesh_of_jobs(tmp_path, str(tmp_path / "shelf")) as cluster:
        job = SubmittedJob(cluster, tmp_path / "data", texts, MODEL, CHUNK_ROWS)
        await asyncio.to_thread(_kill_each, job)
        sample = np.random.default_rng(1).choice(ROWS, SAMPLE, replace=False).tolist()
        with shoal.Client(cluster.address) as client:
            expected = client.encode(MODEL, [texts[row] for row in sample], timeout=300)
        embedding_id = await asyncio.to_thread(job.check)
    assert embedding_id == expected.embedding_id
    np.testing.assert_allclose(job.vectors(sample), expected.dense, atol=1e-5)


def _kill_each(job: SubmittedJob) -> None:
    """Kill each process once, after some more parts, and wait for the end of the job."""
    job.submit()
    for victim in VICTIMS:
        before = len(parts(job.out))
        wait_until(lambda before=before: len(parts(job.out)) >= before + 5, 180)  # type: ignore[misc]
        assert not job.is_stopped(), f"the job has ended before the kill of {victim}"
        job.kill(victim)
    wait_until(job.is_stopped, 300)
