"""Records of files and batches as they are stored, and as OpenAI's clients read them. Pure.

Times are whole seconds since the epoch; 0 is a time that is not known yet.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: Final[frozenset[Status]] = frozenset(("failed", "completed", "expired", "cancelled"))
FILE_ID: Final = re.compile(r"file-[0-9a-f]{8}[0-9a-f]{32}")
BATCH_ID: Final = re.compile(r"batch_[0-9a-f]{8}[0-9a-f]{32}")
"""Ids have the time of their creation, and 128 random bits."""
FILE_PREFIX: Final = "file-"
BATCH_PREFIX: Final = "batch_"
_TIMES: Final = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def make_id(prefix: str, now: int, secret: str) -> str:
    """Return the id of a new object.

    Args:
        secret: 32 random hexadecimal digits.
    """
    return f"{prefix}{now:08x}{secret}"


def created_at(identity: str) -> int:
    """Return the time in an id."""
    return int(identity[-40:-32], 16)


class FileRecord(msgspec.Struct, kw_only=True, frozen=True):
    """A file.

    Attributes:
        folder: The folder with its data: its id, or that of the batch that wrote it.
        batch: The batch that wrote it; empty for an upload.
        lines: An upper bound of the number of requests of an upload; 0 for a file of a batch.
    """

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int
    folder: str
    batch: str = ""
    lines: int = 0

    def to_openai(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FilePiece(msgspec.Struct, array_like=True, frozen=True):
    """A range of bytes of an object in a file's folder. A file is the sequence of its pieces."""

    name: str
    offset: int
    bytes: int
    object_bytes: int


class BatchError(msgspec.Struct, kw_only=True, frozen=True):
    """Why a batch failed. `line` counts from 1; None for the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Counts(msgspec.Struct):
    """Numbers of requests."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch.

    Attributes:
        tenant: The tenant that the caller named; empty if its credential has only one.
        needs_token: Whether the caller sent a token.
        output_id: The id that the file of results has once it exists.
        errors_id: The same of the file of errors.
        output_seconds: How long these files are kept.
        traceparent: The trace context of the request that created it; empty without a trace.
        max_requests: An upper bound of its requests, until its input is validated.
        stored_bytes: The size of the results that are stored.
        output_bytes: The part of it that is in the file of results.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str
    errors_id: str
    output_seconds: int
    traceparent: str = ""
    max_requests: int = 0
    tenant: str = ""
    needs_token: bool = False
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    model: str = ""
    in_progress_at: int = 0
    finalizing_at: int = 0
    completed_at: int = 0
    failed_at: int = 0
    expired_at: int = 0
    cancelling_at: int = 0
    cancelled_at: int = 0
    counts: Counts = msgspec.field(default_factory=Counts)
    input_tokens: int = 0
    output_tokens: int = 0
    errors: list[BatchError] = msgspec.field(default_factory=list)
    stored_bytes: int = 0
    output_bytes: int = 0

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED

    @property
    def waiting(self) -> int:
        """The number of requests without a result, at most."""
        total = self.counts.total or self.max_requests
        return total - self.counts.completed - self.counts.failed

    @property
    def error_bytes(self) -> int:
        return self.stored_bytes - self.output_bytes

    def to_openai(self) -> dict[str, Any]:
        ended = self.is_ended
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if ended and self.output_bytes else None,
            "error_file_id": self.errors_id if ended and self.error_bytes else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: getattr(self, name) or None for name in _TIMES},
            "request_counts": self.counts,
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": self.metadata,
        }


class Ending(msgspec.Struct, frozen=True):
    """The last state of a batch, once no more requests are executed, and its errors."""

    status: Status
    errors: list[BatchError]


class PartCounts(msgspec.Struct, array_like=True, frozen=True):
    """The sizes and counts of the results of one chunk."""

    output_bytes: int
    error_bytes: int
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    head_bytes: int = 0
    """The size of the line before the results, which has the other numbers."""


class LineChunk(msgspec.Struct, array_like=True, frozen=True):
    """Consecutive lines of an input: the number of the first one, from 1, and their bytes."""

    first: int
    requests: int
    offset: int
    bytes: int


class InputPlan(msgspec.Struct, kw_only=True):
    """The division of an input into chunks. It depends on nothing but the input."""

    requests: int
    model: str
    chunks: list[LineChunk]
