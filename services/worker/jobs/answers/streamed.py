"""Streams text to clients of ExtractStream while the model is still generating it, and chunks to
clients of EncodeStream while later ones are computed.

Not on the request path of the final answer. The runner passes on all tokens so far, or reports that
chunks are computed. Only the newest state of each job is kept; every 50 ms, a thread converts it to
text or vectors, which are sent to the router. The final answer also contains the streamed parts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

from shoal.v1 import worker_pb2

from libs.errors import ShoalError
from libs.models import Prepared
from libs.models.model import ComputesChunks
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
        # are not sent yet, and whether a send is in progress.
        self._growing: dict[tuple[int, int], _GrowingText] = {}
        self._computed: dict[int, HeldJob] = {}
        self._is_sending = False

    def add(self, held: HeldJob, index: int, ids: list[int]) -> None:
        """Set all tokens so far of a job's sequence."""
        self._growing[(held.number, index)] = _GrowingText(held, index, ids)
        self._start()

    def add_chunks(self, held: HeldJob) -> None:
        """Send the chunks of a job that are computed."""
        self._computed[held.number] = held
        self._start()

    def give_up(self) -> None:
        """Stop sending."""
        self._senders.cancel()

    def _start(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            self._senders.start(self._send())

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while self._growing or self._computed:
            growing, self._growing = self._growing, {}
            texts = [progress for progress in growing.values() if not progress.held.unwanted]
            computed, self._computed = self._computed, {}
            jobs = [held for held in computed.values() if _is_held(held)]
            parts = await loop.run_in_executor(self._threads, _parts, texts)
            chunks = await loop.run_in_executor(self._threads, _chunk_parts, jobs)
            sent = await self._send_parts(
                [part for _, _, part in parts] + [part for _, _, part in chunks]
            )
            for held, index, part in parts if sent else ():
                held.streamed[index] = held.streamed.get(index, "") + part.text
            for held, count, _ in chunks if sent else ():
                held.streamed_chunks += count
            is_full = sum(len(part.chunks) for _, _, part in chunks) >= MAX_CHUNKS_BYTES
            for held in jobs if is_full else [held for held, _, _ in chunks]:  # they may have more
                self._computed.setdefault(held.number, held)
            await asyncio.sleep(INTERVAL_SECONDS if sent else FAILED_SECONDS)
        self._is_sending = False

    async def _send_parts(self, parts: list[worker_pb2.JobDelta]) -> bool:
        """Return False if they could not be sent."""
        if not parts:
            return True
        request = worker_pb2.DeltasRequest(worker_id=self._link.identity.worker_id, deltas=parts)
        try:
            await self._link.send_deltas(request)
        except ShoalError as error:
            log.debug("parts of answers could not be streamed: %s", error)
            return False
        return True


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
    chunks = codec.part_of(result, revision=model.card.revision, embedding_id=held.embedding_id)
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
