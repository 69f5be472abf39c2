"""The errors of servers, which are those of their clients (`shoal.errors`).

An error is raised where the fact is known and mapped to a gRPC status in one place,
`libs/serving/calls/interceptor.py`. Between worker and router it travels as a `Failure` message:
`reason` names the class, so `from_reason` can raise the same error again.
"""

from __future__ import annotations

from shoal.errors import BY_REASON
from shoal.errors import AliasChanged as AliasChanged
from shoal.errors import DeadlinePassed as DeadlinePassed
from shoal.errors import Draining as Draining
from shoal.errors import EmbeddingIdMismatch as EmbeddingIdMismatch
from shoal.errors import InputTooLong as InputTooLong
from shoal.errors import InternalError as InternalError
from shoal.errors import InvalidInput as InvalidInput
from shoal.errors import ModelBroken as ModelBroken
from shoal.errors import ModelNotFound as ModelNotFound
from shoal.errors import ModelUnreachable as ModelUnreachable
from shoal.errors import NoCapacity as NoCapacity
from shoal.errors import NotReady as NotReady
from shoal.errors import Outdated as Outdated
from shoal.errors import OutOfMemory as OutOfMemory
from shoal.errors import PermissionDenied as PermissionDenied
from shoal.errors import QueueFull as QueueFull
from shoal.errors import RateLimited as RateLimited
from shoal.errors import ShoalError as ShoalError
from shoal.errors import TaskNotSupported as TaskNotSupported
from shoal.errors import Unauthenticated as Unauthenticated
from shoal.errors import WorkerLost as WorkerLost


def from_reason(
    reason: str, message: str, *, field: str = "", retry_after: float = 0.0
) -> ShoalError:
    """Return the error that `reason` names; an unknown reason (a newer peer's) becomes an
    InternalError. `retry_after` 0: a retry does not help.
    """
    # The text of a worker's internal error is for callers, unlike that of this process.
    kind = ShoalError if reason == ShoalError.reason else BY_REASON.get(reason, InternalError)
    error = kind(message, field=field)
    error.retry_after = retry_after or None
    return error
