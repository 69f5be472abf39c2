"""int8 linear layers by the native library: the weights' layout in memory, and the call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Final

import torch
from torch import Tensor

from libs.kernels.native.library import Int8Linear, native

_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
_CALL: Final = Struct("6P4q2i")
"""`struct Int8Linear` of source/int8/int8.h."""
_ALIGNMENT: Final = 64
"""A quantised row takes a multiple of this many bytes."""


@dataclass(frozen=True, slots=True)
class NativeInt8:
    """An instruction set of the library.

    Attributes:
        columns: Columns of a panel of weights.
        group: Adjacent inputs of a column.
    """

    name: str
    number: int
    columns: int
    group: int
    call: Int8Linear

    def pack(self, codes: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Pack codes [outputs, inputs] int8 and factors [3, outputs] to [panels, groups, columns,
        group] and [3, panels * columns].
        """
        outputs, inputs = codes.shape
        panels, groups = -(-outputs // self.columns), -(-inputs // self.group)
        padded = codes.new_zeros(panels * self.columns, groups * self.group)
        padded[:outputs, :inputs] = codes
        wide = factors.new_zeros(3, panels * self.columns)
        wide[:, :outputs] = factors
        return padded.view(panels, self.columns, groups, self.group).transpose(
            1, 2
        ).contiguous(), wide

    def linear(
        self,
        x: Tensor,
        codes: Tensor,
        factors: Tensor,
        outputs: int,
        *,
        gelu: bool,
        residual: Tensor | None,
    ) -> Tensor:
        """Implement `Way.linear` of `libs/kernels/linear/int8.py`."""
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, inputs = x.shape
        out = x.new_empty(rows, outputs)
        held = None if residual is None else residual.to(x.dtype).contiguous()
        row = -(-codes.shape[1] * 4 // _ALIGNMENT) * _ALIGNMENT
        scratch = torch.empty(rows * (row + 8), dtype=torch.uint8)
        packed = _CALL.pack(
            x.data_ptr(),
            0 if held is None else held.data_ptr(),
            out.data_ptr(),
            codes.data_ptr(),
            factors.data_ptr(),
            scratch.data_ptr(),
            rows,
            inputs,
            outputs,
            x.stride(0),
            torch.get_num_threads(),
            gelu,
        )
        self.call(packed, self.number, _TYPES[x.dtype])
        return out


VARIANTS: Final = (("avx2", 16, 2), ("avx512_vnni", 64, 4))
"""Instruction sets in the library's order: columns of a panel, inputs of a group."""


@cache
def variants() -> tuple[NativeInt8, ...]:
    """Return the instruction sets of this CPU, the best last; empty if the library is not used."""
    library = native()
    if library is None or library.int8 is None:
        return ()
    found = VARIANTS[: library.int8_sets]
    return tuple(
        NativeInt8(name, number, columns, group, library.int8)
        for number, (name, columns, group) in enumerate(found)
    )
