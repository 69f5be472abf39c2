"""Maps a ShoalError to a gRPC status: exactly one ErrorInfo, the invalid field, and when to
retry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from libs.errors import InternalError, ShoalError

DOMAIN: Final = "shoal"
DETAILS_HEADER: Final = "grpc-status-details-bin"

# A status is sent in HTTP/2 headers, of which gRPC peers accept 8 KiB: long text of a client must
# not make its error undeliverable. In bytes: the status has the message up to three times, once
# percent-encoded.
MAX_MESSAGE: Final = 1000
MAX_FIELD: Final = 300
_CUT: Final = "…"


@dataclass(frozen=True, slots=True)
class Status:
    """A gRPC status. `details` is a serialised google.rpc.Status for `grpc-status-details-bin`."""

    code: grpc.StatusCode
    message: str
    details: bytes


def to_status(error: ShoalError, request_id: str) -> Status:
    """Convert `error` to a status. The text of an InternalError is only logged, not sent."""
    code: grpc.StatusCode = grpc.StatusCode[error.code]
    is_ours = isinstance(error, InternalError)
    message = (
        f"internal error; request {request_id}"
        if is_ours
        else _shortened(error.message, MAX_MESSAGE)
    )
    number: int = code.value[0]
    rich = status_pb2.Status(
        code=number,
        message=message,
        details=[_any(part) for part in _parts(error, message, request_id)],
    )
    return Status(code, message, rich.SerializeToString())


def _parts(error: ShoalError, message: str, request_id: str) -> list[Message]:
    metadata = {"request_id": request_id}
    parts: list[Message] = []
    if error.field:
        field = _shortened(error.field, MAX_FIELD)
        metadata["field"] = field
        if error.code == "INVALID_ARGUMENT":
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=field, description=message
            )
            parts.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after:
        parts.append(error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after)))
    return [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata),
        *parts,
    ]


def _any(part: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(part)
    return packed


def _duration(seconds: float) -> duration_pb2.Duration:
    whole = math.floor(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def _shortened(text: str, limit: int) -> str:
    """Cut the text to at most `limit` bytes of UTF-8."""
    whole = text.encode(errors="replace")
    return (
        whole.decode()
        if len(whole) <= limit
        else whole[: limit - len(_CUT.encode())].decode(errors="ignore") + _CUT
    )
