"""The handlers of `/v1/jobs`."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Final, Literal

import msgspec
from shoal.bulk.failures import JobError
from shoal.bulk.places import local_path
from shoal.bulk.spec import DEFAULT_CHUNK_ROWS, BulkLimits, recipe_from

from libs.telemetry import metrics, traces
from services.edge.batches.context import (
    MAX_RECORDS,
    BatchCaller,
    Context,
    json_answer,
    list_page,
    missing,
    new_id,
    read_body,
    storage_errors,
)
from services.edge.batches.files import ids_after, parse_limit, parse_query
from services.edge.batches.leases import BatchLease
from services.edge.batches.manager import Manager, WorkKind, WorkRecord
from services.edge.batches.runner import CANCEL
from services.edge.intake.served import ServedRequest
from services.edge.jobs.objects import FINAL, JOB_ID, JOB_PREFIX, STOPPED, JobRecord
from services.edge.jobs.roots import check_location, tenant_roots
from services.edge.jobs.runner import JobRunner, MeshConnection
from services.edge.jobs.settings import JobSettings
from services.edge.jobs.store import MAX_CHANGES, PAUSE, JobStore
from services.edge.messages.base import Answer, HttpError, Received, invalid
from services.edge.messages.names import AliasNames
from services.edge.messages.reading import read

MAX_SUBMITTED_CHUNK_ROWS: Final = 1 << 16
DEFAULT_PAGE: Final = 20
MAX_JOBS_PAGE: Final = 100
JOB_RELEASE_SECONDS: Final = 10.0
"""Maximum wait of a request to run a job again for the edge that has ended it."""
RELEASE_POLL_SECONDS: Final = 0.05
_BODY_BYTES: Final = 64 << 10
_OPTIONS: Final = {
    "encode": (
        "role",
        "representations",
        "data_type",
        "dimensions",
        "normalize",
        "instruction",
        "chunking",
        "expect_embedding_id",
    ),
    "score": ("scale", "instruction"),
    "extract": (),
}
_SERVING: Final = ("truncation", "adapter", "pool")
"""Options of every verb."""


class JobRecipe(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The recipe of a job, which decides the content of its output, as in its manifest.

    `options` are those of the client's verb, `task` is that of `extract` with its `kind`, `text` is
    the column with the texts, and `keep` names columns that are copied.
    """

    verb: Literal["encode", "score", "extract"]
    model: str
    options: dict[str, Any] = {}
    task: dict[str, Any] = {}
    text: str = "text"
    keep: list[str] = []
    query: str = ""
    query_column: str = ""
    chunk_rows: int = DEFAULT_CHUNK_ROWS


class JobLimits(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The limits of a job, as in its manifest; null for those that stay as they are.

    `in_flight` is a number of chunks, `failed_share` 0 to 1, `deadline` in seconds since the epoch,
    and `patience` in seconds without an answer.
    """

    in_flight: int | None = None
    failed_share: float | None = None
    deadline: float | None = None
    patience: float | None = None


class JobRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A job: `input` is a file, pattern or folder, `output` a folder, both below the roots of the
    edge.
    """

    recipe: JobRecipe
    input: str
    output: str
    limits: JobLimits = msgspec.field(default_factory=JobLimits)


class JobResume(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """New limits of a job that is run again."""

    limits: JobLimits = msgspec.field(default_factory=JobLimits)


class JobKind(WorkKind):
    """Submitted jobs, as work that edges claim."""

    def __init__(self, context: Context, settings: JobSettings, mesh: MeshConnection) -> None:
        self._context, self._settings, self._mesh = context, settings, mesh
        # Series exist before the first event, so that the rate of the first one is not lost.
        for status in STOPPED:
            metrics.HTTP_JOBS_ENDED.labels(status)
        for outcome in ("ok", "failed"):
            metrics.HTTP_JOB_ROWS.labels(outcome)

    def is_id(self, identity: str) -> bool:
        return JOB_ID.fullmatch(identity) is not None

    def find(self, key: str, identity: str) -> JobRecord | None:
        return JobStore(self._context.store, key).job(identity)

    def work(self, key: str, record: WorkRecord, lease: BatchLease) -> JobRunner:
        assert isinstance(record, JobRecord)  # noqa: S101  # for the type checker
        store = JobStore(self._context.store, key)
        return JobRunner(
            self._context, store, record, lease, settings=self._settings, mesh=self._mesh
        )

    def clean(self, key: str, now: float) -> None:
        seconds = self._context.settings.expiry_seconds
        store = JobStore(self._context.store, key)
        store.activate_lost()
        store.delete_expired(now, seconds)


class Jobs:
    """Serves submitted jobs."""

    def __init__(self, context: Context, settings: JobSettings, manager: Manager) -> None:
        self._context, self._settings, self._manager = context, settings, manager

    async def create(self, request: ServedRequest) -> Answer:
        """`POST /v1/jobs`."""
        with storage_errors():
            caller = await self._context.caller(request)
        wanted = read(JobRequest, Received(await read_body(request, _BODY_BYTES), AliasNames({})))
        recipe = _recipe(wanted.recipe)
        limits = self._limits(BulkLimits(), wanted.limits)
        try:
            roots = tenant_roots(self._settings.roots, caller.identified)
            await self._context.io(check_location, wanted.input, roots, "input")
            await self._context.io(check_location, wanted.output, roots, "output")
        except JobError as error:
            raise invalid(str(error), str(error).partition(" ")[0]) from None
        identity, now = new_id(JOB_PREFIX)
        record = JobRecord(
            id=identity,
            created_at=now,
            recipe=msgspec.to_builtins(recipe),
            input=wanted.input,
            output=wanted.output,
            limits=limits,
            tenant=caller.tenant,
            identified=caller.identified,
            needs_token=caller.needs_token,
            traceparent=traces.format_traceparent(traces.current()),
        )
        store = self._store(caller)
        with storage_errors():
            async with self._context.creating_batch(caller.store.key):
                await self._check_quota(store, record)
                await self._check_records(store)
                await self._context.io(store.create, record)
        self._manager.wake()
        return json_answer(record.to_client())

    async def retrieve(self, request: ServedRequest) -> Answer:
        """`GET /v1/jobs/{job_id}`."""
        with storage_errors():
            _, record = await self._find(request)
        return json_answer(record.to_client())

    async def list_jobs(self, request: ServedRequest) -> Answer:
        """`GET /v1/jobs`."""
        query = parse_query(request)
        limit = parse_limit(query, DEFAULT_PAGE, MAX_JOBS_PAGE)
        with storage_errors():
            store = self._store(await self._context.caller(request))
            ids = await self._context.io(store.ids)
            ids = ids_after(ids[::-1], query.get("after"))
            page = await self._context.io(lambda: list(store.jobs(ids[:limit])))
        return list_page([record.to_client() for record in page], has_more=len(ids) > limit)

    async def cancel(self, request: ServedRequest) -> Answer:
        """`POST /v1/jobs/{job_id}/cancel`."""
        with storage_errors():
            caller, record = await self._find(request)
            store = self._store(caller)
            async with self._context.creating_batch(store.key):
                # This is read first, because an edge that ends the job saves it first.
                is_active = await self._context.io(store.is_active, record.id)
                record = await self._record(store, record.id)
                if record.status in FINAL:
                    raise HttpError("CONFLICT", f"the job is {record.status} already")
                if record.is_ended or not is_active:  # No edge runs it.
                    record.status, record.ended_at = "cancelled", int(time.time())
                    await self._change(store, record)
                else:
                    await self._request(store, record, CANCEL)
        return json_answer(record.to_client())

    async def pause(self, request: ServedRequest) -> Answer:
        """`POST /v1/jobs/{job_id}/pause`."""
        with storage_errors():
            caller, record = await self._find(request)
            store = self._store(caller)
            if record.is_ended:
                raise HttpError("CONFLICT", f"the job is {record.status} already")
            await self._request(store, record, PAUSE)
        return json_answer(record.to_client())

    async def resume(self, request: ServedRequest) -> Answer:
        """`POST /v1/jobs/{job_id}/resume`."""
        return await self._restart(request, retry=False)

    async def retry(self, request: ServedRequest) -> Answer:
        """`POST /v1/jobs/{job_id}/retry`."""
        return await self._restart(request, retry=True)

    async def _restart(self, request: ServedRequest, *, retry: bool) -> Answer:
        """Run a job again that has stopped."""
        with storage_errors():
            caller, record = await self._find(request)
            store = self._store(caller)
            body = await read_body(request, _BODY_BYTES)
            wanted = (
                read(JobResume, Received(body, AliasNames({}))) if body.strip() else JobResume()
            )
            await self._wait_until_released(store, record)
            async with self._context.creating_batch(store.key):
                is_active = await self._context.io(store.is_active, record.id)
                record = await self._record(store, record.id)
                if is_active:
                    state = "is stopping" if record.is_ended else "waits or runs"
                    raise HttpError("CONFLICT", f"the job {state}: try again once it has stopped")
                if retry != (record.status == "completed") or record.status == "cancelled":
                    needed = "a completed job" if retry else "a job that stopped before its end"
                    raise HttpError("CONFLICT", f"the job is {record.status}; this needs {needed}")
                record.limits = self._limits(BulkLimits(**record.limits), wanted.limits)
                record.status, record.error, record.ended_at = "queued", "", 0
                record.retry = record.retry or retry
                record.tenant, record.needs_token = caller.tenant, caller.needs_token
                await self._check_quota(store, record)
                if record.changes >= MAX_CHANGES:
                    raise HttpError("CONFLICT", "the job was run too often: submit a new one")
                for name in (CANCEL, PAUSE):
                    await self._context.io(store.requests(record.id).delete, name)
                await self._change(store, record)
                await self._context.io(store.activate, record.id)
        self._manager.wake()
        return json_answer(record.to_client())

    async def _wait_until_released(self, store: JobStore, record: JobRecord) -> None:
        """Wait until the edge that has ended a job has released it, for a limited time.

        That edge saves the end, which clients see, before it releases the job: a client that
        resumes it at once is not refused.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(JOB_RELEASE_SECONDS):
                while True:
                    is_active = await self._context.io(store.is_active, record.id)
                    if not (is_active and record.is_ended):
                        return
                    await asyncio.sleep(RELEASE_POLL_SECONDS)

    def _store(self, caller: BatchCaller) -> JobStore:
        return JobStore(self._context.store, caller.store.key)

    async def _find(self, request: ServedRequest) -> tuple[BatchCaller, JobRecord]:
        caller = await self._context.caller(request)
        record = await self._record(self._store(caller), request.parameter)
        if not record.is_ended:
            self._manager.wake()  # This request may have brought the token that the job needs.
        return caller, record

    async def _record(self, store: JobStore, identity: str) -> JobRecord:
        record = await self._context.io(store.job, identity)
        if record is None:
            raise missing("Job", identity)
        return record

    async def _change(self, store: JobStore, record: JobRecord) -> None:
        """Save a job in its next state. Raises HttpError if another edge did so first."""
        record.changes += 1
        if not await self._context.io(store.change, record):
            raise HttpError("CONFLICT", "the job changes now: try again")

    async def _request(self, store: JobStore, record: JobRecord, name: str) -> None:
        """Leave a request for the edge that runs a job."""
        await self._context.io(store.requests(record.id).create, name, b"{}")
        work = self._manager.find_work(record.id)
        if isinstance(work, JobRunner):
            work.request(name)
        self._manager.wake()  # To stop a job that waits.

    async def _check_quota(self, store: JobStore, record: JobRecord) -> None:
        """Check that a job of a tenant may wait or run. Raises HttpError."""
        active = await self._context.io(store.active_ids)
        if len(active) >= self._settings.tenant_jobs:
            raise HttpError(
                "JOB_QUOTA_EXCEEDED",
                f"{len(active):,} jobs of this tenant wait or run, and at most "
                f"{self._settings.tenant_jobs:,} may: wait, or cancel some",
            )
        others = await self._context.io(lambda: list(store.jobs(active)))
        for other in others:
            is_other = other.id != record.id and not other.is_ended
            if is_other and _is_same(other.output, record.output):
                raise HttpError(
                    "CONFLICT", f"the job {other.id} writes to {record.output}: choose another"
                )

    async def _check_records(self, store: JobStore) -> None:
        """Check that a tenant may have another job. At the limit, its oldest ones that cannot be
        resumed are deleted, because no request deletes a job. Raises HttpError.
        """
        if len(await self._context.io(store.ids)) < MAX_RECORDS:
            return
        await self._context.io(store.forget, max(1, MAX_RECORDS // 100))
        if len(await self._context.io(store.ids)) >= MAX_RECORDS:
            raise HttpError(
                "JOB_QUOTA_EXCEEDED",
                f"this tenant has {MAX_RECORDS:,} jobs that run or may be resumed: cancel some",
            )

    def _limits(self, before: BulkLimits, wanted: JobLimits) -> dict[str, Any]:
        """Return the limits of a job. Raises HttpError."""
        given = {
            name: value
            for name in wanted.__struct_fields__
            if (value := getattr(wanted, name)) is not None
        }
        found = {name: getattr(before, name) for name in wanted.__struct_fields__} | given
        found["in_flight"] = min(found["in_flight"], self._settings.in_flight)
        try:
            BulkLimits(**found)
        except JobError as error:
            raise invalid(str(error), "limits") from None
        return found


def _recipe(wanted: JobRecipe) -> dict[str, Any]:
    """Return the recipe of a request as JSON. Raises HttpError."""
    values = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
    allowed = (*_OPTIONS[wanted.verb], *_SERVING)
    unknown = sorted(set(wanted.options) - set(allowed))
    if unknown:
        raise invalid(
            f"recipe.options has {', '.join(unknown)[:200]}, and {wanted.verb} allows "
            f"{', '.join(allowed)}",
            "recipe.options",
        )
    if wanted.chunk_rows > MAX_SUBMITTED_CHUNK_ROWS:
        raise invalid(
            f"recipe.chunk_rows may be at most {MAX_SUBMITTED_CHUNK_ROWS:,}", "recipe.chunk_rows"
        )
    try:
        found = recipe_from(values)
        found.arguments()
        if found.verb == "extract":
            found.extract_task()
    except (JobError, ValueError, TypeError, KeyError) as error:
        raise invalid(f"recipe: {error}", "recipe") from None
    return values


def _is_same(one: str, other: str) -> bool:
    """Return whether two locations are the same folder."""
    path, second = local_path(one), local_path(other)
    if path is not None and second is not None:
        return path.resolve() == second.resolve()
    return one.rstrip("/") == other.rstrip("/")
