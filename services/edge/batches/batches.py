"""The handlers of `/v1/batches`."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from libs.telemetry import traces
from services.edge.batches.context import (
    BatchCaller,
    Context,
    json_answer,
    list_page,
    missing,
    new_id,
    read_body,
    storage_errors,
)
from services.edge.batches.files import (
    PURPOSE,
    expiry_seconds,
    ids_after,
    parse_limit,
    parse_query,
)
from services.edge.batches.lines import is_endpoint
from services.edge.batches.manager import Manager
from services.edge.batches.objects import BATCH_PREFIX, FILE_PREFIX, BatchRecord, FileRecord
from services.edge.batches.runner import CANCEL
from services.edge.intake.served import ServedRequest
from services.edge.messages.base import Answer, HttpError, Received, invalid
from services.edge.messages.names import AliasNames
from services.edge.messages.reading import read

WINDOW: Final = "24h"
COMPLETION_WINDOW_SECONDS: Final = 86_400
MAX_METADATA: Final = 16
MAX_KEY_CHARACTERS: Final = 64
MAX_VALUE_CHARACTERS: Final = 512
DEFAULT_PAGE: Final = 20
MAX_BATCHES_PAGE: Final = 100
_BODY_BYTES: Final = 64 << 10


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """The expiry of the files of a batch, from their creation."""

    anchor: str
    seconds: int


class BatchRequest(msgspec.Struct, kw_only=True):
    """`endpoint` is `/v1/embeddings`, `/v1/chat/completions`, `/v1/completions`, `/v1/rerank`,
    `/v2/rerank`, or `/v1/encode/`, `/v1/score/` or `/v1/extract/` with a model.
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class Batches:
    """Serves batches."""

    def __init__(self, context: Context, manager: Manager) -> None:
        self._context, self._manager = context, manager

    async def create(self, request: ServedRequest) -> Answer:
        """`POST /v1/batches`."""
        with storage_errors():
            caller = await self._context.caller(request)
        body = await read_body(request, _BODY_BYTES)
        wanted = read(BatchRequest, Received(body, AliasNames({})))
        seconds = _check(wanted)
        with storage_errors():
            found = await self._check_input(caller, wanted.input_file_id)
            requests = min(found.lines, self._context.settings.lines)
            record = self._record(wanted, caller, seconds, requests)
            async with self._context.creating_batch(caller.store.key):
                await self._context.check_records(caller.store)
                await self._context.check_quota(caller.store)
                await self._context.check_batch_quotas(caller.store, requests)
                await self._context.io(caller.store.create_batch, record)
        self._manager.wake()
        return json_answer(record.to_openai())

    async def retrieve(self, request: ServedRequest) -> Answer:
        """`GET /v1/batches/{batch_id}`."""
        with storage_errors():
            caller, record = await self._find(request)
            return json_answer(await self._shown(caller, record))

    async def list_batches(self, request: ServedRequest) -> Answer:
        """`GET /v1/batches`."""
        query = parse_query(request)
        limit = parse_limit(query, DEFAULT_PAGE, MAX_BATCHES_PAGE)
        with storage_errors():
            caller = await self._context.caller(request)
            ids = await self._context.io(caller.store.batch_ids)
            ids = ids_after(ids[::-1], query.get("after"))
            page = await self._context.io(lambda: list(caller.store.batches(ids[:limit])))
            shown = [await self._shown(caller, record) for record in page]
        return list_page(shown, has_more=len(ids) > limit)

    async def cancel(self, request: ServedRequest) -> Answer:
        """`POST /v1/batches/{batch_id}/cancel`."""
        with storage_errors():
            caller, record = await self._find(request)
            if record.is_ended and record.status != "cancelled":
                raise HttpError(
                    "CONFLICT", f"a batch with the status {record.status} cannot be cancelled"
                )
            if not record.is_ended:
                data = await self._context.io(caller.store.data, record.id)
                at = int(time.time())
                await self._context.io(data.create, CANCEL, msgspec.json.encode(at))
                self._manager.cancel(record.id, at)
            return json_answer(await self._shown(caller, record))

    async def _find(self, request: ServedRequest) -> tuple[BatchCaller, BatchRecord]:
        caller = await self._context.caller(request)
        running = self._manager.running(request.parameter)
        if running is not None and running.key == caller.store.key:
            record: BatchRecord | None = running.record
        else:
            record = await self._context.io(caller.store.batch, request.parameter)
        if record is None:
            raise missing("Batch", request.parameter)
        if running is None and not record.is_ended:
            self._manager.wake()  # this request may have brought the token that the batch needs
        return caller, record

    async def _shown(self, caller: BatchCaller, record: BatchRecord) -> dict[str, Any]:
        """Return a batch, with the state `cancelling` after a request to cancel it."""
        shown = record.to_openai()
        if record.is_ended:
            return shown
        data = await self._context.io(caller.store.data, record.id)
        at = await self._context.io(data.read, CANCEL)
        if at is not None:
            shown |= {"status": "cancelling", "cancelling_at": msgspec.json.decode(at, type=int)}
        return shown

    async def _check_input(self, caller: BatchCaller, identity: str) -> FileRecord:
        found = await self._context.io(caller.store.file, identity, time.time())
        if found is None:
            raise HttpError(
                "NO_SUCH_OBJECT",
                f"No such File object: {identity[:100]}",
                field="input_file_id",
                status=400,
            )
        if found.purpose != PURPOSE:
            raise invalid(f"the purpose of the input must be {PURPOSE}", "input_file_id")
        return found

    def _record(
        self, wanted: BatchRequest, caller: BatchCaller, seconds: int, requests: int
    ) -> BatchRecord:
        identity, now = new_id(BATCH_PREFIX)
        longest = int(self._context.settings.expiry_seconds)
        return BatchRecord(
            id=identity,
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            metadata=wanted.metadata,
            created_at=now,
            expires_at=now + COMPLETION_WINDOW_SECONDS,
            output_id=new_id(FILE_PREFIX)[0],
            errors_id=new_id(FILE_PREFIX)[0],
            output_seconds=min(seconds or longest, longest),
            traceparent=traces.format_traceparent(traces.current()),
            max_requests=requests,
            tenant=caller.tenant,
            needs_token=caller.needs_token,
        )


def _check(wanted: BatchRequest) -> int:
    """Return how many seconds outputs are kept; 0 for the default. Raises HttpError."""
    if not is_endpoint(wanted.endpoint):
        raise invalid(
            f"endpoint is {wanted.endpoint[:100]!r}; it must be /v1/embeddings, "
            "/v1/chat/completions, /v1/completions, /v1/rerank, /v2/rerank, or /v1/encode, "
            "/v1/score or /v1/extract with a model",
            "endpoint",
        )
    if len(wanted.endpoint) > 400:
        raise invalid("endpoint has more than 400 characters", "endpoint")
    if wanted.completion_window != WINDOW:
        raise invalid(f"completion_window must be {WINDOW}", "completion_window")
    metadata = wanted.metadata or {}
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_KEY_CHARACTERS or len(value) > MAX_VALUE_CHARACTERS
        for key, value in metadata.items()
    ):
        raise invalid(
            f"metadata may have {MAX_METADATA} pairs, with keys of {MAX_KEY_CHARACTERS} and values "
            f"of {MAX_VALUE_CHARACTERS} characters",
            "metadata",
        )
    after = wanted.output_expires_after
    if after is None:
        return 0
    return expiry_seconds(after.anchor, after.seconds, "output_expires_after")
