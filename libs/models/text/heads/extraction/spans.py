"""Scores of all spans up to a maximum width for each label (GLiNER's markerV0 and markerV1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.kernels.layout import to_device
from libs.models.text.heads.extraction.words import WordPlaces, WordStates, prefix_sums
from libs.models.text.heads.linear import HeadLinear, check_shape

Ids = NDArray[np.int32]
_CHUNK_ELEMENTS: Final = 1 << 25  # elements of the spans' hidden layer in memory at a time: 128 MiB


def enumerate_spans(words: int, width: int) -> tuple[Ids, Ids]:
    """Return first and last words of all spans of at most `width` words, ordered by start and then
    end, [spans] each.
    """
    starts, widths = np.mgrid[:words, : min(width, words)].astype(np.int32)
    inside = starts + widths < words
    return starts[inside], (starts + widths)[inside]


class TwoLayers(nn.Module):
    """Linear, ReLU, linear: the gliner package's projection layer (its tensors end in `.0` and
    `.3`).
    """

    def __init__(
        self, state: Mapping[str, Tensor], stem: str, *, size: int, inputs: int, file: str
    ) -> None:
        super().__init__()
        check_shape(state, f"{stem}.0.weight", (size * 4, inputs), file)
        check_shape(state, f"{stem}.0.bias", (size * 4,), file)
        check_shape(state, f"{stem}.3.weight", (size, size * 4), file)
        check_shape(state, f"{stem}.3.bias", (size,), file)
        self.inner = HeadLinear(state, f"{stem}.0", "relu")
        self.outer = HeadLinear(state, f"{stem}.3", "identity")

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, inputs] to [rows, size]."""
        return self.outer.forward(self.inner.forward(x))


def folded(last: HeadLinear, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Fold labels [labels, size] into a linear layer.

    Returns the layer of their product: weight [labels, inputs] and bias [labels].
    """
    base = labels.new_zeros(len(labels)) if last.bias is None else labels @ last.bias
    return labels @ last.weight, base


class SpanMarker(nn.Module):
    """The representation of a span, from its first and last word; markerV1 adds the mean of all
    words of the text.

    The first layer takes them concatenated, so its products with first and with last words are
    computed once per word, not once per span, and added for each span.
    """

    def __init__(
        self, state: Mapping[str, Tensor], stem: str, *, size: int, mean: bool, file: str
    ) -> None:
        super().__init__()
        self.start = TwoLayers(state, f"{stem}.project_start", size=size, inputs=size, file=file)
        self.end = TwoLayers(state, f"{stem}.project_end", size=size, inputs=size, file=file)
        self.out = TwoLayers(
            state, f"{stem}.out_project", size=size, inputs=size * (3 if mean else 2), file=file
        )
        self._size, self._mean = size, mean

    @property
    def size(self) -> int:
        """Return the dimensions of a word's state."""
        return self._size

    def halves(self, words: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a first and a last word's part of a span's hidden layer, [words, 4 size] each.

        Args:
            words: [words, size]
            counts: Number of words of each text.
        """
        parts = torch.split(self.out.inner.weight, self._size, dim=1)
        first = F.linear(self.start.forward(words).relu(), parts[0])
        last = F.linear(self.end.forward(words).relu(), parts[1], self.out.inner.bias)
        if self._mean and len(words):
            sizes = to_device(np.array(counts, dtype=np.int32), words.device).long()
            means = torch.segment_reduce(words, "mean", lengths=sizes, axis=0, unsafe=True)
            first = first + F.linear(means.relu(), parts[2]).repeat_interleave(
                sizes, dim=0, output_size=len(words)
            )
        return first, last

    def forward(self, words: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """Return the representations of spans of one text, [spans, size].

        Args:
            words: [words, size]
            starts: Rows of the spans' first words, [spans].
            ends: Rows of the spans' last words, [spans].
        """
        first, last = self.halves(words, [len(words)])
        return self.out.outer.forward(
            (first.index_select(0, starts) + last.index_select(0, ends)).relu()
        )


class SpanScorer(nn.Module):
    """Logits of spans: the dot product of a span's and a label's representation.

    The last layer of spans is linear and folded into each label once, so a span costs one row of a
    small product.
    """

    def __init__(self, marker: SpanMarker, width: int) -> None:
        super().__init__()
        self.marker, self.width = marker, width

    def shape(self, place: WordPlaces) -> tuple[int, ...]:
        """Return the shape of one sequence's logits: [spans, labels], spans in `enumerate_spans`'s
        order."""
        return len(enumerate_spans(place.words, self.width)[0]), place.label_count

    def forward(self, states: WordStates, places: Sequence[WordPlaces]) -> Tensor:
        """Return the logits of all sequences, flat and end to end."""
        first, last = self.marker.halves(states.words, [place.words for place in places])
        keys, base = folded(self.marker.out.outer, states.labels)
        word_starts = prefix_sums([place.words for place in places])
        spans = [enumerate_spans(place.words, self.width) for place in places]
        starts, ends = (
            to_device(
                np.concatenate(
                    [start + item[side] for start, item in zip(word_starts, spans, strict=False)]
                ),
                first.device,
            )
            for side in (0, 1)
        )
        span_starts = prefix_sums([len(item[0]) for item in spans])
        label_starts = prefix_sums([place.label_count for place in places])
        logits = [first.new_empty(0)]
        for some in chunks(span_starts, max(1, _CHUNK_ELEMENTS // first.shape[1])):
            begin, end = span_starts[some.start], span_starts[some.stop]
            hidden = (
                first.index_select(0, starts[begin:end]) + last.index_select(0, ends[begin:end])
            ).relu_()
            for i in some:
                rows = hidden[span_starts[i] - begin : span_starts[i + 1] - begin]
                own = slice(label_starts[i], label_starts[i + 1])
                logits.append(torch.addmm(base[own], rows, keys[own].T).flatten())
        return torch.cat(logits)


def chunks(starts: Sequence[int], budget: int) -> Iterator[range]:
    """Group adjacent sequences of at most `budget` spans together; a sequence with more is its own
    group."""
    first = 0
    for i in range(1, len(starts)):
        if i - first > 1 and starts[i] - starts[first] > budget:
            yield range(first, i - 1)
            first = i - 1
    if first < len(starts) - 1:
        yield range(first, len(starts) - 1)
