"""shoal-qdrant with Qdrant in memory, and against the numbers of `shoal.Client`."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import shoal
from qdrant_client import AsyncQdrantClient, QdrantClient
from qdrant_client import models as qm
from shoal_qdrant import ShoalExtractor, ShoalReranker, ShoalVectorizer

FORMS = ("dense", "sparse", "multi_vector")


@pytest.mark.parametrize("kind", ["dense", "prompted"])
async def test_dense_vectors(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    vectorizer = ShoalVectorizer(models[kind], names={"dense": "text"})
    documents = client.encode(models[kind], texts, role="document").dense.tolist()
    queries = client.encode(models[kind], texts, role="query").dense.tolist()
    assert [one["text"] for one in vectorizer.vectors(texts)] == documents
    assert await vectorizer.avectors(texts) == vectorizer.vectors(texts)
    assert (
        vectorizer.query(texts[0])["query"]
        == (await vectorizer.aquery(texts[0]))["query"]
        == queries[0]
    )
    assert (queries != documents) is (kind == "prompted")
    assert vectorizer.points([]) == []


def test_sparse_and_multi_vectors(
    models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    wanted = client.encode(models["hybrid"], texts, role="document", representations=FORMS)
    found = ShoalVectorizer(models["hybrid"], forms=FORMS).vectors(texts)
    assert [one["dense"] for one in found] == wanted.dense.tolist()
    assert [(one["sparse"].indices, one["sparse"].values) for one in found] == [
        (c.tolist(), w.tolist()) for c, w in wanted.sparse
    ]
    assert [one["multi_vector"] for one in found] == [rows.tolist() for rows in wanted.multi_vector]


@pytest.mark.parametrize(
    "forms", [("dense",), ("sparse",), ("multi_vector",), ("dense", "sparse"), FORMS], ids="+".join
)
async def test_stored_and_found(
    forms: tuple[str, ...], models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    vectorizer = ShoalVectorizer(models["hybrid"], forms=forms)
    collection = vectorizer.collection()
    assert await vectorizer.acollection() == collection
    points = vectorizer.points(
        texts, payloads=[{"number": number} for number in range(len(texts))], ids=range(len(texts))
    )
    qdrant, other = QdrantClient(":memory:"), AsyncQdrantClient(":memory:")
    qdrant.create_collection("texts", **collection)
    qdrant.upsert("texts", points)
    await other.create_collection("texts", **collection)
    await other.upsert("texts", await vectorizer.apoints(texts, ids=range(len(texts))))
    asked = vectorizer.query("fish", limit=3)
    found = qdrant.query_points("texts", **asked).points
    assert [one.id for one in found] == [
        one.id for one in (await other.query_points("texts", **asked)).points
    ]
    assert found[0].payload == {"text": texts[found[0].id], "number": found[0].id}
    assert (await vectorizer.aquery("fish", limit=3)) == asked
    if len(forms) == 1:
        wanted = scores(client, models["hybrid"], forms[0], texts)
        order = [
            int(i) for i in np.argsort(-wanted, kind="stable")[:3] if wanted[i] > 0
        ]  # Qdrant leaves out sparse vectors that share nothing
        assert [one.id for one in found] == order
        np.testing.assert_allclose([one.score for one in found], wanted[order], rtol=1e-5)


def scores(client: shoal.Client, model: str, form: str, texts: list[str]) -> np.ndarray:
    """Compute with numpy the scores that Qdrant should return for a form."""
    query = client.encode(model, "fish", role="query", representations=FORMS)
    documents = client.encode(model, texts, role="document", representations=FORMS)
    if form == "dense":
        return documents.dense @ query.dense[0]
    if form == "sparse":
        return np.array([dot(row, query.sparse[0]) for row in documents.sparse])
    return np.array(
        [(query.multi_vector[0] @ rows.T).max(axis=1).sum() for rows in documents.multi_vector]
    )


def dot(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> float:
    common, left, right = np.intersect1d(one[0], other[0], return_indices=True)
    return float(one[1][left] @ other[1][right]) if len(common) else 0.0


@pytest.mark.parametrize("kind", ["dense", "reranker"])
async def test_reranked_points(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    reranker = ShoalReranker(models[kind])
    points = [
        qm.ScoredPoint(id=number, version=1, score=0.0, payload={"text": text})
        for number, text in enumerate(texts)
    ]
    found = reranker.rerank("fish", points, top_n=3)
    wanted = client.score(models[kind], "fish", texts, top_n=3)
    assert [(one.id, one.score) for one in found] == [
        (i, float(wanted.scores[i])) for i in wanted.ranking.tolist()
    ]
    assert await reranker.arerank("fish", points, top_n=3) == found
    assert reranker.rerank("fish", []) == []
    with pytest.raises(ValueError, match="has no text 'text'"):
        reranker.rerank("fish", [qm.ScoredPoint(id=1, version=1, score=0.0)])


async def test_extraction(models: dict[str, str], client: shoal.Client, texts: list[str]) -> None:
    extractor = ShoalExtractor(models["entities"], options={"aggregation": "none"})
    wanted = client.entities(models["entities"], texts, aggregation="none")
    payloads = [{"text": text} for text in texts]
    found = extractor.payloads(payloads)
    assert [[one["start"] for one in payload["entities"]] for payload in found] == [
        [e.start for e in one.entities] for one in wanted
    ]
    assert await extractor.apayloads(payloads) == found
    qdrant, vectorizer = QdrantClient(":memory:"), ShoalVectorizer(models["dense"])
    qdrant.create_collection("texts", **vectorizer.collection())
    qdrant.upsert("texts", vectorizer.points(texts, payloads=found))
    label = next(one for payload in found for one in payload["entities"])["label"]
    condition = qm.FieldCondition(key="entities[].label", match=qm.MatchValue(value=label))
    kept = qdrant.query_points(
        "texts", **vectorizer.query("fish"), query_filter=qm.Filter(must=[condition])
    ).points
    assert {one.payload["text"] for one in kept} == {
        payload["text"]
        for payload in found
        if label in [one["label"] for one in payload["entities"]]
    }


def test_pickle_has_no_token(token: str, models: dict[str, str]) -> None:
    vectorizer = ShoalVectorizer(models["dense"], token=token)
    data = pickle.dumps(vectorizer)
    assert token.encode() not in data
    assert pickle.loads(data).vectors(["fish"]) == ShoalVectorizer(models["dense"]).vectors(
        ["fish"]
    )
