"""Measurement of the memory that a computation holds at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns.

    A view counts as its base tensor; views of `but` do not count.
    """

    def __init__(self, but: Tensor | None = None) -> None:
        super().__init__()
        self.numbers = 0
        self._but = None if but is None else but.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() != self._but:
                self.numbers = max(self.numbers, t.untyped_storage().nbytes() // t.element_size())
        return out
