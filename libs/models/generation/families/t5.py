"""T5 and mT5 (arXiv 1910.10683): the encoder of `libs/models/text/families/seq2seq/t5.py`, and a decoder of the same form.

Its relative position bias tells distances to earlier tokens only, so all buckets are for these.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from libs.models import weights
from libs.models.generation.decoding.cross import PreNormCrossLayer
from libs.models.generation.decoding.settings import Settings
from libs.models.generation.decoding.writer import LanguageHead, Writer
from libs.models.layers.buckets import BucketBias
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.text.families.seq2seq import t5
from libs.models.text.registry import build_encoder, prepare
from libs.models.weights import HeadRule, Maybe, Rule, TensorFile

MODEL_TYPES: Final = t5.MODEL_TYPES

_LONGEST: Final = 1 << 13  # tokens of an answer; positions are relative, so this bounds only the table of distances
_BLOCK: Final = "decoder.block.{}.layer"
_DECODER: Final[dict[str, Rule]] = {
    "shared": "embed.token",
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
_TABLE: Final[dict[str, Rule]] = dict.fromkeys(t5.WEIGHTS) | _DECODER
_HEAD: Final[dict[str, HeadRule]] = {"lm_head": Maybe("head")}


class CausalBias(BucketBias):
    """T5's bias in a decoder: one half of the buckets for exact distances to earlier tokens, the other for farther ones."""

    def prepare(self) -> None:
        weight = self.buckets.weight
        back = torch.arange(self._reach, -self._reach - 1, -1, device=weight.device).clamp(min=0)
        self.table = weight[_bucket_of(back, weight.shape[0], self._farthest)].T.contiguous()


def _bucket_of(back: Tensor, buckets: int, farthest: int) -> Tensor:
    exact = buckets // 2
    ratio = (back.clamp(min=1).float() / exact).log() / math.log(farthest / exact)
    wide = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(back < exact, back, wide)


def load(config: Config, tensors: TensorFile, settings: Settings, dtype: torch.dtype, device: torch.device) -> Writer:
    """Raises ModelBroken naming the key of config.json, or the file and tensor, that cannot be served."""
    encoder, _ = build_encoder(config.values, tensors, dtype=dtype, device=device, head_tables={})
    spec = _spec(config)
    with torch.device("meta"):
        decoder = _decoder(config, spec)
    state = weights.load(
        decoder, tensors, table=_TABLE, prefixes=t5.PREFIXES, head_table=_HEAD, dtype=dtype, device=device
    )  # fmt: skip
    prepare(decoder)
    decoder.embed.token = encoder.embed.token  # one table in memory
    # A head in the file is used whatever the config says. Only the first T5, whose head is the token table, scales the states:
    # transformers 5 says so in `scale_decoder_outputs` and always writes true as `tie_word_embeddings`; older versions have the
    # latter key alone.
    weight = state["head.weight"].to(dtype) if "head.weight" in state else decoder.token_weight
    scales = config.flag("scale_decoder_outputs", config.flag("tie_word_embeddings", True))
    scaled = config.text("model_type") == "t5" and scales
    head = LanguageHead(weight, scale=spec.hidden**-0.5 if scaled else 1.0)
    return Writer(decoder.requires_grad_(False).eval(), head.eval(), settings, encoder)


def _spec(config: Config) -> EncoderSpec:
    layers = config.layers("num_decoder_layers", config.layers("num_layers"))
    return replace(t5.spec_of(config), causal=True, layers=(LayerSpec(),) * layers)


def _decoder(config: Config, spec: EncoderSpec) -> PackedEncoder:
    embed = TokenEmbedding(EmbeddingSpec(config.size("vocab_size"), spec.hidden, positions=_LONGEST, norm_eps=None, table=False))
    farthest = config.size("relative_attention_max_distance", 128)
    bias = CausalBias.of(config, spec.heads, reach=_LONGEST - 1, farthest=farthest)
    return PackedEncoder(spec, embed, relative=bias, layer=partial(PreNormCrossLayer, source=spec.hidden))
