"""GLiREL: zero-shot relation extraction between the request's entities, with the request's
labels."""

from __future__ import annotations

from libs.kinds.glirel.card import (
    ADVICE,
    FILE,
    LABEL_MARKER,
    TEXT_MARKER,
    read_glirel,
)
from libs.kinds.glirel.head import ConcatScorer, EntityMarker, PairDotScorer, PairHead
from libs.kinds.glirel.processor import GlirelProcessor
from libs.models.text.heads.extraction.spans import TwoLayers
from libs.models.text.heads.extraction.words import WordLstm, WordReader
from libs.models.text.heads.state import HeadState, projection
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.processing.extraction.words import WordFrame
from libs.models.text.tokenising.tokenizer import load_tokenizer, need_tokens

_PAIRS = "span_rep_layer.rel_rep_layer"
_NOT_USED = ("coref_classifier.", "refine_relation.", "refine_prompt.", "_rel_filtering.")
"""Layers used in training only. The package loads weights without them, and predicts without them
where its configuration permits that.
"""


def build(parts: EncoderParts) -> Built:
    settings = read_glirel(parts.directory)
    size, file = settings.hidden, parts.file
    tokenizer = load_tokenizer(parts.root, lowercase=False)
    need_tokens(tokenizer, (LABEL_MARKER, TEXT_MARKER), ADVICE)
    frame = WordFrame(
        tokenizer,
        limit=parts.card.max_tokens,
        max_words=settings.max_words,
        pooling=settings.pooling,
    )
    state = HeadState(parts.rest, parts.device, FILE)
    project = projection(state, "token_rep_layer.projection", parts.encoder.hidden_size, size, file)
    recurrent = WordLstm(state, "rnn.lstm", hidden=size, layers=1, device=parts.device, file=file)
    pair = TwoLayers(state, f"{_PAIRS}.out_project", size=size, inputs=size * 2, file=file)
    scorer = (
        PairDotScorer(pair.outer)
        if settings.scorer == "dot"
        else ConcatScorer(pair.outer, state, "scorer.proj", size=size, file=file)
    )
    head = PairHead(
        WordReader(project, settings.pooling, recurrent),
        EntityMarker(state, f"{_PAIRS}.span_marker", size=size, file=file),
        TwoLayers(state, "prompt_rep_layer", size=size, inputs=size, file=file),
        pair.inner,
        scorer,
    )
    for stem in _NOT_USED:
        state.drop(stem)
    state.check_all_used()
    return Built({"relations": head}, GlirelProcessor(parts.card, settings, frame), tokenizer)


load = text_loader(build)
