"""Conversion of outputs to answers: number formats, scales, thresholds, offsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from libs.models import (
    ClassifyWork,
    DataType,
    EncodeResult,
    EncodeWork,
    EntitiesWork,
    ExtractResult,
    PackedModel,
    Result,
    ScoreResult,
    ScoreWork,
    Work,
)
from libs.models.text.processing.answers import sigmoid, unit
from libs.models.text.processing.quantise import store
from tests.models.restoring import restore

ROWS = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=2, max_side=20),
    elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False),
)


def run(model: PackedModel, work: Work) -> Result:
    prepared = model.prepare(work)
    return model.finish(prepared, model.forward(prepared.head, prepared.sequences))


@given(ROWS)
def test_bytes_are_undone_within_half_a_step(values: np.ndarray) -> None:
    for data_type in ("int8", "uint8"):
        stored = store(values, data_type)
        assert stored.values.dtype == data_type
        assert stored.scale is not None
        assert (stored.offset is None) == (data_type == "int8")
        rounding = 1e-6 * np.abs(values).max(axis=1, keepdims=True)
        assert (np.abs(restore(stored) - values) <= stored.scale[:, None] * 0.5001 + rounding).all()


@given(ROWS)
def test_halves_are_rounded_as_torch_rounds_them(values: np.ndarray) -> None:
    for data_type, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        stored = store(values, data_type)  # type: ignore[arg-type]
        assert (
            stored.values.tobytes()
            == torch.from_numpy(values).to(dtype).view(torch.int16).numpy().tobytes()
        )
        assert (
            restore(stored).tobytes()
            == torch.from_numpy(values).to(dtype).float().numpy().tobytes()
        )


@given(ROWS)
def test_binary_holds_the_signs_most_significant_bit_first(values: np.ndarray) -> None:
    stored = store(values, "binary")
    assert stored.shape == values.shape
    assert stored.values.shape == (len(values), -(-values.shape[1] // 8))
    assert (restore(stored) == (values > 0)).all()


def test_binary_bits_by_hand() -> None:
    stored = store(np.array([[1, -1, 0, 2, 3, -4, 5, 6, 7]], np.float32), "binary")
    assert stored.values.tolist() == [[0b10011011, 0b10000000]]


@pytest.mark.parametrize("data_type", ["float32", "float16", "bfloat16", "int8", "uint8"])
def test_every_format_is_near_the_vectors(embedder: PackedModel, data_type: DataType) -> None:
    texts = ["the free software foundation", "warranty"]
    whole, small = (
        run(embedder, EncodeWork(texts)),
        run(embedder, EncodeWork(texts, data_type=data_type)),
    )
    assert isinstance(whole, EncodeResult)
    assert isinstance(small, EncodeResult)
    assert whole.dense is not None
    assert small.dense is not None
    assert small.dense.shape == (2, 64)
    assert (unit(restore(small.dense)) * restore(whole.dense)).sum(1).min() > 0.9999


def test_cosine_scores_and_their_probability(embedder: PackedModel) -> None:
    documents = ["query: warranty", "freedom", "the program"]
    cosine, share = (
        run(embedder, ScoreWork("warranty", documents, scale=scale))
        for scale in ("", "probability")
    )
    assert isinstance(cosine, ScoreResult)
    assert isinstance(share, ScoreResult)
    assert cosine.scores.dtype == share.scores.dtype == np.float32
    assert cosine.scores[0] == pytest.approx(
        1, abs=1e-6
    )  # the query's prompt makes it the same text
    assert share.scores == pytest.approx((1 + cosine.scores) / 2)


def test_classify_by_cosine(embedder: PackedModel) -> None:
    work = ClassifyWork(["about law", "about love"], labels=("love", "law"), hypothesis="about {}")
    result = run(embedder, work)
    assert isinstance(result, ExtractResult)
    assert [item.labels[0].label for item in result.items] == ["law", "love"]
    assert [item.labels[0].score for item in result.items] == pytest.approx([1, 1], abs=1e-6)
    strict = run(
        embedder,
        ClassifyWork(work.texts, work.labels, threshold=0.9999, hypothesis=work.hypothesis),
    )
    assert isinstance(strict, ExtractResult)
    assert [len(item.labels) for item in strict.items] == [1, 1]


def test_classify_thresholds_subsets_and_kinds(classifier: PackedModel) -> None:
    every, some, each = (
        run(classifier, ClassifyWork(["warranty"], labels, multi))
        for labels, multi in (((), None), (("law", "sport"), None), ((), True))
    )
    assert isinstance(every, ExtractResult)
    assert isinstance(some, ExtractResult)
    assert isinstance(each, ExtractResult)
    shares = {item.label: item.score for item in every.items[0].labels}
    assert sum(shares.values()) == pytest.approx(1)
    assert {item.label: item.score for item in some.items[0].labels} == {
        name: shares[name] for name in ("law", "sport")
    }
    assert sum(item.score for item in each.items[0].labels) != pytest.approx(1)
    assert [item.score for item in every.items[0].labels] == sorted(shares.values(), reverse=True)


def test_offsets_are_code_points(tagger: PackedModel) -> None:
    text = "\U0001d518 🦀 code: naïve café 東京"
    result = run(tagger, EntitiesWork([text], aggregation="none"))
    assert isinstance(result, ExtractResult)
    entities = result.items[0].entities
    assert entities
    assert all(item.text == text[item.start : item.end] for item in entities)
    assert max(item.end for item in entities) <= len(text)
    assert [item.start for item in entities] == sorted(item.start for item in entities)


def test_entities_of_the_end_of_a_long_text(tagger: PackedModel) -> None:
    text = " ".join(f"word{n}" for n in range(60))
    result = run(tagger, EntitiesWork([text], aggregation="none", truncation="start"))
    assert isinstance(result, ExtractResult)
    entities = result.items[0].entities
    assert entities
    assert all(
        item.text == text[item.start : item.end] and item.start > len(text) // 2
        for item in entities
    )


def test_entity_labels_and_threshold(tagger: PackedModel) -> None:
    texts = [
        "Programs, GPL; warranty (none)!",
        "To protect your rights, we need to prevent others.",
    ]
    every, places, sure = (
        run(tagger, EntitiesWork(texts, labels=labels, threshold=threshold))
        for labels, threshold in (((), None), (("LOC",), None), ((), 0.9))
    )
    assert isinstance(every, ExtractResult)
    assert isinstance(places, ExtractResult)
    assert isinstance(sure, ExtractResult)
    for some, others, certain in zip(every.items, places.items, sure.items, strict=True):
        assert others.entities == tuple(item for item in some.entities if item.label == "LOC")
        assert certain.entities == tuple(item for item in some.entities if item.score >= 0.9)


def test_sigmoid_does_not_overflow() -> None:
    assert sigmoid(np.array([-1000, 0, 1000], np.float32)).tolist() == [0, 0.5, 1]
