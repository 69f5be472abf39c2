"""Counts of the kernels that a forward launches on a GPU, without one: the encoder runs on the meta
device, where tensors have no values, on the path that CUDA tensors take, and every operator that
launches something is counted.

`python -m tests.gpu.launches` prints the table of docs/gpu.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from libs.kernels import triton_here
from libs.kernels.attention import varlen
from libs.kernels.linear import packed
from libs.models.interface.packed import Packed, Rows
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config
from libs.models.text.registry import empty_encoder, prepare
from tests.parity.checkpoints import random_model
from tests.support.triton_launches import recorded_launches

LENGTHS: Final = (3, 8, 8, 30)

_ALLOCATIONS: Final = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
"""Operators that only take memory."""


class _Operators(TorchDispatchMode):
    """Counts the kernels of torch's own operators, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if (
            name not in _ALLOCATIONS
            and not _is_upload(args)
            and (func._schema.is_mutable or not _is_view(out, args))
        ):
            self.counts[name] += _kernels(name, args)
        return out


def _is_upload(args: Any) -> bool:
    """Return whether a tensor is copied from the host to the device, as `layout.upload` does in one
    copy on CUDA.
    """
    return bool(args) and isinstance(args[0], Tensor) and args[0].device.type == "cpu"


def _is_view(out: Any, args: Any) -> bool:
    """Return whether an operator returns its input. For operators that may copy (`reshape`,
    `contiguous`, `to`), the result decides.
    """
    given = {_memory(one) for one in tree_leaves(args) if isinstance(one, Tensor)}
    return all(_memory(one) in given for one in tree_leaves(out) if isinstance(one, Tensor))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _kernels(name: str, args: Any) -> int:
    """A product that is added to a matrix copies that matrix first, unless it is added in place; a
    bias costs nothing.
    """
    return 2 if name == "addmm" and args[0].dim() == 2 else 1


@contextmanager
def _as_on_a_gpu() -> Iterator[Counter[str]]:
    """The path of CUDA tensors for those of the meta device. The counter is filled when the context
    ends.
    """
    operators, counts = _Operators(), Counter[str]()
    with (
        mock.patch.object(triton_here, "_DEVICES", ("meta",)),
        mock.patch.object(varlen, "_has_flash", return_value=True),
        mock.patch.object(varlen, "_flash_kernel", return_value=varlen._torch_flash),
        mock.patch.object(packed, "_has_gelu_product", return_value=True),
        recorded_launches() as launches,
        operators,
    ):
        yield counts
    counts.update(operators.counts)
    counts.update(launch.name for launch in launches)


def launches(encoder: PackedEncoder, rows: Rows | None = None) -> Counter[str]:
    """The kernels of a forward of `encoder`, which is on the meta device, by name. Copies of the
    batch are not among them.
    """
    rng = np.random.default_rng(0)
    batch = Packed.from_sequences(
        [rng.integers(5, 50, length, dtype=np.int32) for length in LENGTHS], device="meta"
    )
    with _as_on_a_gpu() as counts:
        encoder.forward(batch, rows)
    return counts


def build_encoder(
    kind: str, layers: int, config: Mapping[str, object] | None = None
) -> PackedEncoder:
    """An encoder of this family in bfloat16, without values."""
    settings = random_model(kind, layers=layers, config=config).config.to_dict()
    encoder, _ = empty_encoder(Config(settings))
    encoder.to(torch.bfloat16)
    prepare(encoder)
    return encoder.requires_grad_(False).eval()


def count_kernels(kind: str, layers: int) -> tuple[int, Counter[str]]:
    """Count the kernels that a forward of `layers` layers launches, and those of one more layer."""
    config = CONFIGS.get(kind)
    some, more = launches(build_encoder(kind, 2, config)), launches(build_encoder(kind, 3, config))
    a_layer = more.copy()
    a_layer.subtract(some)
    return some.total() + (layers - 2) * a_layer.total(), +a_layer


# The recipes' heads are of odd sizes, which flash kernels do not take; published ones are not.
CONFIGS: Final[Mapping[str, Mapping[str, object]]] = {
    "qwen3": {"head_dim": 32},
    "qwen2": {"head_dim": 32},
    "llama": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
}

PUBLISHED: Final = {
    "BERT-large": ("bert", 24),
    "ModernBERT-base": ("modernbert", 22),
    "Qwen3-0.6B": ("qwen3", 28),
    "EmbeddingGemma-300M": ("gemma3_text", 24),
}

if __name__ == "__main__":
    for model, (kind, layers) in PUBLISHED.items():
        total, a_layer = count_kernels(kind, layers)
        print(
            f"{model}: {total}, a layer {a_layer.total()}: "
            f"{', '.join(f'{count} {name}' for name, count in a_layer.items())}"
        )
