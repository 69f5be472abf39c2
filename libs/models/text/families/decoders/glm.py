"""GLM-OCR's text model: norms before and after each block, gate and up in one tensor, and rotation
of neighbouring dimensions of a head.

It exists only within its vision-language model, and is causal.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from libs.kernels.rows.rope import rotate
from libs.models.layers.encoder import Attention, PackedEncoder, Shared
from libs.models.layers.spec import Config
from libs.models.text.families.decoders.llama import BLOCKS, HEADS, decoder_spec, token_embedding
from libs.models.weights import Rule

MODEL_TYPES = ("glm_ocr_text",)
PREFIXES = ("", "model.")

_SEPARATE = ("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj")
_SHARED = {name: rule for name, rule in BLOCKS.items() if name not in _SEPARATE}
WEIGHTS: dict[str, Rule] = HEADS | _SHARED | {
    "layers.{}.mlp.gate_up_proj": "layers.{}.ffn.up",
    "layers.{}.post_self_attn_layernorm": "layers.{}.attn_out_norm",
    "layers.{}.post_attention_layernorm": "layers.{}.ffn_norm",
    "layers.{}.post_mlp_layernorm": "layers.{}.ffn_out_norm",
}  # fmt: skip


class PairwiseAttention(Attention):
    """Attention with dimensions 2i and 2i + 1 of a head rotated as a pair. It permutes them into
    `rotate`'s layout, for queries and keys alike, which leaves their products unchanged."""

    def project(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Project [tokens, hidden] to queries [tokens, heads, head_size], and keys and values
        [tokens, kv_heads, head_size].
        """
        if self.rope is None:
            raise TypeError("every layer has rotary positions")
        fused = self.qkv.forward(x).view(-1, sum(self.parts), self.head_size)
        both, v = fused.split_with_sizes((sum(self.parts[:2]), self.parts[2]), dim=1)
        turned = 2 * len(self.rope.frequencies)
        halves = torch.cat(
            (both[..., 0:turned:2], both[..., 1:turned:2], both[..., turned:]), dim=-1
        )
        q, k = rotate(halves, *shared.rotations[self.rope]).split_with_sizes(self.parts[:2], dim=1)
        return q, k, v


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    windows = (None,) * config.layers("num_hidden_layers")
    spec = replace(
        decoder_spec(config, causal=True, windows=windows, partial=True), norm="sandwich"
    )
    return PackedEncoder(spec, token_embedding(config), attention=PairwiseAttention)
