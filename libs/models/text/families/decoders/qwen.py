"""Qwen2 and Qwen3: Llama with QKV biases (2) or QK norm (3). jina-embeddings-v5-text-small is a
Qwen3 (eurobert.py has -nano).

Causal, unless config.json says otherwise (gte-Qwen2) or names Voyage's architecture. With
`use_sliding_window`, layers from `max_window_layers` on have a window.
"""

from __future__ import annotations

from libs.kinds.dense.voyage import is_voyage
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config
from libs.models.text.families.decoders import llama
from libs.models.text.families.decoders.llama import (
    decoder_spec,
    read_window,
    sliding_layers,
    token_embedding,
)
from libs.models.weights import Rule

MODEL_TYPES = ("qwen2", "qwen3", "jina_embeddings_v5")
PREFIXES = ("", "model.")

WEIGHTS: dict[str, Rule] = llama.WEIGHTS | {
    "layers.{}.self_attn.q_norm": "layers.{}.attn.q_norm",
    "layers.{}.self_attn.k_norm": "layers.{}.attn.k_norm",
}

# Defaults for keys that config.json lacks.
_HEAD_SIZE = 128  # of Qwen3
_WINDOW = 4096
_FIRST_SLIDING_LAYER = 28


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    causal = config.flag("is_causal", not is_voyage(config.values))
    windows = _windows(config, causal)
    if config.text("model_type") == "qwen2":
        return PackedEncoder(
            decoder_spec(config, causal=causal, windows=windows, qkv_bias=True),
            token_embedding(config),
        )
    bias, size = config.flag("attention_bias", False), config.size("head_dim", _HEAD_SIZE)
    spec = decoder_spec(
        config,
        causal=causal,
        windows=windows,
        head_size=size,
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
    )
    return PackedEncoder(spec, token_embedding(config))


def _windows(config: Config, causal: bool) -> tuple[int | None, ...]:
    used = config.flag("use_sliding_window", False) and not config.is_null("sliding_window")
    first = config.integer("max_window_layers", _FIRST_SLIDING_LAYER)
    sliding = sliding_layers(config, lambda number: used and number >= first)
    if any(sliding) and not used:
        raise config.unsupported(
            "layer_types", "some layers slide, but use_sliding_window is false"
        )
    window = read_window(config, causal, _WINDOW) if used else None
    return tuple(window if slides else None for slides in sliding)
