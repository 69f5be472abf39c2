"""Locate oneDNN's prepacked weights for kernels that read them in place, without a second copy.

torch hides the layout and the address of such a tensor. The address is read through the C functions
of its ahead-of-time compiler, and the numbers at that address are checked.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

PANEL: Final = 64
"""Outputs of a panel."""
_UNIT: Final = 4
"""Bytes: one float32, or two bfloat16 of adjacent inputs."""
_UNITS: Final = 16
"""Inputs are padded with zeros to a multiple of this many units."""


def address(packed: Tensor, weight: Tensor) -> int:
    """Return the address of `packed`, made by oneDNN from `weight` [outputs, inputs]; 0 if it has
    no panels (`source/layer/layer.h`).
    """
    element = weight.element_size()
    per = _UNIT // element
    padded = (
        -(-weight.shape[0] // PANEL) * PANEL,
        -(-weight.shape[1] // (_UNITS * per)) * _UNITS * per,
    )
    try:
        if (
            not packed.is_mkldnn
            or torch.ops.mkldnn._nbytes(packed) != padded[0] * padded[1] * element
        ):
            return 0
        found = _data(packed)
    except (AttributeError, OSError, RuntimeError):
        return 0
    size = PANEL * padded[1] * element
    last = (padded[0] // PANEL - 1) * PANEL
    for first in sorted({0, min(PANEL, last), last}):
        bytes_ = (ctypes.c_char * size).from_address(found + first // PANEL * size)
        own = torch.frombuffer(bytes_, dtype=weight.dtype)
        if not torch.equal(
            own.view(torch.uint8),
            _panel(weight[first : first + PANEL], padded[1], per).view(torch.uint8),
        ):
            return 0
    return found


def _panel(rows: Tensor, inputs: int, per: int) -> Tensor:
    """Return a flat panel: [up to 64, inputs] -> [units, 64, elements of a unit]."""
    padded = F.pad(rows.detach(), (0, inputs - rows.shape[1], 0, PANEL - rows.shape[0]))
    return padded.view(PANEL, inputs // per, per).transpose(0, 1).flatten()


def _data(tensor: Tensor) -> int:
    """Return the address of a tensor's data. Raises RuntimeError if torch does not return it."""
    # A tensor of torch's C++ interface is one pointer; a handle is the address of that pointer.
    handle, found = ctypes.c_void_p(tensor._cdata), ctypes.c_void_p()
    if (
        _torch().aoti_torch_get_data_ptr(ctypes.byref(handle), ctypes.byref(found))
        or not found.value
    ):
        raise RuntimeError("torch does not return the tensor's address")
    return found.value


@cache
def _torch() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
