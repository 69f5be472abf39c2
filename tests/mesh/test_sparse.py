"""Sparse and hybrid models through the mesh: weighted rows, queries that never reach the device,
three representations in one request.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import shoal
from numpy.typing import NDArray
from sentence_transformers import SparseEncoder

from tests.mesh.test_families import relative_error
from tests.parity.test_hybrid import parts_of_score, reference, write_m3
from tests.parity.test_sparse import write_router
from tests.support.texts import texts

# sentence-transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = texts(12, shortest=1, longest=25, seed=9)
QUERY, DOCUMENTS = TEXTS[0], TEXTS[1:]
HYBRID = "random/m3"


@pytest.fixture(scope="module")
def splade(checkpoints: Path) -> tuple[str, SparseEncoder]:
    directory = write_router(checkpoints / "random" / "bert-splade-parts")
    target = checkpoints / "random" / "bert-splade"
    directory.rename(target)
    return "random/bert-splade", SparseEncoder(str(target), device="cpu")


def test_sparse_rows_of_both_roles(client: shoal.Client, splade: tuple[str, SparseEncoder]) -> None:
    model, theirs = splade
    queries, documents = (
        client.encode(model, TEXTS, role="query"),
        client.encode(model, TEXTS, role="document"),
    )
    assert queries.sparse is not None
    assert documents.sparse is not None
    assert (
        relative_error(whole(queries.sparse), theirs.encode_query(TEXTS).to_dense().numpy()) <= 1e-5
    )
    assert (
        relative_error(whole(documents.sparse), theirs.encode_document(TEXTS).to_dense().numpy())
        <= 1e-5
    )
    assert 0 < queries.usage.input_tokens < documents.usage.input_tokens


def test_score_of_a_sparse_model_is_the_product(
    client: shoal.Client, splade: tuple[str, SparseEncoder]
) -> None:
    model, theirs = splade
    expected = theirs.similarity(theirs.encode_query([QUERY]), theirs.encode_document(DOCUMENTS))[0]
    assert (
        relative_error(client.score(model, QUERY, DOCUMENTS).scores, expected.to_dense().numpy())
        <= 1e-5
    )


def test_three_representations_and_their_score(client: shoal.Client, checkpoints: Path) -> None:
    directory = write_m3(checkpoints / "random" / "m3")
    found = reference(directory, TEXTS)
    answer = client.encode(HYBRID, TEXTS, representations=["dense", "sparse", "multi_vector"])
    assert answer.sparse is not None
    assert answer.multi_vector is not None
    assert (
        relative_error(np.asarray(answer.dense), np.stack([item.dense.numpy() for item in found]))
        <= 1e-5
    )
    assert (
        relative_error(
            answer.multi_vector.values, np.concatenate([item.tokens.numpy() for item in found])
        )
        <= 1e-5
    )
    assert [columns.tolist() for columns, _ in answer.sparse] == [
        sorted(item.lexical) for item in found
    ]
    expected = np.array([parts_of_score(found[0], item) for item in found[1:]]) @ (0.4, 0.2, 0.4)
    assert (
        relative_error(client.score(HYBRID, QUERY, DOCUMENTS).scores, expected.astype(np.float32))
        <= 1e-5
    )


def whole(sparse: shoal.Sparse) -> NDArray[np.float32]:
    """Return the dense array."""
    filled = np.zeros(sparse.shape, np.float32)
    for number, (columns, weights) in enumerate(sparse):
        filled[number, columns] = weights
    return filled
