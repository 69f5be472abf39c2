"""Every family of vision-language models against transformers on random weights: equal, and the same alone as among others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from libs.models.images.vlm.loading import VisionLanguageModel, load_vision_language, model_types
from libs.models.work import InputSequence
from tests.parity.vlm_models import MODELS, QUERIES, Small, opened, pages, small

# transformers and its dependencies warn of their own future.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
FLOAT_BOUND = 1e-5


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(kind)
    small(kind).save(folder)
    return folder


@pytest.fixture(scope="module")
def model(directory: Path) -> VisionLanguageModel:
    return load_vision_language(directory, dtype=torch.float32, device=CPU)


@torch.inference_mode()
def vectors(model: VisionLanguageModel, sequences: Sequence[InputSequence], head: str = "multi_vector") -> list[Tensor]:
    """The head's outputs for sequences in one packed batch, of length 1."""
    (trunk,) = model.trunks
    batch = trunk.pack(sequences, [None] * len(sequences))
    hidden = trunk.encoder.forward(batch)
    arrays = tuple(one.numpy() for one in trunk.heads[head].forward(hidden, batch, sequences))
    outputs = trunk.heads[head].split(arrays, sequences)
    return [torch.nn.functional.normalize(torch.from_numpy(np.asarray(one)), dim=-1) for one in outputs]


def worst(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest error of a vector, relative to its largest value."""
    assert [one.shape for one in got] == [one.shape for one in wanted]
    return max(((one - other).abs().amax(-1) / other.abs().amax(-1)).max().item() for one, other in zip(got, wanted, strict=True))


def pages_of(model: VisionLanguageModel) -> list[InputSequence]:
    return [model.input.sequence(data, f"items[{number}]") for number, data in enumerate(pages())]


def queries_of(model: VisionLanguageModel) -> list[InputSequence]:
    return model.input.of_texts(QUERIES, "query", "end", lambda number: f"items[{number}].text")


def test_every_family_is_in_the_table() -> None:
    assert sorted({kind.split("-")[0] for kind in MODELS}) == sorted(model_types())


def test_pages_and_queries_equal_transformers(kind: str, model: VisionLanguageModel) -> None:
    """One batch of all, and each alone."""
    wanted = small(kind).pages([opened(data) for data in pages()]) + small(kind).queries(QUERIES)
    sequences = pages_of(model) + queries_of(model)
    together = vectors(model, sequences)
    assert worst(together, wanted) <= FLOAT_BOUND
    alone = [vectors(model, [one])[0] for one in sequences]
    assert worst(alone, together) <= 5e-6
