"""Record the project's Triton launches instead of making them.

A recorder replaces every kernel, so the launching functions run on tensors of any device, also
without values.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

_TRITON_MODULES = (
    "libs.kernels.attention.disentangled_triton",
    "libs.kernels.attention.paged_triton",
    "libs.kernels.attention.varlen_triton",
    "libs.kernels.rows.fused_triton",
    "libs.kernels.rows.rope_triton",
)
"""Every module with kernels; a new one is added here, and its variants in
`tests/kernels/compiling.py`.
"""

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_ALIGNMENT = 16
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """A launch of `kernel`, as Triton's launcher would specialise it."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    """The type of each argument by name."""
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    """Names of the arguments that are multiples of 16, as addresses or numbers."""
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


class _Recorder:
    """Stands for a kernel while its launches are recorded."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: object) -> Any:
        return self._record

    def _record(self, *args: Any, **named: Any) -> None:
        options = tuple((name, named.pop(name)) for name in _OPTIONS if name in named)
        parameters = self._kernel.arg_names
        values = dict(zip(parameters, args, strict=False)) | named
        if set(values) != set(parameters):
            raise TypeError(
                f"{self._kernel.__name__} is launched with {sorted(values)}; it takes "
                f"{sorted(parameters)}"
            )
        signature, constants, aligned = [], [], []
        # Interpreted kernels have no typed parameters; their launches are counted, not compiled.
        for parameter in getattr(self._kernel, "params", ()):
            value = values[parameter.name]
            kind = _kind(parameter, value)
            signature.append((parameter.name, kind))
            if kind == "constexpr":
                constants.append((parameter.name, value))
            elif not parameter.do_not_specialize and _is_aligned(value):
                aligned.append(parameter.name)
        self._launches.append(
            Launch(self._kernel, tuple(signature), tuple(constants), tuple(aligned), options)
        )


def _kind(parameter: Any, value: Any) -> str:
    if parameter.is_constexpr:
        return "constexpr"
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if parameter.annotation_type:
        return str(parameter.annotation_type)
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    if value == 1 and not parameter.do_not_specialize:
        return "constexpr"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _is_aligned(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.storage_offset() * value.element_size() % _ALIGNMENT == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % _ALIGNMENT == 0


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """While the context is open no kernel is launched; the list has what would have been."""
    launches: list[Launch] = []
    replaced: list[tuple[Any, str, Any]] = []
    for name in _TRITON_MODULES:
        module = importlib.import_module(name)
        for attribute, value in list(vars(module).items()):
            if isinstance(value, KernelInterface):
                replaced.append((module, attribute, value))
                setattr(module, attribute, _Recorder(value, launches))
    try:
        yield launches
    finally:
        for module, attribute, kernel in replaced:
            setattr(module, attribute, kernel)


def launched_kernels() -> set[str]:
    """The names of all kernels of the project: its Triton functions that no other of them calls."""
    functions = {
        attribute: value
        for name in _TRITON_MODULES
        for attribute, value in vars(importlib.import_module(name)).items()
        if isinstance(value, KernelInterface)
    }
    called = {
        other
        for value in functions.values()
        for other in value.fn.__code__.co_names
        if other in functions
    }
    return set(functions) - called
