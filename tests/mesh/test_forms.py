"""Representations of an answer through the mesh: token vectors and MaxSim, cosine, label prompts,
Matryoshka, and every data type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import shoal
from numpy.typing import NDArray
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from shoal.requests.encode import is_large

from services.local.settings import MINILM
from tests.mesh.test_families import relative_error
from tests.support.texts import texts

TEXTS = texts(24, shortest=1, longest=25, seed=9)
QUERY, DOCUMENTS = TEXTS[0], TEXTS[1:]
LATE = "random/bert-late"
DataType = Literal["float16", "bfloat16", "int8", "uint8"]


@pytest.fixture(scope="module")
def late(checkpoints: Path) -> MultiVectorEncoder:
    return MultiVectorEncoder(str(checkpoints / LATE), device="cpu")


@pytest.fixture
def vectors(client: shoal.Client) -> NDArray[np.number]:
    """Return the vectors of TEXTS, [texts, 384] in float32."""
    dense = client.encode(MINILM, TEXTS).dense
    assert dense is not None
    return dense


@pytest.mark.parametrize("role", ["query", "document"])
def test_token_vectors(
    role: Literal["query", "document"], client: shoal.Client, late: MultiVectorEncoder
) -> None:
    ours = client.encode(LATE, TEXTS, role=role).multi_vector
    reference = late.encode_query(TEXTS) if role == "query" else late.encode_document(TEXTS)
    theirs = [np.asarray(rows) for rows in reference]
    assert ours is not None
    assert [len(rows) for rows in ours] == [len(rows) for rows in theirs]
    assert relative_error(ours.values, np.concatenate(theirs)) <= 1e-5


def test_score_of_a_late_interaction_model_is_maxsim(
    client: shoal.Client, late: MultiVectorEncoder
) -> None:
    answer = client.score(LATE, QUERY, DOCUMENTS, top_n=5)
    theirs = late.similarity(late.encode_query([QUERY]), late.encode_document(DOCUMENTS))[0].numpy()
    assert relative_error(answer.scores, theirs) <= 1e-5
    assert list(answer.ranking) == list(np.argsort(-answer.scores, kind="stable")[:5])


def test_checkpoint_decides_the_truncated_end_of_a_long_text(
    client: shoal.Client, checkpoints: Path
) -> None:
    model, long = "random/bert-left", " ".join(TEXTS)
    theirs = np.asarray(SentenceTransformer(str(checkpoints / model), device="cpu").encode([long]))
    ours, start, end = (
        client.encode(model, [long], truncation=side).dense for side in (None, "start", "end")
    )
    assert ours is not None
    assert start is not None
    assert end is not None
    assert relative_error(ours.astype(np.float32), theirs) <= 1e-5
    assert relative_error(ours.astype(np.float32), start.astype(np.float32)) <= 1e-6
    assert relative_error(ours.astype(np.float32), end.astype(np.float32)) > 0.01


def test_queries_and_documents_may_have_separate_encoders(
    client: shoal.Client, checkpoints: Path
) -> None:
    """One score request uses both encoders."""
    model = "random/two-encoders"
    theirs = SentenceTransformer(str(checkpoints / model), device="cpu")
    queries, documents = theirs.encode_query(TEXTS), theirs.encode_document(TEXTS)
    for ours, wanted in (
        (client.encode(model, TEXTS, role="query").dense, queries),
        (client.encode(model, TEXTS, role="document").dense, documents),
    ):
        assert ours is not None
        assert relative_error(ours.astype(np.float32), wanted) <= 1e-5
    answer = client.score(model, TEXTS[0], TEXTS)
    assert (
        relative_error(answer.scores, theirs.similarity(queries[:1], documents)[0].numpy()) <= 1e-5
    )


def test_score_of_an_embedding_model_is_the_cosine(
    client: shoal.Client, vectors: NDArray[np.number]
) -> None:
    answer = client.score(MINILM, QUERY, DOCUMENTS)
    np.testing.assert_allclose(answer.scores, vectors[1:] @ vectors[0], atol=1e-5)
    assert len(answer.ranking) == len(DOCUMENTS)


def test_classify_with_an_embedding_model_is_the_cosine_to_label_prompts(
    client: shoal.Client, vectors: NDArray[np.number]
) -> None:
    labels = ["law", "queues"]
    prompts = client.encode(MINILM, [f"This is about {label}." for label in labels]).dense
    assert prompts is not None
    answers = client.classify(MINILM, TEXTS, labels, hypothesis="This is about {}.")
    ours = [{found.label: found.score for found in answer.labels} for answer in answers.results]
    expected = vectors @ prompts.T
    np.testing.assert_allclose(
        [[scores[label] for label in labels] for scores in ours], expected, atol=1e-5
    )


def test_truncated_dimensions_are_renormalised(
    client: shoal.Client, vectors: NDArray[np.number]
) -> None:
    dense = client.encode(MINILM, TEXTS, dimensions=64).dense
    cut = vectors[:, :64]
    np.testing.assert_allclose(
        np.asarray(dense), cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6
    )


@pytest.mark.parametrize(
    ("data_type", "bound"), [("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 1e-2), ("uint8", 1e-2)]
)
def test_data_types_can_be_converted_back(
    data_type: DataType, bound: float, client: shoal.Client, vectors: NDArray[np.number]
) -> None:
    assert (
        relative_error(
            client.encode(MINILM, TEXTS, data_type=data_type).dequantize(),
            vectors.astype(np.float32),
        )
        <= bound
    )


def test_binary_vectors_are_the_signs(client: shoal.Client, vectors: NDArray[np.number]) -> None:
    stored = client.encode(MINILM, TEXTS, data_type="binary").vectors
    assert stored is not None
    # a number nearer to 0 than rounding errors may have either sign
    certain = np.abs(vectors) > 1e-6
    np.testing.assert_array_equal(stored.bits()[certain], (vectors > 0)[certain])


def test_large_answer_in_parts_is_equal(client: shoal.Client, vectors: NDArray[np.number]) -> None:
    shortest = sorted(range(len(TEXTS)), key=lambda index: len(TEXTS[index]))[:5]
    asked = shortest * 220
    assert is_large([1] * len(asked), (), "float32", 0)
    with shoal.Client(client.address, request_items=10_000) as other:
        dense = other.encode(MINILM, [TEXTS[index] for index in asked], timeout=300.0).dense
    np.testing.assert_allclose(dense, vectors[asked], atol=1e-5)
