"""A worker without a model, for `benchmarks.mesh.router`: `python -m benchmarks.mesh.stub_worker
ROUTER`.

It registers, pulls and completes as a worker does, through the worker's own `Link`, and answers
each text at once with one ready-made vector. A line on its input is answered with how much it has
pulled and completed. All that it knows of the protocol is in `Stub`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import sys
import time

import numpy as np
import typer
import uvloop
from shoal.v1 import inference_pb2, models_pb2, worker_pb2

from libs.errors import ShoalError
from libs.models import EncodeResult
from libs.models.interface.results import StoredArray
from libs.versions import WIRE_VERSION
from services.worker.mesh import codec, job_codec
from services.worker.mesh.codec import Timings
from services.worker.mesh.link import Link, WorkerIdentity
from services.worker.presence import PresenceStream

MODEL = "stub/embedder"
POOL = "cpu"
DIMENSIONS = 384
PULLS = 2
"""Pulls in flight, as many as an idle worker keeps."""
BATCH_TOKENS = 8192
MAX_JOBS = 256
HEARTBEAT_SECONDS = 1.0
PULL_SECONDS = 5.0


def ready_answer() -> bytes:
    """The serialised JobResult of one text."""
    vector = StoredArray(
        "float32", (1, DIMENSIONS), np.full((1, DIMENSIONS), DIMENSIONS**-0.5, np.float32)
    )
    timings = Timings(queue=0.0, prepare=0.0, wait=0.0, forward=0.0, finish=0.0)
    return codec.encode_result(
        EncodeResult(dense=vector), revision="stub", tokens=8, timings=timings
    )


def report() -> worker_pb2.WorkerModel:
    card = models_pb2.ModelCard(
        model=MODEL,
        revision="stub",
        family="stub",
        tasks=[models_pb2.TASK_ENCODE],
        representations=[inference_pb2.REPRESENTATION_DENSE],
        dimensions=DIMENSIONS,
        max_tokens=512,
    )
    state = models_pb2.MODEL_STATE_RESIDENT
    return worker_pb2.WorkerModel(
        model=MODEL, state=state, bytes=1 << 20, tokens_per_second=1e6, card=card
    )


class Stub:
    """A worker that answers every job at once, until `run` is cancelled.

    Attributes:
        pulls: Number of pulls that returned jobs.
        jobs: Number of jobs with an answer that a router accepted.
    """

    def __init__(self, link: Link) -> None:
        self.pulls = 0
        self.jobs = 0
        self._link = link
        self._lane = worker_pb2.Lane(pool=POOL, model=MODEL)
        self._answer = ready_answer()
        self._beat = asyncio.Event()
        self._numbers = itertools.count(1)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report())
            tasks.create_task(PresenceStream(self._link, self._beat).run())
            for _ in range(PULLS):
                tasks.create_task(self._pull())

    async def _report(self) -> None:
        identity = self._link.identity
        message = worker_pb2.HeartbeatRequest(
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            pool=identity.pool,
            device="none",
            memory_bytes=1 << 30,
            models=[report()],
            batch_tokens=BATCH_TOKENS,
            wire_version=WIRE_VERSION,
        )
        while True:
            self._beat.clear()
            try:
                await self._link.heartbeat(message)
            except ShoalError:
                await asyncio.sleep(0.1)
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._beat.wait()
            except TimeoutError:
                continue

    async def _pull(self) -> None:
        identity = self._link.identity
        while True:
            request = worker_pb2.PullRequest(
                worker_id=identity.worker_id,
                epoch=identity.epoch,
                pool=identity.pool,
                lanes=[self._lane],
                budget_tokens=BATCH_TOKENS,
                budget_jobs=MAX_JOBS,
                wait_seconds=PULL_SECONDS,
                wire_version=WIRE_VERSION,
                batch_id=f"{identity.epoch}-{next(self._numbers)}",
            )
            try:
                pulled = await self._link.pull(request)
            except ShoalError:
                await asyncio.sleep(0.1)
                continue
            if pulled.batch_id:
                self.pulls += 1
                await self._complete(pulled)

    async def _complete(self, pulled: worker_pb2.PullResponse) -> None:
        """Complete the whole batch in one call, as a worker does when its jobs end together."""
        jobs = [
            worker_pb2.CompletedJob(job_id=job_codec.read_job(job).job_id, result=self._answer)
            for job in pulled.jobs
        ]
        request = worker_pb2.CompleteRequest(
            worker_id=self._link.identity.worker_id,
            lane=pulled.lane,
            batch_id=pulled.batch_id,
            jobs=jobs,
            release=True,
        )
        # Not added up in one statement: it would read the sum before it waits, and lose the
        # increments of the other pull.
        accepted = await self._link.complete(request, time.time() + PULL_SECONDS)
        self.jobs += accepted or 0


async def serve(router: str) -> None:
    """Work until its input ends."""
    async with Link(WorkerIdentity("stub", secrets.token_hex(8), POOL), [router]) as link:
        stub = Stub(link)
        working = asyncio.create_task(stub.run())
        print(json.dumps({"ready": True}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps({"pulls": stub.pulls, "jobs": stub.jobs}), flush=True)
        working.cancel()


def main(router: str) -> None:
    uvloop.run(serve(router))


if __name__ == "__main__":
    typer.run(main)
