"""BART (arXiv 1910.13461): post-LayerNorm, learned positions, and a decoder over the text's tokens
shifted right.

A classifier (bart-large-mnli) reads the decoder's state at the end of the text, so nothing is
generated.
"""

from __future__ import annotations

from dataclasses import replace

from libs.models.layers.decoder import Decoder, DecoderEmbedding, EncoderDecoder
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import Rule

MODEL_TYPES = ("bart",)
PREFIXES = ("", "model.")

WEIGHTS: dict[str, Rule] = {
    "shared": "embed.token",
    "encoder.embed_tokens": None,  # copies
    "decoder.embed_tokens": None,
    "encoder.embed_positions": "embed.position",
    "encoder.layernorm_embedding": "embed.norm",
    "encoder.layers.{}.self_attn.q_proj": ("layers.{}.attn.qkv", 0),
    "encoder.layers.{}.self_attn.k_proj": ("layers.{}.attn.qkv", 1),
    "encoder.layers.{}.self_attn.v_proj": ("layers.{}.attn.qkv", 2),
    "encoder.layers.{}.self_attn.out_proj": "layers.{}.attn.out",
    "encoder.layers.{}.self_attn_layer_norm": "layers.{}.attn_norm",
    "encoder.layers.{}.fc1": "layers.{}.ffn.up",
    "encoder.layers.{}.fc2": "layers.{}.ffn.down",
    "encoder.layers.{}.final_layer_norm": "layers.{}.ffn_norm",
    "decoder.embed_positions": "decoder.embed.position",
    "decoder.layernorm_embedding": "decoder.embed.norm",
    "decoder.layers.{}.self_attn.q_proj": ("decoder.layers.{}.attn.qkv", 0),
    "decoder.layers.{}.self_attn.k_proj": ("decoder.layers.{}.attn.qkv", 1),
    "decoder.layers.{}.self_attn.v_proj": ("decoder.layers.{}.attn.qkv", 2),
    "decoder.layers.{}.self_attn.out_proj": "decoder.layers.{}.attn.out",
    "decoder.layers.{}.self_attn_layer_norm": "decoder.layers.{}.attn_norm",
    "decoder.layers.{}.encoder_attn.q_proj": "decoder.layers.{}.cross.q",
    "decoder.layers.{}.encoder_attn.k_proj": ("decoder.layers.{}.cross.kv", 0),
    "decoder.layers.{}.encoder_attn.v_proj": ("decoder.layers.{}.cross.kv", 1),
    "decoder.layers.{}.encoder_attn.out_proj": "decoder.layers.{}.cross.out",
    "decoder.layers.{}.encoder_attn_layer_norm": "decoder.layers.{}.cross_norm",
    "decoder.layers.{}.fc1": "decoder.layers.{}.ffn.up",
    "decoder.layers.{}.fc2": "decoder.layers.{}.ffn.down",
    "decoder.layers.{}.final_layer_norm": "decoder.layers.{}.ffn_norm",
    "classification_head.dense": None,
    "classification_head.out_proj": None,
    "final_logits_bias": None,
    "lm_head": None,
    "qa_outputs": None,
}

_OFFSET = 2  # the reference counts positions from 2, whatever the padding token
_NORM_EPS = 1e-5  # fixed in the reference; config.json has no key for it
_START = 2  # the end of a sentence; default if config.json has none


def build(config: Config) -> PackedEncoder:
    """Build the encoder and decoder that config.json describes, without weights."""
    for key in (
        "scale_embedding",
        "normalize_before",
        "add_final_layer_norm",
        "normalize_embedding",
    ):
        config.require(key, key == "normalize_embedding")
    vocabulary = config.size("vocab_size")
    start = config.integer("decoder_start_token_id", config.integer("eos_token_id", _START))
    if not 0 <= start < vocabulary:
        raise config.unsupported("decoder_start_token_id", f"an id below {vocabulary} is needed")
    spec = _spec(config, "encoder")
    rows = config.size("max_position_embeddings", 1024) + _OFFSET
    embed = TokenEmbedding(
        EmbeddingSpec(vocabulary, spec.hidden, positions=rows, norm_eps=_NORM_EPS, offset=_OFFSET)
    )
    own = replace(_spec(config, "decoder"), causal=True)
    return EncoderDecoder(
        spec, embed, Decoder(own, start, embed=DecoderEmbedding(own, rows, _OFFSET))
    )


def _spec(config: Config, side: str) -> EncoderSpec:
    """Read the layers of one side, `encoder` or `decoder`."""
    hidden = config.size("d_model")
    heads = config.head_count(f"{side}_attention_heads", hidden)
    return EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=config.size(f"{side}_ffn_dim"),
        layers=(LayerSpec(),) * config.layers(f"{side}_layers"),
        norm="post",
        norm_eps=_NORM_EPS,
        activation=config.activation("activation_function"),
    )
