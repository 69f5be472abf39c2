"""The head for late chunks, which dense models have in addition to the head for whole texts."""

from __future__ import annotations

import torch

from libs.models.interface.head import ModelHead
from libs.models.text.heads.modules import dense_layers
from libs.models.text.heads.spans import SpanHead
from libs.models.text.parts import EncoderParts
from libs.models.text.processing.chunking.span_pooling import SPANS_HEAD, SpanPooling


def add_span_head(heads: dict[str, ModelHead], parts: EncoderParts) -> SpanPooling:
    """Add the head to a model's heads, unless its pooling cannot be applied to spans.

    Returns the pooling. Its layers after the pooling are also in host memory, because a chunk can
    span several forward passes.
    """
    if not SpanPooling.is_able(parts.card.pooling):
        return SpanPooling()
    heads[SPANS_HEAD] = SpanHead()
    host = torch.device("cpu")
    state = (
        {name: tensor.to(host) for name, tensor in parts.state.items()}
        if parts.card.modules
        else {}
    )
    return SpanPooling(parts.card.pooling, dense_layers(parts.card, parts.directory, state, host))
