"""The chunks of a job while its texts are read, and the vectors of those that were computed.

A worker divides texts and computes vectors at the same time: `GrowingJob` collects the prepared
chunks, and `computed_rows` selects the first chunks of which all vectors are computed, so
that they can be sent before the answer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from libs.models.interface.results import Chunks
from libs.models.interface.sequences import (
    GeneratedIds,
    InputSequence,
    Output,
    Prepared,
    SparseRow,
    is_finite,
)
from libs.models.interface.work import EncodeWork, Span
from libs.models.text.checks import item_path
from libs.models.text.processing.chunking.span_pooling import GrowingWindows, PooledWindow
from libs.models.text.tokenising.late import Kept

PORTION_CHARACTERS: Final = 8192
"""Characters of chunks that are tokenised together, several milliseconds of work."""
_GROWTH_DIVISOR: Final = 4
"""A job is passed on again when it has grown by this part, so that copies of it cost a constant
factor."""


class ChunkTable:
    """The chunks of a work's texts so far, in order."""

    def __init__(self, work: EncodeWork) -> None:
        self._work = work
        self._offsets = [0]
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._pages: list[int] = []
        self._texts: list[str] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, index: int, spans: Sequence[Span], own: str) -> None:
        """Add chunks of the last text that has some, or of the next one.

        Args:
            own: The text, as far as it was read.
        """
        work = self._work
        if index == len(self._offsets) - 1:
            self._offsets.append(self._offsets[-1])
        self._offsets[-1] += len(spans)
        self._starts += [span.start for span in spans]
        self._ends += [span.end for span in spans]
        if work.documents:
            document = work.documents.get(index)
            pages = None if document is None else document.pages
            self._pages += [0 if pages is None else pages.page_at(span.start) for span in spans]
        if work.chunking is not None and work.chunking.return_text:
            self._texts += [own[span.start : span.end] for span in spans]

    def chunks(self, tokens: Sequence[int]) -> Chunks:
        """Return the chunks so far. `tokens` holds those of each one."""
        return Chunks(
            list(self._offsets),
            list(self._starts),
            list(self._ends),
            list(tokens),
            pages=list(self._pages),
            texts=list(self._texts),
        )


class Growth:
    """Decides when to pass on a job that grows."""

    def __init__(self) -> None:
        self._passed_on = 0

    def is_due(self, chunks: int) -> bool:
        """Return whether a job of this many chunks has grown enough since it was passed on."""
        if chunks - self._passed_on <= self._passed_on // _GROWTH_DIVISOR:
            return False
        self._passed_on = chunks
        return True


@dataclass(frozen=True, slots=True)
class EmbeddingNotes:
    """The state of a job between `prepare` and `finish`."""

    masks: list[Kept]
    """`EncodedTexts.masks` of all sequences."""
    found: list[SparseRow]
    """Results of texts that needed no forward; they precede all others."""
    chunks: Chunks | None = None
    """The chunks of divided texts."""
    windows: tuple[PooledWindow, ...] = ()
    """The window of each sequence, if texts are pooled by spans. Their chunks are those of the job.
    """
    window_ranges: NDArray[np.int64] | None = None
    """[chunks, 2]: the first window that has a part of each chunk, and the end of these windows."""


def embedding_notes(prepared: Prepared) -> EmbeddingNotes:
    """Return the state of a job of an embedding model."""
    return cast(EmbeddingNotes, prepared.notes)


class GrowingJob:
    """The prepared part of a job with chunks, each of which is a sequence or was looked up."""

    def __init__(self, work: EncodeWork, head: str) -> None:
        self.work, self._head = work, head
        self.table, self.growth = ChunkTable(work), Growth()
        self.tokens: list[int] = []
        self.waiting_characters = 0
        # State: chunks that are not tokenised yet, with their paths; and the parts of the prepared
        # job and its notes.
        self._waiting: list[str] = []
        self._waiting_paths: list[str] = []
        self._sequences: list[InputSequence] = []
        self._paths: list[str] = []
        self._masks: list[Kept] = []
        self._found: list[SparseRow] = []
        self._looked_up = 0
        self._cut: tuple[str, ...] = ()

    def add(self, index: int, spans: Sequence[Span], context: str) -> None:
        """Add chunks of a text, to be tokenised later."""
        own, _ = self.work.read_text(index, 0)
        self.table.add(index, spans, own)
        pieces = [f"{context}{span.context}{own[span.start : span.end]}" for span in spans]
        self._waiting += pieces
        self._waiting_paths += [item_path(index)] * len(spans)
        self.waiting_characters += sum(map(len, pieces))

    def take_waiting(self) -> tuple[list[str], list[str]]:
        """Return the chunks that are not tokenised yet, and their paths, and forget them."""
        found = self._waiting, self._waiting_paths
        self._waiting, self._waiting_paths, self.waiting_characters = [], [], 0
        return found

    def extend(self, part: Prepared, paths: Sequence[str]) -> None:
        """Add tokenised chunks."""
        notes = embedding_notes(part)
        self.tokens += [one.tokens for one in part.sequences] or [0] * len(paths)
        self._sequences += part.sequences
        self._paths += paths if part.sequences else ()
        self._masks += notes.masks
        self._found += notes.found
        self._looked_up += part.looked_up
        self._cut += part.cut

    def prepared(self) -> Prepared:
        """Return the prepared part. Earlier results stay valid for their sequences."""
        return Prepared(
            self.work,
            self._head if self._sequences else "sparse",
            list(self._sequences),
            EmbeddingNotes(list(self._masks), list(self._found), self.table.chunks(self.tokens)),
            looked_up=self._looked_up,
            cut=self._cut,
            fields=tuple(self._paths),
        )


class GrowingLateJob:
    """The prepared part of a job with late chunks.

    Args:
        adapter: Of all sequences; empty for none.
        mask: Returns which token vectors of a sequence are returned.
    """

    def __init__(
        self, work: EncodeWork, head: str, adapter: str, mask: Callable[[InputSequence], Kept]
    ) -> None:
        self._work, self._head, self._adapter, self._mask = work, head, adapter, mask
        self._table, self._growth = ChunkTable(work), Growth()
        # State: the current text's index and windows as they grow, the chunks of all texts before
        # it, and the parts of the prepared job.
        self._index = -1
        self._growing: GrowingWindows | None = None
        self._first = 0
        self._tokens: list[int] = []
        self._windows: list[PooledWindow] = []
        self._paths: list[str] = []
        self._masks: list[Kept] = []

    @property
    def chunks(self) -> int:
        """Return the chunks of all texts that are known."""
        return self._first + (0 if self._growing is None else len(self._growing.spans))

    def is_due(self) -> bool:
        """Return whether the job has grown enough since it was passed on."""
        return self._growth.is_due(len(self._windows))

    def begin_text(self, windows: GrowingWindows) -> None:
        """Begin the next text."""
        self._first = len(self._tokens)
        self._growing = windows
        self._index += 1

    def extend(self, *, is_whole: bool) -> list[int]:
        """Add the windows of the text that are known, and the chunks that these have wholly. Return
        the tokens of each of these chunks.

        Args:
            is_whole: All tokens and chunks of the text are known.
        """
        if self._growing is None:
            raise ValueError("no text was begun")
        for window in self._growing.take(is_whole=is_whole):
            sequence = replace(window.sequence, adapter=self._adapter)
            self._windows.append(
                replace(window, sequence=sequence, chunks=window.chunks + self._first)
            )
            self._masks.append(self._mask(sequence))
            self._paths.append(item_path(self._index))
        counts = self._growing.take_counts()
        if counts:
            known = len(self._tokens) - self._first
            own, _ = self._work.read_text(self._index, 0)
            self._table.add(self._index, self._growing.spans[known : known + len(counts)], own)
            self._tokens += counts
        return counts

    def prepared(self) -> Prepared:
        """Return the prepared part. Earlier results stay valid for their sequences."""
        notes = EmbeddingNotes(
            list(self._masks),
            [],
            self._table.chunks(self._tokens),
            tuple(self._windows),
            _window_ranges(self._windows, len(self._tokens)),
        )
        sequences = [window.sequence for window in self._windows]
        return Prepared(self._work, self._head, sequences, notes, fields=tuple(self._paths))


def _window_ranges(windows: Sequence[PooledWindow], chunks: int) -> NDArray[np.int64]:
    """Return [chunks, 2]: the first window of each of the first chunks, and the end."""
    found = np.zeros((chunks, 2), np.int64)
    for number in range(len(windows) - 1, -1, -1):
        own = windows[number].chunks
        found[own[own < chunks], 0] = number
    for number, window in enumerate(windows):
        found[window.chunks[window.chunks < chunks], 1] = number + 1
    return found


def slice_chunks(chunks: Chunks, first: int, end: int) -> Chunks:
    """Return some of the chunks. The first one may continue a text."""
    low = bisect_right(chunks.offsets, first) - 1
    high = bisect_left(chunks.offsets, end)
    offsets = [min(max(one, first), end) - first for one in chunks.offsets[low : high + 1]]
    return Chunks(
        offsets,
        chunks.starts[first:end],
        chunks.ends[first:end],
        chunks.tokens[first:end],
        pages=chunks.pages[first:end],
        texts=chunks.texts[first:end],
        continues=first > chunks.offsets[low],
    )


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Chunks `first` to `end` of a job, and the indices of the sequences of their vectors."""

    first: int
    end: int
    sequences: Sequence[int]


def computed_rows(
    notes: EmbeddingNotes, outputs: Mapping[int, Output], first: int, most_bytes: int
) -> ChunkRows | None:
    """Return the next chunks from `first` on of which all vectors are computed; None without any.

    The time depends on the chunks that are returned, not on those of the job.

    Args:
        notes: Those of a job with chunks.
        most_bytes: Of the vectors of all returned chunks, as they are computed. The first one may
            have more.
    """
    if notes.chunks is None:
        return None
    ranges, end, left = notes.window_ranges, first, most_bytes
    sizes = (
        _sizes(outputs, first)
        if ranges is None
        else _late_sizes(notes.windows, ranges, outputs, first)
    )
    most = notes.chunks.offsets[-1] - 1 - first  # the last chunk is left to the answer
    for size in islice(sizes, max(0, most)):
        left -= size
        if left < 0 and end > first:
            break
        end += 1
    if end <= first:
        return None
    if ranges is None:
        return ChunkRows(first, end, range(first, end))
    sequences = {number for own in ranges[first:end].tolist() for number in range(*own)}
    return ChunkRows(first, end, sorted(sequences))


def _sizes(outputs: Mapping[int, Output], first: int) -> Iterator[int]:
    """Yield the bytes of each chunk from `first` on that is computed."""
    index = first
    while (output := outputs.get(index)) is not None and is_finite(output):
        yield output_bytes(output)
        index += 1


def _late_sizes(
    windows: Sequence[PooledWindow],
    ranges: NDArray[np.int64],
    outputs: Mapping[int, Output],
    first: int,
) -> Iterator[int]:
    """Yield the bytes of each late chunk from `first` on of which all windows are computed."""
    sizes: dict[int, int] = {}
    for chunk in range(first, len(ranges)):
        begin, end = ranges[chunk].tolist()
        for number in range(begin, end):
            if number in sizes:
                continue
            output = outputs.get(number)
            if output is None or not is_finite(output):
                return
            sizes[number] = output_bytes(output) // len(windows[number].chunks)
        yield sum(sizes[number] for number in range(begin, end))


def cut_window(
    window: PooledWindow, output: Output, rows: ChunkRows, spans: Sequence[bool]
) -> tuple[PooledWindow, Output]:
    """Return a window and its output without other chunks than `rows`, which are counted from the
    first one.

    Args:
        spans: Whether each head pools spans, so that its output has a row for each chunk; those of
            other heads have a row for each token.
    """
    kept = (window.chunks >= rows.first) & (window.chunks < rows.end)
    parts = output if isinstance(output, tuple) else (output,)
    cut = tuple(
        part[kept] if is_span and isinstance(part, np.ndarray) else part
        for part, is_span in zip(parts, spans, strict=True)
    )
    own = replace(window, chunks=window.chunks[kept] - rows.first, rows=window.rows[kept])
    return own, cut if isinstance(output, tuple) else cut[0]


def output_bytes(output: Output) -> int:
    """Return the bytes of an output's numbers."""
    if isinstance(output, tuple):
        return sum(map(output_bytes, output))
    if isinstance(output, SparseRow):
        return output.values.nbytes + output.indices.nbytes
    return output.ids.nbytes if isinstance(output, GeneratedIds) else output.nbytes
