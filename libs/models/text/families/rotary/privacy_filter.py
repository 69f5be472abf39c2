"""openai/privacy-filter: a bidirectional gpt-oss for token classification.

Pre-RMSNorm, rotary positions with YaRN, windowed attention with sinks, and a mixture of gated
experts in every layer.
"""

from __future__ import annotations

from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.rotary import read_rope
from libs.models.layers.sinks import SinkAttention
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import Rule

MODEL_TYPES = ("openai_privacy_filter",)
PREFIXES = ("", "model.")

WEIGHTS: dict[str, Rule] = {
    "embed_tokens": "embed.token",
    "layers.{}.input_layernorm": "layers.{}.attn_norm",
    "layers.{}.self_attn.q_proj": ("layers.{}.attn.qkv", 0),
    "layers.{}.self_attn.k_proj": ("layers.{}.attn.qkv", 1),
    "layers.{}.self_attn.v_proj": ("layers.{}.attn.qkv", 2),
    "layers.{}.self_attn.o_proj": "layers.{}.attn.out",
    "layers.{}.self_attn": "layers.{}.attn",  # sinks
    "layers.{}.post_attention_layernorm": "layers.{}.ffn_norm",
    "layers.{}.mlp.router": "layers.{}.ffn.router",
    "layers.{}.mlp.experts": "layers.{}.ffn",
    "norm": "norm",
    "score": None,
}

# Defaults for keys that config.json lacks.
_THETA = 150_000.0
_GAIN = 1.702  # of the gate's sigmoid: quick GELU
_LIMIT = 7.0


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    config.require("swiglu_alpha", _GAIN)
    hidden, heads = config.size("hidden_size"), config.heads("num_attention_heads")
    shared, size = config.size("num_key_value_heads", heads), config.size("head_dim", 64)
    if heads % shared:
        raise config.unsupported(
            "num_key_value_heads", f"it does not divide the {heads} attention heads"
        )
    rope = read_rope(config, size, theta=config.number("rope_theta", _THETA))
    experts, used = config.size("num_local_experts"), config.size("num_experts_per_tok", 4)
    if used > experts:
        raise config.unsupported("num_experts_per_tok", f"it exceeds the {experts} experts")
    layer = LayerSpec(rope, window=config.size("sliding_window", 128), experts=experts)
    bias = config.flag("attention_bias", True)
    spec = EncoderSpec(
        hidden=hidden,
        heads=heads,
        kv_heads=shared,
        head_size=size,
        ffn=config.size("intermediate_size"),
        layers=(layer,) * config.layers("num_hidden_layers"),
        norm="pre",
        norm_kind="rms",
        norm_eps=config.number("rms_norm_eps", 1e-5),
        activation="quick_gelu",
        gated=True,
        gate_limit=config.number("swiglu_limit", _LIMIT),
        experts_used=used,
        qkv_bias=bias,
        out_bias=bias,
    )
    positions = config.size("max_position_embeddings", 131_072)
    embed = EmbeddingSpec(
        config.size("vocab_size"), hidden, positions=positions, norm_eps=None, table=False
    )
    return PackedEncoder(spec, TokenEmbedding(embed), attention=SinkAttention)
