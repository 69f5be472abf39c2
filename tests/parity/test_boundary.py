"""GLiNER2.5 (the architecture `boundary`) against the gliner2 package: equal answers to equal
schemas."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gliner2.inference import overlap
from gliner2.models.boundary import engine
from safetensors.torch import load_file, save_file
from scipy.optimize import linear_sum_assignment
from shoal.extractions import Extraction
from shoal.schema import Schema, SchemaField, SchemaLabel, SchemaStructure

from libs.catalog.detect import read_card
from libs.errors import InputTooLong, InvalidInput, ModelBroken
from libs.kinds.gliner2.boundary import head, records
from libs.kinds.gliner2.boundary.edges import RelationEdge, distinct
from libs.kinds.gliner2.boundary.head import UNUSED
from libs.kinds.gliner2.boundary.records import assigned
from libs.kinds.gliner2.boundary.spans import ScoredSpan, disjoint
from libs.kinds.gliner2.schemas import word_pattern
from libs.kinds.gliner2.spans import processor as structure
from libs.models import EntitiesWork, StructureWork
from services.worker.check import selftest
from tests.parity import test_gliner2
from tests.parity.boundary_models import make_boundary
from tests.parity.gliner2_models import SCHEMA, TEXTS, Reference, write_transformers_layout
from tests.parity.test_gliner2 import Found, load, run, same

# gliner2, transformers and their dependencies emit warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIGS: dict[str, tuple[Mapping[str, Any], str]] = {
    "published": ({}, "deberta-v2"),
    "plain": (
        {
            "directional_relation_states": False,
            "relation_biaffine_content": False,
            "boundary_attention_window": 0,
            "boundary_refinement_layers": 2,
            "dropout": 0.0,
            "relation_pair_cap": 30,
            "pool_boundary_top_k": 16,
            "pool_size": 90,
            "min_pool_per_query": 0,
        },
        "bert",
    ),
}

NAMES = SchemaStructure(
    "licence",
    (
        SchemaField("name", dtype="str"),
        SchemaField("right", threshold=0.45),
        SchemaField("of", "str"),
    ),
)
NAMED = SchemaStructure(
    "place",
    (
        SchemaField("city"),
        SchemaField("kind", "str", ("gpl", "others", "To")),
        SchemaField("sort", "list", ("Which", "or", "we", "see")),
    ),
)
"""Choices that the texts contain."""
RECORDS = {"spans": (NAMES,), "choices": SCHEMA.structures, "mentions": (NAMED, NAMES)}
MIXED = replace(
    SCHEMA,
    structures=(
        NAMES,
        SchemaStructure("a", (SchemaField("b"), SchemaField("c", "str", ("free", "we")))),
    ),
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _choices_before_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package fails if a record's span and the choice that fills its field both precede the
    text, in the prompt: it searches the span's place in the text."""
    place = engine.token_boundaries_to_character_offsets

    def of_text(start: int, end: int, *offsets: Any) -> tuple[int, int]:
        return place(start, end, *offsets) if start >= 0 else (0, 0)

    monkeypatch.setattr(engine, "token_boundaries_to_character_offsets", of_text)


@pytest.fixture(scope="module", params=list(CONFIGS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    head, encoder = CONFIGS[request.param]
    return make_boundary(tmp_path_factory.mktemp("boundary"), head, encoder=encoder)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_boundary(
        tmp_path_factory.mktemp("boundary"), {"pool_size": 60, "pool_boundary_top_k": 12}, seed=1
    )


def ours(found: Extraction) -> Found:
    """Use test_gliner2's schema, with relations that have a score in addition to those of head and
    tail."""
    flat = test_gliner2.ours(replace(found, relations=()))
    for one in found.relations:
        place = (
            "relation",
            one.label,
            *((end.text, end.start, end.end) for end in (one.head, one.tail)),
        )
        flat |= {
            (*place, name): score
            for name, score in _scores(one.score, one.head.score, one.tail.score)
        }
    return flat


def _scores(pair: float, head: float, tail: float) -> list[tuple[str, float]]:
    return [("pair", pair), ("head", head), ("tail", tail)]


def theirs(text: str, answer: Mapping[str, Any], schema: Schema) -> Found:
    """Return the package's answer without the full stop that it adds to a text, without places of
    choices, and with all scores.
    """
    rest = {**answer, "relation_extraction": {}}
    for asked in schema.structures:
        rest[asked.name] = _instances(text, answer.get(asked.name) or [], asked)
    flat = test_gliner2.theirs(text, rest, schema)
    for label, found in answer.get("relation_extraction", {}).items():
        for one in found:
            ends = [_span(text, one[end]) for end in ("head", "tail")]
            if all(end[0] for end in ends):
                scores = _scores(
                    one["confidence"], one["head"]["confidence"], one["tail"]["confidence"]
                )
                flat |= {
                    ("relation", label.partition(":")[0], *ends, name): score
                    for name, score in scores
                }
    return flat


def _span(text: str, found: Mapping[str, Any]) -> tuple[str, int, int]:
    start, end = found["start"], found["end"]
    kept = text[start:end].rstrip() if end > len(text) else text[start:end]
    return kept, start, start + len(kept)


def _instances(
    text: str, found: Sequence[Mapping[str, Any]], asked: SchemaStructure
) -> list[dict[str, Any]]:
    made = []
    for instance in found:
        fields: dict[str, Any] = {}
        for field in asked.fields:
            value = instance[field.name]
            values = [one for one in (value if isinstance(value, list) else [value]) if one]
            if field.choices:
                fields[field.name] = [
                    {"text": one["text"], "confidence": one["confidence"]} for one in values
                ]
            else:
                fields[field.name] = [one for one in values if _span(text, one)[0]]
        if any(fields.values()):
            made.append(fields)
    return made


def check(made: Reference, texts: list[str], schema: Schema) -> Counter[str]:
    """Compare all answers and return how many of each kind existed."""
    kinds: Counter[str] = Counter()
    found = run(load(made.directory), StructureWork(texts, schema))[0]
    for text, mine in zip(texts, found, strict=True):
        other = made.answers([text], schema)[0]
        flat = ours(mine)
        best = {("class", one.name, one.labels[0].label) for one in mine.classifications}
        multi = {one.name for one in schema.classifications if one.multi_label}
        # For a classification with one answer, the package returns only the best label.
        kept = {
            place: score
            for place, score in flat.items()
            if place[0] != "class" or place[1] in multi or place in best
        }
        same(kept, theirs(text, other, schema))
        kinds.update(place[0] for place in flat)
    return kinds


def test_card_describes_the_model(made: Reference) -> None:
    card = read_card(made.directory, "org/name")
    assert (card.kind, card.tasks, card.max_tokens) == ("gliner2", ("entities", "structure"), 512)


def test_entities_equal_the_package(made: Reference) -> None:
    for threshold in (0.5, 0.2, 0.01):
        found = check(
            made,
            TEXTS,
            replace(SCHEMA, classifications=(), relations=(), structures=(), threshold=threshold),
        )
    assert found["entity"] > 10


def test_classes_equal_the_package(made: Reference) -> None:
    found = check(made, TEXTS, Schema(classifications=SCHEMA.classifications))
    assert found["class"] > 4 * len(TEXTS) - 1


def test_relations_equal_the_package(made: Reference) -> None:
    asked = (
        SchemaLabel("protects", "keeps safe"),
        SchemaLabel("runs", threshold=0.3),
        SchemaLabel("of"),
    )
    for threshold in (0.5, 0.1, 0.0):
        found = check(made, TEXTS, Schema(relations=asked, threshold=threshold))
    assert found["relation"] > 10


@pytest.mark.parametrize("name", list(RECORDS))
def test_records_equal_the_package(made: Reference, name: str) -> None:
    found = sum(
        (
            check(made, TEXTS, Schema(structures=RECORDS[name], threshold=threshold))
            for threshold in (0.8, 0.6)
        ),
        Counter(),
    )
    assert found["structure"] > 10


def test_combined_schema_equals_the_package(made: Reference) -> None:
    texts = [f"{' '.join(TEXTS)} {TEXTS[3]} {TEXTS[0]}", *TEXTS[:2]]
    found = check(made, texts, MIXED) + check(made, texts, replace(MIXED, threshold=0.3))
    assert min(found[kind] for kind in ("entity", "class", "relation", "structure")) > 3


def test_long_text_equals_the_package(made: Reference) -> None:
    """The text has more words than boundaries attend to, and more pairs than are scored."""
    drawn = random.Random(7)
    words = [word for text in TEXTS for word in text.split()]
    text = " ".join(drawn.choice(words) for _ in range(75))
    found = check(
        made,
        [text],
        Schema(SCHEMA.entities, relations=SCHEMA.relations, structures=(NAMES,), threshold=0.3),
    )
    assert min(found[kind] for kind in ("entity", "structure")) > 2


def test_truncated_texts_equal_the_package(first: Reference) -> None:
    model = load(first.directory)
    asked, text = (
        Schema(SCHEMA.entities, threshold=0.05),
        "Ada wrote a program, and then another. " * 60,
    )
    [begin], [end] = run(
        model, StructureWork([text], asked), StructureWork([text], asked, truncation="start")
    )
    assert (
        max(one.end for one in begin.entities)
        < 2000
        < 1200 + min(one.start for one in end.entities)
    )
    for one in (*begin.entities, *end.entities):
        assert text[one.start : one.end] == one.text
    with pytest.raises(InputTooLong):
        model.prepare(StructureWork([text], asked, truncation="none"))
    [nothing] = run(model, StructureWork([f"{'😀' * 4000} a"], SCHEMA))[
        0
    ]  # no word of the text fits, only those of choices
    assert not nothing.entities
    assert len(nothing.classifications) == 2
    [bare] = run(
        model, StructureWork([f"{'😀' * 4000} a"], Schema(SCHEMA.entities, SCHEMA.classifications))
    )[0]
    assert not bare.entities
    assert len(bare.classifications) == 2


def test_batch_equals_each_text_alone(first: Reference) -> None:
    model = load(first.directory)
    alone = Schema(classifications=SCHEMA.classifications)
    works = [
        StructureWork(TEXTS, schema) for schema in (MIXED, alone, replace(SCHEMA, threshold=0.3))
    ]
    works.append(StructureWork(TEXTS[::-1], Schema(SCHEMA.entities, threshold=0.1)))
    for work, found in zip(works, run(model, *works), strict=True):
        for text, one in zip(work.texts, found, strict=True):
            same(ours(one), ours(run(model, StructureWork([text], work.schema))[0][0]))


def test_entity_labels_alone_equal_the_package(first: Reference) -> None:
    model = load(first.directory)
    labels = ("person", "licence name", "city")
    schema = Schema(tuple(map(SchemaLabel, labels)), threshold=0.2)
    loose = run(model, EntitiesWork(TEXTS, labels=labels, threshold=0.2, flat=False))[0]
    for text, one, other in zip(TEXTS, loose, first.answers(TEXTS, schema), strict=True):
        same(ours(one), theirs(text, other, schema))
    for one, every in zip(
        run(model, EntitiesWork(TEXTS, labels=labels, threshold=0.2))[0], loose, strict=True
    ):
        assert set(one.entities) <= set(every.entities)
        assert all(before.end <= after.start for before, after in pairwise(one.entities))


def test_model_check_passes(first: Reference) -> None:
    """Its outputs in a batch and alone are compared element by element, so columns must not depend
    on the scored pairs.
    """
    tests = list(selftest.run(first.directory, "test/model", None))
    assert all(test.passed for test in tests if "bfloat16" not in test.name)
    assert {test.name for test in tests} >= {
        "entities: packed as alone",
        "structure: packed as alone",
        "structure: answer",
    }


def test_bfloat16_is_near(first: Reference) -> None:
    asked = StructureWork(
        TEXTS, Schema(classifications=SCHEMA.classifications[:1], entities=SCHEMA.entities)
    )
    exact, near = (
        run(load(first.directory, dtype), asked)[0] for dtype in (torch.float32, torch.bfloat16)
    )
    for one, other in zip(exact, near, strict=True):
        scores = {label.label: label.score for label in other.classifications[0].labels}
        assert all(
            abs(label.score - scores[label.label]) < 0.1 for label in one.classifications[0].labels
        )


def test_every_tensor_is_used_or_known(first: Reference, tmp_path: Path) -> None:
    """Every missing or unknown tensor is refused by its name."""
    shutil.copytree(first.directory, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    names = [name for name in tensors if not name.startswith(("encoder.", *UNUSED))]
    assert len(names) > 90
    for name in names:
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
        with pytest.raises(ModelBroken, match=re.escape(name.rpartition(".")[0])):
            load(tmp_path / "model")
    save_file(tensors | {"boundary_head.other.weight": torch.zeros(2)}, file)
    with pytest.raises(
        ModelBroken, match=re.escape("'boundary_head.other.weight' does not belong")
    ):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("candidate_pool", "per_query"),
        ("candidate_pool", None),
        ("candidate_attention_layers", 1),
        ("query_attention_layers", None),
        ("enable_span_content", False),
        ("content_soft_max_pool", True),
        ("use_inside_evidence", False),
        ("enable_abstention", False),
        ("adaptive_threshold", True),
        ("overlap_policy", "nested"),
        ("pair_temperature", 2.0),
        ("record_temperature", 0.5),
        ("boundary_dim", 64),
        ("boundary_dim", 1 << 20),
        ("boundary_attention_heads", 5),
        ("boundary_attention_layers", 99),
        ("pool_boundary_top_k", 1 << 12),
        ("pool_size", 1 << 20),
        ("min_pool_per_query", 1000),
        ("pair_dim", 0),
        ("relation_pair_cap", 0),
        ("record_dim", 17),
        ("abstention_threshold", 1.5),
        ("abstention_threshold", "high"),
        ("classification_temperature", 0),
        ("enable_relations", False),
        ("enable_records", False),
        ("directional_relation_states", False),
    ],
)
def test_unsupported_settings_are_refused(
    first: Reference, tmp_path: Path, key: str, value: object
) -> None:
    with pytest.raises(ModelBroken):
        load(_changed(first, tmp_path, {key: value}))


def test_another_version_is_refused(first: Reference, tmp_path: Path) -> None:
    directory = _changed(first, tmp_path, {})
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architecture_version": 2}))
    with pytest.raises(ModelBroken, match="`architecture_version` is 2"):
        load(directory)


def test_classes_have_a_temperature(first: Reference, tmp_path: Path) -> None:
    asked = StructureWork(TEXTS, Schema(classifications=SCHEMA.classifications[:1]))
    warm, usual = (
        run(load(where), asked)[0]
        for where in (_changed(first, tmp_path, {"classification_temperature": 4}), first.directory)
    )
    for one, other in zip(warm, usual, strict=True):
        scores = {label.label: label.score for label in other.classifications[0].labels}
        warmed = {label: score**0.25 for label, score in scores.items()}
        for label in one.classifications[0].labels:
            assert label.score == pytest.approx(
                warmed[label.label] / sum(warmed.values()), abs=1e-5
            )


def test_layout_of_transformers_has_the_same_answers(made: Reference, tmp_path: Path) -> None:
    directory = write_transformers_layout(made, tmp_path / "model")
    card, other = (read_card(each, "org/name") for each in (directory, made.directory))
    assert (card.kind, card.family, card.max_tokens) == (other.kind, other.family, other.max_tokens)
    asked = StructureWork(TEXTS, MIXED)
    found = run(load(directory), asked)[0]
    assert sum(len(one.entities) for one in found) > 0
    assert found == run(load(made.directory), asked)[0]


def test_absent_labels_have_no_entities(first: Reference, tmp_path: Path) -> None:
    asked = StructureWork(TEXTS, Schema(SCHEMA.entities, threshold=0.1))
    assert sum(len(one.entities) for one in run(load(first.directory), asked)[0]) > 0
    sure = load(_changed(first, tmp_path, {"abstention_threshold": 0.0}))
    assert not any(one.entities for one in run(sure, asked)[0])


def test_answer_is_bounded(first: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(first.directory)
    monkeypatch.setattr(structure, "_ANSWER", (0, 100))
    for schema in (
        Schema(tuple(map(SchemaLabel, "abcd")), threshold=0.0),
        Schema(structures=(NAMES,), threshold=0.3),
    ):
        with pytest.raises(InvalidInput, match="raise the thresholds") as caught:
            run(model, StructureWork(["short", TEXTS[0]], schema))
        assert caught.value.field == "items[1].text"


def test_records_are_bounded(first: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = (
        load(first.directory),
        StructureWork(TEXTS[:1], Schema(structures=(NAMES,), threshold=0.5)),
    )
    assert len(run(model, asked)[0][0].structures) > 1
    monkeypatch.setattr(records, "MAX_STEPS", 3)
    with pytest.raises(InvalidInput, match="raise the thresholds") as caught:
        run(model, asked)
    assert caught.value.field == "items[0].text"
    monkeypatch.setattr(head, "MAX_STEPS", 3)  # the output does not have more either
    with pytest.raises(InvalidInput, match="raise the thresholds"):
        run(model, asked)


def _changed(made: Reference, directory: Path, head: Mapping[str, object]) -> Path:
    """Return a copy of the checkpoint with other values in `boundary_head`."""
    shutil.copytree(made.directory, directory / "model")
    config = directory / "model" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"boundary_head": values["boundary_head"] | dict(head)}))
    return directory / "model"


def test_assignments_are_the_cheapest() -> None:
    drawn = np.random.default_rng(0)
    for rows, columns in [(1, 1), (1, 7), (6, 6), (20, 31), (40, 40)]:
        for costs in (
            drawn.random((rows, columns)),
            drawn.integers(0, 3, (rows, columns)).astype(np.float64),
        ):
            chosen = assigned(costs)
            assert len(set(chosen)) == rows
            assert costs[np.arange(rows), chosen].sum() == pytest.approx(
                costs[linear_sum_assignment(costs)].sum()
            )


def test_disjoint_spans_have_the_largest_sum() -> None:
    drawn = np.random.default_rng(1)
    for _ in range(50):
        spans = [
            ScoredSpan(start, start + size, score)
            for start, size, score in zip(
                drawn.integers(0, 12, 10).tolist(),
                drawn.integers(1, 6, 10).tolist(),
                (drawn.integers(1, 5, 10) / 4).tolist(),
                strict=True,
            )
        ]
        assert disjoint(spans) == overlap.resolve_overlaps(
            spans,
            "flat",
            score=lambda one: one.score,
            start=lambda one: one.start,
            end=lambda one: one.end,
        )


def test_relations_are_distinct() -> None:
    """Parts of a mention, other mentions of the same words, and pairs implied by
    another pair are dropped.
    """
    text = "Ada Lovelace of Acme met ada lovelace of ACME, and Ada of Acme Ltd met Acme."
    words = [match.span() for match in word_pattern().finditer(text)]
    drawn = random.Random(3)

    def mention() -> tuple[int, int]:
        first = drawn.randrange(len(words))
        return words[first][0], words[min(len(words) - 1, first + drawn.randrange(3))][1]

    for count in (0, 1, 2, 5, 20, 60):
        for _ in range(20):
            roles: list[dict[tuple[int, int], float]] = [{}, {}]
            pairs = dict.fromkeys((mention(), mention()) for _ in range(count))
            edges = []
            for ends in pairs:
                head, tail = (
                    ScoredSpan(*end, role.setdefault(end, drawn.random()))
                    for end, role in zip(ends, roles, strict=True)
                )
                edges.append(RelationEdge(head, tail, drawn.random()))
            asked = [
                {
                    "score": edge.score,
                    "head": (text[edge.head.start : edge.head.end], *edge.head),
                    "tail": (text[edge.tail.start : edge.tail.end], *edge.tail),
                }
                for edge in edges
            ]
            left = engine.BoundaryExtractor._deduplicate_relation_edges(asked)
            wanted = [(one["head"][1:], one["tail"][1:], one["score"]) for one in left]
            assert [
                tuple(map(tuple, edge[:2])) + edge[2:] for edge in distinct(edges, text)
            ] == wanted
