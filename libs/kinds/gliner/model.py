"""GLiNER: zero-shot entity recognition with the request's labels, and in some models relations
between the entities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tokenizers import Tokenizer

from libs.catalog.checkpoint.files import CheckpointConfig, read_config
from libs.errors import ModelBroken
from libs.kinds.gliner.card import (
    ADVICE,
    FILE,
    LABELS_FOLDER,
    LABELS_PREFIX,
    Gliner,
    read_gliner,
)
from libs.kinds.gliner.head import EntityHead
from libs.kinds.gliner.processor import GlinerProcessor, LabelTokens
from libs.kinds.gliner.relations import EntityPairScorer, build_linking
from libs.kinds.gliner.word_labels import WordScorer
from libs.models.text.heads.extraction.label_vectors import LabelVectors
from libs.models.text.heads.extraction.spans import SpanMarker, SpanScorer, TwoLayers
from libs.models.text.heads.extraction.words import WordLstm, WordReader
from libs.models.text.heads.state import HeadState, projection
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.processing.extraction.words import WordFrame
from libs.models.text.registry import build_encoder
from libs.models.text.tokenising.tokenizer import FILE as TOKENIZER
from libs.models.text.tokenising.tokenizer import largest_id, load_tokenizer
from libs.models.weights import TensorFile

_MARKER = "span_rep_layer.span_rep_layer"


def build(parts: EncoderParts) -> Built:
    settings = read_gliner(parts.directory)
    own, others = parts.rest.split(LABELS_PREFIX)
    state = HeadState(others, parts.device, FILE)
    tokenizer = load_tokenizer(parts.root, lowercase=False)
    if settings.labels is None:
        _check_markers(settings, tokenizer)
    labels = (
        None if settings.labels is None else _labels(parts, settings, settings.labels, own, state)
    )
    frame = WordFrame(
        tokenizer,
        limit=parts.card.max_tokens,
        max_words=settings.max_words,
        pooling=settings.pooling,
    )
    head = _head(parts, settings, state, None if labels is None else labels[1])
    pairs = _pairs(parts, settings, state) if settings.adjacency else None
    if settings.labels is not None:
        state.drop("rnn.")
    if settings.span_mode == "markerV1":
        # The package has these layers but uses the plain mean.
        state.drop(f"{_MARKER}.project_first.")
    state.check_all_used()
    processor = GlinerProcessor(
        parts.card, settings, frame, tokens=None if labels is None else labels[0], pairs=pairs
    )
    return Built({"entities": head}, processor, tokenizer)


def _head(
    parts: EncoderParts, settings: Gliner, state: HeadState, vectors: LabelVectors | None
) -> EntityHead:
    size, file = settings.hidden, parts.file
    project = projection(state, "token_rep_layer.projection", parts.encoder.hidden_size, size, file)
    recurrent = None
    if settings.recurrent:
        recurrent = WordLstm(
            state,
            "rnn.lstm",
            hidden=size,
            layers=settings.recurrent,
            device=parts.device,
            file=file,
        )
    scorer: SpanScorer | WordScorer
    if settings.span_mode == "token_level":
        scorer = WordScorer(state, "scorer", size=size, file=file)
    else:
        scorer = SpanScorer(_marker(parts, settings, state), settings.max_width)
    prompted = settings.span_mode != "token_level" or settings.adjacency
    return EntityHead(
        WordReader(project, settings.pooling, recurrent),
        scorer,
        prompt=TwoLayers(state, "prompt_rep_layer", size=size, inputs=size, file=file)
        if prompted
        else None,
        vectors=vectors,
        relations=bool(settings.adjacency),
    )


def _marker(parts: EncoderParts, settings: Gliner, state: HeadState) -> SpanMarker:
    return SpanMarker(
        state, _MARKER, size=settings.hidden, mean=settings.span_mode == "markerV1", file=parts.file
    )


def _pairs(parts: EncoderParts, settings: Gliner, state: HeadState) -> EntityPairScorer:
    """Build the scorer of relations, which runs on the host on every device."""
    size = settings.hidden
    pair = TwoLayers(state, "pair_rep_layer", size=size, inputs=size * 2, file=parts.file)
    linking = build_linking(settings.adjacency, state, size=size, file=parts.file)
    return EntityPairScorer(
        _marker(parts, settings, state), pair, linking, whole=settings.adjacency == "gcn"
    ).cpu()


def _labels(
    parts: EncoderParts,
    settings: Gliner,
    config: Mapping[str, object],
    own: TensorFile,
    state: HeadState,
) -> tuple[LabelTokens, LabelVectors]:
    """Build the bi-encoder's encoder for labels, in the text encoder's data type."""
    encoder, _ = build_encoder(
        config, own, dtype=parts.encoder.dtype, device=parts.device, head_tables={}, int8=parts.int8
    )
    project = projection(
        state, "token_rep_layer.labels_projection", encoder.hidden_size, settings.hidden, parts.file
    )
    folder = parts.directory / LABELS_FOLDER
    name = f"{LABELS_FOLDER}/tokenizer_config.json"
    written = read_config(parts.directory, name) or CheckpointConfig(name, {})
    limit = min(
        written.number("model_max_length", encoder.max_positions, most=math.inf),
        encoder.max_positions,
    )
    tokenizer = load_tokenizer(folder, lowercase=False)
    if largest_id(tokenizer) >= encoder.embed.vocabulary:
        raise ModelBroken(
            f"{LABELS_FOLDER}/{TOKENIZER}: the encoder has no vector for the id "
            f"{largest_id(tokenizer)}"
        )
    return LabelTokens(tokenizer, limit), LabelVectors(encoder, project)


def _check_markers(settings: Gliner, tokenizer: Tokenizer) -> None:
    markers = {settings.ent_token: settings.ent_index, settings.sep_token: -1}
    if settings.adjacency:
        markers[settings.rel_token] = settings.rel_index
    for token, index in markers.items():
        found = tokenizer.token_to_id(token)
        if found is None or index not in (-1, found):
            wanted = "" if index == -1 else f" with the id {index} that gliner_config.json names"
            raise ModelBroken(
                f"tokenizer.json: token {token!r}{wanted}, which marks labels, is missing. {ADVICE}"
            )


load = text_loader(build)
