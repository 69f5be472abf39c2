"""Latent attention pooling (NV-Embed, arXiv 2405.17428): token states attend to learnt latents,
then the mean is taken.

The latents are constants, and therefore their keys and values too. When a model is loaded, the
query projection is folded into the keys and the output projection into the values. This reduces
32,768 elements per token and projection to heads * latents = 4,096.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels.pooling.pooled import mean
from libs.kernels.rows.norms import layer_norm
from libs.kinds.nvembed.card import Latent
from libs.models.interface.head import Array, split_rows
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output
from libs.models.text.heads.linear import check_shape
from libs.models.text.heads.pooled import without_prompts

_STEM: Final = "latent_attention_model"
_NORM_EPS: Final = 1e-5
_WIDER: Final = 4
"""Ratio of the feed-forward's inner width to the hidden size."""
_ROWS: Final = 2048
"""Tokens at a time: the feed-forward's inner width, with its gate, is eight times that of a
state."""


class LatentHead(nn.Module):
    """Map hidden states to [sequences, hidden] float32."""

    def __init__(
        self,
        settings: Latent,
        state: Mapping[str, Tensor],
        size: int,
        dtype: torch.dtype,
        file: str,
    ) -> None:
        """Build the head. Raises ModelBroken for a tensor.

        Args:
            size: Size of hidden states.
            dtype: Type of the products; the encoder's.
        """
        super().__init__()
        attend, forward, inner = (
            f"{_STEM}.cross_attend_blocks.{part}" for part in ("0.fn", "1.fn", "0")
        )
        wide, width = settings.heads * settings.head_size, _WIDER * size
        for name, shape in {
            f"{_STEM}.latents": (settings.latents, size),
            f"{attend}.to_q.weight": (wide, size),
            f"{attend}.to_kv.weight": (2 * wide, size),
            f"{attend}.to_out.weight": (size, wide),
            f"{forward}.net.0.weight": (2 * width, size),
            f"{forward}.net.0.bias": (2 * width,),
            f"{forward}.net.2.weight": (size, width),
            f"{forward}.net.2.bias": (size,),
        }.items():
            check_shape(state, name, shape, file)
        self.attention_norm = _Norm(state, f"{inner}.norm", size, file)
        self.ffn_norm = _Norm(state, f"{_STEM}.cross_attend_blocks.1.norm", size, file)
        context = _Norm(state, f"{inner}.norm_context", size, file)(state[f"{_STEM}.latents"])
        keys, values = self._folded(settings, state, context, attend)
        self.keys, self.values = _frozen(keys, dtype), _frozen(values, dtype)
        self.up, self.down = (
            _frozen(state[f"{forward}.net.{place}.weight"], dtype) for place in (0, 2)
        )
        self.up_bias, self.down_bias = (
            _frozen(state[f"{forward}.net.{place}.bias"], dtype) for place in (0, 2)
        )
        self._heads = settings.heads

    @staticmethod
    def _folded(
        settings: Latent, state: Mapping[str, Tensor], context: Tensor, stem: str
    ) -> tuple[Tensor, Tensor]:
        """Return keys with the query projection [heads * latents, hidden], and values with the
        output projection [hidden, heads * latents].
        """
        size, wide = settings.head_size, settings.heads * settings.head_size
        query, both, out = (state[f"{stem}.{name}.weight"] for name in ("to_q", "to_kv", "to_out"))
        keys, values = [], []
        for head in range(settings.heads):
            own = slice(head * size, (head + 1) * size)
            keys.append((context @ both[own].T) @ query[own] * size**-0.5)
            values.append(out[:, own] @ (context @ both[wide:][own].T).T)
        return torch.cat(keys), torch.cat(values, dim=1)

    @property
    def rows(self) -> Rows | None:
        return None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        states, cu_seqlens = without_prompts(
            hidden, batch, [sequence.skip for sequence in sequences]
        )
        return (
            mean(
                torch.cat(
                    [
                        self._layer(part.float())
                        for part in states.split_with_sizes(_parts(len(states)))
                    ]
                ),
                cu_seqlens,
            ),
        )

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        return split_rows(arrays[0])

    def _layer(self, x: Tensor) -> Tensor:
        """Apply the layer to [tokens, hidden] float32."""
        scores = self._product(self.attention_norm(x), self.keys).view(len(x), self._heads, -1)
        x = x + self._product(scores.softmax(-1).flatten(1), self.values)
        inner, gate = self._product(self.ffn_norm(x), self.up, self.up_bias).chunk(2, dim=-1)
        return x + self._product(inner * F.gelu(gate), self.down, self.down_bias)

    @staticmethod
    def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x.to(weight.dtype), weight, bias).float()


class _Norm(nn.Module):
    """LayerNorm in float32 over [rows, size]."""

    def __init__(self, state: Mapping[str, Tensor], stem: str, size: int, file: str) -> None:
        super().__init__()
        for ending in ("weight", "bias"):
            check_shape(state, f"{stem}.{ending}", (size,), file)
        self.weight = _frozen(state[f"{stem}.weight"], torch.float32)
        self.bias = _frozen(state[f"{stem}.bias"], torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, _NORM_EPS)


def _frozen(tensor: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(tensor.to(dtype), requires_grad=False)


def _parts(rows: int) -> list[int]:
    return [min(_ROWS, rows - start) for start in range(0, rows, _ROWS)]
