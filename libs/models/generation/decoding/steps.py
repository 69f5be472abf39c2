"""A decode step on CUDA: one new token of each sequence, with all inputs in one int32 array and one
copy to the device.

The array holds token ids, positions, the bounds of each sequence's query and keys, and the page
table. Only the number of sequences and the width of the table determine the launches, not lengths,
so a graph can replay a step (`graphs.py`). Unused slots of the batch are empty: they have no keys,
and nothing is stored for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from libs.kernels.attention.paged import PAGE, PagedLayout, Pages, pages_for
from libs.kernels.layout import BatchLayout, to_device
from libs.kernels.triton_here import has_triton
from libs.models.generation.decoding.language_model import KeyValuePlaces, LanguageModel
from libs.models.generation.decoding.rules import Ids
from libs.models.interface.packed import Packed

_ALIGNMENT: Final = 16
"""The parts of the array start at multiples of this: Triton compiles kernels again for pointers
that are aligned to less than 16 bytes.
"""

_Array = TypeVar("_Array", Ids, Tensor)


class StepRow(NamedTuple):
    """The new token of one sequence, its position, its number of keys including the token's, and
    their pages.
    """

    token: int
    position: int
    keys: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step's inputs.

    Attributes:
        sequences: Number of sequences, unused slots included.
        width: Pages of the longest possible sequence.
    """

    sequences: int
    width: int

    @property
    def size(self) -> int:
        """Return the length of the input array."""
        return 4 * _aligned(self.sequences + 1) + self.sequences * self.width

    def fill(self, inputs: Ids, rows: Sequence[StepRow]) -> None:
        """Overwrite the inputs. Only the entries of the page table that are read are written."""
        ids, positions, queries, keys, numbers = _parts(inputs, self)
        ids[len(rows) :] = positions[len(rows) :] = 0
        ids[: len(rows)] = [row.token for row in rows]
        positions[: len(rows)] = [row.position for row in rows]
        queries[:] = np.arange(self.sequences + 1)
        keys[0] = 0
        np.cumsum([row.keys for row in rows], out=keys[1 : len(rows) + 1])
        keys[len(rows) + 1 :] = keys[len(rows)]
        for own, row in zip(numbers, rows, strict=False):
            own[: len(row.pages)] = row.pages

    def empty(self) -> Ids:
        """Return inputs without a sequence."""
        inputs = np.zeros(self.size, np.int32)
        self.fill(inputs, ())
        return inputs

    def batch(self, buffer: Tensor) -> tuple[Packed, KeyValuePlaces]:
        """Return the batch for the model's forward: views of the inputs on the device, without
        reading them.
        """
        ids, positions, queries, keys, numbers = _parts(buffer, self)
        ones = (1,) * self.sequences
        layout = BatchLayout(queries, keys, 1, self.width * PAGE, ())
        where = PagedLayout(layout, queries, numbers, np.empty((0, 0), np.int32), ones, (), ones)
        return Packed(ids, positions, None, ones, layout, None, ()), KeyValuePlaces(
            where, where, None
        )


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _parts(buffer: _Array, shape: StepShape) -> tuple[_Array, _Array, _Array, _Array, _Array]:
    """Split into views: ids, positions, the ends of queries and of keys, and the page table."""
    count, part = shape.sequences, _aligned(shape.sequences + 1)
    return (
        buffer[:count],
        buffer[part : part + count],
        buffer[2 * part : 2 * part + count + 1],
        buffer[3 * part : 3 * part + count + 1],
        buffer[4 * part :].reshape(count, shape.width),
    )


class StepForward:
    """A model's decode step over the pages of its loop."""

    def __init__(self, language_model: LanguageModel, pages: Sequence[Pages]) -> None:
        self.language_model, self.width = language_model, pages_for(language_model.max_positions)
        self._pages = pages

    @staticmethod
    def takes(language_model: LanguageModel, pages: Sequence[Pages]) -> bool:
        """Return whether the model's steps can run this way: on CUDA, without cross attention,
        states in place of keys, or length-dependent launches.
        """
        if (
            language_model.has_cross
            or language_model.state_bytes
            or not has_triton(pages[0][0])
            or not language_model.decoder.is_graph_capturable
        ):
            return False
        from libs.kernels.attention import paged_triton

        return paged_triton.takes(
            language_model.heads, language_model.kv_heads, language_model.head_size
        )

    @staticmethod
    def sizes(language_model: LanguageModel, most: int) -> list[int]:
        """Return numbers of sequences up to `most` that together use all kernel variants."""
        from libs.kernels.attention import paged_triton

        of_splits = {
            paged_triton.splits(count, language_model.kv_heads): count
            for count in range(most, 0, -1)
        }
        return list(of_splits.values())

    def run(self, shape: StepShape, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely next tokens, [sequences] int64, and all scores, [sequences,
        vocabulary] float32, without waiting for the device.
        """
        batch, places = shape.batch(buffer)
        scores = self.language_model.forward(batch, self._pages, places)
        return scores[:, : self.language_model.settings.vocabulary].argmax(dim=1), scores

    def eager(self, rows: Sequence[StepRow]) -> tuple[Tensor, Tensor]:
        """Run these sequences without unused slots."""
        shape = StepShape(len(rows), self.width)
        inputs = np.zeros(shape.size, np.int32)
        shape.fill(inputs, rows)
        return self.run(shape, to_device(inputs, self.language_model.device))
