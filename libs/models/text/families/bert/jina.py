"""Jina BERT v2 (arXiv 2310.19923), jina-embeddings-v2-*: BERT with ALiBi and GeGLU, under BERT's
model_type.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from libs.errors import ModelBroken
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder, PositionBias
from libs.models.layers.spec import Activation, Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.text.families.bert.bert import HEADS
from libs.models.weights import Rule

MODEL_TYPES = ("bert",)
PREFIXES = ("", "bert.")

COMMON = HEADS | {
    "embeddings.position_ids": None,
    "embeddings.word_embeddings": "embed.token",
    "embeddings.token_type_embeddings": "embed.segment",
    "embeddings.LayerNorm": "embed.norm",
    "encoder.layer.{}.attention.self.query": ("layers.{}.attn.qkv", 0),
    "encoder.layer.{}.attention.self.key": ("layers.{}.attn.qkv", 1),
    "encoder.layer.{}.attention.self.value": ("layers.{}.attn.qkv", 2),
    "encoder.layer.{}.attention.output.dense": "layers.{}.attn.out",
    "encoder.layer.{}.attention.output.LayerNorm": "layers.{}.attn_norm",
}

WEIGHTS: dict[str, Rule] = COMMON | {
    "encoder.layer.{}.mlp.gated_layers": "layers.{}.ffn.up",
    "encoder.layer.{}.mlp.wo": "layers.{}.ffn.down",
    "encoder.layer.{}.mlp.layernorm": "layers.{}.ffn_norm",
}

# Bounds the table of all distances, which has a row for each head.
_MAX_POSITIONS = 1 << 17
_ACTIVATIONS: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}


def claims(config: Config) -> bool:
    return uses_alibi(config) and not norms_queries(config)


def uses_alibi(config: Config) -> bool:
    return config.text("position_embedding_type", "absolute") == "alibi"


def norms_queries(config: Config) -> bool:
    """Return whether it is the variant in `jina_code`. Only the name of the remote code in
    config.json distinguishes it.
    """
    sources = (config.text("_name_or_path", ""), config.part("auto_map").text("AutoConfig", ""))
    return any("jina-bert-v2-qk-post-norm" in source for source in sources)


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    spec = jina_spec(config)
    embed = jina_embedding(config, spec)
    return PackedEncoder(spec, embed, relative=alibi(spec, embed))


def jina_spec(config: Config, *, gate_last: bool = False) -> EncoderSpec:
    hidden = config.size("hidden_size")
    heads = config.head_count("num_attention_heads", hidden)
    kind = config.text("feed_forward_type", "geglu")
    if kind not in _ACTIVATIONS:
        raise config.unsupported("feed_forward_type", f"supported are {', '.join(_ACTIVATIONS)}")
    return EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=config.size("intermediate_size"),
        layers=(LayerSpec(),) * config.layers("num_hidden_layers"),
        norm="post",
        norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=_ACTIVATIONS[kind],
        gated=True,
        gate_last=gate_last,
        up_bias=False,
    )


def jina_embedding(config: Config, spec: EncoderSpec) -> TokenEmbedding:
    return TokenEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            spec.hidden,
            positions=config.size("max_position_embeddings"),
            norm_eps=spec.norm_eps,
            segments=config.integer("type_vocab_size", 2),
            table=False,
        )
    )


def alibi(spec: EncoderSpec, embed: TokenEmbedding) -> AlibiBias:
    if embed.max_positions > _MAX_POSITIONS:
        found = f"max_position_embeddings is {embed.max_positions}"
        raise ModelBroken(f"config.json: {found}: with ALiBi at most {_MAX_POSITIONS:,} is served")
    return AlibiBias(slopes(spec.heads), embed.max_positions, like=lambda: embed.token.weight)


class AlibiBias(PositionBias):
    """ALiBi: a penalty linear in the distance, symmetric, with a slope for each head.

    Args:
        like: Returns a loaded weight with the table's type and device.
    """

    def __init__(self, slopes: list[float], positions: int, like: Callable[[], Tensor]) -> None:
        super().__init__()
        self._slopes, self._reach, self._like = slopes, positions - 1, like
        self.register_buffer("table", None, persistent=False)

    def prepare(self) -> None:
        """Compute the bias of all distances. Call it after loading."""
        weight = self._like()
        distances = torch.arange(-self._reach, self._reach + 1, device=weight.device).abs()
        steep = torch.tensor(self._slopes, device=weight.device)
        self.table = (-steep[:, None] * distances).to(weight.dtype)


def slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes (arXiv 2108.12409, section 3).

    For a power of two they are 2^(-8/n), 2^(-16/n), ...; else those of the lower power, and every
    second one of the higher power (the reference code's rule).
    """
    power = 2 ** math.floor(math.log2(heads))
    own = [2.0 ** (-8.0 * number / power) for number in range(1, power + 1)]
    return own + [2.0 ** (-4.0 * number / power) for number in range(1, 2 * (heads - power), 2)]
