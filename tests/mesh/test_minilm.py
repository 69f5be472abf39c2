"""The real model through the real mesh, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import shoal
import torch
import transformers
from numpy.typing import NDArray

from services.local.settings import MINILM
from tests.support.cluster import Cluster
from tests.support.texts import texts

PATIENCE = 300.0  # seconds: many tokens for a busy machine of two cores
TEXTS = texts(260, shortest=1, longest=40) + texts(60, shortest=41, longest=330)
"""1 to 330 words: 1 to over 400 tokens; the model's limit is 256. Most are short, since tokens cost
time, not texts.
"""


@pytest.fixture(scope="module")
def reference(minilm: Path) -> NDArray[np.float32]:
    """Return vectors [texts, 384] by transformers in fp32, one text at a time, mean-pooled and
    normalised according to the model's card.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm, attn_implementation="eager").eval()
    rows = []
    with torch.inference_mode():
        for text in TEXTS:
            hidden = model(
                **tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
            ).last_hidden_state[0]
            rows.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    return np.stack(rows)


def cosines(ours: NDArray[np.number], theirs: NDArray[np.float32]) -> NDArray[np.float64]:
    wide, other = ours.astype(np.float64), theirs.astype(np.float64)
    return np.asarray(
        (wide * other).sum(1) / np.linalg.norm(wide, axis=1) / np.linalg.norm(other, axis=1)
    )


def test_texts_cover_1_to_400_tokens(minilm: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    lengths = [len(tokenizer.tokenize(text)) for text in TEXTS]
    assert len(lengths) >= 300
    assert min(lengths) <= 4
    assert max(lengths) >= 400


def test_float32_equals_transformers(client: shoal.Client, reference: NDArray[np.float32]) -> None:
    dense = client.encode(MINILM, TEXTS, timeout=PATIENCE).dense
    assert dense is not None
    assert dense.shape == (len(TEXTS), 384)
    assert cosines(dense, reference).min() >= 0.99999


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.999), ("int8", 0.99)])
def test_other_number_formats_are_close_to_transformers(
    dtype: str, least: float, tmp_path: Path, minilm: Path, reference: NDArray[np.float32]
) -> None:
    """A core without bfloat16 emulates it, so every fourth text must do, of all lengths."""
    with (
        Cluster(tmp_path, models=f"{MINILM}={minilm}", dtype=dtype) as cluster,
        shoal.Client(cluster.address) as client,
    ):
        dense = client.encode(MINILM, TEXTS[::4], timeout=PATIENCE).dense
    assert dense is not None
    assert cosines(dense, reference[::4]).min() >= least


def test_text_alone_equals_the_same_text_in_a_batch(client: shoal.Client) -> None:
    some = TEXTS[::4]
    together = client.encode(MINILM, some, timeout=PATIENCE).dense
    assert together is not None
    for index in range(0, len(some), 4):
        alone = client.encode(MINILM, [some[index]]).dense
        assert alone is not None
        np.testing.assert_allclose(alone[0], together[index], rtol=1e-5, atol=1e-6)


def test_usage_counts_tokens_exactly(client: shoal.Client, minilm: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    expected = sum(
        len(tokenizer(text, truncation=True, max_length=256)["input_ids"]) for text in TEXTS[:40]
    )
    assert client.encode(MINILM, TEXTS[:40]).usage.input_tokens == expected
