"""shoal-lancedb in tables on disk, and against the numbers of `shoal.Client`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
import shoal
from lancedb.embeddings import EmbeddingFunctionRegistry, get_registry
from lancedb.index import FTS
from lancedb.pydantic import LanceModel, MultiVector, Vector
from shoal_lancedb import ShoalEmbeddings, ShoalExtractor, ShoalMultiVectorEmbeddings, ShoalReranker


def made(where: Path, function: Any, texts: list[str]) -> Any:
    class Text(LanceModel):
        text: str = function.SourceField()
        vector: Vector(function.ndims()) = function.VectorField()  # type: ignore[valid-type]

    table = lancedb.connect(where).create_table("texts", schema=Text)
    table.add([{"text": text} for text in texts])
    return table


@pytest.mark.parametrize("kind", ["dense", "prompted"])
def test_roles_are_those_of_the_client(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str], tmp_path: Path
) -> None:
    function = get_registry().get("shoal").create(model=models[kind])
    documents = client.encode(models[kind], texts, role="document").dense
    query = client.encode(models[kind], texts[0], role="query").dense[0]
    np.testing.assert_array_equal(
        np.stack(function.compute_source_embeddings(pa.array(texts))), documents
    )
    np.testing.assert_array_equal(function.compute_query_embeddings(texts[0])[0], query)
    assert np.array_equal(query, documents[0]) is (kind == "dense")
    table = made(tmp_path, function, texts)
    np.testing.assert_array_equal(np.stack(table.to_arrow()["vector"].to_pylist()), documents)
    found = table.search(texts[0]).metric("cosine").limit(3).to_list()
    assert [one["text"] for one in found] == [
        texts[i] for i in np.argsort(-(documents @ query), kind="stable")[:3]
    ]


def test_rows_without_text_get_no_vector(models: dict[str, str]) -> None:
    function = get_registry().get("shoal").create(model=models["dense"])
    assert [one is None for one in function.compute_source_embeddings(["fish", "", None])] == [
        False,
        True,
        True,
    ]
    assert function.compute_source_embeddings([]) == []
    assert function.max_retries == 0


def test_table_is_opened_again(
    models: dict[str, str], texts: list[str], tmp_path: Path, token: str, address: str
) -> None:
    get_registry().set_var("shoal_token", token)
    function = (
        get_registry()
        .get("shoal")
        .create(
            model=models["prompted"],
            address=address,
            token="$var:shoal_token",
            options={"truncation": "end"},
        )
    )
    wanted = made(tmp_path, function, texts).search("fish").limit(3).to_list()
    table = lancedb.connect(tmp_path).open_table("texts")
    assert table.search("fish").limit(3).to_list() == wanted
    again = table.embedding_functions["vector"].function
    assert isinstance(again, ShoalEmbeddings)
    assert (again.model, again.token, again.options) == (
        models["prompted"],
        token,
        {"truncation": "end"},
    )
    assert all(
        token.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()
    )
    stored = json.loads(table.schema.metadata[b"embedding_functions"])
    assert stored[0]["name"] == "shoal"
    assert stored[0]["model"]["token"] == "$var:shoal_token"
    assert token not in repr(function)
    assert hash(again) == hash(function)
    with pytest.raises(ValueError, match="Sensitive key 'token'"):
        get_registry().get("shoal").create(model="org/model", token=token)


def test_multi_vectors(
    models: dict[str, str], client: shoal.Client, texts: list[str], tmp_path: Path
) -> None:
    function = get_registry().get("shoal-multivector").create(model=models["hybrid"])
    documents = client.encode(
        models["hybrid"], texts, role="document", representations="multi_vector"
    ).multi_vector
    query = client.encode(
        models["hybrid"], "fish", role="query", representations="multi_vector"
    ).multi_vector[0]
    vectors = function.compute_source_embeddings(texts)
    assert vectors == [rows.tolist() for rows in documents]

    class Text(LanceModel):
        text: str = function.SourceField()
        vector: MultiVector(function.ndims()) = function.VectorField()  # type: ignore[valid-type]

    table = lancedb.connect(tmp_path).create_table("texts", schema=Text)
    table.add(
        [{"text": text, "vector": vector} for text, vector in zip(texts, vectors, strict=True)]
    )
    found = table.search("fish").metric("cosine").limit(3).to_list()
    maxsim = np.array([(query @ rows.T).max(axis=1).sum() for rows in documents])
    assert [one["text"] for one in found] == [
        texts[i] for i in np.argsort(-maxsim, kind="stable")[:3]
    ]
    assert isinstance(
        lancedb.connect(tmp_path).open_table("texts").embedding_functions["vector"].function,
        ShoalMultiVectorEmbeddings,
    )


@pytest.mark.parametrize("kind", ["dense", "reranker"])
def test_reranked_results(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str], tmp_path: Path
) -> None:
    table = made(tmp_path, get_registry().get("shoal").create(model=models["dense"]), texts)
    table.create_index("text", config=FTS())
    wanted = client.score(models[kind], "fish", texts)
    order = [texts[i] for i in wanted.ranking]
    ranked = [float(wanted.scores[i]) for i in wanted.ranking]
    reranker = ShoalReranker(models[kind])
    by_vector = (
        table.search("fish").limit(len(texts)).rerank(reranker, query_string="fish").to_list()
    )
    assert [one["text"] for one in by_vector] == order
    np.testing.assert_allclose([one["_relevance_score"] for one in by_vector], ranked, rtol=1e-6)
    hybrid = table.search("fish", query_type="hybrid").limit(len(texts)).rerank(reranker).to_list()
    assert [one["text"] for one in hybrid] == order
    by_words = (
        table.search("fish", query_type="fts")
        .rerank(ShoalReranker(models[kind], top_n=1))
        .to_list()
    )
    assert [one["text"] for one in by_words] == [next(text for text in order if "fish" in text)]
    nothing = table.search("zeppelin", query_type="fts").rerank(reranker).to_list()
    assert nothing == []
    every = (
        table.search("fish", query_type="hybrid")
        .rerank(ShoalReranker(models[kind], return_score="all"))
        .to_list()
    )
    assert {"_distance", "_score", "_relevance_score"} <= set(every[0])
    assert "_distance" not in by_vector[0]


async def test_extraction(
    models: dict[str, str], client: shoal.Client, texts: list[str], tmp_path: Path
) -> None:
    extractor = ShoalExtractor(models["entities"], options={"aggregation": "none"})
    wanted = client.entities(models["entities"], texts, aggregation="none")
    rows = pa.table({"text": texts})
    enriched = extractor.enrich(rows)
    assert (await extractor.aenrich(rows)).equals(enriched)
    table = lancedb.connect(tmp_path).create_table("texts", enriched)
    found = table.to_arrow()["entities"].to_pylist()
    assert [[one["start"] for one in each] for each in found] == [
        [one.start for one in each.entities] for each in wanted
    ]
    labels = (
        ShoalExtractor(models["dense"], find="labels", labels=["animals", "finance"])
        .enrich(rows)["labels"]
        .to_pylist()
    )
    best = client.classify(models["dense"], texts, ["animals", "finance"])
    assert [one[0]["label"] for one in labels] == [one.labels[0].label for one in best]


async def test_in_the_asynchronous_api(
    models: dict[str, str], texts: list[str], tmp_path: Path
) -> None:
    made(tmp_path, get_registry().get("shoal").create(model=models["dense"]), texts)
    table = await (await lancedb.connect_async(tmp_path)).open_table("texts")
    await table.create_index("text", config=FTS())
    found = (
        await (await table.search("fish", query_type="hybrid"))
        .rerank(ShoalReranker(models["dense"]))
        .to_list()
    )
    assert {one["text"] for one in found} == set(texts)
    assert isinstance(get_registry(), EmbeddingFunctionRegistry)
