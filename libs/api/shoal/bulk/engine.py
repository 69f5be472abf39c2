"""Runs a bulk job: reads chunks, keeps a number of them in flight, and commits a part for each.

The order of writes makes every row appear once, whatever is killed when:

1. The manifest is written, with the state `running`.
2. Until a part with a result is committed, one chunk is in flight at a time. Its answer decides the
   embedding id and the schema, which are in the manifest before the part is committed.
3. Parts are committed in any order, each under a name made of its origin.
4. At a start, parts that the manifest does not have yet are adopted by their names. All other
   chunks are sent.
5. A part that a retry replaced is deleted once a manifest without it is written. The state
   `completed` is written after that.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Final, Literal

from shoal.bulk.cost import CostMeter
from shoal.bulk.failures import InputChanged, JobError, StorageError
from shoal.bulk.flow import MAX_CHARACTERS_IN_FLIGHT, FlowControl, JobThroughput
from shoal.bulk.inputs import RowChunk, open_source
from shoal.bulk.manifest import CONTROL, MANIFEST, CommittedPart, Manifest, State, load
from shoal.bulk.matching import changed_file, find_input
from shoal.bulk.parts import PartContent, PartWriter, failed_rows, read_content
from shoal.bulk.places import OutputPlace, absolute, read_file_version
from shoal.bulk.progress import JobProgress
from shoal.bulk.sending import ChunkResults, Sender
from shoal.bulk.spec import BulkLimits, BulkRecipe, InputFile
from shoal.client import AsyncClient
from shoal.errors import (
    DeadlinePassed,
    ModelChanged,
    Overloaded,
    ShoalError,
    TlsFailed,
    Unavailable,
)

_REPORT_SECONDS: Final = 0.5
_CONTROL_SECONDS: Final = 2.0
_SAVE_SECONDS: Final = 3.0
_SAVE_SHARE: Final = 20
"""Manifests are written for at most a twentieth of the time."""
_FIRST_DELAY_SECONDS: Final = 0.5
_MAX_DELAY_SECONDS: Final = 30.0
_SLOT_SECONDS: Final = 0.05
"""Seconds between two looks for a free place after an overload."""
_DRAIN_SECONDS: Final = 30.0
MAX_TIMEOUT_SECONDS: Final = 1800.0
MAX_DEFERRED_CHUNKS: Final = 64
"""Chunks without a result that are kept in memory at the beginning of a job."""
MIN_SHARE_ROWS: Final = 1000
"""A share of failed rows is computed of at least this number of rows."""


def create(place: OutputPlace, uri: str, recipe: BulkRecipe, limits: BulkLimits) -> Manifest:
    """Return the manifest of a new job, or of the job of this recipe and input that the output
    location has already. Raises JobError if it has another one.
    """
    uri, found = absolute(uri), load(place)
    if place.uri == uri.rstrip("/") or place.uri.startswith(uri.rstrip("/") + "/"):
        raise JobError(
            f"the output {place.uri} is in the input {uri}, so a further job would read its parts: "
            "choose another output"
        )
    if found is not None and _is_continued(place, found, recipe, uri):
        return replace(found, limits=limits)
    if found is None and _has_parts(place):
        raise JobError(
            f"{place.uri} has parts and no {MANIFEST}; choose another output, or delete them"
        )
    version = find_input(uri)
    return Manifest(uuid.uuid4().hex[:12], recipe, version, limits, created_at=time.time())


def _is_continued(place: OutputPlace, found: Manifest, recipe: BulkRecipe, uri: str) -> bool:
    """Return True if an output location has the job of this recipe and input, and False if it has
    another one that failed before its first part, as with a misspelt model: that one is replaced.
    Raises JobError if it has any other job.
    """
    wanted = {**asdict(recipe), "input": uri}
    known = {**asdict(found.recipe), "input": found.input.uri}
    changed = [name for name, value in wanted.items() if value != known[name]]
    if found.state == "failed" and not _has_parts(place):
        # The input may have been corrected, too.
        return not changed and changed_file(found.input) is None
    if not changed:
        return True
    raise JobError(
        f"{place.uri} has the job {found.job} with another {', '.join(changed)}; choose "
        "another output"
    )


def _has_parts(place: OutputPlace) -> bool:
    return any(name.startswith("part-") for name in place.names())


class JobRun:
    """One run of a job.

    Args:
        timeout: Seconds for one request, which are doubled if a request misses this deadline.
        on_progress: Called twice a second.
    """

    def __init__(
        self,
        place: OutputPlace,
        manifest: Manifest,
        client: AsyncClient,
        *,
        timeout: float = 60.0,
        on_progress: Callable[[JobProgress], None] | None = None,
    ) -> None:
        self._place, self._manifest = place, manifest
        self._sender, self._timeout = Sender(client, manifest.recipe), timeout
        self._on_progress = on_progress
        self._client = client
        self._flow = FlowControl(manifest.limits.in_flight)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self._characters = 0
        self._deferred: list[tuple[RowChunk, ChunkResults]] = []
        self._replaced: list[str] = []
        self._stopped, self._finished = asyncio.Event(), asyncio.Event()
        self._saving = asyncio.Lock()
        self._state: State = "completed"
        self._reason = ""
        self._error: Exception | None = None
        self._waiting_for = ""
        self._began = self._answered_at = self._saved_at = self._due_at = time.monotonic()
        self._active_before = manifest.active_seconds
        self._rate = JobThroughput(self._began)
        self._save_seconds = 0.0

    async def run(self, *, retry: bool = False) -> Manifest:
        """Run the job until its end or a stop.

        Args:
            retry: Send the failed rows of committed parts again, instead of the missing chunks.

        Returns:
            The manifest, with the state that the job reached.

        Raises:
            JobError: The job cannot go on. ShoalError: the mesh refuses the job. The manifest says
                the same.
        """
        with self._place.locked():
            self._prepare(retry)
            metering = asyncio.create_task(self._meter.run())
            metering.add_done_callback(self._metered)
            watching = asyncio.create_task(self._watch())
            try:
                await self._send_all(retry)
            except Exception as error:  # Of any kind: the manifest must say that the job failed.
                self._fail(error)
            finally:
                await self._end_tasks()
                metering.cancel()
                self._finished.set()
                await watching
            if self._state == "completed" and not retry:
                self._check_complete()
            await self._end()
        if self._error is not None:
            raise self._error
        return self._manifest

    async def _end(self) -> None:
        """Save the state that the job reached. Raises StorageError unless it failed before."""
        try:
            if self._replaced:
                await self._save("running")
            await self._save(self._state)
        except StorageError as error:
            if self._error is None:
                raise
            self._error.add_note(f"the manifest still says that the job runs: {error}")

    def pause(self) -> None:
        """Stop sending, and end when the chunks in flight are committed. A second call does not
        wait for them.
        """
        if self._stopped.is_set():
            self._cancel_sending()
        self._stop("paused", "")

    def cancel(self) -> None:
        """End the job for good; its parts stay."""
        self._stop("cancelled", "")
        self._cancel_sending()

    def _prepare(self, retry: bool) -> None:
        """Read the state of the output location. Raises JobError."""
        found, own = load(self._place), self._manifest
        # Another process may have gone on since it was read.
        if found is not None and _is_continued(self._place, found, own.recipe, own.input.uri):
            self._manifest = replace(found, limits=own.limits)
            self._active_before = found.active_seconds
        manifest = self._manifest
        if manifest.state == "cancelled" or (manifest.state == "completed" and not retry):
            raise JobError(f"the job {manifest.job} is {manifest.state}")
        if (change := changed_file(manifest.input)) is not None:
            raise _input_changed(*change)
        if retry and not manifest.parts:
            raise JobError(f"the job {manifest.job} has no parts in {self._place.uri} to retry")
        replaced = manifest.adopt(self._place, self._adopted)
        self._writer = PartWriter(manifest.recipe, manifest.schema)
        self._meter = CostMeter(
            self._client, manifest.recipe.model, manifest.limits.prices, manifest.cost
        )
        self._source = open_source(manifest.input, manifest.recipe)
        manifest.total = manifest.total if self._source.total is None else self._source.total
        self._place.delete(CONTROL)
        manifest.state, manifest.error = "running", ""
        manifest.save(self._place)
        for name in replaced:
            self._place.delete(name)

    def _adopted(self, name: str, data: bytes) -> CommittedPart | None:
        content = read_content(data, self._manifest.recipe.suffix)
        chunk, _, rest = name.removeprefix("part-").partition("-")
        attempt = rest.partition(".r")[2].partition(".")[0]
        return _part(int(chunk), name, content, int(attempt or 0))

    async def _send_all(self, retry: bool) -> None:
        """Send all chunks that have no part, or failed rows. Raises JobError."""
        parts = self._manifest.parts

        def is_wanted(number: int) -> bool:
            self._expect_within(0.0)
            if self._stopped.is_set():  # Any chunk ends the search, and is not sent.
                return True
            part = parts.get(number)
            return part is not None and part.failed > 0 if retry else part is None

        reader = self._source.chunks(is_wanted)
        loop = asyncio.get_running_loop()
        # One thread reads, because allocators keep the memory that each thread has used.
        with ThreadPoolExecutor(1) as thread:
            while (chunk := await loop.run_in_executor(thread, self._read, reader)) is not None:
                await self._room(chunk)
                if self._stopped.is_set():
                    return
                task = asyncio.create_task(self._process(chunk, retry))
                self._tasks.add(task)
                task.add_done_callback(self._done)
                self._characters += chunk.characters
        while self._tasks and not self._stopped.is_set():
            await self._change()
        if self._deferred and not self._stopped.is_set():
            raise self._without_results()

    def _read(self, reader: Iterator[RowChunk]) -> RowChunk | None:
        """Return the next chunk, of the input as it was when the job began. Raises JobError."""
        chunk = next(reader, None)
        self._expect_within(0.0)
        for then in self._source.take_read():
            if (now := read_file_version(then.uri)) != then:
                raise _input_changed(then, now)
        return chunk

    async def _room(self, chunk: RowChunk) -> None:
        """Wait until a chunk may be sent."""
        while self._tasks and not self._stopped.is_set():
            limit = self._flow.limit if self._is_identified else 1
            fits = self._characters + chunk.characters <= MAX_CHARACTERS_IN_FLIGHT
            if len(self._tasks) < limit and fits:
                return
            await self._change()

    @property
    def _is_identified(self) -> bool:
        """True once a part with a result decided the schema and the model's identity."""
        return self._writer.has_schema and bool(self._manifest.parts)

    async def _change(self) -> None:
        """Wait until a chunk is done or the job is stopped."""
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait({*self._tasks, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    async def _process(self, chunk: RowChunk, retry: bool) -> None:
        """Send a chunk and commit its part."""
        try:
            await (self._retry(chunk) if retry else self._send(chunk))
        except asyncio.CancelledError:
            if not self._stopped.is_set():
                raise
        except (JobError, ShoalError) as error:
            self._fail(error)
        finally:
            self._characters -= chunk.characters

    async def _send(self, chunk: RowChunk) -> None:
        answer = await self._send_until_answered(chunk, None)
        await self._identify(answer)
        if not (self._writer.has_schema or self._writer.decides_schema(answer)):
            self._defer(chunk, answer)
            return
        await self._commit(chunk, answer)
        await self._commit_deferred()
        self._check_share()

    def _defer(self, chunk: RowChunk, answer: ChunkResults) -> None:
        """Keep a chunk without any result until the schema is known. Raises JobError."""
        self._deferred.append((chunk, answer))
        self._check_share()
        if len(self._deferred) > MAX_DEFERRED_CHUNKS:
            raise self._without_results()

    def _without_results(self) -> JobError:
        """Return the error of a job without any result, so that the types of its columns are not
        known. None of its chunks has a part, and all of them are sent again when it is resumed.
        """
        rows = sum(len(chunk) for chunk, _ in self._deferred)
        reason = next(iter(self._deferred[-1][1].errors.values()))
        return JobError(
            f"none of the first {rows:,} rows has a result; the last error is: {reason}. Correct "
            "the cause and resume, or run a new job"
        )

    async def _retry(self, chunk: RowChunk) -> None:
        """Replace the part of a chunk by one with the results of its failed rows."""
        old = self._manifest.parts[chunk.number]
        before = await asyncio.to_thread(self._place.read, old.name)
        if before is None:
            raise StorageError(f"the part {self._place.full_path(old.name)} is missing")
        failed = failed_rows(before, self._manifest.recipe.suffix)
        rows = sorted({line["row"] - chunk.first for line in failed})
        answer = await self._send_until_answered(chunk, rows)
        await self._identify(answer)
        if len(answer.errors) < len(rows):
            await self._commit(chunk, answer, before, old.attempt + 1)
            self._replaced.append(old.name)

    async def _send_until_answered(self, chunk: RowChunk, rows: list[int] | None) -> ChunkResults:
        """Send a chunk until it is answered. Raises ShoalError if it cannot be."""
        delay, answer = _FIRST_DELAY_SECONDS, ChunkResults()
        while True:
            # After an overload, chunks in flight wait for each other, too.
            while len(self._sending) >= self._flow.limit:
                await self._sleep(_SLOT_SECONDS)
            if self._stopped.is_set():
                raise asyncio.CancelledError
            sent_at = time.monotonic()
            # The first 16 digits accept any number format.
            expected = self._manifest.embedding_id.partition(".")[0]
            expected = self._manifest.recipe.options.get("expect_embedding_id") or expected
            timeout = self._timeout
            answered = answer.rows
            sending = self._sender.send(
                chunk,
                rows,
                answer,
                expected=expected,
                timeout=timeout,
                on_reply=partial(self._expect_within, timeout),
            )
            task = asyncio.create_task(sending)
            self._sending.add(task)
            self._expect_within(timeout)
            try:
                await task
            except ShoalError as error:
                if not _is_transient(error):
                    raise
                if isinstance(error, (Overloaded, DeadlinePassed)):
                    self._flow.overloaded(sent_at, time.monotonic())
                if isinstance(error, DeadlinePassed):
                    # A slow worker would pass the same deadline again, and the job never end.
                    longer = min(2 * timeout, MAX_TIMEOUT_SECONDS)
                    self._timeout = max(self._timeout, longer)
                self._waiting_for = str(error)
                if answer.rows > answered:  # Only the others are sent again.
                    delay, self._answered_at = _FIRST_DELAY_SECONDS, time.monotonic()
                await self._sleep(max(delay, error.retry_after or 0.0))
                delay = min(2 * delay, _MAX_DELAY_SECONDS)
            else:
                self._flow.succeeded()
                self._waiting_for, self._answered_at = "", time.monotonic()
                count = len(chunk) if rows is None else len(rows)
                self._rate.add(count, answer.tokens, self._answered_at)
                return answer
            finally:
                self._sending.discard(task)

    async def _sleep(self, seconds: float) -> None:
        """Wait before a chunk is sent again. Raises CancelledError if the job is stopped."""
        seconds *= 1 + 0.5 * random.random()  # noqa: S311
        self._expect_within(seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
            raise asyncio.CancelledError

    def _expect_within(self, seconds: float) -> None:
        """Expect the next chunk, answer or attempt within a time. Any thread may call it."""
        self._due_at = max(self._due_at, time.monotonic() + seconds)

    async def _identify(self, answer: ChunkResults) -> None:
        """Record the identity of the first answer, and require it of others. Raises JobError."""
        manifest = self._manifest
        for embedding_id in answer.embedding_ids:
            recipe, known = embedding_id.partition(".")[0], manifest.embedding_id.partition(".")[0]
            if known and recipe != known:
                raise JobError(_changed(f"embedding id {known} to {embedding_id or 'none'}"))
            if known and embedding_id != manifest.embedding_id:
                manifest.embedding_id = known  # Of several number formats.
            elif not known:
                manifest.embedding_id = embedding_id
        for revision in answer.revisions:
            manifest.revision = manifest.revision or revision
            if revision != manifest.revision and not manifest.embedding_id:
                raise JobError(_changed(f"revision {manifest.revision} to {revision}"))

    async def _commit(
        self, chunk: RowChunk, answer: ChunkResults, before: bytes = b"", attempt: int = 0
    ) -> None:
        """Commit the part of an answered chunk. Raises JobError."""
        content = await asyncio.to_thread(self._content, chunk, answer, before)
        if self._writer.schema != self._manifest.schema or not self._manifest.parts:
            self._manifest.schema = self._writer.schema
            await self._save("running")
        name = self._manifest.chunk_part_name(chunk.number, len(chunk), attempt)
        part = await asyncio.to_thread(self._create, chunk.number, name, content, attempt)
        self._manifest.add(part)
        self._check_size()

    def _content(self, chunk: RowChunk, answer: ChunkResults, before: bytes) -> PartContent:
        import pyarrow

        try:
            return self._writer.content(chunk, answer, before)
        except pyarrow.ArrowException as error:
            raise JobError(
                f"rows {chunk.first:,} to {chunk.first + len(chunk) - 1:,} cannot be written with "
                f"the columns of earlier parts: {error}"
            ) from error

    def _create(self, number: int, name: str, content: PartContent, attempt: int) -> CommittedPart:
        if not self._place.create(name, content.data):  # By another process; the first wins.
            data = self._place.read(name) or b""
            content = read_content(data, self._manifest.recipe.suffix)
        return _part(number, name, content, attempt)

    async def _commit_deferred(self) -> None:
        """Commit the parts without a result that waited for the schema."""
        deferred, self._deferred = self._deferred, []
        for chunk, answer in deferred:
            await self._commit(chunk, answer)

    def _check_share(self) -> None:
        """Raise JobError if too many rows failed."""
        manifest = self._manifest
        rows = manifest.rows + sum(len(chunk) for chunk, _ in self._deferred)
        failed = manifest.failed + sum(len(answer.errors) for _, answer in self._deferred)
        allowed = manifest.limits.failed_share
        if failed > allowed * rows and (rows >= MIN_SHARE_ROWS or not allowed):
            raise JobError(
                f"{failed:,} of {rows:,} rows failed, more than the allowed share of "
                f"{allowed:.0%}: see `shoal job results {self._place.uri} --failed`; resume with a "
                "larger --max-failed to go on"
            )

    def _check_size(self) -> None:
        """Raise JobError if the parts are too large."""
        size, most = self._manifest.size, self._manifest.limits.output_bytes
        if most and size > most:
            raise JobError(
                f"the parts have {size:,} bytes, and at most {most:,} are allowed: of a submitted "
                "job this is what SHOAL_JOBS_TENANT_OUTPUT_BYTES leaves next to its tenant's other "
                "outputs"
            )

    def _check_complete(self) -> None:
        manifest = self._manifest
        manifest.total = manifest.rows if manifest.total is None else manifest.total
        if manifest.rows != manifest.total:
            self._fail(
                JobError(
                    f"the parts have {manifest.rows:,} of {manifest.total:,} rows; this is a fault "
                    "of shoal"
                )
            )

    def _metered(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            error.add_note("without --price, the job does not ask for the workers of the mesh")
            self._fail(error)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, Exception) else JobError(repr(error)))

    def _fail(self, error: Exception) -> None:
        if self._error is None and self._state != "cancelled":
            self._error = error
            self._state, self._reason = "failed", str(error)
        self._stopped.set()
        self._cancel_sending()

    def _stop(self, state: State, reason: str) -> None:
        if not self._stopped.is_set() or state == "cancelled":
            self._state, self._reason = state, reason
        self._stopped.set()

    def _cancel_sending(self) -> None:
        """Cancel requests; parts that are written are committed."""
        for task in self._sending:
            task.cancel()

    async def _end_tasks(self) -> None:
        """Wait for the chunks in flight: of a job that is paused for a limited time."""
        if self._tasks and self._state == "paused":
            await asyncio.wait(self._tasks, timeout=_DRAIN_SECONDS)
        self._cancel_sending()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Save the manifest, obey requests and limits, and report progress, until the end."""
        checked_at = 0.0
        while not self._finished.is_set():
            now = time.monotonic()
            if now - checked_at >= _CONTROL_SECONDS:
                checked_at = now
                await self._obey()
            self._check_limits(now)
            progress = self._progress(now)
            if self._on_progress is not None:
                self._on_progress(progress)
            if now - self._saved_at > max(_SAVE_SECONDS, _SAVE_SHARE * self._save_seconds):
                with suppress(StorageError):  # The next commit reports it.
                    await self._save("running")
            with suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_SECONDS):
                    await self._finished.wait()

    async def _obey(self) -> None:
        """Follow a request that another process left in the output location."""
        try:
            data = await asyncio.to_thread(self._place.read, CONTROL)
            request = json.loads(data)["request"] if data else ""
        except (StorageError, ValueError, KeyError, TypeError):
            return
        if request == "cancel":
            self.cancel()
        elif request == "pause" and not self._stopped.is_set():
            self.pause()

    def _check_limits(self, now: float) -> None:
        limits = self._manifest.limits
        if self._stopped.is_set():
            return
        if limits.deadline and time.time() >= limits.deadline:
            self._stop("expired", "the deadline passed; resume with a later --deadline")
            self._cancel_sending()
        elif self._waiting_for and now - self._answered_at > limits.patience:
            self._fail(
                JobError(
                    f"no chunk was answered for {limits.patience:g} s: {self._waiting_for}; "
                    "resume when the mesh serves the model again"
                )
            )

    def _progress(self, now: float) -> JobProgress:
        manifest = self._manifest
        rows_per_second, tokens_per_second = self._rate.per_second(now)
        total = manifest.total or self._source.estimate(manifest.input.size)
        left = None
        if total and rows_per_second > 0:
            left = max(0.0, (total - manifest.rows) / rows_per_second)
        cost = self._meter.spent(now)
        whole = sum(cost.values()) + self._meter.left(left) if cost and left is not None else None
        return JobProgress(
            manifest.rows,
            total,
            manifest.failed,
            manifest.tokens,
            rows_per_second,
            tokens_per_second,
            left,
            len(self._tasks),
            self._waiting_for,
            cost,
            whole,
            manifest.size,
            max(0.0, now - self._due_at),
        )

    async def _save(self, state: State) -> None:
        """Save the manifest, and delete parts that it replaced by others. Raises StorageError."""
        async with self._saving:
            manifest, began = self._manifest, time.monotonic()
            manifest.state = state
            manifest.error = self._reason if state != "running" else ""
            manifest.active_seconds = self._active_before + began - self._began
            manifest.cost = self._meter.spent(began)
            manifest.progress = self._progress(began).rates() if state == "running" else {}
            replaced = list(self._replaced)
            # Encoding the parts of a large job takes long, and others may be added during it.
            written = replace(manifest, parts=dict(manifest.parts))
            await asyncio.to_thread(written.save, self._place)
            manifest.updated_at = written.updated_at
            for name in replaced:
                await asyncio.to_thread(self._place.delete, name)
                self._replaced.remove(name)
            self._saved_at = time.monotonic()
            self._save_seconds = self._saved_at - began


def _input_changed(then: InputFile, now: InputFile | None) -> InputChanged:
    has = "is gone" if now is None else f"has {now.size:,} ({now.tag})"
    return InputChanged(
        f"the input {then.uri} changed since the job began: it had {then.size:,} bytes "
        f"({then.tag}) and {has}; restore it and resume, or run a new job with another output"
    )


def request(place: OutputPlace, manifest: Manifest, wanted: Literal["pause", "cancel"]) -> bool:
    """Ask the process that runs a job to pause or cancel it. Return False if none runs it: then a
    cancelled job is recorded as such here.

    Raises:
        StorageError: The output location cannot be written.
    """
    if manifest.state == "running" and not manifest.is_interrupted(place):
        place.replace(CONTROL, json.dumps({"request": wanted}).encode())
        return True
    if wanted == "cancel":
        with place.locked():
            manifest.state, manifest.error = "cancelled", ""
            manifest.save(place)
    return False


def _part(number: int, name: str, content: PartContent, attempt: int) -> CommittedPart:
    counts = (content.rows, content.failed, content.tokens, content.truncated)
    return CommittedPart(number, name, *counts, content.sha256, len(content.data), attempt)


def _is_transient(error: ShoalError) -> bool:
    """Return True if the chunk may be answered later."""
    if isinstance(error, TlsFailed):
        return False
    return isinstance(error, (Overloaded, Unavailable, DeadlinePassed, ModelChanged))


def _changed(what: str) -> str:
    return (
        f"the model changed during the job, from {what}: vectors and scores of both cannot be "
        "mixed; restore the model and resume, or run a new job with another output"
    )
