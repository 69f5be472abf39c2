"""Gemma 2 (arXiv 2408.00118): sandwich norms, soft-capped attention scores, and a window in every
other layer; causal.
"""

from __future__ import annotations

from dataclasses import replace

from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.rotary import read_rope
from libs.models.layers.spec import Config, EmbeddingSpec, LayerSpec
from libs.models.text.families.decoders import gemma3
from libs.models.text.families.decoders.gemma3 import GemmaEmbedding
from libs.models.text.families.decoders.llama import decoder_spec, read_window, sliding_layers
from libs.models.weights import Rule

MODEL_TYPES = ("gemma2",)
PREFIXES = ("", "model.")

WEIGHTS: dict[str, Rule] = {
    stem: rule for stem, rule in gemma3.WEIGHTS.items() if not stem.endswith(("q_norm", "k_norm"))
}

# transformers' values for keys that config.json lacks.
_HEAD_SIZE = 256
_SCALAR = 256  # attention scores are divided by its root
_WINDOW = 4096
_SOFTCAP, _FINAL_SOFTCAP = 50.0, 30.0


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    # transformers' two implementations of attention disagree about the flag: one ignores it.
    config.require("use_bidirectional_attention", False)
    size, bias = config.size("head_dim", _HEAD_SIZE), config.flag("attention_bias", False)
    rope = read_rope(config, size)
    window = (
        None
        if config.is_null("sliding_window")
        else read_window(config, causal=True, default=_WINDOW)
    )
    slides = sliding_layers(config, lambda number: number % 2 == 0)
    spec = replace(
        decoder_spec(config, causal=True, windows=(), head_size=size, qkv_bias=bias, out_bias=bias),
        layers=tuple(LayerSpec(rope=rope, window=window if own else None) for own in slides),
        norm="sandwich",
        norm_shift=1.0,
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        scale=config.positive("query_pre_attn_scalar", _SCALAR) ** -0.5,
        softcap=None
        if config.is_null("attn_logit_softcapping")
        else config.positive("attn_logit_softcapping", _SOFTCAP),
    )
    embed = EmbeddingSpec(
        config.size("vocab_size"),
        spec.hidden,
        positions=config.size("max_position_embeddings", 8192),
        norm_eps=None,
        table=False,
        scale=spec.hidden**0.5,
    )
    return PackedEncoder(spec, GemmaEmbedding(embed))


def final_softcap(config: Config) -> float | None:
    """Return the soft cap of the next token's logits in a model of any family; None without one."""
    if config.text("model_type") in MODEL_TYPES and not config.is_null("final_logit_softcapping"):
        return config.positive("final_logit_softcapping", _FINAL_SOFTCAP)
    return (
        config.positive("final_logit_softcapping")
        if config.has("final_logit_softcapping")
        else None
    )
