"""Every error that a caller can see, in one hierarchy (the table in docs/api.md).

An error is raised where the fact is known and mapped to a gRPC status in one place,
`libs/serving/calls/interceptor.py`. Between worker and router it travels as a `Failure` message:
`reason` names the class, so `from_reason` can raise the same error again.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Status = Literal[
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "INTERNAL",
]


class ShoalError(Exception):
    """The failure, its place (`field`, a path in the request), and when a retry may help
    (`retry_after`, seconds; 0: never).
    """

    status: ClassVar[Status] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"
    default_retry_after: ClassVar[float] = 0.0

    def __init__(self, message: str, *, field: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = self.default_retry_after if retry_after is None else retry_after


class InvalidInput(ShoalError):
    """The request violates the API's contract."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_INPUT"


class InputTooLong(InvalidInput):
    """An item has more tokens than the model takes, and truncation is NONE."""

    reason = "INPUT_TOO_LONG"


class TaskNotSupported(InvalidInput):
    """The model does not support the requested task."""

    reason = "TASK_NOT_SUPPORTED"


class Unauthenticated(ShoalError):
    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDenied(ShoalError):
    status = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class ModelNotFound(ShoalError):
    """No worker can find the model."""

    status = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"


class ModelUnreachable(ShoalError):
    """No worker has the model on disk, and a store that may have it could not be asked.

    It is unknown whether the model exists, so it is not MODEL_NOT_FOUND. Workers try again after a
    minute; a client that repeats the call before that gets the same error, so it has no RetryInfo.
    """

    status = "FAILED_PRECONDITION"
    reason = "MODEL_UNREACHABLE"


class ModelBroken(ShoalError):
    """The model was found and cannot be loaded."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_LOAD_FAILED"


class EmbeddingIdMismatch(ShoalError):
    """The vectors would not have the embedding id that the request requires, or parts of a request
    would have vectors that cannot be compared.
    """

    status = "FAILED_PRECONDITION"
    reason = "EMBEDDING_ID_MISMATCH"


class AliasChanged(ShoalError):
    """The alias does not have the revision that the request requires: another caller changed it."""

    status = "FAILED_PRECONDITION"
    reason = "ALIAS_CHANGED"


class NotReady(ShoalError):
    """This process has not read the state of the mesh yet: no answer is better than a wrong one."""

    status = "FAILED_PRECONDITION"
    reason = "NOT_READY"
    default_retry_after = 1.0


class Outdated(ShoalError):
    """The other process has a version that this one no longer supports."""

    status = "FAILED_PRECONDITION"
    reason = "OUTDATED"


class QueueFull(ShoalError):
    """The lane holds as many tokens as it may."""

    status = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"
    default_retry_after = 1.0


class OutOfMemory(ShoalError):
    """An item needs more memory than its worker has, even alone. Trying again there would fail
    again.
    """

    status = "RESOURCE_EXHAUSTED"
    reason = "OUT_OF_MEMORY"


class RateLimited(ShoalError):
    status = "RESOURCE_EXHAUSTED"
    reason = "RATE_LIMITED"
    default_retry_after = 1.0


class NoCapacity(ShoalError):
    """No component can take the work now: for instance, no worker is registered, or Redis is
    unreachable.
    """

    status = "UNAVAILABLE"
    reason = "NO_CAPACITY"
    default_retry_after = 1.0


class Draining(ShoalError):
    """This process is stopping; another one answers."""

    status = "UNAVAILABLE"
    reason = "DRAINING"
    default_retry_after = 0.1


class WorkerLost(ShoalError):
    """Workers died with the job as often as is allowed. A retry could kill more of them, so none is
    advised.
    """

    status = "UNAVAILABLE"
    reason = "WORKER_LOST"


class DeadlinePassed(ShoalError):
    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_PASSED"


class InternalError(ShoalError):
    """A fault of Shoal. Callers see a fixed text and the request id; the log has the details."""


def _subclasses(kind: type[ShoalError]) -> list[type[ShoalError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _subclasses(child))]


_BY_REASON: dict[str, type[ShoalError]] = {
    kind.reason: kind for kind in reversed(_subclasses(ShoalError))
}


def from_reason(
    reason: str, message: str, *, field: str = "", retry_after: float = 0.0
) -> ShoalError:
    """Return the error that `reason` names; an unknown reason (a newer peer's) becomes an
    InternalError.
    """
    return _BY_REASON.get(reason, InternalError)(message, field=field, retry_after=retry_after)
