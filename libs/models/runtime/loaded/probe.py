"""Measure the activation memory of a batch: the peak bytes of new tensors alive at the same time.

Runs one time per model and process, after the first load, with a tiny forward. Bytes are counted at
operator dispatch, so the result is the same on every device, and the device need not be idle; a
kernel's internal workspace is not included.
"""

from __future__ import annotations

import math
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

from libs.models.interface.sequences import InputRows, InputSequence, never_yield
from libs.models.layers.embeddings import InputLayer
from libs.models.runtime.backbone import Backbone, LayeredTower, SampledTower

_SEQUENCES = 4
_TOKENS = 16  # of each sequence

_MODE_LOCK = Lock()  # torch stores in globals that a dispatch mode is active


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures new storages of strided tensors on this thread while active. `peak`: most bytes at
    the same time.
    """

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        """Start measuring. `known`: existing tensors, which are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._known = {
            tensor.untyped_storage().data_ptr()
            for tensor in known
            if tensor.layout is torch.strided
        }
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # otherwise torch imports its compiler, which takes seconds, only to disable it here
        return False

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
def activation_bytes_per_token(backbone: Backbone, weights: Sequence[Tensor]) -> float:
    """Measure a few short sequences through the backbone's encoder and each head. `weights`:
    existing tensors, not counted.

    Heads that need more input than tokens are left out, and so is a tower, which `image_bytes`
    measures. Errors of the encoder propagate.
    """
    backbone = replace(backbone, tower=None)
    length = min(_TOKENS, backbone.encoder.max_positions)
    rows = [_sequence(backbone.encoder.embed, number, length) for number in range(_SEQUENCES)]
    live = LiveBytes(weights)
    with _MODE_LOCK, live:
        _run(backbone, rows)
    return live.peak / (length * _SEQUENCES)


@torch.inference_mode()
def image_bytes(
    backbone: Backbone, weights: Sequence[Tensor], tokens: int, largest: int, image: int
) -> int:
    """Return the bytes of activations for a batch of `tokens` image tokens, or for the largest
    image if that needs more; 0 for a text backbone.

    One small image is measured and scaled by tokens. Errors of the backbone propagate.

    Args:
        largest: Tokens of the largest image.
        image: Tower tokens of a tower's largest input.
    """
    tower, tokens = backbone.tower, max(tokens, largest)
    if not isinstance(tower, SampledTower):
        return 0
    sample = tower.sample()
    live = LiveBytes(weights)
    if not isinstance(tower, LayeredTower):
        with _MODE_LOCK, live:
            _run(backbone, [sample])
        return math.ceil(live.peak / sample.tokens * tokens)
    inputs = () if sample.rows is None else sample.rows.inputs
    with _MODE_LOCK, live:
        rows = tower.forward_preemptible(inputs, never_yield)
    patches = sum(map(tower.count_tokens, inputs))
    chunk_tokens = max(min(tokens * patches / len(rows), tower.chunk_tokens), image)
    # The rows exist while the text encoder computes.
    a_token = activation_bytes_per_token(backbone, weights) + rows.nbytes / len(rows)
    return math.ceil(max(live.peak / patches * chunk_tokens, a_token * tokens))


def _run(backbone: Backbone, rows: Sequence[InputSequence]) -> None:
    """Run a forward through the encoder and each head."""
    batch = backbone.pack(rows, [None] * len(rows))
    hidden = backbone.encoder.forward(batch)
    for head in backbone.heads.values():
        try:
            head.forward(hidden, batch, rows)
        except Exception:  # noqa: S112  # the head needs words or labels, which these sequences lack
            continue


def _sequence(embed: InputLayer, number: int, length: int) -> InputSequence:
    if embed.vocabulary:
        return InputSequence(np.arange(number, number + length, dtype=np.int32) % embed.vocabulary)
    rows = InputRows(
        np.arange(length, dtype=np.int32), np.zeros((length, embed.row_size), np.float32)
    )
    return InputSequence(np.zeros(length, np.int32), rows=rows)
