"""Hierarchical pooling of multi-vectors, against colpali-engine's HierarchicalTokenPooler written
out with scipy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage

from libs.errors import InputTooLong, InvalidInput
from libs.models import EncodeResult, EncodeWork, Part, load_model
from libs.models.text.processing import embedding, pooling
from libs.models.text.processing.pooling import pooled
from tests.parity.vlm_models import pages, small

# transformers and its dependencies emit deprecation warnings; scipy warns of a matrix that looks
# like distances, which it is.
pytestmark = pytest.mark.filterwarnings("ignore")

Array = NDArray[np.float32]


def theirs(vectors: Array, factor: int) -> Array:
    """Return Ward's linkage over the rows of 1 - cosines, cut to `clusters` clusters, and their
    normalised means.
    """
    distances = 1 - vectors.astype(np.float64) @ vectors.astype(np.float64).T
    labels = fcluster(
        linkage(distances, metric="euclidean", method="ward"),
        t=max(len(vectors) // factor, 1),
        criterion="maxclust",
    )
    means = np.stack([vectors[labels == label].mean(axis=0) for label in dict.fromkeys(labels)])
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def unit(vectors: NDArray[np.floating]) -> Array:
    found: Array = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return found


@pytest.mark.parametrize("factor", [2, 3, 7, 64])
@pytest.mark.parametrize(("count", "dimensions"), [(2, 8), (5, 128), (120, 16), (300, 24)])
def test_reference_pools_alike(count: int, dimensions: int, factor: int) -> None:
    """More vectors than dimensions and fewer; they lie about a few centres, as those of a page
    do.
    """
    random = np.random.default_rng(count + factor)
    vectors = unit(
        random.normal(size=(9, dimensions))[random.integers(0, 9, count)]
        + 0.4 * random.normal(size=(count, dimensions))
    )
    ours, wanted = pooled(vectors, factor, normalize=True), theirs(vectors, factor)
    assert ours.shape == wanted.shape
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, wanted, atol=2e-6)


def test_vectors_that_are_equal_become_one() -> None:
    """An empty page is pooled too."""
    blank = np.tile(unit(np.ones((1, 8))), (30, 1))
    np.testing.assert_allclose(pooled(blank, 3, normalize=True)[:1], blank[:1], atol=1e-6)
    vectors = np.repeat(unit(np.eye(4, 8)), 5, axis=0)
    np.testing.assert_allclose(pooled(vectors, 5, normalize=True), unit(np.eye(4, 8)), atol=1e-6)


def test_vectors_of_any_length_keep_their_scale() -> None:
    """Clusters are by direction; means are of the vectors as they are, unless they are scaled."""
    vectors = np.array([[2, 0, 0], [0, 3, 0], [4, 0.01, 0], [0, 5, 0.01]], np.float32)
    np.testing.assert_allclose(pooled(vectors, 2, normalize=False), [[3, 0.005, 0], [0, 4, 0.005]])
    np.testing.assert_allclose(
        pooled(vectors, 2, normalize=True), [[1, 0, 0], [0, 1, 0]], atol=2e-3
    )


@pytest.mark.parametrize(("count", "factor"), [(1, 2), (3, 0), (3, 1)])
def test_vectors_that_are_not_pooled(count: int, factor: int) -> None:
    vectors = np.ones((count, 4), np.float32)
    assert pooled(vectors, factor, normalize=True) is vectors


def test_pages_are_pooled_as_they_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page alone, before numbers are stored in another type."""
    small("colqwen2").save(tmp_path)
    model = load_model(tmp_path, "tests/reader", torch.device("cpu"), torch.float32)
    files = {i: (Part(data, f"items[{i}].image"),) for i, data in enumerate(pages()[:3])}
    whole, fewer = (EncodeWork([""] * 3, parts=files, pooling_factor=factor) for factor in (0, 3))
    prepared = model.prepare(whole)
    outputs = model.forward_all(prepared)
    plain = model.finish(prepared, outputs)
    found = model.finish(model.prepare(fewer), outputs)
    assert isinstance(plain, EncodeResult)
    assert isinstance(found, EncodeResult)
    assert plain.multi_vector is not None
    assert found.multi_vector is not None
    rows = np.split(
        plain.multi_vector.values.values.astype(np.float32), plain.multi_vector.offsets[1:-1]
    )
    wanted = [theirs(row, 3) for row in rows]
    assert found.multi_vector.offsets == np.cumsum([0, *map(len, wanted)]).tolist()
    assert found.multi_vector.offsets[-1] < plain.multi_vector.offsets[-1] / 2.5
    values = np.split(
        found.multi_vector.values.values.astype(np.float32), found.multi_vector.offsets[1:-1]
    )
    for ours, other in zip(values, wanted, strict=True):
        assert np.abs(ours @ other.T).max(axis=1).min() > 1 - 1e-5, "in whatever order"
    monkeypatch.setattr(embedding, "MAX_VECTORS", 10)
    with pytest.raises(InputTooLong) as caught:
        model.prepare(fewer)
    assert caught.value.field.startswith("items[")
    model.prepare(whole)
    assert pooling.MAX_VECTORS == 4096


def test_only_multi_vectors_are_pooled(embedder: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        embedder.prepare(EncodeWork(["a"], pooling_factor=2))  # type: ignore[attr-defined]
    assert caught.value.field == "pooling_factor"
