"""Load the library, and decide once per process which of its instruction sets is used, if any.

It is not used in these cases: `SHOAL_NATIVE_KERNELS=0`; it was not built or does not load; the CPU
has no AVX2; torch has no libgomp (the library would start a second thread pool, which spins against
torch's); its results differ from torch's operators (`trial.py`).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

import torch

from libs.kernels.native import build

SETS: Final = ("avx2", "avx512", "avx512_bf16")
"""Instruction sets in the library's order; each includes the previous ones."""

TYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
"""Element types in the library's order."""

_OPENMP: Final = "libgomp.so.1"
_INT, _LONG, _FLOAT, _AT = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class RowKernels:
    """The entry points of `rows.cpp`, called with their parameters after the instruction set.
    `embed` returns 1 for invalid ids.
    """

    def __init__(self, opened: ctypes.CDLL, number: int) -> None:
        def entry(name: str, *types: type) -> Callable[..., int]:
            function = opened[f"shoal_{name}"]
            function.argtypes = (_INT, _INT, _INT, *types)
            return partial(function, number)

        self.norm = entry(
            "norm", _AT, _LONG, _AT, _LONG, _LONG, _LONG, _AT, _AT, _FLOAT, _FLOAT, _INT
        )
        self.gate = entry("gate", _AT, _LONG, _AT, _LONG, _LONG, _INT, _INT)
        self.rotate = entry("rotate", _AT, _LONG, _LONG, _LONG, _LONG, _AT, _AT, _LONG)
        self.pool = entry("pool", _AT, _LONG, _AT, _AT, _LONG, _LONG, _INT)
        self.embed = entry("embed", _AT, _LONG, _AT, _AT, _LONG, _AT, _AT, _LONG, _LONG)


def _no_layer(packed: bytes, kind: int) -> int:
    return 1


def _no_resize(
    x: int, height: int, width: int, step: int, out: int, rows: int, columns: int, resample: int
) -> int:
    return 1


Int8Linear = Callable[[bytes, int, int], None]
"""Takes a packed `struct Int8Linear` of `int8.h`, the instruction set as numbered in `int8.py`, and
0 for float32 or 1 for bfloat16.
"""


@dataclass(frozen=True, slots=True)
class Native:
    """A loaded library and the instruction set to use.

    Attributes:
        attention: Takes a packed `struct Attention` of `attention.h`, and 0 for float32 or 1 for
            bfloat16. Returns 0, or 1 if out of memory.
        layer: The same for `struct LayerCall`.
        paged: The same for `struct Paged` of `paged.h`.
        rows: None for torch's operators.
        int8: Linear layers in int8, called by `int8.py`.
        int8_sets: Number of its instruction sets on this CPU.
        resize: Takes the address of [height, width, step] bytes, height, width, step, the address
            of the result, its height and width, and the number of the filter. Returns as
            `attention`.
    """

    instructions: str
    attention: Callable[[bytes, int], int]
    layer: Callable[[bytes, int], int] = _no_layer
    rows: RowKernels | None = None
    int8: Int8Linear | None = None
    int8_sets: int = 0
    paged: Callable[[bytes, int], int] = _no_layer
    resize: Callable[[int, int, int, int, int, int, int, int], int] = _no_resize

    def has_layers(self, dtype: torch.dtype) -> bool:
        """Return whether `layer` computes in this type."""
        best = {torch.float32: ("avx512", "avx512_bf16"), torch.bfloat16: ("avx512_bf16",)}
        return self.layer is not _no_layer and self.instructions in best.get(dtype, ())


TRIALS: Final[list[Callable[[Native], str]]] = []
"""Tests that a library must pass before it is used: each returns the name of a deviating kernel, or
an empty text. The package's `__init__.py` adds that of `trial.py`, which calls the kernels: they
import this module, so it cannot import them.
"""


class _Unusable(Exception):
    """The reason why the library is not used."""


def name() -> str:
    """Return the instruction set of the native kernels in use ("avx512_bf16", "avx512" or "avx2"),
    or "none: " and the reason.
    """
    chosen = choice()
    return chosen if isinstance(chosen, str) else chosen.instructions


def native() -> Native | None:
    """Return the library to use; None for torch's operators."""
    chosen = choice()
    return None if isinstance(chosen, str) else chosen


@cache
def choice() -> Native | str:
    """Return the library to use, or "none: " and the reason. Decided once per process."""
    if os.environ.get("SHOAL_NATIVE_KERNELS") == "0":
        return "none: SHOAL_NATIVE_KERNELS is 0"
    try:
        path = build.library()
        found = instruction_sets(path)
        loaded = load(path, found[-1])
        # Use a separate thread, since dispatch modes, such as one that counts a forward's memory,
        # belong to the caller's.
        with ThreadPoolExecutor(1) as thread:
            wrong = thread.submit(_wrong, loaded).result()
        if wrong:
            raise _Unusable(f"{loaded.instructions} results differ from torch's for {wrong}")
    except (OSError, RuntimeError, _Unusable) as error:
        return f"none: {error}"
    return loaded


def instruction_sets(path: Path) -> tuple[str, ...]:
    """Return the SETS of this CPU. Raises OSError if the library does not load, _Unusable if it is
    missing or cannot run.
    """
    best = _open(path).shoal_instruction_set()
    if best < 0:
        raise _Unusable("this CPU has no AVX2")
    return SETS[: best + 1]


def load(path: Path, instructions: str) -> Native:
    """Return the library with one of this CPU's instruction sets. Raises as `instruction_sets`."""
    opened, number = _open(path), SETS.index(instructions)

    def entry(name: str) -> Callable[[bytes, int], int]:
        function = opened[name]
        function.argtypes = (ctypes.c_char_p, _INT, _INT)
        return lambda packed, kind: int(function(packed, number, kind))

    int8 = opened.shoal_int8_linear
    int8.argtypes, int8.restype = (ctypes.c_char_p, _INT, _INT), None
    opened.shoal_resize.argtypes = (_INT, _AT, _LONG, _LONG, _INT, _AT, _LONG, _LONG, _INT)
    return Native(
        instructions,
        entry("shoal_attention"),
        entry("shoal_layer"),
        RowKernels(opened, number),
        int8,
        opened.shoal_int8_set() + 1,
        entry("shoal_paged"),
        partial(opened.shoal_resize, number),
    )


def _open(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise _Unusable("not built (libs/kernels/native/build.py)")
    if sys.platform != "linux":
        raise _Unusable("the library is for Linux")
    try:
        ctypes.CDLL(_OPENMP, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        raise _Unusable(f"torch has not loaded {_OPENMP}") from None
    return ctypes.CDLL(str(path))


def _wrong(loaded: Native) -> str:
    return next((wrong for trial in TRIALS if (wrong := trial(loaded))), "")
