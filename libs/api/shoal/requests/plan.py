"""The plan of an inference call: how its items become requests, and the replies one result.
Implemented for each verb. Pure.

`shoal.calls` executes plans; it knows nothing else of a verb. The router validates requests. Only
values that a message cannot hold at all are refused here, with the same InvalidInput and field
path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from shoal.errors import InvalidInput
from shoal.requests import words
from shoal.requests.items import (
    ANY_NUMBER,
    SharedFiles,
    enum_value,
    find_problem,
    item_lengths,
    item_messages,
    max_request_items,
    message,
)
from shoal.results import Skipped
from shoal.tasks import Item
from shoal.transport.methods import Method
from shoal.v1 import inference_pb2 as pb

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A", contravariant=True)
B = TypeVar("B", covariant=True)
ItemRequest = TypeVar("ItemRequest", pb.EncodeRequest, pb.ScoreRequest, pb.ExtractRequest)
M = TypeVar("M")

MAX_REPEATED_BYTES: Final = 192 << 20
"""Maximum bytes that are repeated with all items of a request: a request may make a worker read 256
MiB, of which items are 64 MiB at most.
"""
MAX_ANSWERED_BYTES: Final = 4 << 20
"""Maximum bytes of labels with scores that the answer to a request may repeat, as routers allow;
results that depend on the items share the same limit.
"""


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


class RequestPlan(ABC, Generic[Q, R, T]):
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
    """Maximum number of items of a request; fewer where items have pages of documents."""
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


_ENUM_OPTIONS: Final[Mapping[str, Mapping[Any, object]]] = {
    "truncation": words.TRUNCATIONS,
    "priority": words.PRIORITIES,
}
_CLIENT_OPTIONS: Final = frozenset({"timeout", "on_progress", "on_invalid"})
"""Options that are not fields of requests."""


def request_frame(
    kind: Callable[..., M], model: str, options: Mapping[str, Any], /, **values: object
) -> M:
    """Return a request without items: with the options that are fields of it, and `values`. Raises
    InvalidInput.
    """
    given = {
        name: enum_value(name, value, _ENUM_OPTIONS[name]) if name in _ENUM_OPTIONS else value
        for name, value in options.items()
        if name not in _CLIENT_OPTIONS
    }
    return message(kind, model=model, **{k: v for k, v in given.items() if v is not None}, **values)


class ItemPlan(RequestPlan[ItemRequest, R, T]):
    """The plan of a verb over texts, images and documents.

    Args:
        frame: The request without its items.
        options: The options of the call.
        further_bytes: Bytes that a model may read again with each item, beyond those of the frame.
    """

    def __init__(
        self,
        frame: ItemRequest,
        items: list[Item],
        options: Mapping[str, Any],
        *,
        further_bytes: int = 0,
        answered_bytes: int = 0,
    ) -> None:
        self._frame: ItemRequest = frame
        self._items = items
        self.most_items = max_request_items(items)
        super().__init__(
            item_lengths(items),
            self._find_invalid(options.get("on_invalid", "raise")),
            repeated_bytes=frame.ByteSize() + further_bytes,
            answered_bytes=answered_bytes,
        )

    def build(self, places: Sequence[int]) -> ItemRequest:
        request = type(self._frame)()
        request.CopyFrom(self._frame)
        files = SharedFiles(self._items, places)
        messages = item_messages(self.name, self._items, places, files)
        getattr(request, self.name).extend(messages)
        request.files.extend(files.data())
        return request

    def whole(self) -> ItemRequest:
        """Return all items in one request. Raises InvalidInput for an invalid one."""
        return self.build(range(len(self._items)))

    def _find_invalid(self, on_invalid: str) -> list[Skipped] | None:
        """Return the items that are invalid without asking a router: empty ones, and those that are
        neither text nor image. None: an invalid item fails the call (`on_invalid="raise"`).
        """
        if on_invalid == "raise":
            return None
        if on_invalid != "skip":
            raise InvalidInput(
                f"on_invalid is {on_invalid!r}; it must be one of raise, skip", field="on_invalid"
            )
        found = (
            (index, find_problem(f"{self.name}[{index}]", item))
            for index, item in enumerate(self._items)
        )
        return [Skipped(index, InvalidInput.reason, problem) for index, problem in found if problem]


def spans(lengths: Sequence[int], *, max_items: int, max_characters: int) -> list[range]:
    """Consecutive ranges of item indices, each of at most `max_items` items and, unless it is a
    single item, `max_characters`.

    Ranges are of even size where the lengths allow, so that no small remainder is sent alone. None
    for an empty list.
    """
    if not lengths:
        return []
    parts = -(-len(lengths) // max_items)
    even = -(-len(lengths) // parts)
    found, begin, characters = [], 0, 0
    for index, length in enumerate(lengths):
        if index > begin and (index - begin == even or characters + length > max_characters):
            found.append(range(begin, index))
            begin, characters = index, 0
        characters += length
    return [*found, range(begin, len(lengths))]
