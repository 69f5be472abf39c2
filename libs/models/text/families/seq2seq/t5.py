"""T5's and mT5's encoder: pre-RMSNorm, relative position bias, unscaled attention scores,
feed-forward plain or gated.

Embedding models are the encoder alone; their checkpoints may also contain the decoder. Generative
models and classifiers compute both (`libs/models/generation/families/t5.py`, `t5_classifier.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from libs.models.layers.buckets import BucketBias
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Activation, Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import Rule

MODEL_TYPES = ("t5", "mt5")
PREFIXES = ("", "transformer.")

_BLOCK = "decoder.block.{}.layer"
DECODER: dict[str, Rule] = {
    "decoder.block.0.layer.0.SelfAttention.relative_attention_bias": "relative.buckets",
    f"{_BLOCK}.0.layer_norm": "layers.{}.attn_norm",
    f"{_BLOCK}.0.SelfAttention.q": ("layers.{}.attn.qkv", 0),
    f"{_BLOCK}.0.SelfAttention.k": ("layers.{}.attn.qkv", 1),
    f"{_BLOCK}.0.SelfAttention.v": ("layers.{}.attn.qkv", 2),
    f"{_BLOCK}.0.SelfAttention.o": "layers.{}.attn.out",
    f"{_BLOCK}.1.layer_norm": "layers.{}.cross_norm",
    f"{_BLOCK}.1.EncDecAttention.q": "layers.{}.cross.q",
    f"{_BLOCK}.1.EncDecAttention.k": ("layers.{}.cross.kv", 0),
    f"{_BLOCK}.1.EncDecAttention.v": ("layers.{}.cross.kv", 1),
    f"{_BLOCK}.1.EncDecAttention.o": "layers.{}.cross.out",
    f"{_BLOCK}.2.layer_norm": "layers.{}.ffn_norm",
    f"{_BLOCK}.2.DenseReluDense.wi": "layers.{}.ffn.up",
    f"{_BLOCK}.2.DenseReluDense.wi_0": ("layers.{}.ffn.up", 0),
    f"{_BLOCK}.2.DenseReluDense.wi_1": ("layers.{}.ffn.up", 1),
    f"{_BLOCK}.2.DenseReluDense.wo": "layers.{}.ffn.down",
    "decoder.final_layer_norm": "norm",
}
"""Names of a decoder with cross attention, for generative models and classifiers."""

_COPIES: dict[str, Rule] = {
    "encoder.embed_tokens": None,
    "decoder.embed_tokens": None,
    # in old checkpoints; the reference ignores it
    "decoder.block.{}.layer.1.EncDecAttention.relative_attention_bias": None,
    "lm_head": None,
}

WEIGHTS: dict[str, Rule] = (
    dict.fromkeys(DECODER)
    | _COPIES
    | {
        "shared": "embed.token",
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
)

_FEED_FORWARDS: dict[str, tuple[bool, Activation]] = {
    "relu": (False, "relu"),
    "gelu": (False, "gelu"),
    "silu": (False, "silu"),
    "gated-gelu": (True, "gelu_tanh"),  # T5 1.1 was trained with the approximation
    "gated-relu": (True, "relu"),
    "gated-silu": (True, "silu"),
}

# Relative positions have no limit, so this bounds only the table of distances. The tokenizer or
# sentence_bert_config.json limits a sequence.
MAX_POSITIONS = 1 << 15


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    spec = read_encoder_spec(config)
    embed = TokenEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            spec.hidden,
            positions=MAX_POSITIONS,
            norm_eps=None,
            table=False,
        )
    )
    return PackedEncoder(spec, embed, relative=bias(config, spec))


def bias(config: Config, spec: EncoderSpec) -> BucketBias:
    """Build the encoder's position bias."""
    return BucketBias.from_config(
        config, spec.heads, reach=MAX_POSITIONS - 1, farthest=_farthest(config)
    )


def read_encoder_spec(config: Config) -> EncoderSpec:
    """Read the encoder's layers. The decoder's have the same form."""
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
    """Read whether the feed-forward is gated, and its activation, from `feed_forward_proj`, with
    different defaults for T5 and mT5.
    """
    name = config.text(
        "feed_forward_proj", "gated-gelu" if config.text("model_type") == "mt5" else "relu"
    )
    if name not in _FEED_FORWARDS:
        raise config.unsupported("feed_forward_proj", f"supported are {', '.join(_FEED_FORWARDS)}")
    return _FEED_FORWARDS[name]


def read_decoder_spec(config: Config) -> EncoderSpec:
    """Read the decoder's layers."""
    layers = config.layers("num_decoder_layers", config.layers("num_layers"))
    return replace(read_encoder_spec(config), causal=True, layers=(LayerSpec(),) * layers)


class CausalBias(BucketBias):
    """T5's bias in a decoder: half of the buckets for exact distances to earlier tokens, half for
    farther ones.
    """

    def prepare(self) -> None:
        weight = self.buckets.weight
        back = torch.arange(self._reach, -self._reach - 1, -1, device=weight.device).clamp(min=0)
        self.table = weight[_past_buckets(back, weight.shape[0], self._farthest)].T.contiguous()


def _past_buckets(back: Tensor, buckets: int, farthest: int) -> Tensor:
    exact = buckets // 2
    ratio = (back.clamp(min=1).float() / exact).log() / math.log(farthest / exact)
    wide = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(back < exact, back, wide)


def causal_bias(config: Config, spec: EncoderSpec, *, reach: int) -> BucketBias:
    """Build the decoder's position bias, for distances up to `reach`."""
    return CausalBias.from_config(config, spec.heads, reach=reach, farthest=_farthest(config))


def _farthest(config: Config) -> int:
    return config.size("relative_attention_max_distance", 128)
