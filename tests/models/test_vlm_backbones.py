"""A vision-language model's backbone in a served model: pages and queries in one batch, and what
adapters call its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from libs.models import PackedModel
from libs.models.images.vlm.loading import VisionLanguageModel, load_vision_language
from libs.models.images.vlm.tower import ImageTower
from libs.models.interface.sequences import YieldPoint
from libs.models.runtime.loaded.peft import LayerPlace
from tests.models.test_backbones import joined
from tests.parity.vlm_models import QUERIES, pages, small

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> VisionLanguageModel:
    """Return a model with windows, positions in three dimensions and a tower."""
    directory: Path = tmp_path_factory.mktemp("qwen")
    small("qwen2_5_vl").save(directory)
    return load_vision_language(directory, dtype=torch.float32, device=torch.device("cpu"))


def test_pages_and_queries_in_one_batch(
    embedder: PackedModel, pictured: VisionLanguageModel
) -> None:
    backbone = pictured.backbones[0]
    model = joined(embedder, backbone)
    assert backbone.tower is not None
    assert model.bytes > embedder.bytes + backbone.encoder.bytes
    assert model.probe() > 0
    given = pictured.input
    sequences = [given.sequence(data, "items[0]") for data in pages()[:4]]
    sequences += given.encode_texts(QUERIES, "query", "end", lambda number: f"items[{number}].text")
    together = model.forward("multi_vector", sequences)
    backwards = model.forward("multi_vector", sequences[::-1])[::-1]
    for number, sequence in enumerate(sequences):
        (alone,) = model.forward("multi_vector", [sequence])
        for found in (together[number], backwards[number]):
            np.testing.assert_allclose(np.asarray(found), np.asarray(alone), rtol=1e-4, atol=1e-4)


def test_adapters_name_the_text_encoders_layers(pictured: VisionLanguageModel) -> None:
    for begin in (
        "",
        "model.",
        "model.language_model.",
        "language_model.model.",
        "vlm.language_model.",
    ):
        assert pictured.names.place(f"{begin}layers.1.self_attn.k_proj") == LayerPlace(
            "layers.1.attn.qkv", 1
        )
    with pytest.raises(KeyError):
        pictured.names.place("visual.blocks.0.attn.qkv")


def test_tower_is_preempted_between_its_layers(
    embedder: PackedModel, pictured: VisionLanguageModel
) -> None:
    """A batch of texts preempts it within the same model; neither changes the other."""
    backbone, given = pictured.backbones[0], pictured.input
    model = joined(embedder, backbone)
    images = [given.sequence(data, "items[0]") for data in pages()[:2]]
    texts = given.encode_texts(QUERIES[:1], "query", "end", lambda number: f"items[{number}].text")
    wanted, (query,) = model.forward("multi_vector", images), model.forward("multi_vector", texts)
    queries = []
    found = model.forward(
        "multi_vector",
        images,
        yield_point=lambda: queries.extend(model.forward("multi_vector", texts)),
    )
    assert isinstance(backbone.tower, ImageTower)
    assert len(queries) == len(backbone.tower.encoder.stack) + len(backbone.encoder.stack)
    for ours, theirs in zip([*found, *queries], [*wanted, *[query] * len(queries)], strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-5, atol=1e-6)


def test_repeated_image_of_a_batch_is_computed_once(
    pictured: VisionLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items share its array, like documents compared with one image."""
    tower = pictured.backbones[0].tower
    assert isinstance(tower, ImageTower)
    made = [pictured.input.sequence(data, "items[0]") for data in pages()[:3]]
    first, second, third = (one.rows.inputs[0] for one in made if one.rows is not None)
    wanted = [tower.forward([picture]) for picture in (first, second, third)]
    seen: list[int] = []
    rows = tower._rows

    def counted(some: Sequence[NDArray[np.generic]], yield_point: YieldPoint) -> torch.Tensor:
        seen.append(len(some))
        return rows(some, yield_point)

    monkeypatch.setattr(tower, "_rows", counted)
    found = tower.forward([second, first, second, third, second])
    assert seen == [3]
    torch.testing.assert_close(
        found, torch.cat([wanted[number] for number in (1, 0, 1, 2, 1)]), rtol=1e-5, atol=1e-6
    )
