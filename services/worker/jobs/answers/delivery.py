"""Open leases and the answers on their way back to a router. Event loop only.

On the request path, between `finisher.py` and WorkerService.Complete. Each lease has one call in
flight at a time: answers that finish during the call are batched into the next one, and the call
that carries the last answer ends the lease.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import Final

from shoal.v1 import worker_pb2

from libs.errors import InvalidInput
from libs.telemetry.logs import fields
from services.worker.jobs.held import HeldJob, Lease
from services.worker.jobs.waste import Waste
from services.worker.machine.tasks import Tasks
from services.worker.memory.resident import Resident
from services.worker.mesh import codec
from services.worker.mesh.link import Link

log = logging.getLogger(__name__)

MAX_RESULT_BYTES: Final = 48 << 20
"""The size limit of one job's answer: routers accept messages of 64 MiB."""

_MAX_CALL_BYTES: Final = 16 << 20


class Delivery:
    """Returns answers to routers.

    Args:
        release: Called for each job that is no longer held.
    """

    def __init__(
        self,
        link: Link,
        tasks: asyncio.TaskGroup,
        release: Callable[[Resident], None],
        *,
        waste: Waste,
    ) -> None:
        self._link = link
        self._worker_id = link.identity.worker_id
        self._clock = link.clock
        self._senders = Tasks(tasks)
        self._release = release
        self._waste = waste
        # Mutable state: a lease is here from its pull until its last answer was accepted.
        self._open: set[Lease] = set()
        self.lease_seconds = math.inf
        """Time until the newest lease expires unless it is renewed."""
        self._settled = asyncio.Event()
        self._settled.set()

    def open(self, lease: Lease) -> None:
        self._open.add(lease)
        self.lease_seconds = lease.lease_seconds or math.inf
        self._settled.clear()
        self._send(lease)

    def deliver(self, answers: Iterable[tuple[HeldJob, bytes]]) -> None:
        """Send serialised JobResults of finished jobs. Drop answers of jobs no longer held."""
        leases = []
        for held, result in answers:
            if self._pop(held):
                held.lease.outbox.append(
                    worker_pb2.CompletedJob(job_id=held.job.job_id, result=_bounded(result))
                )
                held.lease.answer_seconds[held.job.job_id] = held.device_seconds
                held.lease.traceparent = held.span.traceparent or held.lease.traceparent
                leases.append(held.lease)
        for lease in dict.fromkeys(leases):
            self._send(lease)

    def skip(self, jobs: Collection[HeldJob]) -> None:
        """Drop jobs without an answer: cancelled ones, or ones that go back to their lane."""
        for held in jobs:
            held.unwanted = True
            if self._pop(held):
                self._waste.dropped(held)
        for lease in dict.fromkeys(held.lease for held in jobs):
            self._send(lease)

    def cancel(self, cancelled: worker_pb2.CancelledJobs) -> None:
        """Cancel the named jobs, or all jobs of a lost lease, as a heartbeat's reply says."""
        for lease in [lease for lease in self._open if lease.batch_id == cancelled.batch_id]:
            self.skip(
                [
                    held
                    for held in lease.jobs.values()
                    if cancelled.lost or held.job.job_id in cancelled.job_ids
                ]
            )

    def held_batches(self) -> list[worker_pb2.HeldBatch]:
        """Return the leases to renew."""
        return [
            worker_pb2.HeldBatch(lane=lease.lane, batch_id=lease.batch_id)
            for lease in self._open
            if not lease.unreadable
        ]

    def hand_back(self) -> None:
        """Return every job that is still held to its lane."""
        jobs = [held for lease in self._open for held in lease.jobs.values()]
        if jobs:
            log.warning(
                "returning unfinished jobs to their lanes", extra=fields({"jobs": len(jobs)})
            )
        self.skip(jobs)

    def give_up(self) -> None:
        """Stop all retries. Undelivered answers are lost, and their leases expire."""
        self._senders.cancel()

    async def settled(self) -> None:
        """Wait until no lease is open."""
        await self._settled.wait()

    def _pop(self, held: HeldJob) -> bool:
        if held.lease.jobs.pop(held.number, None) is None:
            return False
        held.span.end()
        held.resident.adapters.release(held.lease.lane.adapter)
        self._release(held.resident)
        return True

    def _send(self, lease: Lease) -> None:
        if not lease.sending and (lease.outbox or not lease.jobs) and not lease.closed:
            lease.sending = True
            self._senders.start(self._empty(lease))

    async def _empty(self, lease: Lease) -> None:
        while lease.outbox or not (lease.jobs or lease.closed):
            jobs = _take(lease.outbox)
            is_last = not lease.outbox and not lease.jobs
            request = worker_pb2.CompleteRequest(
                worker_id=self._worker_id,
                lane=lease.lane,
                batch_id=lease.batch_id,
                jobs=jobs,
                release=is_last and not lease.unreadable,
            )
            lease.closed = is_last
            seconds = sum(lease.answer_seconds.pop(one.job_id, 0.0) for one in jobs)
            # One call may carry answers of several traces: its span belongs to the trace of the
            # last one.
            traceparent, lease.traceparent = lease.traceparent, ""
            accepted = await self._link.complete(
                request, self._clock.local(lease.until_unix), traceparent
            )
            if accepted is None:
                log.error(
                    "no router accepted these answers; they are lost",
                    extra=fields({"jobs": len(jobs), "model": lease.lane.model}),
                )
            if jobs:  # the router does not name the refused ones: count the mean
                self._waste.refused(seconds * (1 - (accepted or 0) / len(jobs)))
        lease.sending = False
        if lease.closed:
            self._open.discard(lease)
            if not self._open:
                self._settled.set()


def _take(outbox: list[worker_pb2.CompletedJob]) -> list[worker_pb2.CompletedJob]:
    """Remove and return as many answers as one call may carry, at least one."""
    count, size = 0, 0
    for completed in outbox:
        size += len(completed.result)
        if count and size > _MAX_CALL_BYTES:
            break
        count += 1
    taken, outbox[:] = outbox[:count], outbox[count:]
    return taken


def _bounded(result: bytes) -> bytes:
    if len(result) <= MAX_RESULT_BYTES:
        return result
    size, most = len(result) >> 20, MAX_RESULT_BYTES >> 20
    return codec.failed(
        InvalidInput(
            f"the answer is {size} MiB, limit {most} MiB: request fewer items or a smaller dtype"
        )
    )
