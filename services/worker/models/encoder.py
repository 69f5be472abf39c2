"""The packed transformer encoder: one forward for every family, assembled from an EncoderSpec.

Second stop of a forward, between Packed and the heads. Every choice is made in a constructor, so a forward has no tests of names
and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels.attention import row_attention, varlen_attention
from libs.kernels.linear import PackedLinear
from services.worker.models.embeddings import TokenEmbedding
from services.worker.models.packed import Packed
from services.worker.models.spec import Activation, EncoderSpec

_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class Attention(nn.Module):
    """Self-attention up to, and without, its output projection: that belongs to the layer, which fuses the residual into it."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.qkv = PackedLinear(spec.hidden, 3 * spec.hidden)
        self.out = PackedLinear(spec.hidden, spec.hidden)
        self.shape = (-1, 3, spec.heads, spec.head_size)
        self.scale = spec.head_size**-0.5

    def forward(self, x: Tensor, batch: Packed, bias: Tensor | None) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        q, k, v = self.qkv.forward(x).view(self.shape).unbind(1)  # [tokens, heads, head_size] each
        mixed = varlen_attention(q, k, v, batch.cu_seqlens, batch.max_seqlen, groups=batch.groups, scale=self.scale, bias=bias)
        return mixed.flatten(1)

    def of_rows(self, x: Tensor, batch: Packed, rows: Tensor) -> Tensor:
        """The same for one row of each sequence only: [tokens, hidden] -> [sequences, hidden]"""
        q, k, v = self.qkv.forward(x).view(self.shape).unbind(1)
        q = q.index_select(0, rows)
        return row_attention(q, k, v, batch.cu_seqlens, batch.max_seqlen, groups=batch.groups, scale=self.scale).flatten(1)


class FeedForward(nn.Module):
    """up, activation; `down` is applied by the layer, which fuses the residual into it."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.up = PackedLinear(spec.hidden, spec.ffn, activation="gelu" if spec.activation == "gelu" else "none")
        self.down = PackedLinear(spec.ffn, spec.hidden)
        self._function = _FUNCTIONS.get(spec.activation)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, ffn]"""
        x = self.up.forward(x)
        return x if self._function is None else self._function(x)


class Layer(nn.Module):
    """One transformer layer: attention and feed-forward, each with its residual. Subclasses place the norms."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.attn, self.ffn = Attention(spec), FeedForward(spec)
        self.attn_norm = nn.LayerNorm(spec.hidden, eps=spec.norm_eps)
        self.ffn_norm = nn.LayerNorm(spec.hidden, eps=spec.norm_eps)

    def forward(self, x: Tensor, batch: Packed, bias: Tensor | None) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.after_attention(x, self.attn.forward(self.before_attention(x), batch, bias))

    def of_rows(self, x: Tensor, batch: Packed, rows: Tensor) -> Tensor:
        """The same for one row of each sequence: only keys and values are computed for the others. Returns [sequences, hidden]."""
        return self.after_attention(x.index_select(0, rows), self.attn.of_rows(self.before_attention(x), batch, rows))

    def before_attention(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        raise NotImplementedError


class PostNormLayer(Layer):
    """BERT: norm after each residual add."""

    def before_attention(self, x: Tensor) -> Tensor:
        return x

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        normed: Tensor = self.attn_norm(self.attn.out.add(mixed, x))
        out: Tensor = self.ffn_norm(self.ffn.down.add(self.ffn.forward(normed), normed))
        return out


class PreNormLayer(Layer):
    """Norm before each block; the residual stream itself is not normalised."""

    def before_attention(self, x: Tensor) -> Tensor:
        normed: Tensor = self.attn_norm(x)
        return normed

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = self.attn.out.add(mixed, x)
        return self.ffn.down.add(self.ffn.forward(self.ffn_norm(x)), x)


class PositionBias(nn.Module):
    """What a family adds to attention scores by distance. `table` is `varlen_attention`'s `bias`; a subclass computes it in
    `prepare`.
    """

    table: Tensor


class TextEncoder(nn.Module):
    """Packed token ids to hidden states. `max_positions`: the longest sequence that the position table has rows for."""

    def __init__(self, spec: EncoderSpec, embed: TokenEmbedding, relative: PositionBias | None = None) -> None:
        super().__init__()
        self.hidden_size, self.max_positions = spec.hidden, embed.max_positions
        self.embed, self.relative = embed, relative
        kind = PostNormLayer if spec.norm == "post" else PreNormLayer
        self.stack = tuple(kind(spec) for _ in range(spec.layers))
        self.layers = nn.ModuleList(self.stack)
        self.norm = nn.LayerNorm(spec.hidden, eps=spec.norm_eps) if spec.norm == "pre" else None

    @property
    def token_weight(self) -> Tensor:
        """The token table [vocabulary, embedding size] in the encoder's type, for heads that share it (a tied decoder)."""
        return self.embed.token.weight

    @property
    def bytes(self) -> int:
        """Memory of all weights, in whichever layout they are."""
        return resident_bytes(self)

    @torch.inference_mode()
    def forward(self, batch: Packed, rows: Tensor | None = None) -> Tensor:
        """Hidden states [tokens, hidden] in the encoder's type.

        With `rows`, one row of each sequence in their order (`batch.first_rows()`, `batch.last_rows()`): only those, [sequences,
        hidden], for which most of the last layer is left out.
        """
        bias = None if self.relative is None else self.relative.table
        whole = self.stack if rows is None or bias is not None else self.stack[:-1]
        x = self.embed.forward(batch)
        for layer in whole:
            x = layer.forward(x, batch, bias)
        if rows is not None:
            # A row's place in its sequence is not known on the host, so a position bias needs the whole last layer.
            x = x.index_select(0, rows) if whole is self.stack else self.stack[-1].of_rows(x, batch, rows)
        return x if self.norm is None else F.layer_norm(x, (self.hidden_size,), self.norm.weight, self.norm.bias, self.norm.eps)


def resident_bytes(module: nn.Module) -> int:
    """Memory of a module's weights, shared storage counted once."""
    storages: dict[int, int] = {}
    packed = 0
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            packed += tensor.numel() * tensor.element_size()
    return packed + sum(storages.values())
