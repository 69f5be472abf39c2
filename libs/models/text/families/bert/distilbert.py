"""DistilBERT: BERT without segments, under other names."""

from __future__ import annotations

from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import Rule

MODEL_TYPES = ("distilbert",)
PREFIXES = ("", "distilbert.")

WEIGHTS: dict[str, Rule] = {
    "embeddings.position_ids": None,
    "embeddings.word_embeddings": "embed.token",
    "embeddings.position_embeddings": "embed.position",
    "embeddings.LayerNorm": "embed.norm",
    "transformer.layer.{}.attention.q_lin": ("layers.{}.attn.qkv", 0),
    "transformer.layer.{}.attention.k_lin": ("layers.{}.attn.qkv", 1),
    "transformer.layer.{}.attention.v_lin": ("layers.{}.attn.qkv", 2),
    "transformer.layer.{}.attention.out_lin": "layers.{}.attn.out",
    "transformer.layer.{}.sa_layer_norm": "layers.{}.attn_norm",
    "transformer.layer.{}.ffn.lin1": "layers.{}.ffn.up",
    "transformer.layer.{}.ffn.lin2": "layers.{}.ffn.down",
    "transformer.layer.{}.output_layer_norm": "layers.{}.ffn_norm",
    "pre_classifier": None,
    "classifier": None,
    "vocab_transform": None,
    "vocab_layer_norm": None,
    "vocab_projector": None,
    "qa_outputs": None,
}

_NORM_EPS = 1e-12  # fixed in the reference; config.json has no key for it


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    hidden = config.size("dim")
    heads = config.head_count("n_heads", hidden)
    spec = EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=config.size("hidden_dim"),
        layers=(LayerSpec(),) * config.layers("n_layers"),
        norm="post",
        norm_eps=_NORM_EPS,
        activation=config.activation("activation"),
    )
    embed = TokenEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            hidden,
            positions=config.size("max_position_embeddings"),
            norm_eps=_NORM_EPS,
        )
    )
    return PackedEncoder(spec, embed)
