"""Late chunking: a whole text as one sequence, or as overlapping windows if the model takes fewer
tokens, and its chunks' vectors.

1. Within the model's length this is the published method (Günther et al., arXiv 2409.04701, and its
   evaluation in jina-ai/late-chunking). The whole text with its special tokens and prompt is one
   sequence, and a chunk's vector is pooled from the states of its tokens. The first chunk also has
   the tokens before the text, the last one those after it, so a single chunk has the text's vector.
2. Beyond that length it is the paper's "long late chunking" (section 3.1). Each window begins some
   tokens before the end of the previous one, and its states of these tokens are discarded. Every
   window has the special tokens and the prompt, as any sequence of the model has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from libs.catalog.card import PoolingMode
from libs.errors import InvalidInput
from libs.models.interface.sequences import InputSequence
from libs.models.interface.work import Span
from libs.models.text.heads.linear import HeadLinear
from libs.models.text.heads.spans import SpanRows
from libs.models.text.tokenising.late import Kept
from libs.models.text.tokenising.whole import WholeText

SPANS_HEAD: Final = "dense_spans"
"""The name of the head that pools spans."""

WINDOW_OVERLAP: Final = 256
"""Tokens of a text that a window repeats from the previous one; at most a quarter of the window."""

SPAN_POOLINGS: Final[frozenset[PoolingMode]] = frozenset(
    {"cls", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"}
)
"""Poolings that are sums of weighted states. Models that pool [CLS] use the mean for spans."""

_UNKNOWN: Final = -1
"""The rows of a chunk that are not known yet."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PooledWindow:
    """A sequence of a text, and the chunks that it contains parts of."""

    sequence: InputSequence
    chunks: NDArray[np.int64]
    """The numbers of the chunks, ascending, in the order of the window's output."""
    rows: NDArray[np.int64]
    """[chunks, 2]: the first token of the sequence that belongs to each chunk, and the end."""


class SpanPooling:
    """The pooling of spans of one model. Without `modes` spans have only token vectors.

    `layers` are those after the pooling, on the CPU, for threads that finish answers."""

    def __init__(
        self, modes: Sequence[PoolingMode] = (), layers: Sequence[HeadLinear] = ()
    ) -> None:
        self._modes = tuple(modes)
        self._layers = tuple(layers)

    @staticmethod
    def is_able(modes: Sequence[PoolingMode]) -> bool:
        """Return whether spans can be pooled by these modes."""
        return bool(modes) and SPAN_POOLINGS.issuperset(modes)

    @property
    def has_vectors(self) -> bool:
        """Return whether a span has a dense vector."""
        return bool(self._modes)

    def grow(self, limit: int, *, pools_prompt: bool, path: str) -> GrowingWindows:
        """Return the windows of the next text, each of at most `limit` tokens."""
        return GrowingWindows(self._modes, limit, pools_prompt=pools_prompt, path=path)

    def vectors(
        self, windows: Sequence[PooledWindow], outputs: Sequence[Array], offsets: Sequence[int]
    ) -> Iterator[Array]:
        """Yield [chunks, dimensions] of each text, from the outputs of all windows.

        Args:
            offsets: The first chunk of each text, and the end.
        """
        total = np.zeros((offsets[-1], outputs[0].shape[1]), np.float32)
        for window, rows in zip(windows, outputs, strict=True):
            total[window.chunks] += rows
        for begin, end in pairwise(offsets):
            pooled = torch.from_numpy(total[begin:end])
            with torch.inference_mode():
                for layer in self._layers:
                    pooled = layer(pooled)
            found: Array = pooled.numpy()
            yield found

    @staticmethod
    def token_rows(
        windows: Sequence[PooledWindow],
        outputs: Sequence[Array],
        kept: Sequence[Kept],
        chunks: int,
    ) -> list[Array]:
        """Return the token vectors of each chunk.

        Args:
            kept: The vectors of each window that are returned (None: all).
        """
        parts: list[list[Array]] = [[] for _ in range(chunks)]
        for window, rows, mask in zip(windows, outputs, kept, strict=True):
            for chunk, (low, high) in zip(
                window.chunks.tolist(), window.rows.tolist(), strict=True
            ):
                own = rows[low:high]
                parts[chunk].append(own if mask is None else own[mask[low:high]])
        return [np.concatenate(own) for own in parts]


class GrowingWindows:
    """The windows of one text, as its tokens and chunks become known.

    Only the tokens of windows and chunks that are not known yet are kept, and only the chunks with
    such tokens are looked at, so the time is proportional to the text.

    Args:
        modes: The model's poolings; empty for token vectors alone.
        limit: Maximum tokens of a window.
        pools_prompt: Whether the prompt's tokens are pooled with the first chunk's.
        path: The item, for errors.
    """

    def __init__(
        self, modes: Sequence[PoolingMode], limit: int, *, pools_prompt: bool, path: str
    ) -> None:
        self._modes, self._limit, self._path = modes, limit, path
        self._pools_prompt = pools_prompt
        # State: the tokens before the text and the special tokens after it; the text's tokens from
        # `_base` on, and their places; the chunks, whether these are all, and how many of the first
        # ones were counted; those with tokens that no window has yet (number, start, end, and their
        # rows once these are known); the first token of the next window, and the end of those that
        # the windows before it have.
        self._lead, self._own, self._closing = _Tokens(), _Tokens(), _Tokens()
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._base = 0
        self.spans: list[Span] = []
        self._has_all_chunks = False
        self._counts: dict[int, int] = {}
        self._counted = 0
        self._open: NDArray[np.int64] = np.zeros((0, 5), np.int64)
        self._begin = self._owned = 0
        self._is_done = False

    def read(self, tokens: Iterator[WholeText], chunks: Iterator[list[Span]]) -> Iterator[bool]:
        """Read all parts of the text's tokens and chunks, as they need each other. Yield after each
        part of tokens whether these are all.

        Args:
            chunks: In the order of their starts, unless one part has all of them.
        """
        for spans in chunks:
            first = len(self.spans)
            self.spans += spans
            found = [
                (number, span.start, span.end, _UNKNOWN, _UNKNOWN)
                for number, span in enumerate(spans, first)
            ]
            self._open = np.concatenate((self._open, np.array(found, np.int64)))
            while self._end < spans[-1].end and (part := next(tokens, None)) is not None:
                self._add(part)
                yield False
        self._has_all_chunks = True
        for part in tokens:
            self._add(part)
            yield False
        yield True

    @property
    def kept_tokens(self) -> int:
        """Return the tokens of the text that are kept."""
        return len(self._starts)

    @property
    def _known(self) -> int:
        """Return the tokens of the text that are known."""
        return self._base + len(self._starts)

    @property
    def _end(self) -> int:
        """Return the code point at which the last known token begins."""
        return int(self._starts[-1]) if len(self._starts) else -1

    def _add(self, part: WholeText) -> None:
        types = part.type_ids
        if not len(self._starts):
            self._closing = _Tokens(part.closing_ids, part.closing_type_ids)
        self._lead = self._lead.and_more(part.ids, types, slice(0, part.first))
        self._own = self._own.and_more(part.ids, types, slice(part.first, part.end))
        before = self._starts[-1:]
        starts = np.maximum.accumulate(np.concatenate((before, part.starts)))
        self._starts = np.concatenate((self._starts, starts[len(before) :]))

    def take(self, *, is_whole: bool = False) -> list[PooledWindow]:
        """Return the next windows that later tokens and chunks do not change. Raises InvalidInput.

        Args:
            is_whole: All tokens and chunks are known.
        """
        own = self._known
        if is_whole and not own + len(self._lead.ids):
            raise InvalidInput(
                f"{self._path} has no token in the model's tokenizer", field=self._path
            )
        if not (own or is_whole):
            return []  # the prompt may go on
        room = self._limit - len(self._lead.ids) - len(self._closing.ids)
        if room < 2:
            raise InvalidInput(
                f"the prompt leaves no tokens for a text: the model's maximum is {self._limit}",
                field="instruction",
            )
        self._place_chunks(is_whole=is_whole)
        windows: list[PooledWindow] = []
        while not self._is_done:
            end = min(self._begin + room, own)
            is_last = is_whole and end == own
            if not is_last and not self._is_known(end, is_whole=is_whole):
                break
            windows.append(self._window(end, is_last=is_last))
            self._begin, self._owned = end - min(WINDOW_OVERLAP, room // 4), end
            self._is_done = is_last
        self._forget_tokens()
        return [window for window in windows if len(window.chunks)]

    def take_counts(self) -> list[int]:
        """Return the number of tokens of each of the next chunks that the windows have wholly."""
        found = []
        while (count := self._counts.pop(self._counted, None)) is not None:
            found.append(count)
            self._counted += 1
        return found

    def _is_known(self, end: int, *, is_whole: bool) -> bool:
        """Return whether the chunks with tokens before `end`, and all of their tokens, are known,
        and that the text has further tokens.
        """
        if is_whole:
            return True
        if end >= self._known:
            return False
        # A chunk in which no token begins has the token before it.
        place = self._starts[end - self._base]
        has_chunks = self._has_all_chunks or self.spans[-1].start > place
        return has_chunks and not bool(((self._open[:, 1] <= place) & self._is_unplaced).any())

    @property
    def _is_unplaced(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self._open[:, 4] == _UNKNOWN
        return found

    def _place_chunks(self, *, is_whole: bool) -> None:
        """Find the rows of the whole text that each chunk pools: the first one and the end, which
        are final if a token begins at the chunk's end or later.

        A chunk in which no token begins has the previous token, which it lies within.
        """
        is_known = self._is_unplaced & (is_whole | (self._open[:, 2] <= self._end))
        places, own, first = self._open[is_known, 1:3], self._known, len(self._lead.ids)
        begins, ends = self._base + np.searchsorted(self._starts, places, side="left").T
        is_empty = begins >= ends
        begins = np.where(is_empty, np.maximum(begins - 1, 0), begins)
        ends = np.where(is_empty, np.minimum(begins + 1, own), ends)
        lows = np.where(begins == 0, 0 if self._pools_prompt else first, first + begins)
        rows = first + own + len(self._closing.ids)
        highs = np.where((ends == own) & is_whole, rows, first + ends)
        self._open[is_known, 3:] = np.stack((np.minimum(lows, highs - 1), highs), axis=1)

    def _forget_tokens(self) -> None:
        """Forget the tokens before the next window, except those that chunks may need."""
        needed = self._open[self._is_unplaced, 1].tolist()
        if not self._has_all_chunks:
            needed.append(self.spans[-1].start)
        place = min(needed, default=self._end)
        # A chunk in which no token begins has the token before it.
        before = max(0, int(np.searchsorted(self._starts, place, side="left")) - 1)
        count = max(0, min(before, self._begin - self._base))
        self._own = self._own.from_token(count)
        self._starts = self._starts[count:]
        self._base += count

    def _window(self, end: int, *, is_last: bool) -> PooledWindow:
        """Build the window of the text's tokens from the next one to `end`."""
        first, begin = len(self._lead.ids), self._begin
        low = 0 if begin == 0 else first + self._owned
        high = first + end + (len(self._closing.ids) if is_last else 0)
        numbers, ranges, is_placed = self._open[:, 0], self._open[:, 3:], ~self._is_unplaced
        lows, highs = np.maximum(ranges[:, 0], low), np.minimum(ranges[:, 1], high)
        is_here = is_placed & (lows < highs)
        chunks, ranges, lows, highs = (one[is_here] for one in (numbers, ranges, lows, highs))
        is_over = is_placed & (self._open[:, 4] <= high)
        for number, _, _, row, row_end in self._open[is_over].tolist():
            self._counts[number] = row_end - row
        self._open = self._open[~is_over]
        counts = highs - lows
        begins = np.where(lows < first, lows, lows - begin)
        own = slice(begin - self._base, end - self._base)
        sequence = self._lead.and_more(self._own.ids, self._own.types, own).and_more(
            self._closing.ids, self._closing.types, slice(None)
        )
        found = InputSequence(sequence.ids, sequence.types)
        places = np.stack((begins, begins + counts), axis=1)
        if not self._modes or not len(chunks):
            return PooledWindow(found, chunks, places)
        rows = np.concatenate(
            [np.arange(low, high, dtype=np.int32) for low, high in places.tolist()]
        )
        weights = [
            self._weights(np.arange(low, high) - begin, end - begin)
            for low, high, (begin, end) in zip(
                lows.tolist(), highs.tolist(), ranges.tolist(), strict=True
            )
        ]
        spans = SpanRows(rows, np.concatenate(weights), counts.astype(np.int32))
        return PooledWindow(replace(found, input=spans), chunks, places)

    def _weights(self, places: NDArray[np.int64], count: int) -> NDArray[np.float32]:
        """Return [places, poolings]: the weights of some tokens of a chunk of `count`, by their
        places in it."""
        columns = []
        for mode in self._modes:
            match mode:
                case "lasttoken":
                    columns.append((places == count - 1).astype(np.float32))
                case "weightedmean":
                    columns.append(((places + 1) / (count * (count + 1) / 2)).astype(np.float32))
                case "mean_sqrt_len_tokens":
                    columns.append(np.full(len(places), 1 / np.sqrt(count), np.float32))
                case _:
                    columns.append(np.full(len(places), 1 / count, np.float32))
        return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True)
class _Tokens:
    ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    types: NDArray[np.int32] | None = None

    def and_more(
        self, ids: NDArray[np.int32], types: NDArray[np.int32] | None, which: slice
    ) -> _Tokens:
        """Return these tokens and some of the others."""
        if types is None:
            return _Tokens(np.concatenate((self.ids, ids[which])))
        own = np.zeros(0, np.int32) if self.types is None else self.types
        return _Tokens(np.concatenate((self.ids, ids[which])), np.concatenate((own, types[which])))

    def from_token(self, first: int) -> _Tokens:
        """Return the tokens from one on."""
        return _Tokens(self.ids[first:], None if self.types is None else self.types[first:])
