"""The routes of files and batches, for the table of routes and the OpenAPI document."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from services.edge.batches.batches import Batches, BatchRequest
from services.edge.batches.files import FileService
from services.edge.dialects.openai import OPENAI
from services.edge.intake.served import Serve, ServedRequest
from services.edge.messages.base import Answer, HttpError, Received, Route

PAGE: Final = {
    "after": "The id of the last object of the page before.",
    "limit": "The maximum number of objects.",
}


class BatchesFile(msgspec.Struct, kw_only=True):
    """A file. `status` is always `processed`."""

    id: str
    object: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str


class BatchesUpload(msgspec.Struct, kw_only=True):
    """A form with the part `file`, which has a file name, and fields. `purpose` is `batch`."""

    file: str
    purpose: str
    expires_after_anchor: str = msgspec.field(name="expires_after[anchor]", default="created_at")
    expires_after_seconds: int | None = msgspec.field(name="expires_after[seconds]", default=None)


class BatchesDeleted(msgspec.Struct, kw_only=True):
    """The answer to a deletion."""

    id: str
    object: str
    deleted: bool


class BatchesFilePage(msgspec.Struct, kw_only=True):
    """A page of files, newest first unless `order` is `asc`."""

    object: str
    data: list[BatchesFile]
    has_more: bool
    first_id: str | None
    last_id: str | None


class BatchesBatch(msgspec.Struct, kw_only=True):
    """A batch. Times that are not known yet are null, and so are files without content."""

    id: str
    object: str
    endpoint: str
    model: str | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    errors: dict[str, Any] | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: dict[str, int]
    usage: dict[str, Any]
    metadata: dict[str, str] | None


class BatchesPage(msgspec.Struct, kw_only=True):
    """A page of batches, newest first."""

    object: str
    data: list[BatchesBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


def _decode_nothing(received: Received) -> Answer:
    """Stand in for the decoder of a dialect: `handlers` and `refusals` serve all these routes."""
    raise HttpError("NO_SUCH_ROUTE", "this route is served without a decoder")


def served_route(method: str, path: str, summary: str, answer: Any, **more: Any) -> Route:
    """Return a route that is served by a handler and not by a dialect."""
    return Route(method, path, OPENAI, _decode_nothing, summary, answer=answer, **more)


_FORM: Final = {"body": BatchesUpload, "body_media_type": "multipart/form-data"}
_ORDER: Final = {
    **PAGE,
    "order": "asc or desc, by the time of creation.",
    "purpose": "batch or batch_output.",
}
ROUTES: Final = (
    served_route("POST", "/v1/files", "Uploads the input of a batch", BatchesFile, **_FORM),
    served_route("GET", "/v1/files", "Lists files", BatchesFilePage, query=_ORDER),
    served_route("GET", "/v1/files/{file_id}", "Describes a file", BatchesFile),
    served_route("DELETE", "/v1/files/{file_id}", "Deletes a file", BatchesDeleted),
    served_route("GET", "/v1/files/{file_id}/content", "Downloads a file", bytes),
    served_route(
        "POST", "/v1/batches", "Starts a batch of requests", BatchesBatch, body=BatchRequest
    ),
    served_route("GET", "/v1/batches", "Lists batches", BatchesPage, query=PAGE),
    served_route("GET", "/v1/batches/{batch_id}", "Describes a batch", BatchesBatch),
    served_route("POST", "/v1/batches/{batch_id}/cancel", "Ends a batch early", BatchesBatch),
)


def handlers(files: FileService, batches: Batches) -> dict[tuple[str, str], Serve]:
    """Return the handler of each route, by method and path."""
    return {
        ("POST", "/v1/files"): files.create,
        ("GET", "/v1/files"): files.list_files,
        ("GET", "/v1/files/{file_id}"): files.retrieve,
        ("DELETE", "/v1/files/{file_id}"): files.delete,
        ("GET", "/v1/files/{file_id}/content"): files.content,
        ("POST", "/v1/batches"): batches.create,
        ("GET", "/v1/batches"): batches.list_batches,
        ("GET", "/v1/batches/{batch_id}"): batches.retrieve,
        ("POST", "/v1/batches/{batch_id}/cancel"): batches.cancel,
    }


def refusals() -> dict[tuple[str, str], Serve]:
    """Return handlers of all routes for an edge without a storage."""
    return {(route.method, route.path): _refuse for route in ROUTES}


async def _refuse(request: ServedRequest) -> Answer:
    raise HttpError(
        "BATCHES_DISABLED",
        "files and batches are switched off: set SHOAL_BATCHES_URL on the edge to a directory or "
        "a URL such as s3://bucket/prefix",
    )
