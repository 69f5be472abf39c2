"""A decode step on CUDA: one new token of each sequence, whose inputs are one piece of int32 and
one copy to the device.

Token ids, positions, where each sequence's query and its keys begin and the last ones end, and the
page table. The number of sequences and the width of the table decide what is launched, lengths do
not, so that a step can be replayed from a graph (`graphs.py`). Places of the batch that no sequence
has are empty: they have no keys, and nothing is stored for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from libs.kernels.attention.paged import PAGE, PagedLayout, Pages, pages_for
from libs.kernels.layout import Layout, to_device
from libs.kernels.triton_here import has_triton
from libs.models.generation.decoding.rules import Ids
from libs.models.generation.decoding.writer import Places, Writer
from libs.models.packed import Packed

_ALIGNMENT: Final = 16
"""Numbers at whose multiples the parts begin: Triton compiles kernels again for pointers that are
aligned to less than 16 bytes.
"""

_Array = TypeVar("_Array", Ids, Tensor)


class StepRow(NamedTuple):
    """The new token of one sequence, its position, how many keys the sequence has with it, and
    their pages.
    """

    token: int
    position: int
    keys: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step's inputs. `sequences`: with the empty places. `width`: pages of the
    longest sequence there can be.
    """

    sequences: int
    width: int

    @property
    def size(self) -> int:
        """How many numbers the inputs are."""
        return 4 * _aligned(self.sequences + 1) + self.sequences * self.width

    def fill(self, inputs: Ids, rows: Sequence[StepRow]) -> None:
        """Writes the inputs, whatever they were. The page table is written as far as it is read."""
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
        """Inputs without a sequence."""
        inputs = np.zeros(self.size, np.int32)
        self.fill(inputs, ())
        return inputs

    def batch(self, buffer: Tensor) -> tuple[Packed, Places]:
        """The batch as the writer's forward takes it: views of the inputs on the device, of which
        no value is read.
        """
        ids, positions, queries, keys, numbers = _parts(buffer, self)
        ones = (1,) * self.sequences
        layout = Layout(queries, keys, 1, self.width * PAGE, ())
        where = PagedLayout(layout, queries, numbers, np.empty((0, 0), np.int32), ones, (), ones)
        return Packed(ids, positions, None, ones, layout, None, ()), Places(where, where, None)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _parts(buffer: _Array, shape: StepShape) -> tuple[_Array, _Array, _Array, _Array, _Array]:
    """Views: ids, positions, the ends of queries and of keys, and the page table."""
    count, part = shape.sequences, _aligned(shape.sequences + 1)
    return (
        buffer[:count],
        buffer[part : part + count],
        buffer[2 * part : 2 * part + count + 1],
        buffer[3 * part : 3 * part + count + 1],
        buffer[4 * part :].reshape(count, shape.width),
    )


class StepForward:
    """A writer's forward of a step, over the pages of its loop."""

    def __init__(self, writer: Writer, pages: Sequence[Pages]) -> None:
        self.writer, self.width = writer, pages_for(writer.max_positions)
        self._pages = pages

    @staticmethod
    def takes(writer: Writer, pages: Sequence[Pages]) -> bool:
        """Whether the writer's steps are computed so: on CUDA, unless they read an encoder's states
        or go by lengths.
        """
        if (
            writer.has_cross
            or not has_triton(pages[0][0])
            or not writer.decoder.is_graph_capturable
        ):
            return False
        from libs.kernels.attention import paged_triton

        return paged_triton.takes(
            writer.decoder.stack[0].attn.parts[0], writer.kv_heads, writer.head_size
        )

    def run(self, shape: StepShape, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token after each sequence, [sequences] int64, and all scores, [sequences,
        vocabulary] float32. Does not wait for the device."""
        batch, places = shape.batch(buffer)
        scores = self.writer.forward(batch, self._pages, places)
        return scores[:, : self.writer.settings.vocabulary].argmax(dim=1), scores

    def eager(self, rows: Sequence[StepRow]) -> tuple[Tensor, Tensor]:
        """`run` for these sequences, without empty places."""
        shape = StepShape(len(rows), self.width)
        inputs = np.zeros(shape.size, np.int32)
        shape.fill(inputs, rows)
        return self.run(shape, to_device(inputs, self.writer.device))
