"""The handlers of `/v1/files`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final
from urllib.parse import parse_qs

from shoal.bulk.failures import StorageError

from services.edge.batches.context import (
    BatchCaller,
    Context,
    json_answer,
    list_page,
    missing,
    new_id,
    storage_errors,
)
from services.edge.batches.objects import FILE_PREFIX, FilePiece, FileRecord
from services.edge.batches.store import FILE_PIECE_BYTES, FileContent, TenantStore
from services.edge.intake.forms import Form
from services.edge.intake.reading import BodyLimits
from services.edge.intake.served import ServedRequest, StreamedAnswer
from services.edge.messages.base import Answer, HttpError, invalid

UPLOAD_SECONDS: Final = 600.0
"""The time limit of a whole upload, which is that of OpenAI's clients."""
PURPOSE: Final = "batch"
OUTPUT_PURPOSE: Final = "batch_output"
MIN_EXPIRY_SECONDS: Final = 3600
MAX_EXPIRY_SECONDS: Final = 30 * 86_400
MAX_FILES_PAGE: Final = 10_000
_HELD_BYTES: Final = 3 * FILE_PIECE_BYTES
"""Memory of an upload: a piece, its copy while it is written, and data that arrives."""
_SENT_BYTES: Final = 256 << 10
_FORM_BYTES: Final = 256 << 10
"""The maximum size of a form in addition to that of its file."""


class FileService:
    """Serves files."""

    def __init__(self, context: Context, bounds: BodyLimits) -> None:
        self._context, self._bounds = context, bounds

    async def create(self, request: ServedRequest) -> Answer:
        """`POST /v1/files`."""
        if request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise HttpError("UNSUPPORTED_MEDIA", "send files without content-encoding")
        form = Form(request.headers.get("content-type", ""))
        limit = self._context.settings.file_bytes
        length = request.headers.get("content-length", "")
        size = int(length) if length.isdecimal() and len(length) < 20 else 0
        if size > limit + _FORM_BYTES:
            raise _too_large(limit)
        with storage_errors():
            caller = await self._context.caller(request)
            await self._context.check_records(caller.store)
            await self._context.check_quota(caller.store, max(0, size - _FORM_BYTES))
            await request.payer.reserve(_HELD_BYTES)
            return await self._receive(request, form, caller)

    async def _receive(self, request: ServedRequest, form: Form, caller: BatchCaller) -> Answer:
        identity, now = new_id(FILE_PREFIX)
        upload, received = _Upload(self._context, caller, identity), 0
        try:
            async for data in self._pieces(request):
                received += len(data)
                for part in form.feed(data):
                    await upload.add(part)
                if received - upload.size > _FORM_BYTES:
                    raise HttpError(
                        "TOO_LARGE",
                        f"the form has more than {_FORM_BYTES:,} bytes in addition to its file",
                    )
            form.finish()
            record = self._record(form, identity, now, upload)
            await upload.commit(record)
        except BaseException:
            if not upload.is_committing:  # else the file may exist
                await asyncio.shield(upload.discard())
            raise
        finally:
            upload.close()
        return json_answer(record.to_openai())

    async def _pieces(self, request: ServedRequest) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises HttpError."""
        loop = asyncio.get_running_loop()
        end = loop.time() + UPLOAD_SECONDS
        is_last = False
        while not is_last:
            try:
                async with asyncio.timeout_at(min(end, loop.time() + self._bounds.pause_seconds)):
                    event = await request.receive()
            except TimeoutError:
                raise HttpError(
                    "REQUEST_TIMEOUT",
                    f"no data of the file arrived for {self._bounds.pause_seconds:g} s, or the "
                    f"whole file did not arrive within {UPLOAD_SECONDS:g} s",
                ) from None
            if event["type"] == "http.disconnect":
                raise asyncio.CancelledError
            is_last = not event.get("more_body")
            yield event.get("body", b"")

    def _record(self, form: Form, identity: str, now: int, upload: _Upload) -> FileRecord:
        """Return the record of an upload. Raises HttpError."""
        purpose = form.fields.get("purpose", "")
        if purpose != PURPOSE:
            raise invalid(f"purpose is {purpose[:50]!r}; it must be {PURPOSE}", "purpose")
        if not upload.size:
            raise invalid("the file is empty", "file")
        seconds = expiry_seconds(
            form.fields.get("expires_after[anchor]"), form.fields.get("expires_after[seconds]")
        )
        longest = int(self._context.settings.expiry_seconds)
        return FileRecord(
            id=identity,
            filename=form.file_name or "",
            purpose=purpose,
            bytes=upload.size,
            lines=upload.lines,
            created_at=now,
            expires_at=now + min(seconds or longest, longest),
            folder=identity,
        )

    async def list_files(self, request: ServedRequest) -> Answer:
        """`GET /v1/files`."""
        query = parse_query(request)
        limit = parse_limit(query, MAX_FILES_PAGE, MAX_FILES_PAGE)
        with storage_errors():
            caller = await self._context.caller(request)
            return await self._context.io(_page, caller.store, query, limit)

    async def retrieve(self, request: ServedRequest) -> Answer:
        """`GET /v1/files/{file_id}`."""
        with storage_errors():
            _, record = await self._find(request)
        return json_answer(record.to_openai())

    async def delete(self, request: ServedRequest) -> Answer:
        """`DELETE /v1/files/{file_id}`."""
        with storage_errors():
            caller, record = await self._find(request)
            in_use = {} if record.batch else await self._context.io(caller.store.inputs_in_use)
            if (batch := in_use.get(record.id)) is not None:
                raise HttpError(
                    "CONFLICT", f"{batch} reads this file: wait until it has ended, or cancel it"
                )
            await self._context.io(caller.store.delete_file, record)
        return json_answer({"id": record.id, "object": "file", "deleted": True})

    async def content(self, request: ServedRequest) -> StreamedAnswer:
        """`GET /v1/files/{file_id}/content`."""
        with storage_errors():
            caller, record = await self._find(request)
            content = await self._context.io(FileContent, caller.store, record)
            # An object is read as a whole, and a piece of it is sent.
            await request.payer.reserve(2 * content.max_object_bytes)
        headers = (
            (b"content-length", b"%d" % record.bytes),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        )
        return StreamedAnswer(self._stream(content), b"application/octet-stream", headers=headers)

    async def _stream(self, content: FileContent) -> AsyncGenerator[bytes]:
        pieces = content.pieces()
        while (data := await self._context.io(lambda: next(pieces, None))) is not None:
            for start in range(0, len(data), _SENT_BYTES):
                yield data[start : start + _SENT_BYTES]

    async def _find(self, request: ServedRequest) -> tuple[BatchCaller, FileRecord]:
        caller = await self._context.caller(request)
        record = await self._context.io(caller.store.file, request.parameter, time.time())
        if record is None:
            raise missing("File", request.parameter)
        return caller, record


@dataclass
class _Upload:
    """An upload that is being stored."""

    context: Context
    caller: BatchCaller
    identity: str
    size: int = 0
    breaks: int = 0
    ends_with_break: bool = False
    pieces: list[FilePiece] = field(default_factory=list)
    buffer: bytearray = field(default_factory=bytearray)
    is_committing: bool = False

    @property
    def lines(self) -> int:
        return self.breaks + (not self.ends_with_break)

    async def add(self, data: bytes) -> None:
        """Append to the file. Raises HttpError, QuotaExceeded, StorageError."""
        limit = self.context.settings.file_bytes
        if self.size + len(data) > limit:
            raise _too_large(limit)
        self.size += len(data)
        if data:
            self.breaks += data.count(b"\n")
            self.ends_with_break = data.endswith(b"\n")
        self.context.add_pending(self.caller.store.key, len(data))
        self.buffer += data
        if len(self.buffer) >= FILE_PIECE_BYTES:
            await self._write()

    async def commit(self, record: FileRecord) -> None:
        if self.buffer:
            await self._write()
        self.is_committing = True
        await self.context.io(self.caller.store.create_file, record, self.pieces)

    async def discard(self) -> None:
        """Delete the data that was written."""
        self.buffer.clear()
        store = self.caller.store
        with suppress(StorageError):
            await self.context.io(self.context.store.remove_folder, store.key, self.identity)

    def close(self) -> None:
        self.context.add_pending(self.caller.store.key, -self.size)

    async def _write(self) -> None:
        store, data = self.caller.store, bytes(self.buffer)
        self.buffer.clear()
        await self.context.check_quota(store)
        name = f"{len(self.pieces):08}"
        self.pieces.append(FilePiece(name, 0, len(data), len(data)))
        await self.context.io(lambda: store.data(self.identity).create(name, data))


def _too_large(limit: int) -> HttpError:
    return HttpError(
        "TOO_LARGE", f"the file is larger than the limit of {limit:,} bytes: send several"
    )


def expiry_seconds(anchor: Any, seconds: Any, field: str = "expires_after") -> int:
    """Return the seconds of an `expires_after`; 0 without one. Raises HttpError."""
    if anchor is None and seconds is None:
        return 0
    if anchor != "created_at":
        raise invalid(f"{field}.anchor must be created_at", f"{field}.anchor")
    try:
        value = int(str(seconds))
    except ValueError:
        value = 0
    if not MIN_EXPIRY_SECONDS <= value <= MAX_EXPIRY_SECONDS:
        raise invalid(
            f"{field}.seconds must be {MIN_EXPIRY_SECONDS:,} to {MAX_EXPIRY_SECONDS:,}",
            f"{field}.seconds",
        )
    return value


def parse_query(request: ServedRequest) -> dict[str, str]:
    """Return the parameters of the query. Raises HttpError."""
    try:
        found = parse_qs(request.query, keep_blank_values=True, max_num_fields=16)
    except ValueError:
        raise invalid("the query has more than 16 parameters", "") from None
    return {name: values[0] for name, values in found.items()}


def parse_limit(query: dict[str, str], default: int, most: int) -> int:
    """Return the requested size of a page. Raises HttpError."""
    text = query.get("limit", "")
    limit = int(text) if text.isdecimal() and len(text) < 10 else 0
    if text and not 1 <= limit <= most:
        raise invalid(f"limit must be 1 to {most:,}", "limit")
    return limit or default


def ids_after(ids: list[str], after: str | None) -> list[str]:
    """Return the ids of a list that follow one of them. Raises HttpError."""
    if not after:
        return ids
    if after not in ids:
        raise invalid("after is not the id of an object in this list", "after")
    return ids[ids.index(after) + 1 :]


def _page(store: TenantStore, query: dict[str, str], limit: int) -> Answer:
    """Return a page of files. Blocks; raises HttpError, StorageError.

    Only files of the page are read, and those before its end that have expired or have another
    purpose.
    """
    purpose, now = query.get("purpose"), time.time()
    ids = store.file_ids()
    if query.get("order") != "asc":
        ids.reverse()
    found = (
        one.to_openai()
        for one in store.files(ids_after(ids, query.get("after")))
        if one.expires_at > now and purpose in (None, "", one.purpose)
    )
    page = list(islice(found, limit + 1))
    return list_page(page[:limit], has_more=len(page) > limit)
