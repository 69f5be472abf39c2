"""T5 and mT5 (arXiv 1910.10683): the encoder of `libs/models/text/families/seq2seq/t5.py`, and a
decoder of the same structure.
"""

from __future__ import annotations

from typing import Final

import torch

from libs.models import weights
from libs.models.generation.decoding.language_model import LanguageHead, LanguageModel
from libs.models.generation.decoding.settings import DecodeSettings
from libs.models.layers.decoder import cross_layer
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec
from libs.models.text.families.seq2seq import t5
from libs.models.text.registry import build_encoder, prepare
from libs.models.weights import HeadRule, Maybe, Rule, TensorFile

MODEL_TYPES: Final = t5.MODEL_TYPES

# Positions are relative, so this bounds only the table of distances.
_MAX_ANSWER_TOKENS: Final = 1 << 13
_TABLE: Final[dict[str, Rule]] = dict.fromkeys(t5.WEIGHTS) | t5.DECODER | {"shared": "embed.token"}
_HEAD: Final[dict[str, HeadRule]] = {"lm_head": Maybe("head")}


def load(
    config: Config,
    tensors: TensorFile,
    settings: DecodeSettings,
    dtype: torch.dtype,
    device: torch.device,
) -> LanguageModel:
    """Load a T5 model. Raises ModelBroken with the key of config.json, or the file and tensor, that
    is not supported.
    """
    encoder, _ = build_encoder(config.values, tensors, dtype=dtype, device=device, head_tables={})
    spec = t5.read_decoder_spec(config)
    with torch.device("meta"):
        decoder = _decoder(config, spec)
    state = weights.load(
        decoder, tensors, table=_TABLE, prefixes=t5.PREFIXES, head_table=_HEAD,
        dtype=dtype, device=device,
    )  # fmt: skip
    prepare(decoder)
    decoder.embed.token = encoder.embed.token  # one table in memory
    # A head in the file is used whatever the config says. Only the first T5, with the token table
    # as its head, scales the states. transformers 5 records this in `scale_decoder_outputs` and
    # always writes true as `tie_word_embeddings`; older versions have only the latter key.
    weight = state["head.weight"].to(dtype) if "head.weight" in state else decoder.token_weight
    scales = config.flag("scale_decoder_outputs", config.flag("tie_word_embeddings", True))
    scaled = config.text("model_type") == "t5" and scales
    head = LanguageHead(weight, scale=spec.hidden**-0.5 if scaled else 1.0)
    return LanguageModel(decoder.requires_grad_(False).eval(), head.eval(), settings, encoder)


def _decoder(config: Config, spec: EncoderSpec) -> PackedEncoder:
    embed = TokenEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            spec.hidden,
            positions=_MAX_ANSWER_TOKENS,
            norm_eps=None,
            table=False,
        )
    )
    bias = t5.causal_bias(config, spec, reach=_MAX_ANSWER_TOKENS - 1)
    return PackedEncoder(spec, embed, relative=bias, layer=cross_layer(spec, spec.hidden))
