"""The batch that a model's forward receives: sequences laid end to end, without padding.

It is built from the token ids that `prepare` produced and read by the encoder. Everything that the
host needs during a forward (lengths, runs) is kept in host memory here, so a forward never
synchronises with the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from libs.kernels.layout import BatchLayout, ends, to_device, upload

Ids = npt.NDArray[np.int32]
Axes = npt.NDArray[np.int32] | npt.NDArray[np.float32]
Rows = Literal["first", "last"]
"""The row of each sequence's first token ([CLS], <s>) or of its last."""


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Input rows of a batch that have no token id, such as the embeddings of image patches.

    Attributes:
        places: [n] int64. The tokens of the batch that these rows are the input of.
        values: [n, InputLayer.row_size].
        deeper: Tensors of the same shape, added to these tokens' hidden states after the first
            layer, the second and so on.
    """

    places: Tensor
    values: Tensor
    deeper: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences in the order given, each of at least one token.

    The CPU's attention handles adjacent sequences of equal length together, so sort by length
    before packing.
    """

    ids: Tensor  # [tokens] int32
    positions: (
        Tensor  # [tokens] int32, each sequence counted from 0, or from the end of its shared prefix
    )
    type_ids: Tensor | None  # [tokens] int32; None: all of segment 0
    lengths: tuple[int, ...]
    layout: BatchLayout  # every token is a query
    key_rows: (
        Tensor | None
    )  # [keys] int32: the rows that are keys, in the layout's order; None for all, each one time
    keys: tuple[int, ...]  # number of keys of each sequence
    given: GivenRows | None = None  # None: the input of every token is its id
    one_row: BatchLayout | None = None  # cached result of `row_layout`; None: computed on request
    axes: Tensor | None = (
        # [axes, tokens] int32 or float32: positions in several dimensions; None: `positions` in all
        None
    )
    wholes: tuple[
        int, ...
    ] = ()  # token counts of the whole sequences that these are parts of; empty: `keys`
    windows: BatchLayout | None = (
        None  # the windows of an image as sequences, for layers with windowed attention
    )
    cu_rows: Tensor | None = (
        # [sequences + 1] int32: 0, 1, 2 and so on, for `row_layout`; None: computed on request
        None
    )

    @staticmethod
    def from_sequences(
        sequences: Sequence[Ids],
        type_ids: Sequence[Ids | None] | None = None,
        device: torch.device | str = "cpu",
        *,
        seen: Sequence[int] | None = None,
        before: Sequence[int | None] | None = None,
        places: Sequence[Ids | None] | None = None,
        values: Tensor | None = None,
        deeper: Sequence[Tensor] = (),
        axes: Sequence[Axes | None] | None = None,
        windows: Sequence[int] | None = None,
    ) -> Packed:
        """Pack token ids into one batch on `device`.

        Args:
            type_ids: Segments of each sequence. If only some have them, the others are segment 0.
            seen: Sequence i's tokens attend to its first `seen[i]` tokens only; 0 for all.
            before: Index of the sequence in this batch that is sequence i's shared prefix, to which
                all its tokens attend; None for no prefix.
            places: Tokens of sequence i with a row of `values` as their input instead of an id.
            values: The rows of all sequences in turn.
            deeper: See `GivenRows.deeper`.
            axes: Sequence i's positions in several dimensions, [axes, tokens]; None for its token
                indices in every dimension.
            windows: Lengths of the windows that make up all sequences.
        """
        lengths = tuple(len(ids) for ids in sequences)
        segments = None
        if type_ids is not None and any(types is not None for types in type_ids):
            segments = np.concatenate(
                [
                    np.zeros(n, np.int32) if t is None else t
                    for n, t in zip(lengths, type_ids, strict=True)
                ]
            )
        cu_lengths = ends(lengths)
        starts = cu_lengths[:-1]
        prefixes = [0 if number is None else lengths[number] for number in before or ()]
        keys, key_rows = lengths, None
        if any(seen or ()) or any(prefixes):
            chosen = [_key_rows(i, starts, lengths, seen, before) for i in range(len(lengths))]
            keys, key_rows = tuple(len(rows) for rows in chosen), np.concatenate(chosen)
        first = starts - np.array(prefixes, np.int32) if prefixes else starts
        positions = np.arange(cu_lengths[-1], dtype=np.int32) - np.repeat(first, lengths)
        arrays = {
            "ids": np.concatenate(sequences),
            "positions": positions,
            "cu_queries": cu_lengths,
            "cu_keys": None if keys == lengths else ends(keys),
            "types": segments,
            "key_rows": key_rows,
            # Few batches on a CPU need them, and building them costs more than copying the others.
            "cu_rows": np.arange(len(lengths) + 1, dtype=np.int32)
            if torch.device(device).type == "cuda"
            else None,
        }
        there = {name: array for name, array in arrays.items() if array is not None}
        found = dict(zip(there, upload(list(there.values()), device), strict=True))
        return Packed(
            ids=found["ids"],
            positions=found["positions"],
            type_ids=found.get("types"),
            lengths=lengths,
            layout=BatchLayout.at(
                found["cu_queries"], found.get("cu_keys", found["cu_queries"]), lengths, keys
            ),
            key_rows=found.get("key_rows"),
            keys=keys,
            given=None
            if values is None
            else GivenRows(_rows_at(places or (), starts, device), values, tuple(deeper)),
            axes=_axes(axes or (), positions, lengths, device),
            windows=None if windows is None else BatchLayout.from_lengths(windows, windows, device),
            cu_rows=found.get("cu_rows"),
        )

    @property
    def cu_seqlens(self) -> Tensor:
        """Return the start of each sequence and the end of the last: [sequences + 1] int32."""
        return self.layout.cu_queries

    def rows(self, which: Rows) -> Tensor:
        """Return the index of one row of each sequence: [sequences] int32."""
        return self.cu_seqlens[:-1] if which == "first" else self.cu_seqlens[1:] - 1

    def row_layout(self) -> BatchLayout:
        """Return the layout of one query per sequence, which attends to the sequence's keys."""
        ones = (1,) * len(self.lengths)
        if self.cu_rows is not None:
            return BatchLayout.at(self.cu_rows, self.layout.cu_keys, ones, self.keys)
        return self.one_row or BatchLayout.from_lengths(ones, self.keys, self.ids.device)


def _rows_at(places: Sequence[Ids | None], starts: Ids, device: torch.device | str) -> Tensor:
    rows = [start + own for start, own in zip(starts, places, strict=False) if own is not None]
    return to_device(np.concatenate(rows), device).long()


def _axes(
    axes: Sequence[Axes | None], positions: Ids, lengths: Sequence[int], device: torch.device | str
) -> Tensor | None:
    count = next((len(own) for own in axes if own is not None), 0)
    if not count:
        return None
    parts = np.split(positions, np.cumsum(lengths)[:-1])
    whole = [
        np.tile(places, (count, 1)) if own is None else own
        for own, places in zip(axes, parts, strict=True)
    ]
    joined = np.concatenate(whole, axis=1)
    return to_device(joined, device, np.float32 if joined.dtype == np.float32 else np.int32)


def _key_rows(
    number: int,
    starts: Ids,
    lengths: Sequence[int],
    seen: Sequence[int] | None,
    before: Sequence[int | None] | None,
) -> Ids:
    own = np.arange(
        starts[number],
        starts[number] + (seen[number] if seen and seen[number] else lengths[number]),
    )
    other = before[number] if before else None
    if other is None:
        return own.astype(np.int32)
    return np.concatenate([np.arange(starts[other], starts[other] + lengths[other]), own]).astype(
        np.int32
    )
