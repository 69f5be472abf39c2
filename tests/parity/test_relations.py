"""Relations between entities against the gliner package's relation models: equal pairs and scores
from the same directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shoal.extractions import Entity, Relation

from libs.errors import InvalidInput, ModelBroken
from libs.kinds.gliner import processor as gliner
from libs.models import EntitiesWork, ExtractResult, PackedModel, RelationsWork, load_model
from tests.parity import gliner_models
from tests.parity.gliner_models import LABELS, Found, Reference, make_reference, slug

# gliner, transformers and their dependencies emit warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

RELATIONS = ["works for", "part", "lives in"]
TEXTS = [
    *gliner_models.TEXTS[:2],
    "The licensee conveys; the source code of the work must be conveyed too.",
    gliner_models.TEXTS[3],
]
Make = Callable[[Mapping[str, object]], Reference]

KINDS: list[dict[str, object]] = [
    {"relations_layer": "none"},
    {"relations_layer": "gcn"},
    {"relations_layer": "dot", "embed_rel_token": False},
    {"relations_layer": "bilinear", "span_mode": "markerV1"},
    {"relations_layer": "mlp", "num_rnn_layers": 0},
    {"relations_layer": "none", "span_mode": "token_level"},
    {"relations_layer": "gcn", "span_mode": "token_level"},
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """References, each built once, of the first seed with results."""
    made: dict[str, Reference] = {}

    def get(config: Mapping[str, object]) -> Reference:
        key = repr(config)
        for seed in range(50):
            if key not in made:
                reference = make_reference(tmp_path_factory.mktemp("relations"), config, seed=seed)
                if 20 <= len(reference.relations(TEXTS[2], LABELS, RELATIONS, 0.0)) <= 1500:
                    made[key] = reference
        return made[key]

    return get


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PackedModel:
    return load_model(directory, "test/model", torch.device("cpu"), dtype)


def relations(model: PackedModel, work: RelationsWork) -> list[tuple[Relation, ...]]:
    prepared = model.prepare(work)
    result = model.finish(prepared, model.forward(prepared.head, prepared.sequences))
    assert isinstance(result, ExtractResult)
    return [item.relations for item in result.items]


def place(entity: Entity) -> Found:
    return entity.start, entity.end, entity.label


def keyed(found: tuple[Relation, ...]) -> dict[tuple[Found, Found, str], float]:
    keys = {(place(one.head), place(one.tail), one.label): one.score for one in found}
    assert len(keys) == len(found)
    return keys


@pytest.mark.parametrize("config", KINDS, ids=slug)
def test_relations_equal_the_package(make: Make, config: dict[str, object]) -> None:
    reference = make(config)
    model = load(reference.directory)
    assert model.card.tasks == ("entities", "relations")
    everything = [reference.relations(text, LABELS, RELATIONS, 0.0) for text in TEXTS]
    scores = sorted(score for theirs in everything for score in theirs.values())
    # No score is near a threshold, where a rounding error would decide.
    for threshold in [0.0, *(sum(scores[len(scores) * part // 4 :][:2]) / 2 for part in (1, 3))]:
        work = RelationsWork(
            TEXTS, labels=tuple(RELATIONS), entity_labels=tuple(LABELS), threshold=threshold
        )
        for text, found, every in zip(TEXTS, relations(model, work), everything, strict=True):
            ours, theirs = (
                keyed(found),
                {key: score for key, score in every.items() if score > threshold},
            )
            assert ours.keys() == theirs.keys()
            assert all(abs(ours[key] - theirs[key]) <= 1e-5 for key in ours)
            assert [one.score for one in found] == sorted(ours.values(), reverse=True)
            assert all(text[one.head.start : one.head.end] == one.head.text for one in found)


@pytest.mark.parametrize("config", [KINDS[0], KINDS[5]], ids=slug)
def test_relation_model_finds_entities_alone(make: Make, config: dict[str, object]) -> None:
    reference = make(config)
    model = load(reference.directory)
    prepared = model.prepare(EntitiesWork(TEXTS, labels=tuple(LABELS), threshold=0.3))
    result = model.finish(prepared, model.forward(prepared.head, prepared.sequences))
    assert isinstance(result, ExtractResult)
    theirs = reference.entities(TEXTS, LABELS, 0.3, flat=True)
    assert sum(map(len, theirs)) > 3
    for item, other in zip(result.items, theirs, strict=True):
        ours = {place(one): one.score for one in item.entities}
        assert ours.keys() == other.keys()
        assert all(abs(ours[key] - other[key]) <= 1e-5 for key in ours)


def test_threshold_applies_to_relations_only(make: Make) -> None:
    """Entities use the model's threshold, so a low threshold adds relations between the same
    entities."""
    model = load(make(KINDS[0]).directory)
    few, many = (
        relations(model, RelationsWork(TEXTS, tuple(RELATIONS), tuple(LABELS), threshold))[2]
        for threshold in (None, 0.0)
    )
    entities = {place(one.head) for one in many}
    assert len(many) == len(entities) * (len(entities) - 1) * len(RELATIONS)
    assert few == tuple(one for one in many if one.score >= 0.5)


def test_only_the_best_relations_of_a_text_are_returned(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(make(KINDS[0]).directory)
    work = RelationsWork(TEXTS[2:3], tuple(RELATIONS), tuple(LABELS), threshold=0.0)
    every = relations(model, work)[0]
    monkeypatch.setattr(gliner, "MAX_RELATIONS", 3)
    assert relations(model, work)[0] == every[:3]


@pytest.mark.parametrize("config", [KINDS[1], KINDS[5]], ids=slug)
def test_packed_batch_equals_each_text_alone(make: Make, config: dict[str, object]) -> None:
    """Some texts have no words or entities."""
    model = load(make(config).directory)
    texts = [*TEXTS, " ", "!"]
    together = relations(model, RelationsWork(texts, tuple(RELATIONS), tuple(LABELS), 0.1))
    for text, found in zip(texts, together, strict=True):
        ours, alone = (
            keyed(found),
            keyed(relations(model, RelationsWork([text], tuple(RELATIONS), tuple(LABELS), 0.1))[0]),
        )
        assert ours.keys() == alone.keys()
        assert all(abs(ours[key] - alone[key]) <= 1e-5 for key in ours)


def test_entity_and_relation_labels_are_required(make: Make) -> None:
    model = load(make(KINDS[0]).directory)
    for work, field in (
        (RelationsWork(["a"], labels=("in",)), "relations.entity_labels"),
        (RelationsWork(["a"], labels=(), entity_labels=("city",)), "relations.labels"),
    ):
        with pytest.raises(InvalidInput) as caught:
            model.prepare(work)
        assert caught.value.field == field


def test_invalid_checkpoints_are_refused(make: Make, tmp_path: Path) -> None:
    directory = make({"relations_layer": "gcn"}).directory
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = "relations_rep_layer.relation_rep_layer.gcn.linear.bias"
    save_file(
        {key: value for key, value in tensors.items() if key != name},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ModelBroken, match=rf"model\.safetensors: tensor `{name}` is missing"):
        load(tmp_path)
    config = json.loads((tmp_path / "gliner_config.json").read_text())
    (tmp_path / "gliner_config.json").write_text(
        json.dumps({**config, "triples_layer": "distmult"})
    )
    with pytest.raises(ModelBroken, match=r"gliner_config\.json: `triples_layer`"):
        load(tmp_path)
