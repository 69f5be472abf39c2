"""Items are cut to their share of an answer: the best results stay, whatever else is in the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.extractions import (
    Classification,
    Entity,
    Extraction,
    LabelScore,
    PageText,
    Region,
    Relation,
    Structure,
    TokenLogprob,
    ToolCall,
    Value,
)
from shoal.v1 import worker_pb2

from libs.models import ExtractResult
from libs.models.interface.sequences import ANY_BYTES, SparseRow
from libs.models.interface.work import EncodeWork, never_cancelled
from libs.models.runtime.answer_budget import build_result, fit_to_bytes, select_best
from libs.models.text.processing.answers import sparse_rows
from services.worker.mesh import codec

TEXTS = st.text("aé東 ", max_size=12)
SCORES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])  # many are equal
ENTITIES = st.builds(Entity, st.integers(0, 1 << 31), st.integers(0, 1 << 31), TEXTS, SCORES, TEXTS)
RELATIONS = st.builds(Relation, ENTITIES, ENTITIES, TEXTS, SCORES)
EDGES = st.floats(0, 1e4, width=32)
REGIONS = st.builds(
    Region, EDGES, EDGES, EDGES, EDGES, TEXTS, SCORES, st.lists(EDGES, max_size=6).map(tuple)
)
VALUES = st.builds(Value, TEXTS, SCORES, st.integers(0, 1 << 31), st.integers(0, 1 << 31))
FIELDS = st.one_of(st.none(), VALUES, st.lists(VALUES, max_size=3).map(tuple))
STRUCTURES = st.builds(Structure, TEXTS, st.dictionaries(TEXTS, FIELDS, max_size=3))


def lists(of: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(of, max_size=8).map(tuple)


FOUND = st.builds(
    Extraction,
    entities=lists(ENTITIES),
    relations=lists(RELATIONS),
    regions=lists(REGIONS),
    structures=lists(STRUCTURES),
    pages=lists(st.builds(PageText, st.integers(1, 100), TEXTS, st.just(True))),
)
RESULTS = ("entities", "relations", "regions", "structures")


def score(result: object) -> float:
    if isinstance(result, Structure):
        return max((value.score for _, value in result.values()), default=0.0)
    return getattr(result, "score")  # noqa: B009 - one of four classes


def scores(item: Extraction) -> list[float]:
    return [score(result) for name in RESULTS for result in getattr(item, name)]


def serialized_bytes(item: Extraction) -> int:
    times = codec.Timings(0, 0, 0, 0, 0)
    data = codec.encode_result(ExtractResult([item]), revision="", tokens=0, timings=times)
    return worker_pb2.JobResult.FromString(data).extract.results[0].ByteSize()


@given(FOUND, st.integers(0, 1500))
def test_best_results_are_kept_within_the_share(item: Extraction, share: int) -> None:
    cut = fit_to_bytes(item, share)
    if cut.truncated:
        assert serialized_bytes(dataclasses.replace(cut, pages=(), truncated=False)) <= share
        left_out = list(scores(item))
        for one in scores(cut):
            left_out.remove(one)
        assert not left_out or not scores(cut) or min(scores(cut)) >= max(left_out)
    else:
        assert cut == item
        assert serialized_bytes(item) <= share or cut == Extraction()
    for name in RESULTS:  # in their order
        rest = iter(getattr(item, name))
        assert all(any(one is other for other in rest) for one in getattr(cut, name))
    for page, whole in zip(cut.pages, item.pages, strict=True):
        assert whole.text.startswith(page.text)


@given(FOUND, st.lists(FOUND, max_size=3), st.integers(0, 1500))
def test_item_is_cut_alone_as_among_others(
    item: Extraction, others: list[Extraction], share: int
) -> None:
    (alone,) = build_result([item], share, never_cancelled).items
    assert (
        build_result([*others, item, *others], share, never_cancelled).items[len(others)] == alone
    )
    assert fit_to_bytes(fit_to_bytes(item, share), share) == alone


FILLED: dict[str, object] = {
    "entities": (Entity(0, 1, "label", 0.5, "a"),),
    "labels": (LabelScore("label", 0.5),),
    "relations": (Relation(Entity(0, 1, "", 1.0, "a"), Entity(1, 2, "", 1.0, "b"), "label", 0.5),),
    "regions": (Region(0, 0, 1, 1, "label", 0.5),),
    "pages": (PageText(1, "text", True),),
    "text": "text",
    "form": {"key": ["value", 1, None]},
    "classifications": (Classification("name", (LabelScore("label", 0.5),)),),
    "tool_calls": (ToolCall("name", "{}"),),
    "tokens": (TokenLogprob("text", -0.5, (TokenLogprob("text", -0.5),)),),
    "structures": (Structure("name", {"field": (Value("a", 0.5),)}),),
}
SIZELESS = {"document_pages", "finish_reason", "truncated"}


def test_every_field_of_an_extraction_counts_or_is_of_fixed_size() -> None:
    assert {field.name for field in dataclasses.fields(Extraction)} == FILLED.keys() | SIZELESS


@pytest.mark.parametrize("name", FILLED)
def test_further_field_leaves_less_room_for_the_others(name: str) -> None:
    entity = Entity(0, 1, "label", 0.25, "a")
    room = next(
        size
        for size in range(1000)
        if not fit_to_bytes(Extraction(entities=(entity,)), size).truncated
    )
    item = dataclasses.replace(Extraction(entities=(entity,)), **{name: FILLED[name]})  # type: ignore[arg-type]
    if name != "entities":
        assert fit_to_bytes(item, room).truncated
    assert not fit_to_bytes(item, room + 200).truncated


def test_layers_of_pages_are_cut_where_the_share_ends_and_written_pages_stay() -> None:
    pages = (PageText(1, "é" * 50, True), PageText(2, "written", False), PageText(3, "more", True))
    cut = fit_to_bytes(Extraction(pages=pages), 16 + 7 + 51)
    assert [page.text for page in cut.pages] == ["é" * 25, "written", ""]
    assert cut.truncated


def test_json_that_takes_more_than_the_share_is_left_out_and_its_text_stays() -> None:
    item = Extraction(text="[1]", form={"numbers": [1.0] * 100})
    assert fit_to_bytes(item, 100) == Extraction(text="[1]", truncated=True)
    assert fit_to_bytes(item, 10_000) == item


@given(st.lists(SCORES, max_size=30), SCORES, st.integers(1, 12))
def test_best_scores_are_those_of_a_stable_sort(
    values: list[float], threshold: float, most: int
) -> None:
    found = np.array(values, np.float32)
    kept, is_cut = select_best(found, threshold, most)
    reached = [
        index for index in np.argsort(-found, kind="stable").tolist() if found[index] >= threshold
    ]
    assert kept.tolist() == reached[:most]
    assert is_cut == (len(reached) > most)


def test_items_are_made_one_by_one_until_the_check_between_them_raises() -> None:
    made: list[int] = []

    def items() -> Iterator[Extraction]:
        for number in range(100):
            made.append(number)
            yield Extraction()

    def check_cancelled() -> None:
        if len(made) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_result(items(), ANY_BYTES, check_cancelled)
    assert made == [0, 1, 2]


def test_of_a_sparse_row_the_largest_weights_that_fit_stay() -> None:
    rows = [
        SparseRow(np.array([1, 4, 6], np.int32), np.array([0.5, -0.75, 0.25], np.float32)),
        SparseRow(np.array([2], np.int32), np.array([0.125], np.float32)),
    ]
    whole, cut = (sparse_rows(EncodeWork(["a", "b"]), 10, rows, share) for share in (24, 16))
    assert (whole.indices.tolist(), whole.truncated) == ([1, 4, 6, 2], False)
    assert (cut.indices.tolist(), cut.offsets, cut.truncated) == ([1, 4, 2], [0, 2, 3], True)
    alone = sparse_rows(EncodeWork(["a"]), 10, rows[:1], 16)
    assert alone.indices.tolist() == [1, 4]
