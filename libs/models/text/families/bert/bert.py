"""BERT, RoBERTa and their variants: post-LayerNorm, learned positions, and segments (token
types).
"""

from __future__ import annotations

from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import Rule

MODEL_TYPES = ("bert", "electra", "roberta", "xlm-roberta", "camembert")
PREFIXES = ("", "bert.", "electra.", "roberta.")

# Heads of transformers' own classes. A kind that uses one names it in its head table, which takes
# precedence over this one.
HEADS: dict[str, Rule] = {
    "pooler.dense": None,
    "classifier": None,
    "classifier.dense": None,
    "classifier.out_proj": None,
    "cls.predictions.bias": None,
    "cls.predictions.decoder": None,
    "cls.predictions.transform.dense": None,
    "cls.predictions.transform.LayerNorm": None,
    "cls.seq_relationship": None,
    "discriminator_predictions.dense": None,
    "discriminator_predictions.dense_prediction": None,
    "generator_lm_head": None,
    "generator_predictions.LayerNorm": None,
    "generator_predictions.dense": None,
    "lm_head.bias": None,
    "lm_head.decoder": None,
    "lm_head.dense": None,
    "lm_head.layer_norm": None,
    "qa_outputs": None,
}

EMBEDDINGS: dict[str, Rule] = {
    "embeddings.position_ids": None,  # int64 counts that older transformers stored
    "embeddings.token_type_ids": None,
    "embeddings.word_embeddings": "embed.token",
    "embeddings.position_embeddings": "embed.position",
    "embeddings.token_type_embeddings": "embed.segment",
    "embeddings.LayerNorm": "embed.norm",
    "embeddings_project": "embed.project",
}

BLOCKS: dict[str, Rule] = {
    "encoder.layer.{}.attention.self.query": ("layers.{}.attn.qkv", 0),
    "encoder.layer.{}.attention.self.key": ("layers.{}.attn.qkv", 1),
    "encoder.layer.{}.attention.self.value": ("layers.{}.attn.qkv", 2),
    "encoder.layer.{}.attention.output.dense": "layers.{}.attn.out",
    "encoder.layer.{}.intermediate.dense": "layers.{}.ffn.up",
    "encoder.layer.{}.output.dense": "layers.{}.ffn.down",
}

NORMS: dict[str, Rule] = {
    "encoder.layer.{}.attention.output.LayerNorm": "layers.{}.attn_norm",
    "encoder.layer.{}.output.LayerNorm": "layers.{}.ffn_norm",
}

WEIGHTS = HEADS | EMBEDDINGS | BLOCKS | NORMS

_NO_OFFSET = ("bert", "electra")


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    spec = bert_spec(config)
    return PackedEncoder(spec, bert_embedding(config, spec))


def bert_spec(config: Config) -> EncoderSpec:
    """Read the layers. Raises ModelBroken for settings that none of these families supports."""
    config.require("position_embedding_type", "absolute")
    config.require("is_decoder", False)
    config.require("add_cross_attention", False)
    hidden = config.size("hidden_size")
    heads = config.head_count("num_attention_heads", hidden)
    return EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=config.size("intermediate_size"),
        layers=(LayerSpec(),) * config.layers("num_hidden_layers"),
        norm="post",
        norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=config.activation("hidden_act"),
    )


def bert_embedding(config: Config, spec: EncoderSpec) -> TokenEmbedding:
    """Build the embedding. RoBERTa and its variants count positions from the padding token's id +
    1."""
    plain = config.text("model_type") in _NO_OFFSET
    return TokenEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            config.size("embedding_size", spec.hidden),
            positions=config.size("max_position_embeddings"),
            norm_eps=spec.norm_eps,
            offset=0 if plain else config.integer("pad_token_id", 1) + 1,
            segments=config.integer("type_vocab_size", 2),
            hidden=spec.hidden,
        )
    )
