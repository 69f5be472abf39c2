"""The head for late chunks, which dense models have beside that for whole texts."""

from __future__ import annotations

import torch

from libs.models.head import ModelHead
from libs.models.text.heads.modules import dense_layers
from libs.models.text.heads.spans import SpanHead
from libs.models.text.kinds.kind import Parts
from libs.models.text.processing.chunking.span_pooling import SPANS_HEAD, SpanPooling


def add_span_head(heads: dict[str, ModelHead], parts: Parts) -> SpanPooling:
    """Adds the head to those of a model, unless spans cannot be pooled as the model pools texts.
    Returns how it pools them.

    The layers after the pooling are in host memory as well, since a chunk may be of several forward
    passes.
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
