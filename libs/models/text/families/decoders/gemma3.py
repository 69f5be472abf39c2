"""Gemma 3's text model (embeddinggemma): sandwich norms, QK norm, and two RoPE bases.

Five of six layers have sliding-window attention and a RoPE base that full attention does not use.
With `use_bidirectional_attention` no layer is causal.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.rotary import read_rope
from libs.models.layers.spec import Config, EmbeddingSpec, LayerSpec
from libs.models.text.families.decoders.llama import (
    BLOCKS,
    HEADS,
    decoder_spec,
    read_window,
    sliding_layers,
)
from libs.models.weights import Rule

MODEL_TYPES = ("gemma3_text",)
PREFIXES = ("", "model.")

WEIGHTS: dict[str, Rule] = (
    HEADS
    | BLOCKS
    | {
        "layers.{}.self_attn.q_norm": "layers.{}.attn.q_norm",
        "layers.{}.self_attn.k_norm": "layers.{}.attn.k_norm",
        "layers.{}.post_attention_layernorm": "layers.{}.attn_out_norm",
        "layers.{}.pre_feedforward_layernorm": "layers.{}.ffn_norm",
        "layers.{}.post_feedforward_layernorm": "layers.{}.ffn_out_norm",
    }
)

# Defaults for keys that config.json lacks.
_HEAD_SIZE = 256
_SCALAR = 256  # attention scores are divided by its root
_WINDOW = 4096
_PATTERN = 6  # every sixth layer has full attention
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


class GemmaEmbedding(TokenEmbedding):
    """Token embeddings times a scale in the weights' data type: in bfloat16 the square root of 768
    rounds to 27.75.
    """

    def prepare(self) -> None:
        super().prepare()
        self._scale = float(torch.tensor(self._scale, dtype=self.token.weight.dtype, device="cpu"))


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    if config.has("attn_logit_softcapping"):
        raise config.unsupported("attn_logit_softcapping", "only null is supported")
    causal = not config.flag("use_bidirectional_attention", False)
    # In a bidirectional model, the window counts both sides together.
    window = (
        read_window(config, causal, _WINDOW)
        if causal
        else config.size("sliding_window", _WINDOW) // 2
    )
    size = config.size("head_dim", _HEAD_SIZE)
    full = LayerSpec(
        rope=read_rope(
            config, size, theta=config.number("rope_theta", _GLOBAL_THETA), kind="full_attention"
        )
    )
    local = config.number("rope_local_base_freq", _LOCAL_THETA)
    sliding = LayerSpec(
        rope=read_rope(config, size, theta=local, kind="sliding_attention", scaled=False),
        window=window,
    )
    pattern = config.size(
        "sliding_window_pattern", config.size("_sliding_window_pattern", _PATTERN)
    )
    layers = sliding_layers(config, lambda number: (number + 1) % pattern != 0)
    bias = config.flag("attention_bias", False)
    spec = replace(
        decoder_spec(
            config,
            causal=causal,
            windows=(),
            head_size=size,
            qk_norm=True,
            qkv_bias=bias,
            out_bias=bias,
        ),
        layers=tuple(sliding if slides else full for slides in layers),
        norm="sandwich",
        norm_shift=1.0,
        activation=config.activation("hidden_activation")
        if config.has("hidden_activation")
        else "gelu_tanh",
        scale=config.positive("query_pre_attn_scalar", _SCALAR) ** -0.5,
    )
    embed = GemmaEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            spec.hidden,
            positions=config.size("max_position_embeddings"),
            norm_eps=None,
            table=False,
            scale=spec.hidden**0.5,
        )
    )
    return PackedEncoder(spec, embed)
