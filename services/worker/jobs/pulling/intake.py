"""Accepts pulled batches: reads their jobs and prepares them in threads.

On the request path, between `puller.py`, which pulls batches, and `runner.py`, which runs prepared
jobs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

from google.protobuf.message import DecodeError
from shoal.v1 import worker_pb2

from libs.catalog.card import Card
from libs.documents.reader import shared_reader
from libs.documents.text_size import TextBudget
from libs.errors import InternalError, ShoalError
from libs.models import CancelCheck, EncodeWork, Prepared, Work, with_truncation
from libs.models.images.memory import reserving
from libs.models.interface.model import ComputesChunks
from libs.models.runtime.documents import has_documents, with_pages
from libs.telemetry import metrics
from libs.telemetry.logs import fields
from services.worker.jobs import spans
from services.worker.jobs.answers.delivery import Delivery
from services.worker.jobs.answers.finisher import Finisher
from services.worker.jobs.execution.runner import DeviceRunner
from services.worker.jobs.held import HeldJob, Lease, PreparationKind, Unwanted
from services.worker.jobs.pulling.preparing import (
    BLOCKED_SECONDS,
    SMALL_BYTES,
    GiveWay,
    Preparation,
    Preparers,
)
from services.worker.jobs.pulling.pulls import LaneName, Lead
from services.worker.jobs.pulling.reading import estimate_input_sizes, estimated_tokens
from services.worker.memory.residency import Residency
from services.worker.memory.resident import Resident
from services.worker.mesh import codec, job_codec
from services.worker.mesh.link import Link
from services.worker.scheduling.batcher import Flow
from services.worker.scheduling.meter import whole_texts

log = logging.getLogger(__name__)


class JobIntake:
    """Reads and prepares pulled batches.

    `lead` measures how long before the device is free a pull must be sent.

    Args:
        wake: Set when prepared jobs may change the choice of pulls.
    """

    def __init__(
        self,
        link: Link,
        residency: Residency,
        delivery: Delivery,
        runner: DeviceRunner,
        finisher: Finisher,
        *,
        preparers: Mapping[PreparationKind, Preparers],
        wake: asyncio.Event,
    ) -> None:
        self._worker_id = link.identity.worker_id
        self._unix_time = link.clock.now
        self._residency = residency
        self._delivery = delivery
        self._runner = runner
        self._finisher = finisher
        self._preparations = {
            kind: Preparation(
                own, self._prepare, clock=time.monotonic, serves_others=runner.serves_others
            )
            for kind, own in preparers.items()
        }
        self._wake = wake
        self._documents = shared_reader()
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        # Mutable state, of the event loop.
        self.lead = Lead()
        self._relieving: asyncio.TimerHandle | None = None

    def waiting(self) -> dict[LaneName, dict[Flow, int]]:
        """Return estimated tokens in or before preparation, by lane and flow."""
        found: dict[LaneName, Counter[Flow]] = {}
        for preparation in self._preparations.values():
            for lane, flows in preparation.waiting().items():
                found.setdefault(lane, Counter()).update(flows)
        return {lane: dict(flows) for lane, flows in found.items()}

    def accept(self, response: worker_pb2.PullResponse, sent_at: float) -> bool:
        """Accept a pulled batch. `sent_at` is when the pull was sent (monotonic clock).

        Return whether it has jobs that will soon be prepared. If its model or adapter was evicted
        since the pull, the batch is returned to its lane.
        """
        resident, adapter = self._residency.serving(response.lane.model), response.lane.adapter
        if resident is None or not resident.adapters.serves(adapter):
            self.hand_back(response)
            return False
        lease = _lease(response, sent_at)
        jobs = self._read(lease, resident, response.jobs)
        self._residency.hold(resident, len(jobs), sum(held.estimated_tokens for held in jobs))
        resident.adapters.hold(adapter, len(jobs), time.monotonic())
        self._delivery.open(lease)
        for kind, preparation in self._preparations.items():
            if own := [held for held in jobs if held.kind == kind]:
                preparation.add(own)
        if jobs:
            self._relieve_in_time()
        is_quick = all(held.kind == "quick" for held in jobs)
        return bool(jobs) and is_quick and sum(held.read_bytes for held in jobs) <= SMALL_BYTES

    def hand_back(self, response: worker_pb2.PullResponse) -> None:
        """Return all jobs of a pulled batch to their lane."""
        self._delivery.open(_lease(response))

    def _relieve_in_time(self) -> None:
        """Schedule a check for threads blocked by one long text while other callers wait."""
        if self._relieving is None:
            self._relieving = self._loop.call_later(BLOCKED_SECONDS, self._relieve)

    def _relieve(self) -> None:
        self._relieving = None
        waiting = [preparation.relieve() for preparation in self._preparations.values()]
        if any(waiting):
            self._relieve_in_time()

    def _read(self, lease: Lease, resident: Resident, payloads: Collection[bytes]) -> list[HeldJob]:
        now, unix = time.monotonic(), self._unix_time()
        for payload in payloads:
            try:
                job = job_codec.read_job(payload)
            except DecodeError:
                log.error(
                    "cannot parse a job; leaving its lease to expire",
                    extra=fields({"model": resident.name}),
                )
                lease.unreadable += 1
                continue
            queued = max(0.0, unix - job.queued_unix_ms / 1000)
            held = HeldJob(
                next(self._numbers), job, lease, resident, received_at=now, queue_seconds=queued
            )
            reading = estimate_input_sizes(
                job, len(payload), has_images=resident.model.card.images is not None
            )
            held.read_bytes, held.pages, held.kind = reading.bytes, reading.pages, reading.kind
            held.estimated_tokens = estimated_tokens(
                job, held.read_bytes, _longest(resident.model.card), held.pages
            )
            held.span = spans.begin(job, lease.lane, self._worker_id, waited=queued)
            metrics.QUEUE_SECONDS.labels(resident.name).observe(queued)
            lease.jobs[held.number] = held
            lease.until_unix = max(lease.until_unix, held.deadline_unix)
        return list(lease.jobs.values())

    def _prepare(self, jobs: list[HeldJob], give_way: GiveWay) -> None:
        """Prepare jobs. Runs on a preparing thread."""
        ready: list[HeldJob] = []
        failures: list[tuple[HeldJob, bytes]] = []
        for held in jobs:
            try:
                error = self._prepare_one(held, partial(self._check_cancelled, held, give_way))
            except Unwanted:
                continue
            if error is None:
                ready.append(held)
            else:
                held.span.failed(error)
                failures.append((held, codec.failed(error, first_item=held.job.first_item)))
                if held.queued:
                    held.unwanted = True
                    self._runner.wake()  # to drop its sequences
        self._finisher.finished(self._runner.add(ready), is_idle=True)
        self._loop.call_soon_threadsafe(self._prepared, jobs[0].lease, ready, failures)

    def _check_cancelled(self, held: HeldJob, give_way: GiveWay) -> None:
        """Yield to other callers between two slices. Raise if the job was cancelled or has
        expired.
        """
        give_way()
        self._check(held)

    def _check(self, held: HeldJob) -> None:
        """Raise if the job was cancelled or is past its deadline."""
        held.check_wanted(self._unix_time(), "tokenised")

    def _prepare_one(self, held: HeldJob, check_cancelled: CancelCheck) -> ShoalError | None:
        started = time.monotonic()
        try:
            check_cancelled()
            # Outputs of an adapter are not cached: its name may later refer to another adapter.
            work = job_codec.to_work(
                held.job, scope=None if held.lease.lane.adapter else held.job.tenant
            )
            files = job_codec.document_files(held.job)
            if isinstance(work, EncodeWork):
                held.embedding_id = held.resident.embedding_id(
                    work, held.job.encode.expect_embedding_id
                )
            held.drop_operation()
            if has_documents(work):
                reader = self._documents.metered(
                    held.document_seconds.add, partial(self._check, held)
                )
                budget = TextBudget(held.job.document_pages, held.job.document_bytes)
                work = with_pages(work, files, reader, check_cancelled, budget)
            del files
            held.streams_chunks = _streams_chunks(held.job, work)
            for part in self._prepare_work(held, work, check_cancelled):
                prepared = _adapted(part, held.lease.lane.adapter)
                if isinstance(work, EncodeWork) and work.chunking is not None:
                    self._runner.grow(held, prepared)
                else:
                    held.prepared = prepared
            held.outputs.update(held.ready.known)
            metrics.IMAGE_CACHE_EVENTS.labels("hit").inc(len(held.ready.known))
            held.learnt = whole_texts(work, held.ready, held.resident.model.card)
        except Unwanted:
            raise
        except ShoalError as error:
            return error
        except Exception as error:
            log.exception(
                "a job could not be prepared", extra=fields({"model": held.resident.name})
            )
            return InternalError(f"the input could not be prepared: {type(error).__name__}")
        ended = time.monotonic()
        held.prepare_seconds = ended - started
        metrics.PREPARE_SECONDS.labels(held.resident.name).observe(held.prepare_seconds)
        held.span.stage("prepare", started, ended)
        return None

    def _prepare_work(
        self, held: HeldJob, work: Work, check_cancelled: CancelCheck
    ) -> Iterator[Prepared]:
        """Yield the prepared part of a job as it grows. The last result is the whole job."""
        model = held.resident.model
        work = with_truncation(work, model.card)
        if model.card.images is None:
            if isinstance(model, ComputesChunks):
                yield from model.prepare_parts(work, check_cancelled)
            else:
                yield model.prepare(work, check_cancelled)
            return
        with reserving(partial(self._residency.decoding.reserve, check=partial(self._check, held))):
            yield model.prepare(work, check_cancelled)

    def _prepared(
        self, lease: Lease, ready: list[HeldJob], failures: list[tuple[HeldJob, bytes]]
    ) -> None:
        self.lead.add(time.monotonic() - lease.pulled_at)
        for held in ready:
            held.resident.meter.add_texts(*held.learnt)
        self._delivery.deliver(failures)
        if (
            not ready or self._runner.is_running
        ):  # an idle device takes the jobs at once and then sets `wake` itself
            self._wake.set()


def _lease(response: worker_pb2.PullResponse, pulled_at: float = 0.0) -> Lease:
    return Lease(response.lane, response.batch_id, response.lease_ms / 1000, pulled_at=pulled_at)


def _streams_chunks(job: worker_pb2.Job, work: Work) -> bool:
    """Return whether the job's chunks are sent before its answer. Merging similar vectors takes
    longer than computing them, so it is done once, for the answer.
    """
    return (
        bool(job.stream_to)
        and isinstance(work, EncodeWork)
        and work.chunking is not None
        and work.pooling_factor <= 1
    )


def _longest(card: Card) -> int:
    """Return the tokens of the longest sequence of a text or an image."""
    return card.max_tokens if card.images is None else max(card.max_tokens, card.images.max_tokens)


def _adapted(prepared: Prepared, adapter: str) -> Prepared:
    """Assign each sequence to the adapter, if one is named."""
    if not adapter:
        return prepared
    return replace(
        prepared, sequences=[replace(sequence, adapter=adapter) for sequence in prepared.sequences]
    )
