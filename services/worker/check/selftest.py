"""Runs a model on this machine's CPU with built-in texts: the second half of `shoal models check`.

Tests that its weights fit its configuration, its answers are numbers of the right shape, and a text has the same answer alone,
packed among others and twice in a batch. The correct answers are not known here: for those see tests/parity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from libs.catalog.card import Card
from libs.catalog.overrides import Overrides
from libs.models import (
    ClassifyWork,
    EncodeResult,
    EncodeWork,
    EntitiesWork,
    Extraction,
    ExtractResult,
    Given,
    Output,
    PackedModel,
    Prepared,
    RelationsWork,
    Result,
    ScoreResult,
    ScoreWork,
    SparseRow,
    Work,
    is_finite,
    load_model,
)
from services.worker.check.explain import Test

RELATIVE_ERROR = 1e-5
"""Tolerance in float32 between a sequence packed and alone."""

BFLOAT16_COSINE = 0.99
"""The least cosine to float32. Below it a model loses too much quality in bfloat16: its card should say `dtype: float32`."""

_TEXTS = [
    "Ada Lovelace wrote the first program in London.",
    "Herring",
    "A shoal of fish turns as one, though each of them follows only its neighbours; no leader says where it should go. " * 3,
    "Ada Lovelace wrote the first program in London.",
]
_LABELS = ("person", "place")


def run(directory: Path, model: str, overrides: Overrides | None) -> Iterator[Test]:
    """Runs the checks and yields each when it is done. Raises ModelBroken if the model cannot be loaded."""
    overrides = None if overrides is None else replace(overrides, dtype=None)
    runs: list[_Run] = []
    loaded = _load(directory, model, overrides, torch.float32)
    yield Test("loads in float32", True, f"{loaded.bytes:,} bytes, at most {loaded.max_tokens:,} tokens")
    for work in works(loaded.card, _TEXTS):
        done = _run(loaded, work)
        runs.append(done)
        yield from _checks(loaded, done)
    del loaded
    low = _load(directory, model, overrides, torch.bfloat16)
    for done in runs:
        nearest = min(map(_cosine, low.forward(done.prepared.head, done.prepared.sequences), done.outputs))
        yield Test(f"{done.task}: bfloat16 near float32", nearest >= BFLOAT16_COSINE, f"lowest cosine {nearest:.5f}")


@dataclass(frozen=True, slots=True)
class _Run:
    """A job and the outputs of its sequences in float32, packed."""

    task: str
    prepared: Prepared
    outputs: list[Output]


def _load(directory: Path, model: str, overrides: Overrides | None, dtype: torch.dtype) -> PackedModel:
    return load_model(directory, model, torch.device("cpu"), dtype, overrides)


def works(card: Card, texts: list[str]) -> Iterator[Work]:
    """A job for each task of the model."""
    for task in card.tasks:
        match task:
            case "encode":
                yield EncodeWork(texts, role="document", representations=card.representations)
            case "score":
                yield ScoreWork("Who wrote the first program?", texts)
            case "entities":
                yield EntitiesWork(texts, labels=() if card.labels else _LABELS)
            case "classify":
                yield ClassifyWork(texts, labels=() if card.labels else _LABELS)
            case "relations":
                given = tuple(map(_ends, texts)) if card.given_entities else ()
                named = () if card.labels or card.given_entities else _LABELS
                yield RelationsWork(texts, labels=("lived in", "wrote"), entity_labels=named, entities=given)


def _ends(text: str) -> tuple[Given, ...]:
    """A text's first and last three characters, for models that relate given entities."""
    return Given(0, 3), Given(len(text) - 3, len(text))


def _run(model: PackedModel, work: Work) -> _Run:
    prepared = model.prepare(work)
    task = type(work).__name__.removesuffix("Work").lower()
    return _Run(task, prepared, model.forward(prepared.head, prepared.sequences))


def _checks(model: PackedModel, done: _Run) -> Iterator[Test]:
    prepared, outputs = done.prepared, done.outputs
    tokens = [sequence.tokens for sequence in prepared.sequences]
    finite = all(map(is_finite, outputs))
    yield Test(f"{done.task}: finite", finite, f"{len(outputs)} sequences of {min(tokens)} to {max(tokens)} tokens")
    alone = [model.forward(prepared.head, [sequence])[0] for sequence in prepared.sequences]
    error = max(map(_relative_error, outputs, alone))
    yield Test(f"{done.task}: packed as alone", error <= RELATIVE_ERROR, f"relative error {error:.1e}")
    twins = max((_relative_error(outputs[i], outputs[j]) for i, j in _twins(prepared)), default=None)
    if twins is not None:
        yield Test(f"{done.task}: same text, same answer", twins <= RELATIVE_ERROR, f"relative error {twins:.1e}")
    if finite:
        wrong = _wrong(model.card, prepared.work, model.finish(prepared, outputs))
        yield Test(f"{done.task}: answer", not wrong, wrong or "shapes and offsets are right")


def _twins(prepared: Prepared) -> Iterator[tuple[int, int]]:
    """Pairs of sequences with the same tokens, segments and tokens before them."""
    seen: dict[tuple[bytes, ...], int] = {}
    for number, sequence in enumerate(prepared.sequences):
        arrays = (sequence.ids, sequence.type_ids, sequence.before)
        first = seen.setdefault(tuple(b"" if array is None else array.tobytes() for array in arrays), number)
        if first != number:
            yield first, number


def _wrong(card: Card, work: Work, result: Result) -> str:
    """What is wrong with an answer; empty if nothing is."""
    texts = work.documents if isinstance(work, ScoreWork) else work.texts
    match result:
        case EncodeResult():
            return _wrong_vectors(card, len(texts), result)
        case ScoreResult(scores):
            return "" if scores.shape == (len(texts),) else f"scores have shape {scores.shape}, not ({len(texts)},)"
        case ExtractResult(items):
            if len(items) != len(texts):
                return f"{len(items)} answers for {len(texts)} texts"
            return next((wrong for text, item in zip(texts, items, strict=True) if (wrong := _wrong_extraction(text, item))), "")


def _wrong_vectors(card: Card, count: int, result: EncodeResult) -> str:
    if result.dense is not None and result.dense.shape != (count, card.dimensions):
        return f"dense vectors have shape {result.dense.shape}, not {(count, card.dimensions)}"
    if result.multi_vector is not None:
        rows = result.multi_vector
        if len(rows.offsets) != count + 1 or rows.values.shape != (rows.offsets[-1], card.multi_vector_dimensions):
            return f"multi-vectors have shape {rows.values.shape} and {len(rows.offsets)} offsets for {count} texts"
    if result.sparse is not None:
        sparse = result.sparse
        if len(sparse.offsets) != count + 1 or (len(sparse.indices) and int(sparse.indices.max()) >= sparse.columns):
            return f"sparse vectors have {len(sparse.offsets)} offsets for {count} texts and {sparse.columns} columns"
    return ""


def _wrong_extraction(text: str, item: Extraction) -> str:
    related = [entity for relation in item.relations for entity in (relation.head, relation.tail)]
    for entity in (*item.entities, *related):
        if text[entity.start : entity.end] != entity.text:
            return f"entity {entity.text!r} is not at {entity.start}..{entity.end}"
    return ""


def _relative_error(one: Output, other: Output) -> float:
    """The largest difference over the largest number; infinite where shapes differ."""
    a, b = _vector(one, other), _vector(other, one)
    if a.shape != b.shape:
        return float("inf")
    largest = float(np.abs(b).max(initial=0.0))
    return float(np.abs(a - b).max(initial=0.0)) / (largest or 1.0)


def _cosine(one: Output, other: Output) -> float:
    a, b = _vector(one, other), _vector(other, one)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    # Two empty answers are the same answer.
    return float(a @ b) / norms if norms else float(a.shape == b.shape and not a.any() and not b.any())


def _vector(output: Output, other: Output) -> NDArray[np.float64]:
    """All numbers of an output; sparse ones over the columns that it or `other` has."""
    if isinstance(output, tuple):
        others: Sequence[Output] = other if isinstance(other, tuple) else (other,) * len(output)
        return np.concatenate([_vector(part, its) for part, its in zip(output, others, strict=True)])
    if isinstance(output, SparseRow):
        columns = np.union1d(output.indices, other.indices) if isinstance(other, SparseRow) else output.indices
        values = np.zeros(len(columns))
        values[np.searchsorted(columns, output.indices)] = output.values
        return values
    return np.asarray(output, dtype=np.float64).ravel()
