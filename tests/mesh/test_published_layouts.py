"""Published models, laid out as on the hub, are requested by name. The first request is answered,
and equals the same weights in safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
import shoal
from shoal.cli import main
from typer.testing import CliRunner

from tests.mesh import published_layouts
from tests.mesh.published_layouts import Published
from tests.parity import glirel_models
from tests.parity.gliner_models import LABELS, TEXTS
from tests.parity.image_models import pictures
from tests.store.fake_hub import FakeHub, serving
from tests.support.cluster import Cluster

# transformers, gliner and glirel emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

M3: Final = "BAAI/bge-m3"
URCHADE: Final = "urchade/gliner_small-v2.1"
RELATIONS: Final = "Programs such as the GPL, which users run, are free software."
TOLERANCE: Final = 1e-6
"""A CPU's products depend on the addresses of weights: the same weights twice in one worker differ
by some 1e-7.
"""

SPANS: Final = glirel_models.spans_of(RELATIONS, "GPL", "users", "free software")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published_layouts.write(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def hub(published: Published) -> Iterator[FakeHub]:
    with serving(FakeHub(models=dict(published.hub))) as running:
        yield running


@pytest.fixture(scope="module")
def mesh(
    published: Published, hub: FakeHub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("mesh")
    twins = ":".join(f"{twin(model)}={path}" for model, path in published.twins.items())
    environment = {
        "SHOAL_STORES": "hf",
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(directory / "hf"),
        "HF_HUB_OFFLINE": "0",
    }
    with Cluster(directory, models=twins, environment=environment) as cluster:
        yield cluster


def twin(model: str) -> str:
    return f"twin/{model.replace('/', '-')}"


def run(mesh: Cluster, *arguments: str) -> Any:
    """Run a command, and return its JSON output."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shoal.cli.options.REACH_SECONDS", 60.0)
        ran = CliRunner().invoke(
            main.build(), [*arguments, "--address", mesh.address, "--timeout", "120", "--json"]
        )
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


Scores = dict[tuple[object, ...], float]
"""Scores by item, position and label."""


def entities(client: shoal.Client, model: str) -> Scores:
    found = client.extract(
        model, TEXTS, task=shoal.Entities(labels=LABELS, threshold=0.3), timeout=120
    )
    scores: Scores = {
        (item, *place(one)): one.score
        for item, result in enumerate(found)
        for one in result.entities
    }
    assert len(scores) > 3
    return scores


def relations(client: shoal.Client, model: str) -> Scores:
    task = shoal.Relations(labels=glirel_models.LABELS, threshold=0.0, entities=[SPANS])
    return related(client.extract(model, [RELATIONS], task=task, timeout=120))


def joint(client: shoal.Client, model: str) -> Scores:
    """Return entities and their relations from one model."""
    task = shoal.Relations(labels=["part of"], entity_labels=LABELS, threshold=0.1)
    found = client.extract(model, TEXTS[2:], task=task, timeout=120)
    return {
        (item, *place(one)): one.score
        for item, result in enumerate(found)
        for one in result.entities
    } | related(found)


def related(found: shoal.ExtractResult) -> Scores:
    scores: Scores = {
        (item, *place(one.head), *place(one.tail), one.label): one.score
        for item, result in enumerate(found)
        for one in result.relations
    }
    assert scores
    return scores


def place(entity: shoal.Entity) -> tuple[int, int, str]:
    return entity.start, entity.end, entity.label


def lines(client: shoal.Client, model: str) -> Scores:
    found = client.extract(model, pictures()[:2], shoal.ReadText(max_tokens=8), timeout=120)
    assert any(one.text for one in found)
    return {(one.text, item): 1.0 for item, one in enumerate(found)}


ASKED: Final[dict[str, Callable[[shoal.Client, str], Scores]]] = {
    "urchade/gliner_multi-v2.1": entities,
    "numind/NuNER_Zero": entities,
    "gliner-community/gliner_small-v2.5": entities,
    "knowledgator/gliner-pii-small-v1.0": entities,
    "knowledgator/gliner-bi-small-v2.0": entities,
    "knowledgator/gliner-relex-large-v1.0": joint,
    "jackboyla/glirel-large-v0": relations,
    "microsoft/trocr-base-printed": lines,
}


def test_bge_m3_is_served_by_name(mesh: Cluster) -> None:
    items = run(mesh, "encode", M3, *TEXTS)["items"]
    with shoal.Client(mesh.address) as client:
        found, wanted = (
            client.encode(model, TEXTS, representations=["dense", "sparse", "multi_vector"])
            for model in (M3, twin(M3))
        )
    assert found.dense is not None
    assert wanted.dense is not None
    np.testing.assert_allclose(found.dense, wanted.dense, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(
        [item["dense"] for item in items], wanted.dense, rtol=0, atol=TOLERANCE
    )
    assert found.sparse is not None
    assert wanted.sparse is not None
    for ours, theirs in zip(found.sparse, wanted.sparse, strict=True):
        for numbers, same in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(numbers, same, rtol=0, atol=TOLERANCE)
    assert found.multi_vector is not None
    assert wanted.multi_vector is not None
    for rows, same in zip(found.multi_vector, wanted.multi_vector, strict=True):
        np.testing.assert_allclose(rows, same, rtol=0, atol=TOLERANCE)


def test_urchade_gliner_is_served_by_name(mesh: Cluster) -> None:
    labels = [argument for label in LABELS for argument in ("--label", label)]
    found = run(mesh, "extract", "entities", URCHADE, TEXTS[2], *labels, "--threshold", "0.3")
    with shoal.Client(mesh.address) as client:
        wanted = client.extract(
            twin(URCHADE), TEXTS[2:3], task=shoal.Entities(labels=LABELS, threshold=0.3)
        )[0].entities
    assert [
        (one["start"], one["end"], one["label"]) for one in found["results"][0]["entities"]
    ] == [(one.start, one.end, one.label) for one in wanted]
    assert wanted


@pytest.mark.parametrize("model", ASKED)
def test_published_model_equals_its_twin(model: str, mesh: Cluster, hub: FakeHub) -> None:
    with shoal.Client(mesh.address) as client:
        assert ASKED[model](client, model) == pytest.approx(
            ASKED[model](client, twin(model)), abs=TOLERANCE
        )
    stored = mesh.directory / "store" / "models" / model
    assert not [path for path in stored.rglob("*") if path.suffix in (".bin", ".pt", ".onnx")]


def test_only_settings_and_vocabularies_of_base_models_are_fetched(
    hub: FakeHub, published: Published
) -> None:
    """No model fetches the weights of its base model, or the files in onnx/."""
    assert {*ASKED, M3, URCHADE} == set(published.twins)
    assert not [path for path in hub.calls if "deberta-v3" in path and path.endswith(".bin")]
    assert not [path for path in hub.calls if "/onnx/" in path]
