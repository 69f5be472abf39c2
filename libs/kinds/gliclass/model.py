"""GLiClass: zero-shot classification with the request's labels, all scored in one forward."""

from __future__ import annotations

import torch
from torch import Tensor

from libs.catalog.checkpoint.files import need_config
from libs.errors import ModelBroken
from libs.kinds.gliclass.card import read_gliclass
from libs.kinds.gliclass.head import GliclassHead
from libs.kinds.gliclass.processor import GliclassProcessor
from libs.models.layers.activations import FUNCTIONS
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.spec import Config
from libs.models.text.heads.linear import check_shape
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.tokenising.tokenizer import load_tokenizer

_PREFIX = "model."
_SEGMENTS = "segment_embeddings.weight"
_SEGMENT_COUNT = 3  # labels, text, and examples, which requests do not have


def build(parts: EncoderParts) -> Built:
    settings = read_gliclass(parts.directory)
    if parts.encoder.causal:
        raise ModelBroken(
            f"config.json: `encoder_config` describes a decoder ({parts.card.family}), not "
            "supported for GLiClass: labels do "
            "not see the text behind them"
        )
    state = {name.removeprefix(_PREFIX): _read(parts, name) for name in parts.rest.names()}
    if settings.segments:
        _add_segments(parts, state)
    function = FUNCTIONS[
        Config(need_config(parts.directory, "config.json").values).activation(
            "projector_hidden_act"
        )
    ]
    head = GliclassHead(settings, state, parts.encoder.hidden_size, function, parts.file)
    for name in sorted(state):
        raise ModelBroken(
            f"{parts.file}: tensor {_PREFIX + name!r} does not belong to the model in config.json"
        )
    tokenizer = load_tokenizer(parts.root, lowercase=False)
    return Built({"labels": head}, GliclassProcessor(parts.card, settings, tokenizer), tokenizer)


def _read(parts: EncoderParts, name: str) -> Tensor:
    return parts.rest.read(name).to(device=parts.device, dtype=torch.float32)


def _add_segments(parts: EncoderParts, state: dict[str, Tensor]) -> None:
    """Add segment embeddings, which distinguish labels from text, to the token embeddings, as BERT
    does."""
    embed = parts.encoder.embed
    if not isinstance(embed, TokenEmbedding) or embed.segments:
        raise ModelBroken(
            "config.json: `use_segment_embeddings`: not supported for an encoder that already has "
            "segments"
        )
    size = embed.token.weight.shape[1]
    check_shape(state, _SEGMENTS, (_SEGMENT_COUNT, size), parts.file)
    embed.add_segments(state.pop(_SEGMENTS))


load = text_loader(build)
