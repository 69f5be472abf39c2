"""Heads with labels or an instruction of the caller, through the mesh, against their reference
packages.

Pooled, token-vector, sparse and hybrid models and zero-shot classes: test_families.py,
test_forms.py, test_sparse.py, test_labels.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from sentence_transformers import CrossEncoder
from shoal import errors

from libs import models
from tests.mesh.test_families import relative_error
from tests.parity import (
    boundary_models,
    gliner2_models,
    glirel_models,
    test_boundary,
    test_decoders,
    test_gliner2,
)
from tests.parity.gliner_models import LABELS, TEXTS, Reference, make_reference
from tests.support.waiting import wait_until

# The packages emit many warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

RELATIONS = ["works for", "part", "lives in"]


@pytest.fixture(scope="module")
def reranker(
    checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, CrossEncoder]:
    directory = tmp_path_factory.mktemp("reranker")
    theirs = test_decoders.save_reranker(test_decoders.write_language_model(directory))
    (directory / "saved").rename(checkpoints / "random" / "qwen3-yes-no")
    return "random/qwen3-yes-no", theirs


def test_rerankers_by_yes_and_no(client: shoal.Client, reranker: tuple[str, CrossEncoder]) -> None:
    model, theirs = reranker
    wanted = theirs.predict(
        [(test_decoders.QUERY, text) for text in TEXTS], activation_fn=torch.nn.Identity()
    )
    answer = client.score(model, test_decoders.QUERY, TEXTS, scale="logit")
    assert relative_error(answer.scores, wanted) <= 1e-5
    # The common prefix of all documents was computed once.
    alone = sum(
        client.score(model, test_decoders.QUERY, [text]).usage.input_tokens for text in TEXTS
    )
    assert answer.usage.input_tokens < alone


def gliner(
    name: str, config: dict[str, object], checkpoints: Path, tmp_path: Path, **options: Any
) -> Reference:
    made = make_reference(tmp_path, config, **options)
    made.directory.rename(checkpoints / "random" / name)
    return made


@pytest.mark.parametrize(
    ("name", "config", "options"),
    [
        ("gliner-span", {}, {"encoder": "deberta-v2"}),
        ("gliner-token", {"span_mode": "token_level"}, {}),
        ("gliner-bi", {}, {"labels_encoder": "bert"}),
    ],
)
def test_entities_of_the_callers_labels(
    name: str,
    config: dict[str, object],
    options: dict[str, Any],
    client: shoal.Client,
    checkpoints: Path,
    tmp_path: Path,
) -> None:
    made = gliner(name, config, checkpoints, tmp_path, **options)
    for flat, threshold in ((True, 0.5), (False, 0.3)):
        answer = client.entities(f"random/{name}", TEXTS, LABELS, threshold=threshold, flat=flat)
        ours = [
            {(one.start, one.end, one.label): one.score for one in item.entities}
            for item in answer.results
        ]
        theirs = made.entities(TEXTS, LABELS, threshold, flat=flat)
        assert sum(map(len, ours)) > 3
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.keys() == other.keys()
            assert all(abs(mine[key] - other[key]) <= 1e-5 for key in mine)


def test_relations(client: shoal.Client, checkpoints: Path, tmp_path: Path) -> None:
    made = gliner(
        "relex",
        {"relations_layer": "gcn", "span_mode": "token_level"},
        checkpoints,
        tmp_path,
        seed=3,
    )
    found = 0
    for text in TEXTS:
        (item,) = client.relations(
            "random/relex", [text], RELATIONS, entity_labels=LABELS, threshold=0.0
        ).results
        ours = {
            (
                (one.head.start, one.head.end, one.head.label),
                (one.tail.start, one.tail.end, one.tail.label),
                one.label,
            ): one.score
            for one in item.relations
        }
        theirs = made.relations(text, LABELS, RELATIONS, 0.0)
        assert ours.keys() == theirs.keys()
        assert all(abs(ours[key] - theirs[key]) <= 1e-5 for key in ours)
        found += len(ours)
    assert found


def test_relations_between_given_entities(
    client: shoal.Client, checkpoints: Path, tmp_path: Path
) -> None:
    """Items with and without entities are in one request."""
    made = glirel_models.make_reference(tmp_path, {}, encoder="deberta-v2")
    made.directory.rename(checkpoints / "random" / "glirel")
    spans = glirel_models.spans_of(TEXTS[0], "GPL", "naïve", "東京", "free_software")
    theirs = made.relations(TEXTS[0], spans, RELATIONS, 0.2)
    given = [(start, end, f"kind {start}") for start, end in spans]
    texts = [TEXTS[0], TEXTS[1], TEXTS[0]]
    answer = client.relations(
        "random/glirel", texts, RELATIONS, entities=[given, [], given], threshold=0.2
    )
    assert theirs
    for number, item in enumerate(answer.results):
        ours = {
            ((one.head.start, one.head.end), (one.tail.start, one.tail.end), one.label): one.score
            for one in item.relations
        }
        assert ours.keys() == (set() if number == 1 else theirs.keys())
        assert all(abs(ours[key] - theirs[key]) <= 1e-5 for key in ours)
        assert all(one.head.label == f"kind {one.head.start}" for one in item.relations)
    assert (
        not client.relations("random/glirel", TEXTS[:1], RELATIONS, entities=[given[:1]])
        .results[0]
        .relations
    )
    with pytest.raises(errors.InvalidInput, match="no item has any") as caught:
        client.relations("random/glirel", TEXTS, RELATIONS, entity_labels=LABELS)
    assert caught.value.field == "items[0].entities"


def test_models_that_find_entities_refuse_given_entities(
    client: shoal.Client, checkpoints: Path, tmp_path: Path
) -> None:
    """The worker reports it while the model's card is unknown, and the router afterwards."""
    gliner("relex-none", {"relations_layer": "none"}, checkpoints, tmp_path)
    for _ in range(2):
        with pytest.raises(errors.InvalidInput) as caught:
            client.relations(
                "random/relex-none",
                TEXTS[:2],
                RELATIONS,
                entity_labels=LABELS,
                entities=[[], [(0, 1)]],
            )
        assert caught.value.field == "items[1].entities"


SCHEMA = (
    shoal.Schema(threshold=0.3)
    .with_entities({"person": None, "licence name": "what it is called"})
    .with_classification(
        "tone", {"calm": "with no haste", "angry": ""}, multi_label=True, threshold=0.5
    )
    .with_relations(["runs"])
    .with_structure(
        "licence",
        [
            ("name", "str"),
            {"name": "kind", "dtype": "str", "choices": ["free", "not free"]},
            "rights",
        ],
    )
)


@pytest.mark.parametrize("name", ["gliner2", "gliner25"])
def test_all_parts_of_a_schema(
    client: shoal.Client, checkpoints: Path, tmp_path: Path, name: str
) -> None:
    """The reference is the library on the same directory, which tests/parity compares with the
    package.
    """
    if name == "gliner2":
        made = gliner2_models.make_reference(tmp_path, {"counting_layer": "count_lstm_v2"})
    else:
        made = boundary_models.make_boundary(tmp_path, {})
    made.directory.rename(checkpoints / "random" / name)
    flat = test_gliner2.ours if name == "gliner2" else test_boundary.ours
    model = test_gliner2.load(checkpoints / "random" / name)
    wanted = test_gliner2.run(model, models.StructureWork(gliner2_models.TEXTS, SCHEMA))[0]
    answer = client.extract(f"random/{name}", gliner2_models.TEXTS, SCHEMA)
    kinds = set()
    for one, other in zip(answer, wanted, strict=True):
        ours, theirs = flat(one), flat(other)
        test_gliner2.same(ours, theirs)
        kinds |= {place[0] for place in ours}
        assert all(
            set(instance) == {"name", "kind", "rights"} for instance in one.json.get("licence", ())
        )
    assert kinds == {"entity", "relation", "class", "structure"}
    wait_until(lambda: bool(read_tasks(client, f"random/{name}")), 60, "the card")
    assert read_tasks(client, f"random/{name}") == ("entities", "structure")
    assert client.entities(f"random/{name}", gliner2_models.TEXTS, ["person"], threshold=0.2)[
        0
    ].entities
    with pytest.raises(errors.InvalidInput) as caught:
        client.extract(f"random/{name}", ["a"], shoal.Schema().with_relations(["x [R] y"]))
    assert caught.value.field == "structure.relations[0].label"
    with pytest.raises(errors.TaskNotSupported):
        client.classify(f"random/{name}", ["a"], ["b"])


def read_tasks(client: shoal.Client, name: str) -> tuple[str, ...]:
    """Return the tasks in a model's card; none before a worker has reported it."""
    cards = [model.card for model in client.models.list() if model.model == name]
    return cards[0].tasks if cards and cards[0] is not None else ()
