"""Measures the activation memory of a batch, beside the weights: the peak bytes of new tensors that live at a time.

Once per model and process, after its first load, with a tiny forward. Counted at operator dispatch, so that it is the same on every
device and needs no idle one; a kernel's internal workspace is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from libs.models.layers.embeddings import InputLayer
from libs.models.trunk import Trunk
from libs.models.work import InputRows, InputSequence

_SEQUENCES = 4
_TOKENS = 16  # of each

_ALONE = Lock()  # torch keeps in globals that a dispatch mode is active


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active on this thread: `peak` is the most bytes that new storages of strided tensors took at a time."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        """`known`: existing tensors, which are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known if tensor.layout is torch.strided}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes seconds, only to disable it here

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and one.layout is torch.strided:
                self._see(one.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages or storage.data_ptr() in self._known:
            return
        size = storage.nbytes()
        self._storages[key] = weakref.ref(storage, partial(self._gone, key, size))
        self._live += size
        self.peak = max(self.peak, self._live)

    def _gone(self, key: int, size: int, _: object) -> None:
        del self._storages[key]
        self._live -= size


@torch.inference_mode()
def activation_bytes_per_token(trunk: Trunk, weights: Sequence[Tensor]) -> float:
    """Measured with a few short sequences, through the trunk's encoder and each head. `weights`: existing tensors, not counted.

    Heads that need more input of a sequence than its tokens are left out, and so is a tower, as its input is not of tokens. Raises
    what the encoder raises.
    """
    trunk = replace(trunk, tower=None)
    length = min(_TOKENS, trunk.encoder.max_positions)
    rows = [_sequence(trunk.encoder.embed, number, length) for number in range(_SEQUENCES)]
    live = LiveBytes(weights)
    with _ALONE, live:
        batch = trunk.pack(rows, [None] * _SEQUENCES)
        hidden = trunk.encoder.forward(batch)
        for head in trunk.heads.values():
            try:
                head.forward(hidden, batch, rows)
            except Exception:  # noqa: S112  # the head needs words or labels, which these sequences lack
                continue
    return live.peak / (length * _SEQUENCES)


def _sequence(embed: InputLayer, number: int, length: int) -> InputSequence:
    if embed.vocabulary:
        return InputSequence(np.arange(number, number + length, dtype=np.int32) % embed.vocabulary)
    rows = InputRows(np.arange(length, dtype=np.int32), np.zeros((length, embed.row_size), np.float32))
    return InputSequence(np.zeros(length, np.int32), rows=rows)
