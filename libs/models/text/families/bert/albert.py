"""ALBERT (arXiv 1909.11942): BERT with shared layer weights and token embeddings narrower than the
layers.

`num_hidden_groups` is the number of layers that have weights; each computes a run of consecutive
layers.
"""

from __future__ import annotations

from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import Rule

MODEL_TYPES = ("albert",)
PREFIXES = ("", "albert.")

_LAYER = "encoder.albert_layer_groups.{}.albert_layers.0"

WEIGHTS: dict[str, Rule] = {
    "embeddings.position_ids": None,
    "embeddings.token_type_ids": None,
    "embeddings.word_embeddings": "embed.token",
    "embeddings.position_embeddings": "embed.position",
    "embeddings.token_type_embeddings": "embed.segment",
    "embeddings.LayerNorm": "embed.norm",
    "encoder.embedding_hidden_mapping_in": "embed.project",
    f"{_LAYER}.attention.query": ("layers.{}.attn.qkv", 0),
    f"{_LAYER}.attention.key": ("layers.{}.attn.qkv", 1),
    f"{_LAYER}.attention.value": ("layers.{}.attn.qkv", 2),
    f"{_LAYER}.attention.dense": "layers.{}.attn.out",
    f"{_LAYER}.attention.LayerNorm": "layers.{}.attn_norm",
    f"{_LAYER}.ffn": "layers.{}.ffn.up",
    f"{_LAYER}.ffn_output": "layers.{}.ffn.down",
    f"{_LAYER}.full_layer_layer_norm": "layers.{}.ffn_norm",
    "pooler": None,
    "classifier": None,
    "predictions.LayerNorm": None,
    "predictions.bias": None,
    "predictions.decoder": None,
    "predictions.dense": None,
    "qa_outputs": None,
    "sop_classifier.classifier": None,
}


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    config.require("position_embedding_type", "absolute")
    config.require("inner_group_num", 1)
    hidden, layers, groups = (
        config.size("hidden_size"),
        config.layers("num_hidden_layers"),
        config.layers("num_hidden_groups", 1),
    )
    if groups > layers:
        raise config.unsupported(
            "num_hidden_groups", f"at most one group for each of the {layers} layers is needed"
        )
    heads = config.head_count("num_attention_heads", hidden)
    spec = EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=config.size("intermediate_size"),
        layers=(LayerSpec(),) * groups,
        # The reference divides in floating point.
        order=tuple(int(number / (layers / groups)) for number in range(layers)),
        norm="post",
        norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=config.activation("hidden_act", "gelu_new"),
    )
    embed = EmbeddingSpec(
        config.size("vocab_size"),
        config.size("embedding_size", 128),
        positions=config.size("max_position_embeddings"),
        norm_eps=spec.norm_eps,
        segments=config.integer("type_vocab_size", 2),
        hidden=hidden,
        projected=True,
    )
    return PackedEncoder(spec, TokenEmbedding(embed))
