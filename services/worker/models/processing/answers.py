"""Outputs of a forward -> vectors, scores and labels, in numpy: what processors finish with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from libs.catalog.card import Card
from libs.kernels.maxsim import maxsim
from services.worker.models.heads.linear import FUNCTIONS
from services.worker.models.processing.entities import softmax
from services.worker.models.processing.quantise import store
from services.worker.models.results import LabelScore, RaggedRows, Stored
from services.worker.models.work import ClassifyWork, EncodeWork, Scale

Array = NDArray[np.float32]
_SHORTEST = np.float32(1e-12)  # torch.nn.functional.normalize's


def dense_rows(work: EncodeWork, card: Card, outputs: Sequence[Array]) -> Stored:
    """Cut, then scaled to length 1 (Matryoshka), then stored."""
    vectors = np.stack(outputs)
    if work.dimensions:
        vectors = vectors[:, : work.dimensions]
    if card.normalize if work.normalize is None else work.normalize:
        vectors = unit(vectors)
    return store(vectors, work.data_type)


def token_rows(work: EncodeWork, card: Card, rows: Sequence[Array]) -> RaggedRows:
    """`rows` [tokens, dimensions] each, of the tokens that count."""
    values = np.concatenate(rows)
    if card.normalize if work.normalize is None else work.normalize:
        values = unit(values)
    offsets = np.cumsum([0, *(len(row) for row in rows)]).tolist()
    return RaggedRows(store(values, work.data_type), offsets)


def cosine_scores(query: Array, documents: Array, scale: Scale) -> Array:
    """query [dimensions], documents [documents, dimensions] -> [documents] in -1..1, or 0..1 as probability."""
    scores: Array = unit(documents) @ unit(query[None])[0]
    return np.float32(0.5) * (1 + scores) if scale == "probability" else scores


def maxsim_scores(query: Array, documents: Sequence[Array], card: Card) -> Array:
    """query [tokens, dimensions] and one such array a document -> [documents]."""
    lengths = [len(document) for document in documents]
    flat = np.concatenate(documents)
    if card.normalize:
        query, flat = unit(query), unit(flat)
    scores: Array = maxsim(torch.from_numpy(query), torch.from_numpy(flat), lengths).numpy()
    return scores / np.float32(len(query)) if card.scoring == "mean_maxsim" else scores


def pair_scores(logits: Array, card: Card, scale: Scale) -> Array:
    """logits [documents, classes] -> [documents]: what the class "relevant" has, on the scale asked for."""
    if scale == "logit":
        return logits[:, card.positive]
    if scale == "probability":
        return sigmoid(logits[:, 0]) if logits.shape[1] == 1 else softmax(logits)[:, card.positive]
    return FUNCTIONS[card.score_activation](torch.from_numpy(logits)).numpy()[:, card.positive]


def class_labels(work: ClassifyWork, card: Card, logits: Array) -> tuple[LabelScore, ...]:
    """Labels of one text, best first. logits [classes]; the shares are of all classes, also where a subset is asked for."""
    multi = card.problem == "multi_label" if work.multi_label is None else work.multi_label
    scores = sigmoid(logits) if multi or len(logits) == 1 else softmax(logits)
    wanted = [(name, score) for name, score in zip(card.classes, scores, strict=True) if not work.labels or name in work.labels]
    return _best_first(wanted, work.threshold)


def nearest_labels(work: ClassifyWork, vectors: Array) -> list[tuple[LabelScore, ...]]:
    """Labels of each text by the cosine of its vector to those of the labels' prompts, best first.

    `vectors`: of the texts, then of the prompts.
    """
    texts = len(work.texts)
    scores = unit(vectors[:texts]) @ unit(vectors[texts:]).T
    return [_best_first(list(zip(work.labels, row, strict=True)), work.threshold) for row in scores]


def _best_first(scores: Sequence[tuple[str, np.float32]], threshold: float | None) -> tuple[LabelScore, ...]:
    kept = [LabelScore(name, float(score)) for name, score in scores if threshold is None or score >= threshold]
    return tuple(sorted(kept, key=lambda item: -item.score))


def unit(vectors: Array) -> Array:
    """Rows of length 1; a row of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Array = vectors / np.maximum(lengths, _SHORTEST)
    return scaled


def sigmoid(logits: Array) -> Array:
    """Without overflow on either side."""
    small = np.exp(-np.abs(logits))
    shares: Array = np.where(logits >= 0, 1, small) / (1 + small)
    return shares
