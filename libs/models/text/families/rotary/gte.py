"""Alibaba's "new" (arXiv 2407.19669), in gte-*-v1.5, gte-multilingual-* and stella_en_400M: BERT
with rotary positions and GeGLU.

transformers and snowflake-arctic-embed-m-v2.0 call it "gte".
"""

from __future__ import annotations

from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.rotary import read_rope
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import Rule

MODEL_TYPES = ("new", "gte")
PREFIXES = ("", "new.", "gte.")

WEIGHTS: dict[str, Rule] = {
    "embeddings.position_ids": None,
    "embeddings.word_embeddings": "embed.token",
    "embeddings.token_type_embeddings": "embed.segment",
    "embeddings.LayerNorm": "embed.norm",
    "encoder.layer.{}.attention.qkv_proj": "layers.{}.attn.qkv",
    "encoder.layer.{}.attention.o_proj": "layers.{}.attn.out",
    "encoder.layer.{}.attn_ln": "layers.{}.attn_norm",
    "encoder.layer.{}.mlp.up_gate_proj": "layers.{}.ffn.up",
    "encoder.layer.{}.mlp.down_proj": "layers.{}.ffn.down",
    "encoder.layer.{}.mlp_ln": "layers.{}.ffn_norm",
    "pooler.dense": None,
    "classifier": None,
    "lm_head.dense": None,
    "lm_head.norm": None,
    "lm_head.decoder": None,
}

MODULES: dict[str, Rule] = {
    "layers.{}.self_attn.q_proj": ("layers.{}.attn.qkv", 0),
    "layers.{}.self_attn.k_proj": ("layers.{}.attn.qkv", 1),
    "layers.{}.self_attn.v_proj": ("layers.{}.attn.qkv", 2),
    "layers.{}.self_attn.o_proj": "layers.{}.attn.out",
    "layers.{}.mlp.up_proj": ("layers.{}.ffn.up", 0),
    "layers.{}.mlp.gate_proj": ("layers.{}.ffn.up", 1),
    "layers.{}.mlp.down_proj": "layers.{}.ffn.down",
}

_THETA = {"new": 10_000.0, "gte": 160_000.0}  # default if config.json has none


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    config.require("position_embedding_type", "rope")
    config.require("layer_norm_type", "layer_norm")
    config.require("pack_qkv", True)
    config.require("logn_attention_scale", False)
    hidden = config.size("hidden_size")
    heads = config.head_count("num_attention_heads", hidden)
    rope = read_rope(
        config,
        hidden // heads,
        theta=config.number("rope_theta", _THETA[config.text("model_type")]),
    )
    spec = EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=config.size("intermediate_size"),
        layers=(LayerSpec(rope),) * config.layers("num_hidden_layers"),
        norm="post",
        norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=config.activation("hidden_act"),
        gated=True,
        gate_last=True,
        up_bias=False,
    )
    embed = TokenEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            hidden,
            positions=config.size("max_position_embeddings"),
            norm_eps=spec.norm_eps,
            segments=config.integer("type_vocab_size", 1),
            table=False,
        )
    )
    return PackedEncoder(spec, embed)
