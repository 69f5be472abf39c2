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

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from libs.models.text.tokenising.text import WholeText

SPANS_HEAD: Final = "dense_spans"
"""The name of the head that pools spans."""

WINDOW_OVERLAP: Final = 256
"""Tokens of a text that a window repeats from the previous one; at most a quarter of the window."""

SPAN_POOLINGS: Final[frozenset[PoolingMode]] = frozenset(
    {"cls", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"}
)
"""Poolings that are sums of weighted states. Models that pool [CLS] use the mean for spans."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Window:
    """A sequence of a text, and the chunks that it contains parts of."""

    sequence: InputSequence
    chunks: NDArray[np.int64]
    """The chunks of the text, in the order of the window's output."""
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

    def windows(
        self, whole: WholeText, spans: Sequence[Span], limit: int, *, pools_prompt: bool, path: str
    ) -> tuple[list[Window], list[int]]:
        """Return the sequences of a text, each of at most `limit` tokens, and the number of tokens
        that each chunk pools. Raises InvalidInput.
        """
        own, after = whole.end - whole.first, len(whole.ids) - whole.end
        room = limit - whole.first - after
        if not len(whole.ids):
            raise InvalidInput(f"{path} has no token in the model's tokenizer", field=path)
        if room < 2:
            raise InvalidInput(
                f"the prompt leaves no tokens for a text: the model's maximum is {limit}",
                field="instruction",
            )
        ranges = _pooled(whole, spans, 0 if pools_prompt else whole.first)
        overlap = min(WINDOW_OVERLAP, room // 4)
        windows: list[Window] = []
        begin = owned = 0
        while True:
            end = min(begin + room, own)
            low = 0 if begin == 0 else whole.first + owned
            high = len(whole.ids) if end == own else whole.first + end
            windows.append(self._window(whole, ranges, (begin, end), (low, high)))
            if end == own:
                return [window for window in windows if len(window.chunks)], (
                    ranges[:, 1] - ranges[:, 0]
                ).tolist()
            begin, owned = end - overlap, end

    def vectors(self, windows: Sequence[Window], outputs: Sequence[Array], chunks: int) -> Array:
        """Return [chunks, dimensions] of a text, from the output of its windows."""
        total = np.zeros((chunks, outputs[0].shape[1]), np.float32)
        for window, rows in zip(windows, outputs, strict=True):
            total[window.chunks] += rows
        pooled = torch.from_numpy(total)
        with torch.inference_mode():
            for layer in self._layers:
                pooled = layer(pooled)
        found: Array = pooled.numpy()
        return found

    @staticmethod
    def token_rows(
        windows: Sequence[Window],
        outputs: Sequence[Array],
        kept: Sequence[Kept],
        chunks: int,
    ) -> list[Array]:
        """Return the token vectors of each chunk of a text.

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

    def _window(
        self,
        whole: WholeText,
        ranges: NDArray[np.int64],
        text: tuple[int, int],
        owned: tuple[int, int],
    ) -> Window:
        """Build a window.

        Args:
            text: The window's first token of the text and its end.
            owned: Rows of the whole text that are pooled from it.
        """
        begin, end = whole.first + text[0], whole.first + text[1]
        kept = np.concatenate(
            (np.arange(whole.first), np.arange(begin, end), np.arange(whole.end, len(whole.ids)))
        )
        lows, highs = np.maximum(ranges[:, 0], owned[0]), np.minimum(ranges[:, 1], owned[1])
        chunks = np.flatnonzero(lows < highs)
        counts = highs[chunks] - lows[chunks]
        begins = np.searchsorted(kept, lows[chunks])
        types = None if whole.type_ids is None else whole.type_ids[kept]
        sequence = InputSequence(whole.ids[kept], types)
        places = np.stack((begins, begins + counts), axis=1)
        if not self._modes or not len(chunks):
            return Window(sequence, chunks, places)
        rows = np.concatenate(
            [np.arange(low, high, dtype=np.int32) for low, high in places.tolist()]
        )
        weights = [
            self._weights(
                np.arange(lows[chunk], highs[chunk]) - ranges[chunk, 0],
                int(ranges[chunk, 1] - ranges[chunk, 0]),
            )
            for chunk in chunks
        ]
        spans = SpanRows(rows, np.concatenate(weights), counts.astype(np.int32))
        return Window(replace(sequence, input=spans), chunks, places)

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


def _pooled(whole: WholeText, spans: Sequence[Span], skip: int) -> NDArray[np.int64]:
    """Return [chunks, 2]: the first row of the whole text that each chunk pools, and the end.

    A chunk in which no token begins has the previous token, which it lies within.

    Args:
        skip: Number of leading rows that are not pooled.
    """
    starts = np.maximum.accumulate(whole.starts) if len(whole.starts) else whole.starts
    own = len(starts)
    begins = np.searchsorted(starts, [span.start for span in spans], side="left")
    ends = np.searchsorted(starts, [span.end for span in spans], side="left")
    is_empty = begins >= ends
    begins = np.where(is_empty, np.maximum(begins - 1, 0), begins)
    ends = np.where(is_empty, np.minimum(begins + 1, own), ends)
    lows = np.where(begins == 0, skip, whole.first + begins)
    highs = np.where(ends == own, len(whole.ids), whole.first + ends)
    return np.stack((np.minimum(lows, highs - 1), highs), axis=1)
