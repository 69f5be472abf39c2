"""The plan of an inference call: how its items become requests, and the replies one result.
Implemented for each verb.

`shoal.calls` executes plans; it knows nothing else of a verb.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from shoal.results import Skipped
from shoal.transport.methods import Method

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A", contravariant=True)
B = TypeVar("B", covariant=True)

MAX_REPEATED_BYTES: Final = 192 << 20
"""What all items of a request may repeat: routers let a request make a worker read 256 MiB, of
which items are 64 MiB at most.
"""
MAX_ANSWERED_BYTES: Final = 4 << 20
"""Maximum bytes of labels with scores that the answer to a request may repeat, as routers allow;
results that depend on the items share the same limit.
"""


ANY_NUMBER: Final = sys.maxsize
"""Of items: what routers allow is the default of the client's own limit."""


class Sink(Protocol[A, B]):
    """Collects the replies to one try of a request, in order: one, or those of a stream."""

    def take(self, reply: A) -> None: ...

    def finish(self) -> B:
        """Return the result, after the last reply."""


class SingleReply(Generic[R, T]):
    """The Sink of a request with one reply."""

    def __init__(self, decode: Callable[[R], T]) -> None:
        self._decode = decode
        self._results: list[T] = []

    def take(self, reply: R) -> None:
        self._results.append(self._decode(reply))

    def finish(self) -> T:
        return self._results[-1]


class Plan(ABC, Generic[Q, R, T]):
    """An inference verb with its arguments, for a list of items that may be sent as several
    requests.

    Args:
        method: The RPC method of each request.
        name: The name of the list in requests and field paths.
        lengths: Characters of each item.
        invalid: Items that are known to be invalid and are not sent; None: any invalid item fails
            the call.
        repeated_bytes: Bytes that a model may read again with each item: the query and labels.
        answered_bytes: Bytes that the answer may repeat for each item: labels with their scores.
    """

    method: Method[Q, R]
    name: str
    most_items: int = ANY_NUMBER
    """Of a request; fewer where items have pages of documents."""
    stream: Method[Q, R] | None = None
    """The method for an answer that is expected to be large; a router that does not have it is
    called by `method`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        invalid: Sequence[Skipped] | None,
        *,
        repeated_bytes: int,
        answered_bytes: int = 0,
    ) -> None:
        self.lengths, self.invalid = lengths, invalid
        self._repeated_bytes, self._answered_bytes = repeated_bytes, answered_bytes

    @property
    def max_items(self) -> int:
        """The most items of one request that a router admits."""
        read, answered = max(1, self._repeated_bytes), max(1, self._answered_bytes)
        return max(
            1, min(self.most_items, MAX_REPEATED_BYTES // read, MAX_ANSWERED_BYTES // answered)
        )

    def places(self) -> Sequence[int]:
        """Return the indices of the items to send."""
        every = range(len(self.lengths))
        if not self.invalid:
            return every
        skipped = {invalid.index for invalid in self.invalid}
        return [index for index in every if index not in skipped]

    def is_large(self, lengths: Sequence[int]) -> bool:
        """Return True if the answer to items of these lengths (in characters) is expected to be
        large.
        """
        return False

    @abstractmethod
    def build(self, places: Sequence[int]) -> Q:
        """Return the request for the items at these indices. Raises InvalidInput."""

    @abstractmethod
    def sink(self, places: Sequence[int]) -> Sink[R, T]:
        """Return a new sink for the replies to these items; each attempt needs its own."""

    @abstractmethod
    def merge(self, results: Sequence[T]) -> T:
        """Return one result from those of all requests, in order; there may be none."""

    def insert_skipped(self, result: T, kept: Sequence[int], skipped: Sequence[Skipped]) -> T:
        """Expand the result for the items at `kept` to all items: the `skipped` ones get empty
        rows.

        The default is for plans with `invalid` None: none of their items is skipped, so their
        result is complete.
        """
        return result
