"""A whole transformer layer in one call of the native library, for batches of any size.

With separate operators, one short query spends half as much time in dispatch as in arithmetic, and
oneDNN's products of few rows reach two thirds of the possible speed; large batches are equally
fast. The model and the CPU decide whether a layer is computed this way, never the number of tokens,
so a text's vector has the same bits in any batch. Weights are read from oneDNN's packed memory
(`panels.py`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from struct import Struct
from typing import Final

import torch
from torch import Tensor

from libs.kernels.layout import BatchLayout
from libs.kernels.native.attention import ALL, table
from libs.kernels.native.library import TYPES, Native, native
from libs.kernels.native.rows import ACTIVATIONS

LAYER_DTYPES: Final = frozenset((torch.bfloat16, torch.float32))
"""Types of layers that are computed this way."""

_LAYER: Final = Struct("PPqq" * 4 + "6P" + "10i" + "3f" + "i")
_CALL: Final = Struct("6P")
_BATCH: Final = Struct("6P2q6i")
"""`struct Layer`, and the two halves of `struct LayerCall` of source/layer/layer.h."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer.

    Attributes:
        panels: Address of the prepacked weight (`panels.py`).
    """

    panels: int
    bias: Tensor | None
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class NormWeights:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer of one of the common forms.

    Attributes:
        post: Norms follow attention and feed-forward; otherwise they precede each.
        activation: As in `gated.py`.
        gated: `up` has gate and up, in this order or, with `gate_last`, the reverse.
        rms: Norms are RMSNorm with weights of `weight + shift`; otherwise LayerNorm.
        q_norm: Norm of each query head; both `q_norm` and `k_norm` are set, or none.
        k_norm: Norm of each key head.
    """

    qkv: Linear
    out: Linear
    up: Linear
    down: Linear
    attention_norm: NormWeights | None
    ffn_norm: NormWeights
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    heads: int
    kv_heads: int
    dim: int
    scale: float
    causal: bool
    window: int | None
    post: bool
    rms: bool
    eps: float
    shift: float
    gated: bool
    gate_last: bool
    activation: str


@dataclass(frozen=True, slots=True)
class LayerPages:
    """A layer's pages of keys and values (`paged.py`).

    Attributes:
        table: Address of a `struct PageTable`.
    """

    keys: Tensor
    values: Tensor
    table: int


class NativeLayer:
    """A layer in the library's format. `parts` must not change: their addresses are stored."""

    def __init__(self, parts: LayerParts, dtype: torch.dtype) -> None:
        self._parts, self._dtype, self._kind = parts, dtype, TYPES[dtype]
        self._layer = ctypes.create_string_buffer(_packed(parts), _LAYER.size)
        self._address = ctypes.addressof(self._layer)
        self._hidden = parts.qkv.inputs

    @staticmethod
    def takes(parts: LayerParts, dtype: torch.dtype, library: Native | None = None) -> bool:
        """Return whether this CPU has a kernel for such a layer. `library`: None for this process's
        choice.
        """
        library = native() if library is None else library
        if library is None or not library.has_layers(dtype):
            return False
        linears = (parts.qkv, parts.out, parts.up, parts.down)
        norms = [
            norm
            for norm in (parts.attention_norm, parts.ffn_norm, parts.q_norm, parts.k_norm)
            if norm is not None
        ]
        tensors = [norm.weight for norm in norms]
        tensors += [linear.bias for linear in linears if linear.bias is not None]
        tensors += [norm.bias for norm in norms if norm.bias is not None]
        return (
            all(linear.panels for linear in linears)
            and all(t.dtype is dtype and t.is_contiguous() for t in tensors)
            and all(norm.bias is None for norm in (parts.q_norm, parts.k_norm) if norm is not None)
            and (parts.q_norm is None) == (parts.k_norm is None)
            and parts.activation in ACTIVATIONS
            and (not parts.gated or parts.up.outputs % 64 == 0)
        )

    def forward(
        self,
        x: Tensor,
        layout: BatchLayout,
        chosen: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
        bias: Tensor | None,
        library: Native | None = None,
        pages: LayerPages | None = None,
    ) -> Tensor | None:
        """Compute [tokens, hidden], or only the rows `chosen` [queries] int32.

        None if the library cannot compute it now, or if a dispatch mode is active on this thread,
        such as one that counts a forward's memory, which could not observe the layer.

        Args:
            layout: Queries (`chosen` or all) and keys (all tokens).
            rotation: cos and sin [tokens, pairs] float32, or None.
            bias: As in `varlen_attention`.
            pages: Where keys and values are stored, and read if requested: then `layout` counts all
                keys of each sequence, and the tokens are the last of them.
        """
        library = native() if library is None else library
        if (
            library is None
            or x.dtype is not self._dtype
            or not x.is_contiguous()
            or torch._C._len_torch_dispatch_stack()
        ):
            return None
        batch, queries = _batch(layout, chosen, rotation, bias, x.shape[0])
        out = x.new_empty((queries, self._hidden))
        stored = (
            (0, 0, 0)
            if pages is None
            else (pages.keys.data_ptr(), pages.values.data_ptr(), pages.table)
        )
        call = _CALL.pack(self._address, x.data_ptr(), out.data_ptr(), *stored) + batch
        return out if library.layer(call, self._kind) == 0 else None


def _packed(parts: LayerParts) -> bytes:
    def at(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    def norm(one: NormWeights | None) -> tuple[int, int]:
        return (0, 0) if one is None else (at(one.weight), at(one.bias))

    linears = [
        (one.panels, at(one.bias), one.inputs, one.outputs)
        for one in (parts.qkv, parts.out, parts.up, parts.down)
    ]
    window = ALL if parts.window is None else min(parts.window, ALL)
    return _LAYER.pack(
        *(number for linear in linears for number in linear),
        *norm(parts.attention_norm),
        *norm(parts.ffn_norm),
        norm(parts.q_norm)[0],
        norm(parts.k_norm)[0],
        parts.heads,
        parts.kv_heads,
        parts.dim,
        window,
        0 if parts.causal else window,
        parts.post,
        parts.rms,
        parts.gated,
        parts.gate_last,
        ACTIVATIONS[parts.activation],
        parts.eps,
        parts.shift,
        parts.scale,
        0,
    )


def _batch(
    layout: BatchLayout,
    chosen: Tensor | None,
    rotation: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    rows: int,
) -> tuple[bytes, int]:
    """Return the data that a forward's layers share, and the number of queries; packed once per
    batch, and again for another rotation.
    """
    key = _batch, id(rotation)
    made = layout.memo.get(key)
    if not isinstance(made, tuple) or made[2] is not bias:
        cos, sin = (None, None) if rotation is None else (t.contiguous() for t in rotation)
        biases, middle = (None, 0) if bias is None else table(bias, layout)
        last = layout.runs[-1]
        queries = last.query + last.count * last.queries
        packed = _BATCH.pack(
            layout.cu_queries.data_ptr(),
            layout.cu_keys.data_ptr(),
            0 if chosen is None else chosen.data_ptr(),
            0 if biases is None else biases.data_ptr(),
            0 if cos is None else cos.data_ptr(),
            0 if sin is None else sin.data_ptr(),
            0 if biases is None else biases.shape[1],
            middle,
            rows,
            queries,
            layout.cu_queries.shape[0] - 1,
            0 if cos is None else cos.shape[1],
            torch.get_num_threads(),
            0,
        )
        # Keep everything alive that is referenced by address.
        made = layout.memo[key] = (packed, queries, bias, rotation, cos, sin, biases, chosen)
    return made[0], made[1]
