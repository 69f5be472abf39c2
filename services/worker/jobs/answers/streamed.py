"""Streams text to clients of ExtractStream while the model is still generating it, and chunks to
clients of EncodeStream while later ones are computed.

Not on the request path of the final answer. The runner passes on all tokens so far, or reports that
chunks are computed. Only the newest state of each job is kept; every 50 ms, a thread converts it to
text or vectors, which are sent to the router. The final answer also contains the streamed parts.

A router forwards parts for another router's client through Redis. Chunks are sent more slowly then,
and apart from text, which is small and stays at its pace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final, Protocol, runtime_checkable

from shoal.v1 import worker_pb2

from libs.errors import ShoalError
from libs.models import Prepared
from libs.models.interface.model import ComputesChunks
from libs.telemetry.logs import fields
from services.worker.jobs.held import HeldJob
from services.worker.machine.tasks import Tasks
from services.worker.mesh import codec
from services.worker.mesh.link import Link

log = logging.getLogger(__name__)

INTERVAL_SECONDS: Final = 0.05
"""Faster than a person reads, and about a hundredth of the messages that one per token would be."""
FAILED_SECONDS: Final = 1.0
MAX_PART_CHARACTERS: Final = 16_384
"""Maximum length of one part. The next part carries the rest."""
CHUNKS_PART_BYTES: Final = 256 << 10
"""Vectors of one part, unless a single chunk has more."""
MAX_CHUNKS_BYTES: Final = 1 << 20
"""Size of all parts with chunks of one call, and maximum size of a part: a chunk with more arrives
with the answer."""
FORWARDED_BYTES_PER_SECOND: Final = 1 << 20
"""Maximum rate of chunks that the router forwards to other routers through Redis. What exceeds it
arrives with the answer. The tenants share it."""


@runtime_checkable
class StreamsText(Protocol):
    """A model with texts that can be streamed during generation."""

    def places(self, prepared: Prepared) -> Sequence[tuple[int, int]]:
        """Return the item and page (0: none) of each sequence, or nothing if no text is being
        generated yet.
        """

    def text(self, prepared: Prepared, ids: Sequence[int]) -> str:
        """Decode the tokens so far of a sequence. The result begins with that of any prefix of
        `ids`.
        """


@dataclass(frozen=True, slots=True)
class _GrowingText:
    """A text that is being generated, and all its tokens so far."""

    held: HeldJob
    index: int
    ids: list[int]


class StreamedParts:
    """Streams growing texts and chunks to routers. Event loop only."""

    def __init__(self, link: Link, tasks: asyncio.TaskGroup, threads: ThreadPoolExecutor) -> None:
        self._link = link
        self._senders = Tasks(tasks)
        self._threads = threads
        # Mutable state: the newest tokens of each text that are not sent yet, jobs with chunks that
        # are not sent yet, and whether a loop sends each of them.
        self._growing: dict[tuple[int, int], _GrowingText] = {}
        self._computed: dict[int, HeldJob] = {}
        self._sends_texts = self._sends_chunks = False

    def add(self, held: HeldJob, index: int, ids: list[int]) -> None:
        """Set all tokens so far of a job's sequence."""
        self._growing[(held.number, index)] = _GrowingText(held, index, ids)
        if not self._sends_texts:
            self._sends_texts = True
            self._senders.start(self._send_texts())

    def add_chunks(self, held: HeldJob) -> None:
        """Send the chunks of a job that are computed."""
        self._computed.setdefault(held.number, held)
        if not self._sends_chunks:
            self._sends_chunks = True
            self._senders.start(self._send_chunks())

    def give_up(self) -> None:
        """Stop sending."""
        self._senders.cancel()

    async def _send_texts(self) -> None:
        loop = asyncio.get_running_loop()
        while self._growing:
            growing, self._growing = self._growing, {}
            texts = [progress for progress in growing.values() if not progress.held.unwanted]
            parts = await loop.run_in_executor(self._threads, _parts, texts)
            response = await self._call([part for _, _, part in parts])
            for held, index, part in () if response is None else parts:
                held.streamed[index] = held.streamed.get(index, "") + part.text
            await asyncio.sleep(FAILED_SECONDS if response is None else INTERVAL_SECONDS)
        self._sends_texts = False

    async def _send_chunks(self) -> None:
        loop, turns = asyncio.get_running_loop(), TenantTurns()
        while self._computed:
            computed, self._computed = self._computed, {}
            jobs = turns.order([held for held in computed.values() if _is_held(held)])
            parts = await loop.run_in_executor(self._threads, _chunk_parts, jobs)
            response = await self._call([part for _, _, part in parts])
            for held, count, _ in () if response is None else parts:
                held.streamed_chunks += count
            sent = [held for held, _, _ in parts]
            turns.note_sent(sent)
            is_full = sum(len(part.chunks) for _, _, part in parts) >= MAX_CHUNKS_BYTES
            rest = [held for held in jobs if held not in sent] if is_full else []
            for held in [*rest, *sent]:  # those that were sent may have more
                self._computed.setdefault(held.number, held)
            await asyncio.sleep(pause_seconds(response))
        self._sends_chunks = False

    async def _call(self, parts: list[worker_pb2.JobDelta]) -> worker_pb2.DeltasResponse | None:
        """Send parts to the router. Return None if they could not be sent."""
        if not parts:
            return worker_pb2.DeltasResponse()
        request = worker_pb2.DeltasRequest(worker_id=self._link.identity.worker_id, deltas=parts)
        try:
            return await self._link.send_deltas(request)
        except ShoalError as error:
            log.debug("parts of answers could not be streamed: %s", error)
            return None


def pause_seconds(response: worker_pb2.DeltasResponse | None) -> float:
    """Return how long to wait after a call with chunks; None if it failed."""
    if response is None:
        return FAILED_SECONDS
    return max(INTERVAL_SECONDS, response.forwarded_bytes / FORWARDED_BYTES_PER_SECOND)


class TenantTurns:
    """Orders jobs so that tenants share calls equally, whatever their numbers of jobs. Pure."""

    def __init__(self) -> None:
        # State: the number of the last call that had parts of each tenant's jobs.
        self._calls = 0
        self._last: dict[str, int] = {}

    def order(self, jobs: Sequence[HeldJob]) -> list[HeldJob]:
        """Return a job of each tenant in turn, beginning with the tenant that has waited longest.
        The jobs of a tenant keep their order.
        """
        by_tenant: dict[str, list[HeldJob]] = {}
        for held in jobs:
            by_tenant.setdefault(held.job.tenant, []).append(held)
        self._last = {tenant: self._last.get(tenant, 0) for tenant in by_tenant}
        queues = sorted(by_tenant, key=self._last.__getitem__)
        rounds = zip_longest(*(by_tenant[tenant] for tenant in queues))
        return [held for each in rounds for held in each if held is not None]

    def note_sent(self, jobs: Sequence[HeldJob]) -> None:
        """Note the jobs of which a call had parts."""
        self._calls += 1
        for held in jobs:
            self._last[held.job.tenant] = self._calls


def within_share(prepared: Prepared, answer_bytes: int) -> Prepared:
    """Limit the bytes of one item's result. Dense vectors, which are most jobs, have a known size
    and need no limit.
    """
    if not answer_bytes or prepared.head == "dense":
        return prepared
    return replace(prepared, answer_bytes=answer_bytes)


def _is_held(held: HeldJob) -> bool:
    """Return whether the job has no answer yet, and a caller waits for it."""
    return not held.unwanted and held.number in held.lease.jobs


def _parts(growing: Iterable[_GrowingText]) -> list[tuple[HeldJob, int, worker_pb2.JobDelta]]:
    """Return the text of each sequence that is not streamed yet. Runs in a thread."""
    found = []
    for progress in growing:
        held, model = progress.held, progress.held.resident.model
        places = model.places(held.ready) if isinstance(model, StreamsText) else ()
        if not isinstance(model, StreamsText) or not places:
            continue
        streamed, text = (
            held.streamed.get(progress.index, ""),
            model.text(held.ready, progress.ids),
        )
        if not text.startswith(streamed) or len(text) == len(streamed):
            continue
        (item, page), job = places[progress.index], held.job
        part = worker_pb2.JobDelta(
            job_id=job.job_id,
            router=job.stream_to,
            batch_id=held.lease.batch_id,
            item=item,
            page=page,
            offset=len(streamed),
            text=text[len(streamed) :][:MAX_PART_CHARACTERS],
        )
        found.append((held, progress.index, part))
    return found


_ChunkPart = tuple[HeldJob, int, worker_pb2.JobDelta]
"""A job, and the number of chunks of a part."""


def _chunk_parts(jobs: Iterable[HeldJob]) -> list[_ChunkPart]:
    """Return the next chunks of each job that has some, of as many jobs as a call may carry. Runs
    in a thread.
    """
    found: list[_ChunkPart] = []
    size = 0
    for held in jobs:
        if not held.streams_chunks or size >= MAX_CHUNKS_BYTES:
            continue
        try:
            part = _chunk_part(held)
        except Exception:  # A fault here must not end the worker: the answer has all chunks.
            log.exception("chunks are not streamed", extra=fields({"job": held.job.job_id}))
            held.streams_chunks = False
            continue
        if part is not None:
            found.append(part)
            size += len(part[-1].chunks)
    return found


def _chunk_part(held: HeldJob) -> _ChunkPart | None:
    model, job = held.resident.model, held.job
    if not isinstance(model, ComputesChunks):
        return None
    prepared = within_share(held.ready, job.item_answer_bytes)
    try:
        result = model.finish_rows(prepared, held.outputs, held.streamed_chunks, CHUNKS_PART_BYTES)
    except ShoalError:  # so does the answer
        return None
    if result is None or result.chunks is None:
        return None
    chunks = codec.encode_part(result, revision=model.card.revision, embedding_id=held.embedding_id)
    if len(chunks) > MAX_CHUNKS_BYTES:
        return None
    part = worker_pb2.JobDelta(
        job_id=job.job_id,
        router=job.stream_to,
        batch_id=held.lease.batch_id,
        offset=held.streamed_chunks,
        chunks=chunks,
    )
    return held, len(result.chunks.starts), part
