"""Gemma 1 (arXiv 2403.08295), the text model of PaliGemma: Llama with RMSNorm weights plus one,
GELU gates and scaled token embeddings.

Causal, unless `use_bidirectional_attention` is set.
"""

from __future__ import annotations

from dataclasses import replace

from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EmbeddingSpec
from libs.models.text.families.decoders import llama
from libs.models.text.families.decoders.gemma3 import GemmaEmbedding
from libs.models.text.families.decoders.llama import decoder_spec
from libs.models.weights import Rule

MODEL_TYPES = ("gemma",)
PREFIXES = ("", "model.")

WEIGHTS: dict[str, Rule] = llama.WEIGHTS

_HEAD_SIZE = 256  # default of transformers


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    bias, layers = config.flag("attention_bias", False), config.layers("num_hidden_layers")
    causal, size = (
        not config.flag("use_bidirectional_attention", False),
        config.size("head_dim", _HEAD_SIZE),
    )
    spec = replace(
        decoder_spec(
            config,
            causal=causal,
            windows=(None,) * layers,
            head_size=size,
            qkv_bias=bias,
            out_bias=bias,
        ),
        norm_shift=1.0,
        # Old files name "gelu" in `hidden_act` although the models were trained with its
        # approximation.
        activation="gelu_tanh",
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
