"""Late interaction: one vector for each token."""

from __future__ import annotations

from libs.models.text.heads.modules import dense_layers, linear_table
from libs.models.text.heads.tokens import TokenHead
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.processing.chunking.span_pooling import SpanPooling
from libs.models.text.processing.embedding import EmbeddingProcessor
from libs.models.text.tokenising.late import LateFrame
from libs.models.text.tokenising.text import special_token


def build(parts: EncoderParts) -> Built:
    card, text = parts.card, parts.text()
    layers = dense_layers(card, parts.directory, parts.state, parts.device)
    late = None
    if card.late is not None:
        fill = special_token(parts.root, "mask_token") or special_token(parts.root, "eos_token")
        late = LateFrame(card.late, text, fill)
    return Built(
        {"multi_vector": TokenHead(layers)},
        EmbeddingProcessor(card, text, late, spans=SpanPooling()),
        text.tokenizer,
    )


load = text_loader(build, linear_table)
