"""Runs the process of one submitted job that this edge has claimed.

The process may be killed at any time: it is started again, and continues with the manifest. If it
ends several times without a further row, the job fails, because its input needs too much memory or
another fault of the job itself is likely.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any, Final

import msgspec
from shoal.bulk.failures import StorageError
from shoal.transport.trust import Tls
from shoal.transport.wire import Metadata

from libs.telemetry import metrics, traces
from libs.telemetry.logs import fields
from services.edge.batches.context import Context
from services.edge.batches.leases import BATCH_RENEW_SECONDS, BatchLease, LeaseLost
from services.edge.batches.runner import CANCEL
from services.edge.credentials import AUTHORIZATION
from services.edge.jobs.objects import JobCounts, JobRecord, Status
from services.edge.jobs.process import JobProcess
from services.edge.jobs.roots import tenant_roots
from services.edge.jobs.settings import JobSettings
from services.edge.jobs.store import PAUSE, JobStore

log = logging.getLogger(__name__)

MAX_FAULTS: Final = 3
"""Maximum number of consecutive faults of the process without a further row."""
PROCESS_RESTART_SECONDS: Final = 1.0
MAX_BUSY_SECONDS: Final = 30.0
"""Maximum wait before another try while another process runs the job."""
BUSY: Final = "BUSY"
"""The reason if another process still runs the job, such as that of an edge that was killed."""
UNAUTHENTICATED: Final = "UNAUTHENTICATED"
_REQUESTS: Final = {CANCEL: "cancel", PAUSE: "pause"}


class MeshConnection:
    """The connection of the process to the routers."""

    def __init__(self, routers: tuple[str, ...], tls: Tls | None) -> None:
        self.routers, self.tls = routers, tls

    def order(self) -> dict[str, Any]:
        return {
            "routers": ",".join(self.routers),
            "tls": None
            if self.tls is None
            else [
                _text(self.tls.root_certificates),
                _text(self.tls.certificate_chain),
                _text(self.tls.private_key),
                self.tls.server_name,
            ],
        }


def _text(source: Any) -> str | None:
    """Return the path of a file of certificates, which the edge reads from its settings."""
    return None if source is None else str(source)


class JobRunner:
    """Runs one job.

    Attributes:
        record: The job, as it is now.
        process: The process of the job while it runs.
    """

    def __init__(
        self,
        context: Context,
        store: JobStore,
        record: JobRecord,
        lease: BatchLease,
        *,
        settings: JobSettings,
        mesh: MeshConnection,
    ) -> None:
        self.key, self.record = store.key, record
        self.is_preempted = False
        self._context, self._store, self._lease = context, store, lease
        self._settings, self._mesh = settings, mesh
        self.process: JobProcess | None = None
        # The state: the request that the process follows, the credential that it has, and whether
        # progress is not saved yet.
        self._request = ""
        self._metadata: Metadata | None = None
        self._is_changed = False
        self._saving = asyncio.Lock()
        self._woken = asyncio.Event()

    def cancel(self, at: int) -> None:
        """Cancel the job, as a client requests."""
        self.request(CANCEL)

    def request(self, name: str) -> None:
        """Cancel or pause the job, as a client requests."""
        if self._request not in (CANCEL, name):
            self._request = name
            self._ask(_REQUESTS[name])
            self._woken.set()

    def preempt(self) -> None:
        """Stop after the chunks in flight, so that other work is run."""
        self.is_preempted = True
        self._ask("pause")
        self._woken.set()

    def _ask(self, name: str) -> None:
        """Pass a request to the process, if there is one."""
        if self.process is not None:
            self.process.request(name)

    async def run(self) -> None:
        """Run until the job stops, is preempted or waits for a token. Raises LeaseLost,
        StorageError.
        """
        record = self.record
        attributes = {"shoal.job.id": record.id, "shoal.job.verb": str(record.recipe.get("verb"))}
        cause = record.traceparent
        with traces.background("run job", attributes, cause=cause, is_root=True) as span:
            try:
                await self._context.run_leased(
                    self._lease, self._work, self._watch, lambda: self.record.is_ended
                )
            finally:
                span.set_attribute("shoal.job.status", self.record.status)
                span.set_attribute("shoal.job.rows", self.record.counts.rows)

    async def _work(self) -> None:
        wait_seconds = PROCESS_RESTART_SECONDS
        while True:
            if request := await self._context.io(self._store.request, self.record.id):
                self.request(request)
            metadata = await self._credential()
            if metadata is None:
                await self._stop_without_process("without a valid token")
                return
            if await self._has_ended_before_start():
                return
            ended = await self._run_process(metadata)
            reason = ended["reason"] if ended is not None else ""
            if ended is not None:
                self.record.faults = max(0, self.record.faults - 1)
            if reason == UNAUTHENTICATED and self.record.needs_token:
                self._context.forget_credential(self.key, metadata)
                await self._save()
                return  # until a newer token arrives
            if ended is not None and reason != BUSY:
                if self.is_preempted and not self._request and ended["state"] == "paused":
                    self._take(ended)
                    self.record.status = "queued"
                    await self._save()
                    return
                await self._end(ended["state"], ended)
                return
            await self._save()
            await self._wait(min(wait_seconds, self.record.expires_at - time.time()))
            if reason == BUSY:
                wait_seconds = min(2 * wait_seconds, MAX_BUSY_SECONDS)
                await self._stop_without_process("while another process ran the job")
            if self.is_preempted or self.record.is_ended:
                return

    async def _has_ended_before_start(self) -> bool:
        """End a job of which no process should be started; return whether it is one."""
        faults = self.record.faults
        if self._request == CANCEL and not self.record.started_at:
            await self._end("cancelled", {})
        elif faults >= MAX_FAULTS and self._request:
            await self._stop_without_process("")
        elif faults >= MAX_FAULTS:
            error = (
                f"the process of the job ended or hung {faults} times without a further row, "
                "perhaps for lack of memory: submit it again with fewer rows in a chunk"
            )
            await self._end("failed", {"error": error})
        return self.record.is_ended

    async def _wait(self, seconds: float) -> None:
        """Wait for a time, or for a request."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._woken.wait()

    async def _credential(self) -> Metadata | None:
        record = self.record
        return await self._context.credential(
            self.key, record.tenant, needs_token=record.needs_token
        )

    async def _stop_without_process(self, why: str) -> None:
        """End a job that a client stopped, or that expired, while its process does not run."""
        if self._request:
            await self._end("cancelled" if self._request == CANCEL else "paused", {})
        elif self.record.expires_at <= time.time():
            await self._end("expired", {"error": f"the deadline passed {why}"})

    async def _run_process(self, metadata: Metadata) -> dict[str, Any] | None:
        """Run the process until its end, and return that; None if it ended by a fault."""
        record, order = self.record, await self._order(metadata)
        record.status, record.started_at = "running", record.started_at or int(time.time())
        record.faults += 1  # An edge that dies with the process cannot count it later.
        await self._save()
        process = await JobProcess.start(record.id, order)
        self.process, self._metadata = process, metadata
        if self._request:
            process.request(_REQUESTS[self._request])
        elif self.is_preempted:
            process.request("pause")
        try:
            return await process.follow(self._take)
        except asyncio.CancelledError:
            # The edge stops it, which is not a fault of the job. This is saved before the process
            # ends, because the edge may be killed soon.
            record.faults = max(0, record.faults - 1)
            with suppress(StorageError):
                await self._save()
            raise
        finally:
            self.process = None
            await process.stop()

    async def _order(self, metadata: Metadata) -> dict[str, Any]:
        record, settings = self.record, self._settings
        others = await self._context.io(self._store.bytes_of_others, record)
        limits = {
            **record.limits,
            "prices": dict(settings.prices),
            "output_bytes": max(1, settings.tenant_output_bytes - others),
        }
        return {
            **self._mesh.order(),
            "tenant": record.tenant,
            "token": _token(metadata),
            "recipe": record.recipe,
            "input": record.input,
            "output": record.output,
            "limits": limits,
            "retry": record.retry,
            "roots": tenant_roots(settings.roots, record.identified),
            "input_bytes": settings.input_bytes,
            "process_bytes": settings.process_bytes,
        }

    def _take(self, report: dict[str, Any]) -> None:
        """Note the progress of a report, and count its rows."""
        record, counts = self.record, report.get("counts")
        if counts is not None:
            before = record.counts
            record.counts = JobCounts(**{**_values(before), **counts})
            failed = record.counts.failed_rows - before.failed_rows
            done = record.counts.rows - before.rows - failed
            # A retry may reduce the number of failed rows.
            metrics.HTTP_JOB_ROWS.labels("ok").inc(max(0, done))
            metrics.HTTP_JOB_ROWS.labels("failed").inc(max(0, failed))
            if record.counts.rows > before.rows:
                record.faults = min(record.faults, 1)
        record.progress = report.get("progress", {})
        record.cost = report.get("cost", record.cost)
        record.embedding_id = report.get("embedding_id", record.embedding_id)
        record.revision = report.get("revision", record.revision)
        self._is_changed = True

    async def _end(self, status: Status, ended: dict[str, Any]) -> None:
        """Record that the job has stopped. Raises LeaseLost if another edge has recorded that."""
        await self._context.renew(self._lease)
        self._take({**ended, "progress": {}})
        record = msgspec.structs.replace(
            self.record,
            status=status,
            error=str(ended.get("error", "")),
            ended_at=int(time.time()),
            faults=0,
            changes=self.record.changes + 1,
        )
        if not await self._context.io(self._store.change, record):
            await self._context.io(self._lease.delete)
            raise LeaseLost(record.id)
        self.record = record
        metrics.HTTP_JOBS_ENDED.labels(status).inc()
        await self._context.io(self._store.deactivate, record.id)
        await self._context.io(self._lease.delete)
        log.info("job ended", extra=fields({"job": record.id, "status": status}))

    async def _watch(self) -> None:
        """Save progress, pass requests and new tokens to the process, until cancelled."""
        while True:
            await asyncio.sleep(BATCH_RENEW_SECONDS)
            if self._is_changed and not self.record.is_ended:
                await self._save()
            if request := await self._context.io(self._store.request, self.record.id):
                self.request(request)
            metadata = await self._credential() if self._metadata is not None else None
            if metadata is not None and metadata != self._metadata:
                self._metadata = metadata
                if self.process is not None:
                    self.process.write(token=_token(metadata))

    async def _save(self) -> None:
        """Save the record. One call at a time, because a later state must be written later."""
        async with self._saving:
            self._is_changed = False
            self.record.updated_at = time.time()
            await self._context.io(self._store.save, msgspec.structs.replace(self.record))


def _values(counts: JobCounts) -> dict[str, Any]:
    return {name: getattr(counts, name) for name in counts.__struct_fields__}


def _token(metadata: Metadata) -> str:
    """Return the token of a caller's metadata; empty without one."""
    value = next((str(value) for name, value in metadata if name == AUTHORIZATION), "")
    return value.partition(" ")[2]
