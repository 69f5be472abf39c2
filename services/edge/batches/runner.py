"""Runs one batch: validates its input, executes its requests and commits the results.

1. All lines are validated and divided into chunks. The division is stored once.
2. Chunks are executed, two at a time, and each is committed as one object, which is created only if
   no other exists. So a request that two edges executed has one result.
3. The files of results and of errors become lists of ranges of these objects, and then the end of
   the batch is committed, once.

A runner that dies leaves the batch to another one, which continues with the chunks that are not
committed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable
from functools import partial
from typing import Final, Literal, Protocol

import msgspec
from shoal.bulk.failures import StorageError
from shoal.bulk.places import OutputPlace
from shoal.transport.wire import Metadata

from libs.telemetry import metrics, traces
from libs.telemetry.logs import fields
from services.edge.batches import lines
from services.edge.batches.context import Context, QuotaExceeded
from services.edge.batches.files import OUTPUT_PURPOSE
from services.edge.batches.gate import REFUSED, Gate
from services.edge.batches.leases import BATCH_RENEW_SECONDS, BatchLease
from services.edge.batches.objects import (
    BatchError,
    BatchRecord,
    Counts,
    Ending,
    FilePiece,
    FileRecord,
    InputPlan,
    LineChunk,
    PartCounts,
    Status,
)
from services.edge.batches.store import FileContent, TenantStore
from services.edge.intake.reading import UNIDENTIFIED_BODY_BYTES
from services.edge.intake.served import Executed

log = logging.getLogger(__name__)

CANCEL: Final = "cancel.json"
"""The object that asks for the end of a batch: the time of the request."""
CHUNKS_IN_FLIGHT: Final = 2
PREEMPT_SECONDS: Final = 30.0
"""Time for which a preempted batch waits for the next answer of its chunks."""
MAX_FAULTS: Final = 3
"""Maximum attempts of a request that fails for a reason other than an overload."""
MIN_REQUEST_SECONDS: Final = 60.0
_PLAN: Final = "plan.json"
_PARTS: Final = "parts.json"
_ENDING: Final = "ending.json"
_EXPIRED: Final = (
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
Stop = Literal["", "cancelled", "expired", "waiting", "failed"]
"""Why a runner executes no more requests."""
_STATUS: Final[dict[Stop, Status]] = {
    "": "completed",
    "cancelled": "cancelled",
    "expired": "expired",
    "failed": "failed",
}
"""The last state of a batch, by the reason for its end."""
_STOP: Final[dict[Status, Stop]] = {status: stop for stop, status in _STATUS.items()}


class Execute(Protocol):
    """Answers a request of a batch through the edge's routes."""

    def __call__(
        self, path: str, body: bytes, metadata: Metadata, request_id: str, seconds: float, /
    ) -> Awaitable[Executed]: ...


class BatchRunner:
    """Runs one batch that this edge has claimed.

    Attributes:
        key: The tenant's key.
        record: The batch, as it is now.
    """

    def __init__(
        self,
        context: Context,
        store: TenantStore,
        record: BatchRecord,
        lease: BatchLease,
        *,
        execute: Execute,
        gate: Gate,
        max_line_bytes: int,
        max_seconds: float,
    ) -> None:
        self.key, self.record = store.key, record
        self._context, self._store, self._lease = context, store, lease
        self._execute, self._gate = execute, gate
        self._max_line_bytes, self._max_seconds = max_line_bytes, max_seconds
        # The state: committed parts, requests in flight, whether progress is not saved yet, why the
        # runner stops, and the last state once it is stored.
        self._parts: dict[int, PartCounts] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._is_changed = False
        self._stop: Stop = ""
        self._ending: Ending | None = None
        self._validation_stop = threading.Event()
        # Whether another batch gets the slot, and the time of the last answer.
        self.is_preempted = False
        self._answered_at = time.monotonic()

    def cancel(self, at: int) -> None:
        """Stop the batch, as a client requests."""
        self.record.cancelling_at = self.record.cancelling_at or at
        self._set_stop("cancelled")
        self._validation_stop.set()

    def preempt(self) -> None:
        """Stop after the chunks in flight, so that another batch is run. If they get no answers,
        stop earlier; they are executed again later.
        """
        self.is_preempted, self._answered_at = True, time.monotonic()
        self._stop_if_stuck()

    def _stop_if_stuck(self) -> None:
        now = time.monotonic()
        if now - self._answered_at >= PREEMPT_SECONDS:
            self._set_stop("waiting")
        elif not self._stop:
            delay = self._answered_at + PREEMPT_SECONDS - now + 0.01
            asyncio.get_running_loop().call_later(delay, self._stop_if_stuck)

    async def run(self) -> None:
        """Run until the batch has ended, is preempted or waits for a token. Raises LeaseLost,
        StorageError.
        """
        record = self.record
        attributes = {"shoal.batch.id": record.id, "shoal.batch.endpoint": record.endpoint}
        with traces.background(
            "run batch", attributes, cause=record.traceparent, is_root=True
        ) as span:
            try:
                await self._run()
            finally:
                counts = self.record.counts
                span.set_attribute("shoal.batch.status", self.record.status)
                span.set_attribute("shoal.batch.requests", counts.total)
                span.set_attribute("shoal.batch.completed", counts.completed)
                span.set_attribute("shoal.batch.failed", counts.failed)

    async def _run(self) -> None:
        """Run while the lease is renewed. Raises LeaseLost, StorageError."""
        timer = asyncio.get_running_loop().call_later(
            max(0.0, self.record.expires_at - time.time()), self._set_stop, "expired"
        )
        try:
            await self._context.run_leased(
                self._lease, self._work, self._watch, lambda: self.record.is_ended
            )
        finally:
            timer.cancel()
            self._validation_stop.set()

    async def _work(self) -> None:
        data = await self._context.io(self._store.data, self.record.id)
        if (cancel := await self._context.io(data.read, CANCEL)) is not None:
            self.cancel(msgspec.json.decode(cancel, type=int))
        try:
            content, plan = await self._plan(data)
        except lines.Invalid as invalid:
            self.record.errors = invalid.errors
            await self._end("failed", data, None)
            return
        except lines.DivisionStopped:
            await self._end(_STATUS[self._stop], data, None)
            return
        record = self.record
        record.model = plan.model
        record.counts.total = plan.requests
        await self._adopt(data, plan)
        if (ending := await self._read_ending(data)) is not None:
            self._continue_ending(ending)
        elif record.status == "validating":
            record.status, record.in_progress_at = "in_progress", int(time.time())
            await self._save(data)
        if self._ending is None and len(self._parts) < len(plan.chunks):
            if content is not None:
                await self._execute_chunks(data, content, plan)
            elif self._stop != "cancelled":
                record.errors = [self._missing_input()]
                self._set_stop("failed")
        if self._stop == "waiting":
            await self._save(data)
            return
        if self._stop == "expired" and content is not None:
            await self._expire_rest(data, content, plan)
        await self._end(await self._save_ending(data), data, plan)

    async def _save_ending(self, data: OutputPlace) -> Status:
        """Store and return the last state, with which another runner continues after a failure.
        Chunks are stored with a part of their results, and files without all of them, only after
        this. It is stored once, so that runners agree on it: one may have been frozen for a time.
        """
        record, ending = self.record, self._ending
        if ending is None:
            ending = Ending(_STATUS[self._stop], record.errors)
            if not await self._context.io(data.create, _ENDING, msgspec.json.encode(ending)):
                ending = await self._read_ending(data) or ending
            self._continue_ending(ending)
            record.status, record.finalizing_at = "finalizing", int(time.time())
        await self._save(data)
        return ending.status

    async def _read_ending(self, data: OutputPlace) -> Ending | None:
        """Return the last state that a runner has stored; None before."""
        stored = await self._context.io(data.read, _ENDING)
        return None if stored is None else msgspec.json.decode(stored, type=Ending)

    def _continue_ending(self, ending: Ending) -> None:
        """Stop for the reason that is stored, whatever else has happened."""
        self._ending, self._stop = ending, _STOP[ending.status]
        self.record.errors = ending.errors

    async def _watch(self) -> None:
        """Save progress and look for a request to cancel, until cancelled."""
        data = await self._context.io(self._store.data, self.record.id)
        while True:
            await asyncio.sleep(BATCH_RENEW_SECONDS)
            if self._is_changed:
                await self._save(data)
            if not self._stop and (at := await self._context.io(data.read, CANCEL)) is not None:
                self.cancel(msgspec.json.decode(at, type=int))

    async def _plan(self, data: OutputPlace) -> tuple[FileContent | None, InputPlan]:
        """Return the input and its division into chunks. Raises lines.Invalid, lines.Stopped.

        An input that is gone is None, and fails the batch unless it was divided before.
        """
        found = await self._context.io(self._store.input_file, self.record.input_file_id)
        content = await self._context.io(FileContent, self._store, found) if found else None
        stored = await self._context.io(data.read, _PLAN)
        if stored is None:
            if content is None:
                raise lines.Invalid([self._missing_input()])
            plan = await self._context.validate(self._validate, content)
            stored = msgspec.json.encode(plan)
            await self._context.io(data.create, _PLAN, stored)
        return content, msgspec.json.decode(stored, type=InputPlan)

    def _missing_input(self) -> BatchError:
        return BatchError(
            code="invalid_request",
            message=f"the file {self.record.input_file_id} was deleted",
            param="input_file_id",
        )

    def _validate(self, content: FileContent) -> InputPlan:
        return lines.divide(
            content.lines(self._max_line_bytes),
            self.record.endpoint,
            max_requests=self._context.settings.lines,
            max_line_bytes=self._max_line_bytes,
            is_stopped=self._validation_stop.is_set,
        )

    async def _adopt(self, data: OutputPlace, plan: InputPlan) -> None:
        """Find the parts that were committed before."""
        saved = await self._context.io(data.read, _PARTS)
        parts = {} if saved is None else msgspec.json.decode(saved, type=dict[int, PartCounts])
        names = set(await self._context.io(data.names))
        for index in range(len(plan.chunks)):
            if index not in parts and _part_name(index) in names:
                parts[index] = _read_counts(await self._context.io(data.read, _part_name(index)))
        record = self.record
        record.counts = Counts(record.counts.total)
        record.output_bytes = record.stored_bytes = record.input_tokens = record.output_tokens = 0
        for index, part in parts.items():
            self._add_part(index, part)
        self._is_changed = True

    async def _execute_chunks(
        self, data: OutputPlace, content: FileContent, plan: InputPlan
    ) -> None:
        """Execute all chunks that are not committed, until the runner stops."""
        waiting = deque(index for index in range(len(plan.chunks)) if index not in self._parts)

        async def drain() -> None:
            while waiting and not self._stop and not self.is_preempted:
                index = waiting.popleft()
                attributes = {"shoal.batch.chunk": index}
                with traces.background("run chunk", attributes):
                    await self._execute_chunk(data, content, plan.chunks[index], index)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CHUNKS_IN_FLIGHT, len(waiting))):
                    group.create_task(drain())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if waiting and not self._stop:
            self._set_stop("waiting")  # the batch is preempted

    async def _execute_chunk(
        self, data: OutputPlace, content: FileContent, chunk: LineChunk, index: int
    ) -> None:
        metadata = await self._context.credential(
            self.key, self.record.tenant, needs_token=self.record.needs_token
        )
        if metadata is None:
            self._set_stop("waiting")
            return
        found = await self._context.io(_read_lines, content, chunk)
        if self._is_stopping():
            return  # `_set_stop` cancels only requests that were sent before
        results = lines.Results()
        tasks = [
            asyncio.create_task(self._execute_line(number, line, metadata, results))
            for number, line in found
        ]
        del found
        self._requests.update(tasks)
        try:
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
            self._requests.difference_update(tasks)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        if self._stop == "waiting":
            return  # the whole chunk is executed again, under the same request ids
        if self._stop == "expired":
            await self._context.io(self._add_expired, content, chunk, results)
        if self._stop:
            await self._save_ending(data)
        if results.numbers:
            await self._commit(data, index, results)

    async def _execute_line(
        self, number: int, line: bytes, metadata: Metadata, results: lines.Results
    ) -> None:
        """Execute a request until it has a result, and add that to the results of its chunk."""
        prepare = partial(lines.prepare, line, self.record.endpoint, self.record.model)
        is_large = len(line) > UNIDENTIFIED_BODY_BYTES
        custom_id, model, body = await asyncio.to_thread(prepare) if is_large else prepare()
        del line, prepare  # only the body is in memory while the request waits
        identity = lines.request_id(self.record.id, number)
        sender = self.key, model
        seconds, faults, attempt = min(MIN_REQUEST_SECONDS, self._max_seconds), 0, 0
        while not self._stop:
            async with self._gate.enter(sender):
                sent_at = time.monotonic()
                executed = await self._execute(
                    self.record.endpoint, body, metadata, identity, seconds
                )
                self._gate.report(sender, executed.status, sent_at, time.monotonic())
            if executed.status == 401:
                self._context.forget_credential(self.key, metadata)
                self._set_stop("waiting")
                return
            if executed.status not in REFUSED:
                faults += 1
                if executed.status < 500 or faults >= MAX_FAULTS:
                    break
                seconds = min(2 * seconds, self._max_seconds)
            attempt += 1
            await asyncio.sleep(lines.retry_delay(attempt, executed.retry_after))
        else:
            return
        self._answered_at = time.monotonic()
        result = lines.result_line(identity, custom_id, executed)
        is_error = executed.status >= 400
        if results.bytes + len(result) > lines.MAX_RESULTS_BYTES:
            message = (
                f"the answers to this and neighbouring requests have more than "
                f"{lines.MAX_RESULTS_BYTES:,} bytes: request less, or base64, in each line"
            )
            result = lines.failed_line(identity, custom_id, "result_too_large", message)
            is_error = True
        results.add(number, result, is_error)
        results.input_tokens += executed.input_tokens
        results.output_tokens += executed.output_tokens

    async def _commit(
        self, data: OutputPlace, index: int, results: lines.Results, *, has_quota: bool = True
    ) -> None:
        """Store the results of a chunk, unless another edge has stored some.

        Args:
            has_quota: Whether the results count in the tenant's quota before they are stored.
        """
        name, part = _part_name(index), results.take_part()
        try:
            if has_quota:
                await self._context.check_quota(
                    self._store, self.record.stored_bytes + len(part), without=self.record.id
                )
        except QuotaExceeded as error:
            self.record.errors = [BatchError(code="storage_quota_exceeded", message=str(error))]
            self._set_stop("failed")
            return
        if await self._context.io(_create_part, data, name, part):
            self._add_part(index, _read_counts(part))
        else:
            self._add_part(index, _read_counts(await self._context.io(data.read, name)))

    async def _expire_rest(self, data: OutputPlace, content: FileContent, plan: InputPlan) -> None:
        """Commit errors for the requests of chunks without results. They are small, and a batch has
        a line for each request also when its tenant has no space left.
        """
        for index, chunk in enumerate(plan.chunks):
            if index in self._parts:
                continue
            results = lines.Results()
            await self._context.io(self._add_expired, content, chunk, results)
            await self._commit(data, index, results, has_quota=False)

    def _add_expired(self, content: FileContent, chunk: LineChunk, results: lines.Results) -> None:
        """Add errors for the requests of a chunk without results. Blocks."""
        for number, line in _read_lines(content, chunk):
            if number not in results.numbers:
                custom_id = lines.parse(line, self.record.endpoint).custom_id
                identity = lines.request_id(self.record.id, number)
                failed = lines.failed_line(identity, custom_id, *_EXPIRED)
                results.add(number, failed, is_error=True)

    async def _end(self, status: Status, data: OutputPlace, plan: InputPlan | None) -> None:
        """Commit the files and the end of the batch."""
        record, now = self.record, int(time.time())
        if plan is not None:
            files = self._files(plan, now)
            for file, pieces in files:
                await self._context.io(self._store.create_file, file, pieces)
        ended = msgspec.structs.replace(record, status=status)
        setattr(ended, f"{status}_at", now)
        await self._context.io(_commit_end, self._store, ended)
        self.record = ended
        await self._context.io(self._store.deactivate, record.id)
        await self._context.io(self._lease.delete)
        log.info(
            "batch ended",
            extra=fields(
                {
                    "batch": record.id,
                    "status": status,
                    "completed": record.counts.completed,
                    "failed": record.counts.failed,
                }
            ),
        )

    def _files(self, plan: InputPlan, now: int) -> list[tuple[FileRecord, list[FilePiece]]]:
        """Return the files of a batch that have content, and their pieces."""
        outputs, errors = list[FilePiece](), list[FilePiece]()
        for index in range(len(plan.chunks)):
            counts = self._parts.get(index)
            if counts is None:
                continue
            size = counts.head_bytes + counts.output_bytes + counts.error_bytes
            name, second = _part_name(index), counts.head_bytes + counts.output_bytes
            if counts.output_bytes:
                outputs.append(FilePiece(name, counts.head_bytes, counts.output_bytes, size))
            if counts.error_bytes:
                errors.append(FilePiece(name, second, counts.error_bytes, size))
        record = self.record
        return [
            (
                FileRecord(
                    id=identity,
                    filename=f"{record.id}_{word}.jsonl",
                    purpose=OUTPUT_PURPOSE,
                    bytes=sum(piece.bytes for piece in pieces),
                    created_at=now,
                    expires_at=now + record.output_seconds,
                    folder=record.id,
                    batch=record.id,
                ),
                pieces,
            )
            for identity, word, pieces in (
                (record.output_id, "output", outputs),
                (record.errors_id, "error", errors),
            )
            if pieces
        ]

    def _add_part(self, index: int, part: PartCounts) -> None:
        """Add a committed part to the parts and to the record."""
        self._parts[index] = part
        record, counts = self.record, self.record.counts
        record.counts = Counts(
            counts.total, counts.completed + part.completed, counts.failed + part.failed
        )
        record.output_bytes += part.output_bytes
        record.stored_bytes += part.output_bytes + part.error_bytes
        record.input_tokens += part.input_tokens
        record.output_tokens += part.output_tokens
        self._is_changed = True

    async def _save(self, data: OutputPlace) -> None:
        self._is_changed = False
        await self._context.io(_save_parts, data, self._parts.copy())
        await self._context.io(self._store.save_batch, msgspec.structs.replace(self.record))

    def _is_stopping(self) -> bool:
        return bool(self._stop)

    def _set_stop(self, reason: Stop) -> None:
        """Execute no more requests. The first reason counts, but no token is needed to end."""
        if self._stop in ("", "waiting"):
            self._stop = reason
        for task in self._requests:
            task.cancel()


def _read_lines(content: FileContent, chunk: LineChunk) -> list[tuple[int, bytes]]:
    """Return the number and the content of each line of a chunk. Blocks."""
    return list(lines.split(content.read(chunk.offset, chunk.bytes), chunk))


def _save_parts(data: OutputPlace, parts: dict[int, PartCounts]) -> None:
    """Store the counts of committed parts. Blocks."""
    data.replace(_PARTS, msgspec.json.encode(parts))


def _create_part(data: OutputPlace, name: str, part: bytes) -> bool:
    """Store a part and count its requests, unless another edge has stored it. Blocks.

    The thread that stores it also counts, because the runner may be cancelled while it waits.
    """
    is_first = data.create(name, part)
    if is_first:
        counts = _read_counts(part)
        metrics.HTTP_BATCH_REQUESTS.labels("ok").inc(counts.completed)
        metrics.HTTP_BATCH_REQUESTS.labels("failed").inc(counts.failed)
    return is_first


def _commit_end(store: TenantStore, record: BatchRecord) -> None:
    """Commit the end of a batch and count it, unless another edge has ended the batch. Blocks."""
    if store.end_batch(record):
        metrics.HTTP_BATCHES_ENDED.labels(record.status).inc()


def _part_name(index: int) -> str:
    return f"part-{index:08}"


def _read_counts(part: bytes | None) -> PartCounts:
    """Return the counts of a stored part. Raises StorageError."""
    try:
        return lines.read_counts(part or b"")
    except ValueError as error:
        raise StorageError(f"a part of a batch is damaged: {error}") from error
