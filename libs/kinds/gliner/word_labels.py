"""Scores of each word for each label: for the beginning, end and inside of an entity (GLiNER's
token level).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels.layout import to_device
from libs.models.text.heads.extraction.words import WordPlaces, WordStates, prefix_sums
from libs.models.text.heads.linear import HeadLinear, check_shape

_CHUNK_ELEMENTS: Final = 1 << 25  # elements of the hidden layer in memory at a time: 128 MiB


class WordScorer(nn.Module):
    """Concatenate the first projections of words and labels and the product of their second ones,
    and apply two layers.

    The first layer is a sum over its three inputs, so words and labels each pass their part once,
    not once per pair.
    """

    def __init__(self, state: Mapping[str, Tensor], stem: str, *, size: int, file: str) -> None:
        super().__init__()
        shapes = {
            "proj_token": (size * 2, size), "proj_label": (size * 2, size),
            "out_mlp.0": (size * 4, size * 3), "out_mlp.3": (3, size * 4),
        }  # fmt: skip
        for name, shape in shapes.items():
            check_shape(state, f"{stem}.{name}.weight", shape, file)
            check_shape(state, f"{stem}.{name}.bias", shape[:1], file)
        self.word = HeadLinear(state, f"{stem}.proj_token", "identity")
        self.label = HeadLinear(state, f"{stem}.proj_label", "identity")
        self.inner = HeadLinear(state, f"{stem}.out_mlp.0", "relu")
        self.outer = HeadLinear(state, f"{stem}.out_mlp.3", "identity")
        self._size = size

    def shape(self, place: WordPlaces) -> tuple[int, ...]:
        """Return the shape of one sequence's logits: [words, labels, 3]."""
        return place.words, place.label_count, 3

    def forward(self, states: WordStates, places: Sequence[WordPlaces]) -> Tensor:
        """Return the logits of all sequences, flat and end to end."""
        of_word, of_label, of_both = torch.split(self.inner.weight, self._size, dim=1)
        word, word_factor = torch.split(self.word.forward(states.words), self._size, dim=1)
        label, label_factor = torch.split(self.label.forward(states.labels), self._size, dim=1)
        word, label = F.linear(word, of_word), F.linear(label, of_label, self.inner.bias)
        rows, columns = _pairs(places)
        step = max(1, _CHUNK_ELEMENTS // of_word.shape[0])
        logits = [word.new_empty(0)]
        for begin in range(0, len(rows), step):
            chosen = to_device(rows[begin : begin + step], word.device)
            named = to_device(columns[begin : begin + step], word.device)
            both = F.linear(
                word_factor.index_select(0, chosen) * label_factor.index_select(0, named), of_both
            )
            hidden = (both + word.index_select(0, chosen) + label.index_select(0, named)).relu_()
            logits.append(self.outer.forward(hidden).flatten())
        return torch.cat(logits)


def _pairs(
    places: Sequence[WordPlaces],
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int32]], ...]:
    """Return the rows of the word and of the label of every pair, by sequence and then by word:
    [pairs] each.
    """
    words = prefix_sums([place.words for place in places])
    labels = prefix_sums([place.label_count for place in places])
    grids = [
        np.mgrid[words[i] : words[i + 1], labels[i] : labels[i + 1]].reshape(2, -1).astype(np.int32)
        for i in range(len(places))
    ]
    rows, columns = np.concatenate(grids, axis=1)
    return rows, columns
