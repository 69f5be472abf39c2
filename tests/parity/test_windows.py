"""GLiNER's models read long texts in windows of whole words, each as they read it alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from shoal.extractions import Entity, Extraction
from shoal.schema import Schema, SchemaClassification, SchemaField, SchemaLabel, SchemaStructure

from libs.errors import InvalidInput
from libs.models import EntitiesWork, ExtractResult, PackedModel, StructureWork, load_model
from libs.models.interface.work import Work, never_cancelled
from libs.models.text.windows.processor import WindowNotes
from tests.parity import gliner2_models
from tests.parity.gliner_models import LABELS, TEXTS, make_reference

pytestmark = pytest.mark.filterwarnings("ignore")

LONG = "\r\n".join((*TEXTS, "“東京” 😀 is e\u0301te\u0301.") * 6)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(directory: Path) -> PackedModel:
    return load_model(directory, "test/model", torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def gliner(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    return load(make_reference(tmp_path_factory.mktemp("gliner"), {}).directory)


@pytest.fixture(scope="module")
def gliner2(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    directory = tmp_path_factory.mktemp("gliner2")
    return load(gliner2_models.make_reference(directory, {"max_width": 3}, seed=1).directory)


def run(model: PackedModel, work: Work) -> list[Extraction]:
    prepared = model.prepare(work)
    outputs = model.forward(prepared.head, prepared.sequences)
    return cast("ExtractResult", model.finish(prepared, outputs, never_cancelled)).items


def check_places(text: str, entities: tuple[Entity, ...]) -> None:
    assert entities
    assert all(text[one.start : one.end] == one.text for one in entities)
    assert list(entities) == sorted(entities, key=lambda one: one.start)


@pytest.mark.parametrize("overlap", [None, 0])
@pytest.mark.parametrize("flat", [True, False])
def test_windows_are_read_as_texts(gliner: PackedModel, flat: bool, overlap: int | None) -> None:
    work = EntitiesWork(["a", LONG], tuple(LABELS), threshold=0.4, flat=flat)
    windowed = replace(work, truncation="windows", window_overlap=overlap)
    prepared = gliner.prepare(windowed)
    assert not prepared.cut_texts
    assert gliner.prepare(work).cut_texts == {"items[1].text"}
    spans = cast("WindowNotes", prepared.notes).groups[1].spans[0]
    assert len(spans) > 4
    first, found = run(gliner, windowed)
    assert [first] == run(gliner, replace(work, texts=["a"]))
    check_places(LONG, found.entities)
    alone = run(gliner, replace(work, texts=[LONG[one.start : one.end] for one in spans]))
    candidates = {
        (one.start + span.start, one.end + span.start, one.label): one.score
        for span, each in zip(spans, alone, strict=True)
        for one in each.entities
    }
    for one in found.entities:
        assert (one.start, one.end, one.label) in candidates
    if overlap == 0:  # nothing to merge
        assert len(found.entities) == sum(len(one.entities) for one in alone)
    if flat:
        ends = [0, *(one.end for one in found.entities)]
        assert all(one.start >= end for one, end in zip(found.entities, ends, strict=False))


def test_labels_that_leave_no_room_are_refused(gliner: PackedModel) -> None:
    labels = tuple(f"licence name {number}" for number in range(200))
    with pytest.raises(InvalidInput) as caught:
        gliner.prepare(EntitiesWork([LONG], labels, truncation="windows"))
    assert caught.value.field == "entities.labels"


def test_schema_is_found_in_all_of_a_text(gliner2: PackedModel) -> None:
    schema = Schema(
        entities=(SchemaLabel("person"), SchemaLabel("licence")),
        classifications=(
            SchemaClassification("tone", (SchemaLabel("calm"), SchemaLabel("angry"))),
        ),
        relations=(SchemaLabel("grants"),),
        structures=(SchemaStructure("offer", (SchemaField("what"), SchemaField("who"))),),
        threshold=0.2,
    )
    text = LONG * 12
    work = StructureWork([text, "a"], schema, truncation="windows")
    prepared = gliner2.prepare(work)
    assert not prepared.cut_texts
    assert len(prepared.sequences) > 3
    found, short = run(gliner2, work)
    (alone,) = run(gliner2, StructureWork(["a"], schema))
    assert [(one.label, one.text) for one in short.entities] == [
        (one.label, one.text) for one in alone.entities
    ]
    assert [one.score for one in short.entities] == pytest.approx(
        [one.score for one in alone.entities], abs=1e-4
    )
    (tone,) = found.classifications
    assert sum(one.score for one in tone.labels) == pytest.approx(1, abs=1e-4)
    for relation in found.relations:
        check_places(text, (relation.head,))
        check_places(text, (relation.tail,))
    for structure in found.structures:
        for _, value in structure.values():
            assert text[value.start : value.end] == value.text
