"""T5's and mT5's encoder: pre-RMSNorm, relative position bias, unscaled attention scores, feed-forward plain or gated.

Of a checkpoint of the whole model only the encoder is served: the decoder's tensors are ignored.
"""

from __future__ import annotations

from libs.models.layers.buckets import BucketBias
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Activation, Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import Rule

MODEL_TYPES = ("t5", "mt5")
PREFIXES = ("", "transformer.")

_DECODER: dict[str, Rule] = {
    "decoder.embed_tokens": None,
    "decoder.final_layer_norm": None,
    "decoder.block.{}.layer.0.layer_norm": None,
    "decoder.block.{}.layer.0.SelfAttention.q": None,
    "decoder.block.{}.layer.0.SelfAttention.k": None,
    "decoder.block.{}.layer.0.SelfAttention.v": None,
    "decoder.block.{}.layer.0.SelfAttention.o": None,
    "decoder.block.{}.layer.0.SelfAttention.relative_attention_bias": None,
    "decoder.block.{}.layer.1.layer_norm": None,
    "decoder.block.{}.layer.1.EncDecAttention.q": None,
    "decoder.block.{}.layer.1.EncDecAttention.k": None,
    "decoder.block.{}.layer.1.EncDecAttention.v": None,
    "decoder.block.{}.layer.1.EncDecAttention.o": None,
    "decoder.block.{}.layer.1.EncDecAttention.relative_attention_bias": None,
    "decoder.block.{}.layer.2.layer_norm": None,
    "decoder.block.{}.layer.2.DenseReluDense.wi": None,
    "decoder.block.{}.layer.2.DenseReluDense.wi_0": None,
    "decoder.block.{}.layer.2.DenseReluDense.wi_1": None,
    "decoder.block.{}.layer.2.DenseReluDense.wo": None,
    "lm_head": None,
}

WEIGHTS: dict[str, Rule] = _DECODER | {
    "shared": "embed.token",
    "encoder.embed_tokens": None,  # a copy
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "relative.buckets",
    "encoder.block.{}.layer.0.SelfAttention.q": ("layers.{}.attn.qkv", 0),
    "encoder.block.{}.layer.0.SelfAttention.k": ("layers.{}.attn.qkv", 1),
    "encoder.block.{}.layer.0.SelfAttention.v": ("layers.{}.attn.qkv", 2),
    "encoder.block.{}.layer.0.SelfAttention.o": "layers.{}.attn.out",
    "encoder.block.{}.layer.0.layer_norm": "layers.{}.attn_norm",
    "encoder.block.{}.layer.1.DenseReluDense.wi": "layers.{}.ffn.up",
    "encoder.block.{}.layer.1.DenseReluDense.wi_0": ("layers.{}.ffn.up", 0),
    "encoder.block.{}.layer.1.DenseReluDense.wi_1": ("layers.{}.ffn.up", 1),
    "encoder.block.{}.layer.1.DenseReluDense.wo": "layers.{}.ffn.down",
    "encoder.block.{}.layer.1.layer_norm": "layers.{}.ffn_norm",
    "encoder.final_layer_norm": "norm",
}

_FEED_FORWARDS: dict[str, tuple[bool, Activation]] = {
    "relu": (False, "relu"),
    "gelu": (False, "gelu"),
    "silu": (False, "silu"),
    "gated-gelu": (True, "gelu_tanh"),  # as T5 1.1 was trained, whatever the name says
    "gated-relu": (True, "relu"),
    "gated-silu": (True, "silu"),
}

# Relative positions have no limit, so this bounds only the table of distances; the tokenizer or sentence_bert_config.json limits
# a sequence.
_LONGEST = 1 << 15


def build(config: Config) -> PackedEncoder:
    """The encoder that config.json describes, without weights."""
    spec = spec_of(config)
    embed = TokenEmbedding(EmbeddingSpec(config.size("vocab_size"), spec.hidden, positions=_LONGEST, norm_eps=None, table=False))
    farthest = config.size("relative_attention_max_distance", 128)
    return PackedEncoder(spec, embed, relative=BucketBias.of(config, spec.heads, reach=_LONGEST - 1, farthest=farthest))


def spec_of(config: Config) -> EncoderSpec:
    """The encoder's layers, whose form the decoder's have too."""
    gated, activation = _feed_forward(config)
    return EncoderSpec(
        hidden=config.size("d_model"),
        heads=config.heads("num_heads"),
        head_size=config.size("d_kv"),
        ffn=config.size("d_ff"),
        layers=(LayerSpec(),) * config.layers("num_layers"),
        norm="pre",
        norm_eps=config.number("layer_norm_epsilon", 1e-6),
        activation=activation,
        norm_kind="rms",
        gated=gated,
        scale=1.0,
        qkv_bias=False,
        out_bias=False,
        up_bias=False,
        down_bias=False,
    )


def _feed_forward(config: Config) -> tuple[bool, Activation]:
    """Whether it is gated, and its activation, from `feed_forward_proj`, whose default differs between T5 and mT5."""
    name = config.text("feed_forward_proj", "gated-gelu" if config.text("model_type") == "mt5" else "relu")
    if name not in _FEED_FORWARDS:
        raise config.unsupported("feed_forward_proj", f"supported are {', '.join(_FEED_FORWARDS)}")
    return _FEED_FORWARDS[name]
