"""Every error that a caller can see, as in the table of errors in docs/api.md.

Servers raise an error where the fact is known; it is mapped to a gRPC status in one place
(`libs/serving/calls/interceptor.py`), from which `shoal.transport.failures` makes the same error
for callers of a client. The class is the kind of failure, the attributes say where it happened.

This module needs the standard library alone, because the libraries of servers share it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final


class ShoalError(Exception):
    """A call failed.

    `code` is the gRPC status name and `reason` the finer upper snake case name. `field` is the path
    of the argument at fault, such as `items[3].text`, or empty. `retry_after` is the number of
    seconds after which a retry may help (the client has then already tried, within the deadline),
    or None where a retry does not help. `request_id` finds the call in the mesh's logs.
    """

    code = "INTERNAL"
    reason = "INTERNAL"
    default_retry_after: ClassVar[float | None] = None

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        retry_after: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = self.default_retry_after if retry_after is None else retry_after
        self.request_id = request_id

    def __str__(self) -> str:
        where = f", field {self.field}" if self.field else ""
        request = f", request {self.request_id}" if self.request_id else ""
        return f"{self.message} [{self.reason}{where}{request}]"

    def move(self, name: str, places: Sequence[int]) -> None:
        """Replace `name[i]` in field and message by `name[places[i]]`: from a request's index to
        that in the caller's list.
        """
        index = self.index(name)
        if index is None or index >= len(places) or places[index] == index:
            return
        before, after = f"{name}[{index}]", f"{name}[{places[index]}]"
        self.message = self.message.replace(before, after)
        self.args = (self.message,)
        self.field = after + self.field.removeprefix(before)

    def index(self, name: str) -> int | None:
        """Return the index of the invalid entry of the list called `name`; None if the error is
        about something else.
        """
        match = re.match(rf"{re.escape(name)}\[(0|[1-9]\d{{0,8}})\]", self.field)
        return int(match[1]) if match else None


class InvalidInput(ShoalError):
    """An argument is not valid; `field` is its path."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_INPUT"


class InputTooLong(InvalidInput):
    """An item has more tokens than the model takes, and truncation is "none"."""

    reason = "INPUT_TOO_LONG"


class TaskNotSupported(InvalidInput):
    """The model does not support the requested task."""

    reason = "TASK_NOT_SUPPORTED"


class Unauthenticated(ShoalError):
    """The token or certificate is missing or wrong."""

    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDenied(ShoalError):
    """The caller is authenticated and not authorised to do this."""

    code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class ModelNotFound(ShoalError):
    """No worker can find the model."""

    code = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"


class ModelUnreachable(ShoalError):
    """No worker has the model on disk, and a store that may have it, such as the Hugging Face hub,
    cannot be reached. The message names the folders and stores that were searched. It is not
    retried: workers ask the stores again after a minute."""

    code = "FAILED_PRECONDITION"
    reason = "MODEL_UNREACHABLE"


class ModelBroken(ShoalError):
    """The model was found and cannot be loaded."""

    code = "FAILED_PRECONDITION"
    reason = "MODEL_LOAD_FAILED"


class EmbeddingIdMismatch(ShoalError):
    """The model would not give vectors with the id that `expect_embedding_id` requires: its files,
    its card or an option changed. The message has both ids and, where it is known, the difference.
    """

    code = "FAILED_PRECONDITION"
    reason = "EMBEDDING_ID_MISMATCH"


class AliasChanged(ShoalError):
    """Another caller changed the alias since it was read. Read it again, then repeat the change."""

    code = "FAILED_PRECONDITION"
    reason = "ALIAS_CHANGED"


class NotReady(ShoalError):
    """A process has not read the state of the mesh yet: no answer is better than a wrong one."""

    code = "FAILED_PRECONDITION"
    reason = "NOT_READY"
    default_retry_after = 1.0


class Outdated(ShoalError):
    """The other process has a version that this one no longer supports."""

    code = "FAILED_PRECONDITION"
    reason = "OUTDATED"


class ModelChanged(ShoalError):
    """The requests of one call were answered by two revisions of the model, so its rows would not
    be comparable. Repeat it.
    """

    code = "ABORTED"
    reason = "MODEL_CHANGED"


class Overloaded(ShoalError):
    """The mesh has reached a limit of admission control."""

    code = "RESOURCE_EXHAUSTED"
    reason = "RESOURCE_EXHAUSTED"


class QueueFull(Overloaded):
    """The model's lane holds as many tokens as it may."""

    reason = "QUEUE_FULL"
    default_retry_after = 1.0


class RateLimited(Overloaded):
    """The tenant's quota is used up."""

    reason = "RATE_LIMITED"
    default_retry_after = 1.0


class OutOfMemory(ShoalError):
    """An item needs more memory than its worker has, even alone: shorten it, let it be truncated,
    or ask a larger pool.
    """

    code = "RESOURCE_EXHAUSTED"
    reason = "OUT_OF_MEMORY"


class Unavailable(ShoalError):
    """The request cannot be served now."""

    code = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class CannotConnect(Unavailable):
    """No router answered: the connection was refused or lost, or the name was not found. Retried,
    at the next address if one is configured.

    Attributes:
        was_sent: False without a connection, so that no router has received the request.
    """

    reason = "CANNOT_CONNECT"
    was_sent = True


class TlsFailed(CannotConnect):
    """The router's certificate is not trusted, or it does not use TLS. A router that refuses our
    certificate does not say so but closes the connection, which is CannotConnect."""

    reason = "TLS_FAILED"
    was_sent = False


class NoCapacity(Unavailable):
    """No component can take the work now: for instance, no worker is registered, or Redis cannot be
    reached.
    """

    reason = "NO_CAPACITY"
    default_retry_after = 1.0


class Draining(Unavailable):
    """The router is shutting down; the request is retried at another."""

    reason = "DRAINING"
    default_retry_after = 0.1


class WorkerLost(Unavailable):
    """The maximum number of workers died with the request. It is not retried, because it may crash
    them.
    """

    reason = "WORKER_LOST"


class DeadlinePassed(ShoalError):
    """The answer did not arrive within the timeout."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_PASSED"
    earlier: ShoalError | None = None
    """Why an earlier try of the request failed, if one did."""


class InternalError(ShoalError):
    """A fault of the mesh. Callers see a fixed text and the request id, under which its logs say
    more.
    """


def _subclasses(kind: type[ShoalError]) -> list[type[ShoalError]]:
    return [below for child in kind.__subclasses__() for below in (child, *_subclasses(child))]


BY_REASON: Final[Mapping[str, type[ShoalError]]] = {
    kind.reason: kind for kind in reversed(_subclasses(ShoalError))
}
"""The class of each reason."""
BY_CODE: Final[Mapping[str, type[ShoalError]]] = {
    kind.code: kind for kind in reversed(ShoalError.__subclasses__())
}
"""The broadest class of each code, for reasons that a newer mesh may have."""
