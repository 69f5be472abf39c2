"""Pool token states to states of words, and gather those of the labels before them: the first step
of heads that label words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from libs.errors import ModelBroken
from libs.kernels.layout import to_device
from libs.kinds.gliner.card import Pooling
from libs.models.interface.packed import Packed
from libs.models.text.heads.linear import HeadLinear

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Label:
    """A label and its tokens, for models with a separate encoder for labels (bi-encoders)."""

    name: str
    ids: Ids


@dataclass(frozen=True, slots=True)
class WordPlaces:
    """The head's input for a sequence (`Sequence.input`): which of its rows of hidden states
    represent words, labels and relations. Row 0 is the sequence's first token.
    """

    pieces: Ids
    """Rows of all tokens of the text's words."""
    sizes: Ids
    """Number of tokens of each word."""
    labels: Ids
    """Row of each label's token."""
    relations: Ids
    """Row of each relation's token."""
    own_labels: tuple[Label, ...] = ()
    """Replaces `labels` where labels have a separate encoder."""

    @property
    def words(self) -> int:
        return len(self.sizes)

    @property
    def label_count(self) -> int:
        return len(self.own_labels) or len(self.labels)


@dataclass(frozen=True, slots=True)
class WordStates:
    """The states of all sequences, end to end: [words, hidden], [labels, hidden] and [relations,
    hidden], float32.
    """

    words: Tensor
    labels: Tensor
    relations: Tensor


class WordReader(nn.Module):
    """Map token states to states of words, labels and relations. `project` maps to the head's size
    if the encoder's differs.
    """

    def __init__(
        self, project: HeadLinear | None, pooling: Pooling, recurrent: WordLstm | None
    ) -> None:
        super().__init__()
        self.project, self.recurrent, self._pooling = project, recurrent, pooling

    def forward(self, hidden: Tensor, batch: Packed, places: Sequence[WordPlaces]) -> WordStates:
        placed = list(zip(prefix_sums(batch.lengths[:-1]), places, strict=True))
        parts = [
            [start + place.pieces for start, place in placed],
            [start + place.labels for start, place in placed],
            [start + place.relations for start, place in placed],
        ]
        chosen = to_device(
            np.concatenate([rows for part in parts for rows in part]).astype(np.int32),
            hidden.device,
        )
        states = hidden.index_select(0, chosen).float()
        if self.project is not None:
            states = self.project.forward(states)
        pieces, labels, relations = torch.split(
            states, [sum(len(rows) for rows in part) for part in parts]
        )
        words = self._pool(pieces, places)
        if self.recurrent is not None:
            words = self.recurrent.forward(words, [place.words for place in places])
        return WordStates(words, labels, relations)

    def _pool(self, pieces: Tensor, places: Sequence[WordPlaces]) -> Tensor:
        if self._pooling in ("first", "last") or not len(pieces):
            return pieces
        sizes = to_device(np.concatenate([place.sizes for place in places]), pieces.device)
        return torch.segment_reduce(
            pieces, self._pooling, lengths=sizes.long(), axis=0, unsafe=True
        )


class WordLstm(nn.Module):
    """A bidirectional LSTM over the words of each sequence, all sequences at once and without
    padding."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        stem: str,
        *,
        hidden: int,
        layers: int,
        device: torch.device,
        file: str,
    ) -> None:
        super().__init__()
        # Check before allocating memory for the sizes in config.json: if the file contains the last
        # layer, the sizes are real.
        last = state.get(f"{stem}.weight_hh_l{layers - 1}_reverse")
        if last is None or last.shape != (hidden // 2 * 4, hidden // 2):
            raise ModelBroken(
                f"{file}: `{stem}` has no {layers} layers of size {hidden}, as gliner_config.json "
                "requires"
            )
        self.lstm = nn.LSTM(
            hidden, hidden // 2, num_layers=layers, bidirectional=True, device=device
        )
        for name, parameter in self.lstm.named_parameters():
            found = state.get(f"{stem}.{name}")
            if found is None or found.shape != parameter.shape:
                raise ModelBroken(
                    f"{file}: `{stem}.{name}` is missing or has another shape than "
                    f"{tuple(parameter.shape)}"
                )
            # Copy, because cuDNN needs all weights in the module's contiguous buffer.
            parameter.data.copy_(found)
        self.requires_grad_(False).eval()

    def forward(self, words: Tensor, counts: Sequence[int]) -> Tensor:
        """Map words [words, hidden] of sequences of `counts` words to the same shape."""
        if not len(words):
            return words
        order, sizes = _by_step(counts)
        packed = PackedSequence(
            words.index_select(0, to_device(order, words.device)), torch.from_numpy(sizes)
        )
        output: Tensor = self.lstm(packed)[0].data
        back = np.empty_like(order)
        back[order] = np.arange(len(order), dtype=np.int32)
        return output.index_select(0, to_device(back, words.device))


def _by_step(counts: Sequence[int]) -> tuple[Ids, NDArray[np.int64]]:
    """Return the order of torch's PackedSequence (all first words, then all second ones, longest
    sequence first), and the number of words of each step.
    """
    starts = np.array(prefix_sums(counts)[:-1])
    longest = np.argsort(-np.array(counts), kind="stable")
    lengths = np.array(counts)[longest]
    sizes = np.array(
        [int((lengths > step).sum()) for step in range(int(lengths[0]))], dtype=np.int64
    )
    order = np.concatenate([starts[longest[:size]] + step for step, size in enumerate(sizes)])
    return order.astype(np.int32), sizes


def prefix_sums(counts: Sequence[int]) -> list[int]:
    """Return the offset of each group of these sizes, and the end of the last."""
    return [0, *accumulate(counts)]
