"""Runs a model on this machine's CPU with built-in texts: the second half of `shoal models check`.

Tests that its weights fit its configuration, that its outputs are finite and of the right shape,
and that a text has the same output alone, packed with others and twice in a batch. It does not know
the correct outputs; tests/parity compares those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from shoal.extractions import Extraction

from libs.catalog.card import Card
from libs.catalog.overrides import Overrides
from libs.errors import ModelBroken
from libs.kernels.linear import int8 as kernels
from libs.models import (
    EncodeResult,
    ExtractResult,
    Output,
    PackedModel,
    Prepared,
    Result,
    ScoreResult,
    ScoreWork,
    Work,
    is_finite,
    load_model,
)
from libs.models.interface.work import DetokenizeWork
from libs.models.runtime.precision import int8
from libs.models.runtime.precision.agreement import cosine, vector
from libs.models.runtime.precision.int8 import JobOutputs, answered
from libs.models.runtime.precision.samples import TEXTS, works
from services.worker.check.explain import Test

RELATIVE_ERROR = 1e-5
"""Tolerance in float32 between a sequence packed and alone."""

BFLOAT16_COSINE = 0.99
"""Minimum cosine to float32. Below it a model loses too much quality in bfloat16: its card should
set `dtype: float32`.
"""


def run(
    directory: Path,
    model: str,
    overrides: Overrides | None,
    *,
    in_int8: bool = False,
    base: Path | None = None,
) -> Iterator[Test]:
    """Run the checks and yield each when it is done. Raises ModelBroken if the model fails to load.

    Args:
        in_int8: Whether a worker would load the model in int8 if its card does not decide. The int8
        loss is always measured, but only fails the check in that case.
        base: As in `load_model`.
    """
    in_int8 = (
        overrides.dtype == "int8"
        if overrides is not None and overrides.dtype not in (None, "auto")
        else in_int8
    )
    overrides = None if overrides is None else replace(overrides, dtype=None)
    runs: list[JobOutputs] = []
    loaded = _load(directory, model, overrides, torch.float32, base)
    yield Test(
        "loads in float32", True, f"{loaded.bytes:,} bytes, at most {loaded.max_tokens:,} tokens"
    )
    for work in works(loaded.card, list(TEXTS)):
        done = answered(loaded, loaded.prepare(work))
        runs.append(done)
        yield from _checks(loaded, done)
    del loaded
    low = _load(directory, model, overrides, torch.bfloat16, base)
    for done in runs:
        nearest = min(map(cosine, low.forward_all(done.prepared), done.outputs))
        yield Test(
            f"{done.task}: bfloat16 near float32",
            nearest >= BFLOAT16_COSINE,
            f"lowest cosine {nearest:.5f}",
        )

    is_of_images = low.card.kind == "images"
    del low
    if is_of_images:
        if in_int8:
            yield Test(
                "loads in int8",
                False,
                "image models are not served in int8: a worker loads it in its default type",
            )
        return
    yield from _int8(directory, model, overrides, runs, wanted=in_int8)


def _int8(
    directory: Path,
    model: str,
    overrides: Overrides | None,
    runs: list[JobOutputs],
    *,
    wanted: bool,
) -> Iterator[Test]:
    """Measure the model's loss in int8. `runs` are jobs and their outputs in float32."""
    try:
        small = _load(directory, model, overrides, torch.int8)
    except ModelBroken as error:
        yield Test("loads in int8", not wanted, error.message)
        return
    if small.data_type != int8.DATA_TYPE:
        yield Test("loads in int8", not wanted, f"not available: {kernels.missing()}")
        return
    for task, found in int8.compared(small, runs):
        advice = "" if found.is_good else "; a card may not say `dtype: int8`"
        yield Test(f"{task}: int8 near float32", found.is_good or not wanted, found.figure + advice)


def _load(
    directory: Path,
    model: str,
    overrides: Overrides | None,
    dtype: torch.dtype,
    base: Path | None = None,
) -> PackedModel:
    return load_model(directory, model, torch.device("cpu"), dtype, overrides, base)


def _checks(model: PackedModel, done: JobOutputs) -> Iterator[Test]:
    prepared, outputs = done.prepared, done.outputs
    tokens = [sequence.tokens for sequence in prepared.sequences]
    finite = all(map(is_finite, outputs))
    yield Test(
        f"{done.task}: finite",
        finite,
        f"{len(outputs)} sequences of {min(tokens)} to {max(tokens)} tokens",
    )
    heads = {index: head for head, indices in prepared.groups().items() for index in indices}
    alone = [
        model.forward(heads[index], [sequence])[0]
        for index, sequence in enumerate(prepared.sequences)
    ]
    error = max(map(_relative_error, outputs, alone))
    yield Test(
        f"{done.task}: packed as alone", error <= RELATIVE_ERROR, f"relative error {error:.1e}"
    )
    twins = max(
        (_relative_error(outputs[i], outputs[j]) for i, j in _twins(prepared)), default=None
    )
    if twins is not None:
        yield Test(
            f"{done.task}: same text, same answer",
            twins <= RELATIVE_ERROR,
            f"relative error {twins:.1e}",
        )
    if finite:
        wrong = _wrong(model.card, prepared.work, model.finish(prepared, outputs))
        yield Test(f"{done.task}: answer", not wrong, wrong or "shapes and offsets are right")


def _twins(prepared: Prepared) -> Iterator[tuple[int, int]]:
    """Yield pairs of sequences with the same tokens, segments, prefix tokens and image."""
    seen: dict[tuple[bytes, ...], int] = {}
    for number, sequence in enumerate(prepared.sequences):
        arrays = (
            sequence.ids,
            sequence.type_ids,
            sequence.before,
            None if sequence.rows is None else sequence.rows.values,
        )
        first = seen.setdefault(
            tuple(b"" if array is None else array.tobytes() for array in arrays), number
        )
        if first != number:
            yield first, number


def _wrong(card: Card, work: Work, result: Result) -> str:
    """Describe the error in an answer; "" if it is valid."""
    if isinstance(work, DetokenizeWork):
        raise TypeError("the self-test does not detokenize")
    texts = work.documents if isinstance(work, ScoreWork) else work.texts
    match result:
        case EncodeResult():
            return _wrong_vectors(card, len(texts), result)
        case ScoreResult(scores):
            return (
                ""
                if scores.shape == (len(texts),)
                else f"scores have shape {scores.shape}, not ({len(texts)},)"
            )
        case ExtractResult(items):
            if len(items) != len(texts):
                return f"{len(items)} answers for {len(texts)} texts"
            return next(
                (
                    wrong
                    for text, item in zip(texts, items, strict=True)
                    if (wrong := _wrong_extraction(text, item))
                ),
                "",
            )
        case _:
            return f"the answer is a {type(result).__name__}"


def _wrong_vectors(card: Card, count: int, result: EncodeResult) -> str:
    if result.dense is not None and result.dense.shape != (count, card.dimensions):
        return f"dense vectors have shape {result.dense.shape}, not {(count, card.dimensions)}"
    if result.multi_vector is not None:
        rows = result.multi_vector
        if len(rows.offsets) != count + 1 or rows.values.shape != (
            rows.offsets[-1],
            card.multi_vector_dimensions,
        ):
            return (
                f"multi-vectors have shape {rows.values.shape} and {len(rows.offsets)} offsets for "
                f"{count} texts"
            )
    if result.sparse is not None:
        sparse = result.sparse
        if len(sparse.offsets) != count + 1 or (
            len(sparse.indices) and int(sparse.indices.max()) >= sparse.columns
        ):
            return (
                f"sparse vectors have {len(sparse.offsets)} offsets for {count} texts and "
                f"{sparse.columns} columns"
            )
    return ""


def _wrong_extraction(text: str, item: Extraction) -> str:
    related = [entity for relation in item.relations for entity in (relation.head, relation.tail)]
    for entity in (*item.entities, *related):
        if text[entity.start : entity.end] != entity.text:
            return f"entity {entity.text!r} is not at {entity.start}..{entity.end}"
    return ""


def _relative_error(one: Output, other: Output) -> float:
    """Return the largest difference over the largest number; infinity if shapes differ."""
    a, b = vector(one, other), vector(other, one)
    if a.shape != b.shape:
        return float("inf")
    largest = float(np.abs(b).max(initial=0.0))
    return float(np.abs(a - b).max(initial=0.0)) / (largest or 1.0)
