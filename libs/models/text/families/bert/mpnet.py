"""MPNet: BERT with a relative position bias that all layers share, and without segments."""

from __future__ import annotations

from libs.models.layers.buckets import BucketBias
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EmbeddingSpec
from libs.models.text.families.bert.bert import bert_spec
from libs.models.weights import Rule

MODEL_TYPES = ("mpnet",)
PREFIXES = ("", "mpnet.")

WEIGHTS: dict[str, Rule] = {
    "embeddings.position_ids": None,
    "embeddings.word_embeddings": "embed.token",
    "embeddings.position_embeddings": "embed.position",
    "embeddings.LayerNorm": "embed.norm",
    "encoder.relative_attention_bias": "relative.buckets",
    "encoder.layer.{}.attention.attn.q": ("layers.{}.attn.qkv", 0),
    "encoder.layer.{}.attention.attn.k": ("layers.{}.attn.qkv", 1),
    "encoder.layer.{}.attention.attn.v": ("layers.{}.attn.qkv", 2),
    "encoder.layer.{}.attention.attn.o": "layers.{}.attn.out",
    "encoder.layer.{}.attention.LayerNorm": "layers.{}.attn_norm",
    "encoder.layer.{}.intermediate.dense": "layers.{}.ffn.up",
    "encoder.layer.{}.output.dense": "layers.{}.ffn.down",
    "encoder.layer.{}.output.LayerNorm": "layers.{}.ffn_norm",
    "pooler.dense": None,
    "classifier": None,
    "classifier.dense": None,
    "classifier.out_proj": None,
    "lm_head.bias": None,
    "lm_head.decoder": None,
    "lm_head.dense": None,
    "lm_head.layer_norm": None,
    "qa_outputs": None,
}

_OFFSET = 2  # the reference counts positions from 2, whatever the padding token


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    spec = bert_spec(config)
    # The reference always uses 32 buckets and ignores the key.
    config.require("relative_attention_num_buckets", 32)
    embed = TokenEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            spec.hidden,
            positions=config.size("max_position_embeddings"),
            norm_eps=spec.norm_eps,
            offset=_OFFSET,
        )
    )
    return PackedEncoder(
        spec,
        embed,
        relative=BucketBias.from_config(config, spec.heads, reach=embed.max_positions - 1),
    )
