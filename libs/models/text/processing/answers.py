"""Post-processing shared by processors, in numpy: outputs of a forward to vectors, scores and
labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from shoal.extractions import LabelScore

from libs.catalog.card import Card, Representation
from libs.kernels.pooling.maxsim import maxsim
from libs.models.interface.results import RaggedRows, SparseRows, StoredArray
from libs.models.interface.sequences import ANY_BYTES, SparseRow
from libs.models.interface.work import CancelCheck, ClassifyWork, EncodeWork, Scale
from libs.models.text.heads.linear import FUNCTIONS
from libs.models.text.processing.entities import softmax
from libs.models.text.processing.pooling import pooled
from libs.models.text.processing.quantise import store

Array = NDArray[np.float32]
_WEIGHTS = {
    "dense": 0.4,
    "sparse": 0.2,
    "multi_vector": 0.4,
}  # `weights_for_different_modes` in BAAI/bge-m3's model card
ENTRY_BYTES = 8
"""Size of a sparse weight with its column in an answer, for any data type."""
_MIN_LENGTH = np.float32(1e-12)  # the same as in torch.nn.functional.normalize


def dense_rows(work: EncodeWork, card: Card, outputs: Sequence[Array]) -> StoredArray:
    """Return dense vectors: truncated, then normalised (Matryoshka), then quantised."""
    vectors = np.stack(outputs)
    if work.dimensions:
        vectors = vectors[:, : work.dimensions]
    if card.normalize if work.normalize is None else work.normalize:
        vectors = unit(vectors)
    return store(vectors, work.data_type)


def token_rows(
    work: EncodeWork, card: Card, rows: Sequence[Array], check_cancelled: CancelCheck
) -> RaggedRows:
    """Return multi-vectors, pooled if the request says so.

    Args:
        rows: [tokens, dimensions] of each item, only returned tokens.
        check_cancelled: Called before each item is pooled; raises if the job was cancelled.
    """
    values = np.concatenate(rows)
    normalize = card.normalize if work.normalize is None else work.normalize
    if normalize:
        values = unit(values)
    if work.pooling_factor > 1:
        parts = np.split(values, np.cumsum([len(row) for row in rows])[:-1])
        rows = []
        for part in parts:
            check_cancelled()
            rows.append(pooled(part, work.pooling_factor, normalize=normalize))
        values = np.concatenate(rows)
    offsets = np.cumsum([0, *(len(row) for row in rows)]).tolist()
    return RaggedRows(store(values, work.data_type), offsets)


def sparse_rows(
    work: EncodeWork, columns: int, rows: Sequence[SparseRow], most_bytes: int = ANY_BYTES
) -> SparseRows:
    """Return sparse vectors, normalised only on request.

    Args:
        columns: Size of the vocabulary.
        most_bytes: Maximum bytes of a row in the answer; a longer row keeps its largest weights.
    """
    most = max(1, most_bytes // ENTRY_BYTES)
    is_cut = any(len(row.values) > most for row in rows)
    rows = [strongest(row, most) for row in rows] if is_cut else rows
    values = (
        [_scaled(row.values) for row in rows] if work.normalize else [row.values for row in rows]
    )
    offsets = np.cumsum([0, *(len(row.values) for row in rows)]).tolist()
    indices = np.concatenate([row.indices for row in rows]).astype(np.uint32)
    return SparseRows(
        columns, offsets, indices, store(np.concatenate(values), work.data_type), truncated=is_cut
    )


def strongest(row: SparseRow, count: int) -> SparseRow:
    """Return the `count` weights of largest magnitude (sentence-transformers' max_active_dims); all
    for 0.
    """
    if not count or len(row.values) <= count:
        return row
    kept = np.sort(np.argpartition(-np.abs(row.values), count - 1)[:count])
    return SparseRow(row.indices[kept], row.values[kept])


def dot_scores(
    query: SparseRow, documents: Sequence[SparseRow], columns: int, *, cosine: bool = False
) -> Array:
    """Return dot products of sparse vectors over a vocabulary of `columns`: [documents].

    With `cosine`, vectors are normalised.
    """
    weights = np.zeros(columns, dtype=np.float32)
    weights[query.indices] = _scaled(query.values) if cosine else query.values
    values = (_scaled(row.values) if cosine else row.values for row in documents)
    scores: Array = np.array(
        [own @ weights[row.indices] for own, row in zip(values, documents, strict=True)],
        dtype=np.float32,
    )
    return scores


def hybrid_scores(parts: Mapping[Representation, Array]) -> Array:
    """Return the weighted mean of the representations' scores, [documents] each."""
    total = sum(_WEIGHTS[form] for form in parts)
    weighted = [np.float32(_WEIGHTS[form] / total) * own for form, own in parts.items()]
    scores: Array = np.sum(weighted, axis=0, dtype=np.float32)
    return scores


def _scaled(values: Array) -> Array:
    scaled: Array = unit(values[None])[0]
    return scaled


def dense_scores(query: Array, documents: Array, card: Card, scale: Scale) -> Array:
    """Compare vectors by the model's similarity function. Distances are negated, so that a higher
    score is always nearer.

    Args:
        query: [dimensions]
        documents: [documents, dimensions]

    Returns:
        [documents]
    """
    if card.scoring not in ("dot", "euclidean", "manhattan"):
        return cosine_scores(query, documents, scale)
    if card.normalize:
        query, documents = unit(query[None])[0], unit(documents)
    if card.scoring == "dot":
        products: Array = documents @ query
        return products
    distances: Array = np.linalg.norm(
        documents - query, ord=1 if card.scoring == "manhattan" else 2, axis=1
    )
    return -distances


def cosine_scores(query: Array, documents: Array, scale: Scale) -> Array:
    """Return [documents] scores in -1..1, or 0..1 as probability.

    Args:
        query: [dimensions]
        documents: [documents, dimensions]
    """
    scores: Array = unit(documents) @ unit(query[None])[0]
    return np.float32(0.5) * (1 + scores) if scale == "probability" else scores


def maxsim_scores(query: Array, documents: Sequence[Array], card: Card) -> Array:
    """Return [documents] MaxSim scores, averaged over query tokens if the card says so.

    Args:
        query: [tokens, dimensions]
        documents: [tokens, dimensions] of each document.
    """
    lengths = [len(document) for document in documents]
    flat = np.concatenate(documents)
    if card.normalize:
        query, flat = unit(query), unit(flat)
    scores: Array = maxsim(torch.from_numpy(query), torch.from_numpy(flat), lengths).numpy()
    if card.scoring != "maxsim":
        scores /= np.float32(len(query))
    return scores


def pair_scores(logits: Array, card: Card, scale: Scale) -> Array:
    """Return the score of the class "relevant" on the requested scale, [documents].

    Args:
        logits: [documents, classes]
    """
    if scale == "logit":
        return logits[:, card.positive]
    if scale == "probability":
        return sigmoid(logits[:, 0]) if logits.shape[1] == 1 else softmax(logits)[:, card.positive]
    return FUNCTIONS[card.score_activation](torch.from_numpy(logits)).numpy()[:, card.positive]


def is_multi_label(work: ClassifyWork, card: Card) -> bool:
    """Return whether each label is scored alone, as requested or by default of the model."""
    return card.problem == "multi_label" if work.multi_label is None else work.multi_label


def class_labels(work: ClassifyWork, card: Card, logits: Array) -> tuple[LabelScore, ...]:
    """Return the labels of one text, best first.

    The softmax of logits [classes] is over all classes, or over the requested labels.
    """
    wanted = [
        index for index, name in enumerate(card.classes) if not work.labels or name in work.labels
    ]
    if is_multi_label(work, card) or len(logits) == 1:
        scores = sigmoid(logits)[wanted]
    else:
        scores = softmax(logits[wanted]) if work.among_labels else softmax(logits)[wanted]
    return best_first(
        [(card.classes[index], score) for index, score in zip(wanted, scores, strict=True)],
        work.threshold,
    )


def nearest_labels(work: ClassifyWork, vectors: Array) -> list[tuple[LabelScore, ...]]:
    """Return the labels of each text by the cosine of its vector with those of the labels' prompts,
    best first.

    Args:
        vectors: The vectors of the texts, then of the prompts.
    """
    texts = len(work.texts)
    scores = unit(vectors[:texts]) @ unit(vectors[texts:]).T
    return [best_first(list(zip(work.labels, row, strict=True)), work.threshold) for row in scores]


def best_first(
    scores: Sequence[tuple[str, np.float32]], threshold: float | None
) -> tuple[LabelScore, ...]:
    """Return the labels that reach the threshold (all for None), best first."""
    kept = [
        LabelScore(name, float(score))
        for name, score in scores
        if threshold is None or score >= threshold
    ]
    return tuple(sorted(kept, key=lambda item: -item.score))


def unit(vectors: Array) -> Array:
    """Normalise rows to length 1, except rows of zeros."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Array = vectors / np.maximum(lengths, _MIN_LENGTH)
    return scaled


def sigmoid(logits: Array) -> Array:
    """Return the sigmoid without overflow on either side."""
    small = np.exp(-np.abs(logits))
    shares: Array = np.where(logits >= 0, 1, small) / (1 + small)
    return shares


def labels_reaching(
    ranked: tuple[LabelScore, ...], threshold: float | None
) -> tuple[LabelScore, ...]:
    """Return the labels, best first, that reach the threshold, and always the best one."""
    if threshold is None:
        return ranked
    return tuple(
        one
        for number, one in enumerate(ranked)
        if number == 0 or np.float32(one.score) >= np.float32(threshold)
    )
