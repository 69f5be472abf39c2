"""GLiNER2 against the gliner2 package: equal answers to equal schemas from the same directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from shoal.extractions import Extraction
from shoal.schema import Schema, SchemaField, SchemaLabel, SchemaStructure
from torch.utils._python_dispatch import TorchDispatchMode

from libs.catalog.detect import read_card
from libs.errors import InputTooLong, InvalidInput, ModelBroken, TaskNotSupported
from libs.kinds.gliner2.schemas import word_pattern
from libs.kinds.gliner2.spans import head as structure
from libs.kinds.gliner2.spans import processor as answers
from libs.models import (
    ClassifyWork,
    EntitiesWork,
    ExtractResult,
    PackedModel,
    StructureWork,
    load_model,
)
from tests.parity.gliner2_models import (
    SCHEMA,
    TEXTS,
    Reference,
    make_reference,
    write_transformers_layout,
)

# gliner2, transformers and their dependencies emit warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

Span = tuple[str, int | None, int | None]
Found = dict[Any, float]
"""An answer's parts, by their place in the answer and in the text, with scores."""

CONFIGS = [
    ("count_lstm", "deberta-v2"),
    ("count_lstm_v2", "deberta-v2"),
    ("count_lstm_moe", "bert"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: config[0])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    counting, encoder = request.param
    return make_reference(
        tmp_path_factory.mktemp("gliner2"),
        {"counting_layer": counting, "max_width": 5},
        encoder=encoder,
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("gliner2"), {"max_width": 3}, seed=1)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PackedModel:
    return load_model(directory, "test/model", torch.device("cpu"), dtype)


def run(model: PackedModel, *works: StructureWork | EntitiesWork) -> list[list[Extraction]]:
    """Run all works in one forward, as a worker does."""
    prepared = [model.prepare(work) for work in works]
    ends = np.cumsum([0, *(len(item.sequences) for item in prepared)])
    outputs = model.forward(
        prepared[0].head, [sequence for item in prepared for sequence in item.sequences]
    )
    results = [
        model.finish(item, outputs[start:end])
        for item, (start, end) in zip(prepared, pairwise(ends), strict=True)
    ]
    return [cast("ExtractResult", result).items for result in results]


def _add(flat: Found, place: tuple[Any, ...], score: float) -> None:
    """Several instances of a relation may have the same place."""
    times = 0
    while (*place, times) in flat:
        times += 1
    flat[*place, times] = score


def ours(found: Extraction) -> Found:
    flat: Found = {
        ("entity", one.label, one.text, one.start, one.end): one.score for one in found.entities
    }
    for number, relation in enumerate(found.relations):
        ends = [(one.text, one.start, one.end) for one in (relation.head, relation.tail)]
        _add(flat, ("relation", relation.label, *ends), relation.score)
        assert relation.score == min(relation.head.score, relation.tail.score)
        assert number == 0 or relation.score <= found.relations[number - 1].score
    for question in found.classifications:
        for label in question.labels:
            flat["class", question.name, label.label] = label.score
    instances: dict[str, int] = {}
    for one in found.structures:
        number = instances[one.name] = instances.get(one.name, -1) + 1
        for name, value in one.values():
            flat["structure", one.name, number, name, value.text, value.start, value.end] = (
                value.score
            )
    return flat


def theirs(text: str, answer: Mapping[str, Any], schema: Schema) -> Found:
    """Return the package's answer without the full stop that it adds to a text, and with scores in
    our form.
    """

    def span(found: Mapping[str, Any]) -> Span:
        if "start" not in found:
            return found["text"], None, None
        start, end = found["start"], found["end"]
        kept = text[start:end].rstrip() if end > len(text) else text[start:end]
        return kept, start, start + len(kept)

    flat: Found = _package_classes(answer, schema)
    for label, spans in answer.get("entities", {}).items():
        flat |= {("entity", label, *span(one)): one["confidence"] for one in spans}
    found_at: list[tuple[tuple[Any, ...], float]] = []
    for label, found in answer.get("relation_extraction", {}).items():
        for one in found:
            place = ("relation", label.partition(":")[0], span(one["head"]), span(one["tail"]))
            found_at.append((place, min(one["head"]["confidence"], one["tail"]["confidence"])))
    for place, score in sorted(found_at, key=lambda one: -one[1]):
        _add(flat, place, score)
    for asked in schema.structures:
        for number, instance in enumerate(answer.get(asked.name) or []):
            for name, value in instance.items():
                for one in value if isinstance(value, list) else [value] if value else []:
                    flat["structure", asked.name, number, name, *span(one)] = one["confidence"]
    return {
        place: score
        for place, score in flat.items()
        if not any(part == "" or _empty(part) for part in place)
    }


def _package_classes(answer: Mapping[str, Any], schema: Schema) -> Found:
    flat: Found = {}
    for question in schema.classifications:
        found = answer[question.name]
        for one in found if isinstance(found, list) else [found]:
            flat["class", question.name, one["label"]] = one["confidence"]
    return flat


def _empty(part: object) -> bool:
    return isinstance(part, tuple) and part[0] == ""


def same(mine: Found, other: Found) -> None:
    assert mine.keys() == other.keys()
    for place, score in mine.items():
        assert abs(score - other[place]) <= 1e-5


def test_answers_equal_the_package(made: Reference) -> None:
    model = load(made.directory)
    loose = replace(SCHEMA, threshold=0.05)
    everything = [
        one for schema in (SCHEMA, loose) for one in run(model, StructureWork(TEXTS, schema))[0]
    ]
    answered = made.answers(TEXTS, SCHEMA) + made.answers(TEXTS, loose)
    kinds: set[str] = set()
    for text, mine, other in zip(TEXTS * 2, everything, answered, strict=True):
        expected = theirs(text, other, SCHEMA)
        flat = ours(mine)
        # For a classification with one answer, the package returns only the best label.
        best = {("class", "tone", mine.classifications[0].labels[0].label)}
        same(
            {
                place: score
                for place, score in flat.items()
                if place[:2] != ("class", "tone") or place in best
            },
            expected,
        )
        kinds |= {place[0] for place in flat}
        assert sum(one.score for one in mine.classifications[0].labels) == pytest.approx(
            1, abs=1e-5
        )
        for entity in mine.entities:
            assert text[entity.start : entity.end] == entity.text
    assert kinds == {"entity", "relation", "class", "structure"}


PARTS = [
    Schema(entities=SCHEMA.entities, threshold=0.2),
    Schema(classifications=SCHEMA.classifications),
    Schema(relations=(SchemaLabel("runs"), SchemaLabel("protects", "keeps safe")), threshold=0.1),
    Schema(structures=SCHEMA.structures[:1], threshold=0.05),
    Schema(
        structures=(SchemaStructure("entities", (SchemaField("head"),)),),
        entities=(SchemaLabel("a (b) | c"),),
        threshold=0.3,
    ),
]


@pytest.mark.parametrize("number", range(4))
def test_each_kind_of_task_alone_equals_the_package(first: Reference, number: int) -> None:
    schema = PARTS[number]
    found = run(load(first.directory), StructureWork(TEXTS, schema))[0]
    for text, mine, other in zip(TEXTS, found, first.answers(TEXTS, schema), strict=True):
        flat = ours(mine)
        if schema.classifications:
            flat = {place: score for place, score in flat.items() if place[1] != "tone"}
            flat["class", "tone", mine.classifications[0].labels[0].label] = (
                mine.classifications[0].labels[0].score
            )
        same(flat, theirs(text, other, schema))


def test_batch_equals_each_text_alone(first: Reference) -> None:
    model = load(first.directory)
    works = [StructureWork(TEXTS, schema) for schema in (SCHEMA, *PARTS)] + [
        StructureWork(TEXTS[::-1], PARTS[0])
    ]
    for work, found in zip(works, run(model, *works), strict=True):
        for text, one in zip(work.texts, found, strict=True):
            same(ours(one), ours(run(model, StructureWork([text], work.schema))[0][0]))


def test_entity_labels_alone_equal_the_package(first: Reference) -> None:
    model = load(first.directory)
    labels = ("person", "licence name", "city")
    schema = Schema(tuple(map(SchemaLabel, labels)), threshold=0.3)
    loose = run(model, EntitiesWork(TEXTS, labels=labels, threshold=0.3, flat=False))[0]
    for text, one, other in zip(TEXTS, loose, first.answers(TEXTS, schema), strict=True):
        same(ours(one), theirs(text, other, schema))
    for one, all_of in zip(
        run(model, EntitiesWork(TEXTS, labels=labels, threshold=0.3))[0], loose, strict=True
    ):
        assert set(one.entities) <= set(all_of.entities)
        assert all(before.end <= after.start for before, after in pairwise(one.entities))
        assert bool(one.entities) == bool(all_of.entities)


def test_spans_are_scored_in_parts(first: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(first.directory)
    whole = run(model, StructureWork(TEXTS, SCHEMA))[0]
    monkeypatch.setattr(structure, "_CHUNK_ELEMENTS", 64 * 4 * 7)
    for one, other in zip(run(model, StructureWork(TEXTS, SCHEMA))[0], whole, strict=True):
        same(ours(one), ours(other))
    monkeypatch.setattr(
        structure, "_MAX_SPANS", 1
    )  # the best of seven spans is kept, so fewer entities are possible
    fewer = run(model, StructureWork(TEXTS, SCHEMA))[0]
    assert sum(len(one.entities) for one in fewer) <= sum(len(one.entities) for one in whole)
    for one, other in zip(fewer, whole, strict=True):  # scores of other parts may round differently
        same(*(ours(Extraction(relations=found.relations)) for found in (one, other)))


def test_batch_waits_for_spans_once(first: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of sequences does not matter. Every full buffer of scores adds one wait; the
    answers are the same.
    """
    model = load(first.directory)
    works = StructureWork(TEXTS, SCHEMA), EntitiesWork(TEXTS, labels=("person", "city"))
    with _Counted() as counted:
        whole = run(model, *works)
    assert counted.times == 1
    monkeypatch.setattr(structure, "_CHUNK_SCORES", 1)
    with _Counted() as counted:
        assert run(model, *works) == whole
    assert counted.times > len(TEXTS)


class _Counted(TorchDispatchMode):
    """Count the operators with a result size that only the device knows."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += str(func).startswith(("aten.nonzero", "aten.masked_select"))
        return func(*args, **(kwargs or {}))


def test_bfloat16_is_near(first: Reference) -> None:
    exact, near = (
        run(load(first.directory, dtype), StructureWork(TEXTS, PARTS[1]))[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    for one, other in zip(exact, near, strict=True):
        for question, rounded in zip(one.classifications, other.classifications, strict=True):
            scores = {label.label: label.score for label in rounded.labels}
            if question.name == "tone":
                assert all(
                    abs(label.score - scores[label.label]) < 0.1 for label in question.labels
                )


def test_card_describes_the_model(first: Reference) -> None:
    card = read_card(first.directory, "org/name")
    assert (card.kind, card.family, card.tasks, card.max_tokens) == (
        "gliner2",
        "deberta-v2",
        ("entities", "structure"),
        512,
    )
    with pytest.raises(TaskNotSupported):
        load(first.directory).prepare(ClassifyWork(["a"], labels=("b",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "other"}, "`architecture`.*'other'.*'span' and 'boundary'"),
        ({"architecture": "boundary"}, "`candidate_pool` is 'per_query'"),
        ({"token_pooling": "mean"}, "`token_pooling`"),
        ({"counting_layer": "other"}, "`counting_layer`.*count_lstm_v2"),
        ({"counting_layer": "count_lstm_v2"}, "tensor `count_embed.transformer"),
        ({"span_head": {"max_width": 0}}, "`max_width`"),
    ],
)
def test_unsupported_settings_are_refused(
    first: Reference, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    shutil.copytree(first.directory, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ModelBroken, match=message):
        load(tmp_path / "model")


def test_layout_of_transformers_has_the_same_answers(made: Reference, tmp_path: Path) -> None:
    directory = write_transformers_layout(made, tmp_path / "model")
    card, other = (read_card(each, "org/name") for each in (directory, made.directory))
    assert (card.kind, card.family, card.max_tokens) == (other.kind, other.family, other.max_tokens)
    asked = StructureWork(TEXTS, replace(SCHEMA, threshold=0.2))
    found = run(load(directory), asked)[0]
    assert sum(len(one.entities) for one in found) > 0
    assert found == run(load(made.directory), asked)[0]


def test_layout_of_transformers_divides_logits_of_classes(first: Reference, tmp_path: Path) -> None:
    warm = write_transformers_layout(first, tmp_path / "model", classification_temperature=4.0)
    asked = StructureWork(TEXTS, Schema(classifications=SCHEMA.classifications[:1]))
    for one, other in zip(
        run(load(warm), asked)[0], run(load(first.directory), asked)[0], strict=True
    ):
        scores = {label.label: label.score**0.25 for label in other.classifications[0].labels}
        for label in one.classifications[0].labels:
            expected = scores[label.label] / sum(scores.values())
            assert label.score == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "model.safetensors", "encoder_config/config.json"]
)
def test_missing_files_are_named(first: Reference, tmp_path: Path, name: str) -> None:
    shutil.copytree(first.directory, tmp_path / "model")
    (tmp_path / "model" / name).unlink()
    with pytest.raises(ModelBroken, match=name):
        load(tmp_path / "model")


def test_invalid_schemas_are_refused(first: Reference) -> None:
    model = load(first.directory)
    bound = SchemaStructure("a", (SchemaField("b", choices=("c", "x[SEP_TEXT]")),))
    for schema, field in [
        (Schema(), "structure"),
        (Schema((SchemaLabel("a[E]"),)), "structure.entities[0].label"),
        (Schema(relations=(SchemaLabel("a", "[P]"),)), "structure.relations[0].description"),
        (Schema(structures=(bound,)), "structure.structures[0].fields[0].choices[1]"),
        (Schema(tuple(SchemaLabel(f"label {number}") for number in range(256))), "structure"),
    ]:
        with pytest.raises(InvalidInput) as caught:
            model.prepare(StructureWork(["a text"], schema))
        assert caught.value.field == field


def test_long_texts_are_truncated_or_refused(first: Reference) -> None:
    model = load(first.directory)
    long = "Ada wrote a program. " * 400
    with pytest.raises(InputTooLong) as caught:
        model.prepare(StructureWork(["a", long], PARTS[0], truncation="none"))
    assert caught.value.field == "items[1].text"
    [begin], [end] = run(
        model, StructureWork([long], PARTS[0]), StructureWork([long], PARTS[0], truncation="start")
    )
    assert max(one.end for one in begin.entities) < 4000 < min(one.start for one in end.entities)


def test_answer_is_bounded(first: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(first.directory)
    monkeypatch.setattr(answers, "_ANSWER", (0, 100))
    schema = Schema(tuple(map(SchemaLabel, ("a", "b", "c", "d"))), threshold=0.0)
    with pytest.raises(InvalidInput, match="raise the thresholds") as caught:
        run(model, StructureWork(["short", TEXTS[0]], schema))
    assert caught.value.field == "items[1].text"


def test_words_equal_the_packages() -> None:
    from gliner2.processing.word_splitter import WhitespaceTokenSplitter

    split = WhitespaceTokenSplitter()
    for text in [
        *TEXTS,
        "a@b.co @me www.x.y/z?q, e\u0301te\u0301-x_y .a.b%c+d@e f.g",
        "क्षत्रिय\u200dक a@b@c.org a.@.de",
    ]:
        assert [match.span() for match in word_pattern().finditer(text)] == [
            (start, end) for _, start, end in split(text)
        ]
