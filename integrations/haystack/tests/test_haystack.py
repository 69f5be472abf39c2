"""shoal-haystack in Haystack's pipelines, their serialisation, and against the numbers of
`shoal.Client`.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
import shoal
from haystack import Document, Pipeline
from haystack.components.embedders.types import DocumentEmbedder, TextEmbedder
from haystack.components.preprocessors import DocumentSplitter
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.core.serialization import component_from_dict, component_to_dict
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret
from haystack_integrations.components.embedders.shoal import (
    ShoalDocumentEmbedder,
    ShoalMultiVectorDocumentEmbedder,
    ShoalMultiVectorTextEmbedder,
    ShoalSparseDocumentEmbedder,
    ShoalSparseTextEmbedder,
    ShoalTextEmbedder,
)
from haystack_integrations.components.extractors.shoal import ShoalExtractor
from haystack_integrations.components.preprocessors.shoal import ShoalDocumentSplitter
from haystack_integrations.components.rankers.shoal import ShoalRanker

TEXT_EMBEDDERS = (ShoalTextEmbedder, ShoalSparseTextEmbedder, ShoalMultiVectorTextEmbedder)
DOCUMENT_EMBEDDERS = (
    ShoalDocumentEmbedder,
    ShoalSparseDocumentEmbedder,
    ShoalMultiVectorDocumentEmbedder,
)
ALL = (*TEXT_EMBEDDERS, *DOCUMENT_EMBEDDERS, ShoalRanker, ShoalExtractor, ShoalDocumentSplitter)


def documents(texts: list[str]) -> list[Document]:
    return [
        Document(id=str(number), content=text, meta={"title": f"title {number}"})
        for number, text in enumerate(texts)
    ]


@pytest.mark.parametrize("kind", ["dense", "prompted"])
async def test_dense_vectors(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    text, document = ShoalTextEmbedder(models[kind]), ShoalDocumentEmbedder(models[kind])
    rows = client.encode(models[kind], texts, role="document").dense.tolist()
    query = client.encode(models[kind], texts[0], role="query").dense[0].tolist()
    given = documents(texts)
    assert [one.embedding for one in document.run(given)["documents"]] == rows
    assert [one.embedding for one in (await document.run_async(given))["documents"]] == rows
    assert (
        text.run(texts[0])
        == await text.run_async(texts[0])
        == {"embedding": query, "meta": {"model": models[kind]}}
    )
    assert (query != rows[0]) is (kind == "prompted")
    assert all(one.embedding is None for one in given)
    assert document.run([])["documents"] == []


async def test_sparse_vectors(
    models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    text, document = (
        ShoalSparseTextEmbedder(models["hybrid"]),
        ShoalSparseDocumentEmbedder(models["hybrid"]),
    )
    rows = client.encode(models["hybrid"], texts, role="document", representations="sparse").sparse
    found = document.run(documents(texts))["documents"]
    assert [(one.sparse_embedding.indices, one.sparse_embedding.values) for one in found] == [
        (columns.tolist(), weights.tolist()) for columns, weights in rows
    ]
    assert (await document.run_async(documents(texts)))["documents"] == found
    query = text.run(texts[0])
    assert query == await text.run_async(texts[0])
    assert query["sparse_embedding"] != found[0].sparse_embedding


async def test_multi_vectors(
    models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    text, document = (
        ShoalMultiVectorTextEmbedder(models["hybrid"]),
        ShoalMultiVectorDocumentEmbedder(models["hybrid"]),
    )
    rows = client.encode(
        models["hybrid"], texts, role="document", representations="multi_vector"
    ).multi_vector
    found = document.run(documents(texts))["documents"]
    assert [one.meta["multi_vector"] for one in found] == [row.tolist() for row in rows]
    assert found[0].meta["title"] == "title 0"
    assert (await document.run_async(documents(texts)))["documents"] == found
    query = text.run(texts[0])
    assert query == await text.run_async(texts[0])
    assert query["multi_vector"] != found[0].meta["multi_vector"]


def test_meta_fields_are_read(models: dict[str, str], client: shoal.Client) -> None:
    embedder = ShoalDocumentEmbedder(
        models["dense"], meta_fields_to_embed=["title", "none"], embedding_separator=" | "
    )
    (found,) = embedder.run([Document(content="content", meta={"title": "title"})])["documents"]
    assert (
        found.embedding
        == client.encode(models["dense"], "title | content", role="document").dense[0].tolist()
    )


@pytest.mark.parametrize("kind", ["dense", "reranker"])
async def test_ranked_documents(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    ranker = ShoalRanker(models[kind], top_k=3)
    given = documents(texts)
    found = ranker.run("fish", given)["documents"]
    wanted = client.score(models[kind], "fish", texts, top_n=3)
    assert [(one.id, one.score) for one in found] == [
        (str(i), float(wanted.scores[i])) for i in wanted.ranking.tolist()
    ]
    assert (await ranker.run_async("fish", given))["documents"] == found
    assert ranker.run("fish", given, top_k=1)["documents"] == found[:1]
    assert ranker.run("fish", [])["documents"] == []
    assert all(one.score is None for one in given)
    with pytest.raises(ValueError, match="top_k"):
        ranker.run("fish", given, top_k=0)


async def test_extraction(models: dict[str, str], client: shoal.Client, texts: list[str]) -> None:
    extractor = ShoalExtractor(models["entities"], options={"aggregation": "none"})
    wanted = client.entities(models["entities"], texts, aggregation="none")
    assert any(one.entities for one in wanted)
    found = extractor.run(documents(texts))["documents"]
    assert [[one["start"] for one in document.meta["named_entities"]] for document in found] == [
        [one.start for one in each.entities] for each in wanted
    ]
    assert (await extractor.run_async(documents(texts)))["documents"] == found
    labels = ShoalExtractor(models["dense"], find="labels", labels=["animals", "finance"]).run(
        documents(texts)
    )["documents"]
    best = client.classify(models["dense"], texts, ["animals", "finance"])
    assert [document.meta["labels"][0]["label"] for document in labels] == [
        one.labels[0].label for one in best
    ]


@pytest.mark.parametrize("method", ["sentences", "tokens", "markdown"])
async def test_split_documents(
    method: Any, models: dict[str, str], client: shoal.Client, long_texts: list[str]
) -> None:
    splitter = ShoalDocumentSplitter(models["dense"], method=method, max_tokens=12, overlap=4)
    given = documents(long_texts)
    wanted = client.encode(
        models["dense"],
        [text for text in long_texts if text],
        role="document",
        chunking=shoal.Chunking(method, 12, 4),
    ).chunks
    found = splitter.run(given)["documents"]
    assert [(one.content, one.meta["split_idx_start"]) for one in found] == [
        (chunk.text, chunk.start) for own in wanted for chunk in own
    ]
    assert [one.meta["split_id"] for one in found] == [
        number for own in wanted for number in range(len(own))
    ]
    for one in found:
        text, start = long_texts[int(one.meta["source_id"])], one.meta["split_idx_start"]
        assert text[start : start + len(one.content)] == one.content
        assert one.meta["title"] == f"title {one.meta['source_id']}"
        assert one.embedding is None
    assert (await splitter.run_async(given))["documents"] == found
    assert (
        splitter.run([])["documents"] == splitter.run([Document(content=None)])["documents"] == []
    )
    assert given == documents(long_texts), "documents are returned as new objects"


def test_page_numbers(models: dict[str, str]) -> None:
    splitter = ShoalDocumentSplitter(models["dense"], max_tokens=8)
    text = "Fish swim in shoals.\f\fShips sail at sea.\fA table of wood."
    for meta, first in (({}, 1), ({"page_number": 7}, 7)):
        found = splitter.run([Document(content=text, meta=meta)])["documents"]
        assert [(one.content, one.meta["page_number"]) for one in found] == [
            ("Fish swim in shoals.", first),
            ("Ships sail at sea.", first + 2),
            ("A table of wood.", first + 3),
        ]


def test_overlaps_have_haystacks_form(models: dict[str, str]) -> None:
    """The overlaps are those that Haystack's own splitter finds in the same chunks."""
    splitter = ShoalDocumentSplitter(models["dense"], method="tokens", max_tokens=6, overlap=2)
    found = splitter.run([Document(content="Fish swim in shoals and ships sail at sea.")])[
        "documents"
    ]
    assert len(found) > 1
    theirs = DocumentSplitter(split_by="word", split_length=3, split_overlap=1)
    same = theirs._create_docs_from_splits(
        [one.content for one in found],
        [one.meta["page_number"] for one in found],
        [one.meta["split_idx_start"] for one in found],
        {"source_id": found[0].meta["source_id"]},
    )
    assert [one.to_dict() for one in same] == [one.to_dict() for one in found]
    assert found[0].meta["_split_overlap"]


@pytest.mark.parametrize("late", [False, True])
async def test_embedded_chunks(
    late: bool, models: dict[str, str], client: shoal.Client, long_texts: list[str]
) -> None:
    splitter = ShoalDocumentSplitter(models["dense"], max_tokens=12, embed=not late, late=late)
    found = splitter.run(documents(long_texts))["documents"]
    wanted = client.encode(
        models["dense"],
        [text for text in long_texts if text],
        role="document",
        chunking=shoal.Chunking(max_tokens=12, late=late),
    )
    assert [one.embedding for one in found] == wanted.dense.tolist()
    assert (await splitter.run_async(documents(long_texts)))["documents"] == found
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    store.write_documents(found)
    query = ShoalTextEmbedder(models["dense"]).run("a table of wood")["embedding"]
    best = store.embedding_retrieval(query, top_k=1)
    assert best[0].meta["source_id"] == "2"


def test_unknown_method_of_splitter_is_refused(models: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="method must be one of sentences, tokens, markdown"):
        ShoalDocumentSplitter(models["dense"], method="spans")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ALL)
def test_written_and_read_again_without_the_token(
    kind: Any, token: str, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", token)
    one = kind(
        models["hybrid"],
        tenant="search",
        token=Secret.from_env_var("MY_TOKEN"),
        options={"truncation": "none"},
    )
    data = component_to_dict(one, "one")
    assert token not in str(data)
    assert data["init_parameters"]["token"] == {
        "type": "env_var",
        "env_vars": ["MY_TOKEN"],
        "strict": True,
    }
    again = component_from_dict(kind, data, "one")
    assert again.to_dict() == data
    assert set(data["init_parameters"]) == set(inspect.signature(kind.__init__).parameters) - {
        "self"
    }
    with pytest.raises(ValueError, match="Cannot serialize token-based secret"):
        kind(models["hybrid"], token=Secret.from_token(token)).to_dict()


def search(models: dict[str, str], store: InMemoryDocumentStore) -> Pipeline:
    pipeline = Pipeline()
    pipeline.add_component("embedder", ShoalTextEmbedder(models["dense"]))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store))
    pipeline.add_component("ranker", ShoalRanker(models["dense"], top_k=1))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    pipeline.connect("retriever.documents", "ranker.documents")
    return pipeline


def test_pipeline_is_written_read_and_run(models: dict[str, str], texts: list[str]) -> None:
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    store.write_documents(ShoalDocumentEmbedder(models["dense"]).run(documents(texts))["documents"])
    pipeline = search(models, store)
    asked = {"embedder": {"text": "fish"}, "ranker": {"query": "fish"}}
    wanted = pipeline.run(asked)
    again = Pipeline.loads(pipeline.dumps())
    assert again.run(asked) == wanted
    with_async = asyncio.run(search(models, store).run_async(asked))
    assert with_async["ranker"] == wanted["ranker"]


@pytest.mark.parametrize("kind", TEXT_EMBEDDERS)
def test_text_embedders_take_text_alone(kind: Any, models: dict[str, str]) -> None:
    embedder: TextEmbedder = kind(models["hybrid"])
    with pytest.raises(TypeError, match="a text is embedded"):
        embedder.run([Document(content="text")])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [*DOCUMENT_EMBEDDERS, ShoalExtractor, ShoalDocumentSplitter])
def test_document_embedders_take_documents_alone(kind: Any, models: dict[str, str]) -> None:
    embedder: DocumentEmbedder = kind(models["hybrid"])
    for wrong in ("text", ["text"]):
        with pytest.raises(TypeError, match="a list of Documents"):
            embedder.run(wrong)  # type: ignore[arg-type]


async def test_closed_and_used_again(models: dict[str, str]) -> None:
    embedder = ShoalTextEmbedder(models["dense"])
    first = embedder.run("fish")
    embedder.close()
    assert embedder.run("fish") == first == await embedder.run_async("fish")
    await embedder.close_async()
    assert await embedder.run_async("fish") == first
