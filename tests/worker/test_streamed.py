"""Chunks that are sent before the answers of their jobs: what tenants share, and the rate of those
that are forwarded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from shoal.v1 import inference_pb2, worker_pb2

from libs.errors import NoCapacity
from libs.models.interface.results import Chunks, EncodeResult, StoredArray
from libs.models.interface.sequences import Output, Prepared
from libs.models.interface.work import CancelCheck, EncodeWork, Work
from services.worker.jobs.answers.streamed import (
    FAILED_SECONDS,
    FORWARDED_BYTES_PER_SECOND,
    INTERVAL_SECONDS,
    MAX_CHUNKS_BYTES,
    StreamedParts,
    TenantTurns,
    pause_seconds,
)
from services.worker.jobs.held import HeldJob, Lease
from services.worker.memory.resident import Resident
from tests.worker.fakes import FakeModel, encode_job

WIDTH = 50_000
"""Numbers of a vector: 200 kB, so that a call has those of five jobs or six."""
CHUNKS = 12
"""Chunks of each job."""


class FakeChunksModel(FakeModel):
    """A model of which all chunks but the last one are computed, each a part."""

    def prepare_parts(self, work: Work, check_cancelled: CancelCheck) -> Iterator[Prepared]:
        raise NotImplementedError

    def finish_rows(
        self, prepared: Prepared, outputs: Mapping[int, Output], first: int, most_bytes: int
    ) -> EncodeResult | None:
        if first == CHUNKS - 1:
            return None
        values = np.full((1, WIDTH), first, np.float32)
        chunks = Chunks([0, 1], [first], [first + 1], [1], continues=first > 0)
        return EncodeResult(StoredArray("float32", (1, WIDTH), values), chunks=chunks)


MODEL = FakeChunksModel()


def held_job(number: int, tenant: str) -> HeldJob:
    resident = Resident("org/fake", MODEL, load_seconds=0.0, loaded_at=0.0, last_used=0.0)
    job = encode_job(f"{tenant}-{number}", "text")
    job.tenant, job.stream_to = tenant, "elsewhere"
    lease = Lease(worker_pb2.Lane(), "1", 15.0)
    held = HeldJob(number, job, lease, resident, received_at=0.0, queue_seconds=0.0)
    held.prepared, held.streams_chunks = Prepared(EncodeWork(["text"]), "dense", []), True
    lease.jobs[number] = held
    return held


class FakeLink:
    """Records the calls to a router. The first ones fail."""

    def __init__(self, failures: int = 0) -> None:
        self.identity = SimpleNamespace(worker_id="w1")
        self.failures = failures
        self.calls: list[list[worker_pb2.JobDelta]] = []

    async def send_deltas(self, request: worker_pb2.DeltasRequest) -> worker_pb2.DeltasResponse:
        if self.failures:
            self.failures -= 1
            raise NoCapacity("no router")
        self.calls.append(list(request.deltas))
        return worker_pb2.DeltasResponse()


async def send_all(link: FakeLink, jobs: list[HeldJob]) -> None:
    with ThreadPoolExecutor(1) as threads:
        async with asyncio.TaskGroup() as tasks:
            parts = StreamedParts(cast(Any, link), tasks, threads)
            for held in jobs:
                parts.add_chunks(held)


async def test_tenants_share_calls_whatever_their_numbers_of_jobs() -> None:
    jobs = [held_job(number, "many") for number in range(20)] + [held_job(20, "few")]
    link = FakeLink(failures=1)
    await send_all(link, jobs)
    first = link.calls[: CHUNKS - 1]
    assert all("few-20" in [part.job_id for part in parts] for parts in first)
    assert all(sum(len(part.chunks) for part in parts) < 2 * MAX_CHUNKS_BYTES for parts in first)
    found = Counter(part.job_id for parts in link.calls for part in parts)
    assert found == {held.job.job_id: CHUNKS - 1 for held in jobs}
    for held in jobs:
        own = [part for parts in link.calls for part in parts if part.job_id == held.job.job_id]
        assert [part.offset for part in own] == list(range(CHUNKS - 1))
        vectors = inference_pb2.EncodeResponse.FromString(own[-1].chunks).dense
        assert np.frombuffer(vectors.data, np.float32)[0] == CHUNKS - 2


def test_tenant_that_has_waited_longest_is_first() -> None:
    turns = TenantTurns()
    a, b, c = held_job(0, "a"), held_job(1, "b"), held_job(2, "c")
    more = held_job(3, "a")
    assert turns.order([a, more, b, c]) == [a, b, c, more]
    turns.note_sent([a, b])
    assert turns.order([a, more, b, c]) == [c, a, b, more]
    turns.note_sent([c, a])
    assert turns.order([a, more, b, c]) == [b, a, c, more]


def test_forwarded_chunks_slow_down_the_next_ones() -> None:
    assert pause_seconds(worker_pb2.DeltasResponse()) == INTERVAL_SECONDS
    forwarded = worker_pb2.DeltasResponse(forwarded_bytes=2 * FORWARDED_BYTES_PER_SECOND)
    assert pause_seconds(forwarded) == 2.0
    assert pause_seconds(None) == FAILED_SECONDS
