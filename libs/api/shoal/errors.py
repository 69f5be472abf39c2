"""What can go wrong, as exceptions: the client's side of the table in docs/api.md.

Every error of a call is a `ShoalError`; its class says what kind of thing happened, its attributes say where. `decode` turns the
status of a failed call into one; it is the only reader of google.rpc details.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "shoal"


class ShoalError(Exception):
    """A call failed.

    `code` is the gRPC status name and `reason` the finer upper snake case name. `field` is the path of the argument at fault, such
    as `items[3].text`, or empty. `retry_after` is the number of seconds after which a retry may help (the client has then already
    tried, within the deadline), or None where a retry does not help. `request_id` finds the call in the mesh's logs.
    """

    code = "INTERNAL"
    reason = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", retry_after: float | None = None, request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.request_id = request_id

    def __str__(self) -> str:
        where = f", field {self.field}" if self.field else ""
        request = f", request {self.request_id}" if self.request_id else ""
        return f"{self.message} [{self.reason}{where}{request}]"

    def move(self, name: str, places: Sequence[int]) -> None:
        """Makes `name[i]` in the field and message `name[places[i]]`: a part's error, told in terms of the caller's list."""
        index = self.index(name)
        if index is None or index >= len(places) or places[index] == index:
            return
        before, after = f"{name}[{index}]", f"{name}[{places[index]}]"
        self.message = self.message.replace(before, after)
        self.args = (self.message,)
        self.field = after + self.field.removeprefix(before)

    def index(self, name: str) -> int | None:
        """Of the entry of the list called `name` that is at fault; None if the error is about something else."""
        match = re.match(rf"{re.escape(name)}\[(0|[1-9]\d{{0,8}})\]", self.field)
        return int(match[1]) if match else None


class InvalidInput(ShoalError):
    """The request breaks its contract; `field` says where."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_INPUT"


class InputTooLong(InvalidInput):
    """An item has more tokens than the model takes, and truncation is "none"."""

    reason = "INPUT_TOO_LONG"


class TaskNotSupported(InvalidInput):
    """The model cannot do what was asked."""

    reason = "TASK_NOT_SUPPORTED"


class Unauthenticated(ShoalError):
    """The token or certificate is missing or wrong."""

    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDenied(ShoalError):
    """The caller is known and may not do this."""

    code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class ModelNotFound(ShoalError):
    """No worker can find the model."""

    code = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"


class ModelBroken(ShoalError):
    """The model was found and cannot be loaded."""

    code = "FAILED_PRECONDITION"
    reason = "MODEL_LOAD_FAILED"


class ModelChanged(ShoalError):
    """A call of several requests was answered by two revisions of the model: its rows would not be comparable. Repeat it."""

    code = "ABORTED"
    reason = "MODEL_CHANGED"


class Overloaded(ShoalError):
    """The mesh has as much work as it may take."""

    code = "RESOURCE_EXHAUSTED"
    reason = "RESOURCE_EXHAUSTED"


class QueueFull(Overloaded):
    """The model's lane is full."""

    reason = "QUEUE_FULL"


class RateLimited(Overloaded):
    """The tenant's quota is used up."""

    reason = "RATE_LIMITED"


class OutOfMemory(ShoalError):
    """An item needs more memory than its worker has, even alone: shorten it, let it be truncated, or ask a larger pool."""

    code = "RESOURCE_EXHAUSTED"
    reason = "OUT_OF_MEMORY"


class Unavailable(ShoalError):
    """Nothing can take the work now."""

    code = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class CannotConnect(Unavailable):
    """No router answered: refused, lost, or not found. Retried, at the next address if there is one.

    `was_sent` is False where there was no connection at all: the next try is the first that a router hears of the request.
    """

    reason = "CANNOT_CONNECT"
    was_sent = True


class TlsFailed(CannotConnect):
    """A router was found, and its certificate is not one to trust, or it speaks no TLS. What it has against our certificate it does
    not tell: it hangs up, which is CannotConnect."""

    reason = "TLS_FAILED"
    was_sent = False


class NoCapacity(Unavailable):
    """A router answered, and has nobody to give the work to."""

    reason = "NO_CAPACITY"


class Draining(Unavailable):
    """The router is stopping; another one answers."""

    reason = "DRAINING"


class WorkerLost(Unavailable):
    """Workers died with the request as often as is allowed. It is not retried: it may be what kills them."""

    reason = "WORKER_LOST"


class DeadlinePassed(ShoalError):
    """The answer did not come within the timeout."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_PASSED"
    earlier: ShoalError | None = None
    """Why an earlier try of the request failed, if one did."""


class InternalError(ShoalError):
    """A fault of the mesh; its logs have more under the request id."""


def _subclasses(kind: type[ShoalError]) -> list[type[ShoalError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _subclasses(child))]


_BY_REASON = {kind.reason: kind for kind in reversed(_subclasses(ShoalError)) if kind is not ShoalError}
# The broadest class of each code, for reasons that a newer mesh may have.
_BY_CODE = {kind.code: kind for kind in reversed(_subclasses(ShoalError)) if ShoalError in kind.__bases__}


# What BoringSSL says, as gRPC passes it on; the first that fits.
_HANDSHAKES = (
    ("certificate has expired", "has a certificate that has expired"),
    ("certificate is not yet valid", "has a certificate that is not valid yet; is the clock right?"),
    ("unsupported certificate purpose", "has a certificate that is not a server's"),
    ("CERTIFICATE_VERIFY_FAILED", "has a certificate of an authority that is not trusted here"),
    ("WRONG_VERSION_NUMBER", "speaks no TLS"),
    ("handshake failed", "cannot agree with us on TLS"),
)

_NOT_SENT = ("last error: ", "DNS resolution failed")
"""What gRPC says of a call for which it found no connection; of one whose connection broke it says nothing of the kind."""


def decode(code: str, text: str, details: bytes, *, address: str) -> ShoalError:
    """The error that a failed call means.

    `code` is the gRPC status name, `details` the serialised google.rpc.Status of the trailing metadata (`grpc-status-details-bin`),
    empty if there is none. UNAVAILABLE without our ErrorInfo did not come from a router but from the way to it, and CANCELLED is
    what a router leaves behind that ends with calls in flight: who cancels a call of ours does not hear of it here.
    """
    info, bad, retry = _details(details)
    if info is None and code in ("UNAVAILABLE", "CANCELLED"):
        return _cannot_connect(address, text)
    if info is None and code == "DEADLINE_EXCEEDED":
        text = "no answer within the timeout; a model's first use includes loading it and may need a longer one"
    reason = info.reason if info is not None else ""
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, ShoalError)
    field = bad.field_violations[0].field if bad is not None and bad.field_violations else ""
    if info is not None and not field:  # BadRequest is for INVALID_ARGUMENT only
        field = info.metadata.get("field", "")
    after = None if retry is None else retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    error = kind(text or f"the call failed with {code}", field=field, retry_after=after)
    error.code = code
    error.reason = reason or (kind.reason if kind.code == code else code)
    return error


def _cannot_connect(address: str, text: str) -> CannotConnect:
    # "connections to all backends failing; last error: UNKNOWN: ipv4:127.0.0.1:50051: Ssl handshake failed ..."
    why = text.partition("last error: ")[2] or text
    if match := re.search(r"Peer name (\S+) is not in peer certificate", why):
        return TlsFailed(f"the router at {address} has no certificate for the name {match[1]}")
    for part, meaning in _HANDSHAKES:
        if part in why:
            return TlsFailed(f"the router at {address} {meaning}")
    if "Socket closed" in why:
        why = "it hung up; it may want TLS, or a certificate of ours that it trusts and that has not expired"
    error = CannotConnect(f"cannot reach a router at {address}: {why}")
    error.was_sent = not any(sign in text for sign in _NOT_SENT)
    return error


def _details(
    data: bytes,
) -> tuple[error_details_pb2.ErrorInfo | None, error_details_pb2.BadRequest | None, error_details_pb2.RetryInfo | None]:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    has_info = has_bad = has_retry = False
    try:
        for detail in status_pb2.Status.FromString(data).details:
            has_info = has_info or (detail.Unpack(info) and info.domain == DOMAIN)
            has_bad = has_bad or detail.Unpack(bad)
            has_retry = has_retry or detail.Unpack(retry)
    except DecodeError:  # details are a help; whoever sends garbage gives none
        return (None, None, None)
    return (info if has_info else None, bad if has_bad else None, retry if has_retry else None)
