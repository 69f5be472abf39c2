"""BART (arXiv 1910.13461), mBART and Marian: an encoder and a decoder with cross attention and
LayerNorm.

BART and Marian apply norms after each residual add, mBART before each block and after the last one.
Marian (arXiv 1804.00344) has sinusoidal positions, and no norm after the embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from libs.models import weights
from libs.models.generation.decoding.language_model import LanguageHead, LanguageModel
from libs.models.generation.decoding.settings import DecodeSettings
from libs.models.interface.packed import Packed
from libs.models.layers.decoder import cross_layer
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.text.registry import prepare
from libs.models.weights import HeadRule, Maybe, Rule, TensorFile

MODEL_TYPES: Final = ("bart", "marian", "mbart")
PAD: Final = 1
PREFIXES: Final = ("", "model.")

_EPS: Final = 1e-5
_OFFSET: Final = 2  # rows of the position table before the first position


def _names(stem: str, layers: str, *, cross: bool) -> dict[str, Rule]:
    """Return the rules of one stack, with names that begin with `stem`."""
    attention: dict[str, Rule] = {
        f"{stem}.layers.{{}}.self_attn.q_proj": (f"{layers}.attn.qkv", 0),
        f"{stem}.layers.{{}}.self_attn.k_proj": (f"{layers}.attn.qkv", 1),
        f"{stem}.layers.{{}}.self_attn.v_proj": (f"{layers}.attn.qkv", 2),
        f"{stem}.layers.{{}}.self_attn.out_proj": f"{layers}.attn.out",
        f"{stem}.layers.{{}}.self_attn_layer_norm": f"{layers}.attn_norm",
        f"{stem}.layers.{{}}.fc1": f"{layers}.ffn.up",
        f"{stem}.layers.{{}}.fc2": f"{layers}.ffn.down",
        f"{stem}.layers.{{}}.final_layer_norm": f"{layers}.ffn_norm",
        f"{stem}.embed_positions": "embed.position",
        f"{stem}.layernorm_embedding": "embed.norm",
        f"{stem}.layer_norm": "norm",
    }
    if not cross:
        return attention
    return attention | {
        f"{stem}.layers.{{}}.encoder_attn.q_proj": f"{layers}.cross.q",
        f"{stem}.layers.{{}}.encoder_attn.k_proj": (f"{layers}.cross.kv", 0),
        f"{stem}.layers.{{}}.encoder_attn.v_proj": (f"{layers}.cross.kv", 1),
        f"{stem}.layers.{{}}.encoder_attn.out_proj": f"{layers}.cross.out",
        f"{stem}.layers.{{}}.encoder_attn_layer_norm": f"{layers}.cross_norm",
    }


def _ignored(names: Mapping[str, Rule]) -> dict[str, Rule]:
    return dict.fromkeys(names)


_ENCODER: Final = _names("encoder", "layers.{}", cross=False)
_DECODER: Final = _names("decoder", "layers.{}", cross=True)
_COPIES: Final[dict[str, Rule]] = {"encoder.embed_tokens": None, "decoder.embed_tokens": None}
_HEADS: Final[dict[str, HeadRule]] = {"lm_head": Maybe("head"), "final_logits_bias": Maybe("bias")}

ENCODER_WEIGHTS: Final[dict[str, Rule]] = (
    {"shared": "embed.token"} | _COPIES | _ENCODER | _ignored(_DECODER)
)
DECODER_WEIGHTS: Final[dict[str, Rule]] = (
    {"shared": "embed.token"} | _COPIES | _DECODER | _ignored(_ENCODER)
)
DECODER_ALONE: Final[dict[str, Rule]] = _DECODER | {"decoder.embed_tokens": "embed.token"}
"""Rules of a decoder with another kind of encoder (Donut, TrOCR)."""

_COMPUTED: Final[dict[str, Rule]] = {
    "encoder.embed_positions": None,
    "decoder.embed_positions": None,
}
"""Computed positions of Marian, which old checkpoints store."""

SINUSOIDAL: Final[dict[str, Rule]] = DECODER_ALONE | {"decoder.embed_positions": None}
"""Rules of a decoder without a table of positions."""


class BartEmbedding(TokenEmbedding):
    """Scaled token embeddings, plus unscaled positions, followed by a norm."""

    def prepare(self) -> None:
        super().prepare()
        if self.places is not None and self._scale != 1.0:
            self.places = self.places / self._scale


class SinusoidalEmbedding(BartEmbedding):
    """Sinusoidal positions as in fairseq, counted from the row after padding (`PAD`)."""

    def prepare(self) -> None:
        weight = self.token.weight
        half = weight.shape[1] // 2
        rates = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
        angles = (
            torch.arange(PAD + 1, PAD + 1 + self.max_positions, dtype=torch.float32)[:, None]
            * rates
        )
        table = F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, weight.shape[1] % 2))
        self.places = (table / self._scale).to(device=weight.device, dtype=weight.dtype)


class MarianEmbedding(BartEmbedding):
    """Sinusoidal positions from 0: sines in the first half, cosines in the second."""

    def prepare(self) -> None:
        weight = self.token.weight
        size = weight.shape[1]
        # The reference uses double precision.
        rates = torch.pow(10_000.0, -torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(self.max_positions, dtype=torch.float64)[:, None] * rates
        table = torch.cat([angles.sin(), angles[:, : size // 2].cos()], dim=1).float()
        self.places = (table / self._scale).to(device=weight.device, dtype=weight.dtype)


class BartInputEmbedding(BartEmbedding):
    """Given rows replace token embeddings before positions and norm are applied."""

    def forward(self, batch: Packed) -> Tensor:
        """Return [tokens, hidden]."""
        x = self.token.forward(batch.ids)
        if batch.given is not None:
            x = x.index_copy(0, batch.given.places, batch.given.values.to(x.dtype))
        if self.places is not None:
            x = x + F.embedding(batch.positions, self.places)
        x = x if self._scale == 1.0 else x * self._scale
        return x if self.norm is None else self.norm.forward(x)


def load(
    config: Config,
    tensors: TensorFile,
    settings: DecodeSettings,
    dtype: torch.dtype,
    device: torch.device,
    *,
    embedding: type[BartEmbedding] = BartEmbedding,
) -> LanguageModel:
    """Load a whole model. `embedding`: the encoder's class.

    Raises ModelBroken with the key of config.json, or the file and tensor, that is not supported.
    """
    computed: dict[str, Rule] = {}
    if config.text("model_type") == "marian":
        config.require("share_encoder_decoder_embeddings", True)
        embedding, computed = MarianEmbedding, _COMPUTED
    with torch.device("meta"):
        encoder = PackedEncoder(
            _spec(config, "encoder", causal=False), _embedding(config, embedding)
        )
    ignored: dict[str, HeadRule] = dict.fromkeys(_HEADS)
    table = ENCODER_WEIGHTS | computed
    weights.load(
        encoder,
        tensors,
        table=table,
        prefixes=PREFIXES,
        head_table=ignored,
        dtype=dtype,
        device=device,
    )
    prepare(encoder)
    made = load_decoder(config, tensors, settings, dtype, device, table=DECODER_WEIGHTS | computed)
    made.decoder.embed.token = encoder.embed.token  # one table in memory
    return LanguageModel(made.decoder, made.head, settings, encoder.requires_grad_(False).eval())


def load_decoder(
    config: Config,
    tensors: TensorFile,
    settings: DecodeSettings,
    dtype: torch.dtype,
    device: torch.device,
    *,
    table: Mapping[str, Rule] = DECODER_WEIGHTS,
    prefixes: tuple[str, ...] = PREFIXES,
    source: int | None = None,
) -> LanguageModel:
    """Load only the decoder and its head. `source`: width of the encoder's states; None for the
    decoder's width.
    """
    with torch.device("meta"):
        spec = _spec(config, "decoder", causal=True)
        embed = _embedding(config, _decoder_embedding(config))
        decoder = PackedEncoder(
            spec, embed, layer=cross_layer(spec, spec.hidden if source is None else source)
        )
    state = weights.load(
        decoder,
        tensors,
        table=table,
        prefixes=prefixes,
        head_table=_HEADS,
        dtype=dtype,
        device=device,
    )
    prepare(decoder)
    return LanguageModel(
        decoder.requires_grad_(False).eval(), _head(config, decoder, state, dtype), settings
    )


def _head(
    config: Config, decoder: PackedEncoder, state: Mapping[str, Tensor], dtype: torch.dtype
) -> LanguageHead:
    tied = config.flag("tie_word_embeddings", True) or "head.weight" not in state
    weight = decoder.token_weight if tied else state["head.weight"].to(dtype)
    bias = state.get("bias")
    return LanguageHead(
        weight, None if bias is None or not bool(bias.any()) else bias.flatten()
    ).eval()


def _spec(config: Config, stack: str, *, causal: bool) -> EncoderSpec:
    hidden = config.size("d_model")
    heads = config.head_count(f"{stack}_attention_heads", hidden)
    norm: Literal["pre", "post"] = "pre" if config.text("model_type") == "mbart" else "post"
    return EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=config.size(f"{stack}_ffn_dim"),
        layers=(LayerSpec(),) * config.layers(f"{stack}_layers"),
        norm=norm,
        norm_eps=_EPS,
        activation=config.activation("activation_function"),
        causal=causal,
    )


def _decoder_embedding(config: Config) -> type[BartEmbedding]:
    if config.text("model_type") == "marian":
        return MarianEmbedding
    return (
        BartEmbedding
        if config.flag("use_learned_position_embeddings", True)
        else SinusoidalEmbedding
    )


def _embedding(config: Config, made: type[BartEmbedding] = BartEmbedding) -> BartEmbedding:
    hidden, is_learned = config.size("d_model"), made not in (MarianEmbedding, SinusoidalEmbedding)
    has_norm = made is not MarianEmbedding and config.flag("layernorm_embedding", True)
    return made(
        EmbeddingSpec(
            config.size("vocab_size"),
            hidden,
            positions=config.size("max_position_embeddings", 1024) + (_OFFSET if is_learned else 0),
            norm_eps=_EPS if has_norm else None,
            table=is_learned,
            offset=_OFFSET if is_learned else 0,
            scale=hidden**0.5 if config.flag("scale_embedding", False) else 1.0,
        )
    )
