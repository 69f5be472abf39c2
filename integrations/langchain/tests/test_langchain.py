"""shoal-langchain in LangChain's own test kit, and against the numbers of `shoal.Client`."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest
import shoal
from langchain_core.documents import Document
from langchain_core.load import dumps, loads
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_qdrant import QdrantVectorStore, RetrievalMode
from langchain_tests.integration_tests import EmbeddingsIntegrationTests, ToolsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests, ToolsUnitTests
from langchain_text_splitters import TextSplitter
from pydantic import SecretStr
from shoal_langchain import (
    ShoalEmbeddings,
    ShoalExtractor,
    ShoalReranker,
    ShoalSparseEmbeddings,
    ShoalTagger,
    ShoalTextSplitter,
)

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
ALL = (
    ShoalEmbeddings,
    ShoalExtractor,
    ShoalReranker,
    ShoalSparseEmbeddings,
    ShoalTagger,
    ShoalTextSplitter,
)


class TestEmbeddingsUnit(EmbeddingsUnitTests):
    @property
    def embeddings_class(self) -> type[ShoalEmbeddings]:
        return ShoalEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": MINILM}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"SHOAL_TOKEN": "t0"}, {"model": MINILM}, {"token": "t0"}


class TestEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[ShoalEmbeddings]:
        return ShoalEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": MINILM, "options": {"dimensions": 128}}


EXTRACTOR = {"model": "random/entities", "options": {"aggregation": "none"}}


class TestToolUnit(ToolsUnitTests):
    @property
    def tool_constructor(self) -> type[ShoalExtractor]:
        return ShoalExtractor

    @property
    def tool_constructor_params(self) -> dict[str, Any]:
        return EXTRACTOR

    @property
    def tool_invoke_params_example(self) -> dict[str, Any]:
        return {"text": "Anna lives in Bern."}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"SHOAL_TOKEN": "t0"}, EXTRACTOR, {"token": "t0"}


class TestTool(ToolsIntegrationTests):
    @property
    def tool_constructor(self) -> type[ShoalExtractor]:
        return ShoalExtractor

    @property
    def tool_constructor_params(self) -> dict[str, Any]:
        return EXTRACTOR

    @property
    def tool_invoke_params_example(self) -> dict[str, Any]:
        return {"text": "Anna lives in Bern."}


@pytest.mark.parametrize("kind", ["dense", "prompted"])
async def test_roles_are_those_of_the_client(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    embeddings = ShoalEmbeddings(model=models[kind])
    documents = client.encode(models[kind], texts, role="document").dense.tolist()
    query = client.encode(models[kind], texts[0], role="query").dense[0].tolist()
    assert (
        embeddings.embed_documents(texts) == await embeddings.aembed_documents(texts) == documents
    )
    assert embeddings.embed_query(texts[0]) == await embeddings.aembed_query(texts[0]) == query
    assert (query != documents[0]) is (kind == "prompted")
    assert embeddings.embed_documents([]) == await embeddings.aembed_documents([]) == []
    assert all(type(number) is float for number in query)


async def test_sparse_vectors(
    models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    sparse = ShoalSparseEmbeddings(model=models["hybrid"])
    wanted = client.encode(
        models["hybrid"], texts, role="document", representations="sparse"
    ).sparse
    found = sparse.embed_documents(texts)
    assert found == await sparse.aembed_documents(texts)
    assert [(one.indices, one.values) for one in found] == [
        (columns.tolist(), weights.tolist()) for columns, weights in wanted
    ]
    assert sparse.embed_query(texts[0]) == await sparse.aembed_query(texts[0]) != found[0]


def test_hybrid_search_in_qdrant(models: dict[str, str], texts: list[str]) -> None:
    store = QdrantVectorStore.from_texts(
        texts,
        embedding=ShoalEmbeddings(model=models["hybrid"]),
        sparse_embedding=ShoalSparseEmbeddings(model=models["hybrid"]),
        retrieval_mode=RetrievalMode.HYBRID,
        location=":memory:",
        collection_name="texts",
    )
    assert {found.page_content for found in store.similarity_search(texts[0], k=len(texts))} == set(
        texts
    )


@pytest.mark.parametrize("kind", ["dense", "reranker"])
async def test_reranked_documents(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    documents = [Document(text, metadata={"number": number}) for number, text in enumerate(texts)]
    reranker = ShoalReranker(model=models[kind], top_n=3)
    found = reranker.compress_documents(documents, "fish")
    wanted = client.score(models[kind], "fish", texts, top_n=3)
    assert [one.metadata["number"] for one in found] == wanted.ranking.tolist()
    assert [one.metadata["relevance_score"] for one in found] == wanted.scores[
        wanted.ranking
    ].tolist()
    assert list(await reranker.acompress_documents(documents, "fish")) == list(found)
    assert all("relevance_score" not in document.metadata for document in documents)
    assert list(reranker.compress_documents([], "fish")) == []


async def test_extraction(models: dict[str, str], client: shoal.Client, texts: list[str]) -> None:
    tool = ShoalExtractor(model=models["entities"], options={"aggregation": "none"})
    wanted = client.entities(models["entities"], texts, aggregation="none")
    assert any(one.entities for one in wanted)
    found = [tool.invoke({"text": text}) for text in texts]
    assert [[one["start"] for one in each] for each in found] == [
        [one.start for one in each.entities] for each in wanted
    ]
    assert found[0] == await tool.ainvoke({"text": texts[0]})
    tagger = ShoalTagger(model=models["dense"], find="labels", labels=["animals", "finance"])
    tagged = tagger.transform_documents([Document(text) for text in texts])
    assert list(tagged) == list(
        await tagger.atransform_documents([Document(text) for text in texts])
    )
    labels = client.classify(models["dense"], texts, ["animals", "finance"])
    assert [one.metadata["labels"][0]["label"] for one in tagged] == [
        one.labels[0].label for one in labels
    ]


@pytest.mark.parametrize("method", ["sentences", "tokens", "markdown"])
async def test_split_documents(
    method: Any, models: dict[str, str], client: shoal.Client, long_texts: list[str]
) -> None:
    splitter = ShoalTextSplitter(model=models["dense"], method=method, max_tokens=12, overlap=4)
    assert isinstance(splitter, TextSplitter)
    given = [
        Document(text, metadata={"tags": [number]})
        for number, text in enumerate(long_texts)
        if text
    ]
    wanted = client.encode(
        models["dense"],
        [document.page_content for document in given],
        role="document",
        chunking=shoal.Chunking(method, 12, 4),
    ).chunks
    found = splitter.split_documents(iter(given))
    assert [(one.page_content, one.metadata["start_index"]) for one in found] == [
        (chunk.text, chunk.start) for own in wanted for chunk in own
    ]
    assert len(wanted[0]) > 1
    assert [one.metadata["tags"] for one in found] == [
        document.metadata["tags"] for document, own in zip(given, wanted, strict=True) for _ in own
    ]
    found[0].metadata["tags"].append("more")
    assert given[0].metadata == {"tags": [0]}, "metadata is copied"
    assert found[1].metadata["tags"] == [0]
    found[0].metadata["tags"].pop()
    assert found == await splitter.asplit_documents(given)
    assert found == list(splitter.transform_documents(given))
    assert found == list(await splitter.atransform_documents(given))


async def test_start_index_is_exact(models: dict[str, str], long_texts: list[str]) -> None:
    splitter = ShoalTextSplitter(model=models["dense"], max_tokens=8)
    metadatas = [{"text": text} for text in long_texts]
    found = splitter.create_documents(long_texts, metadatas)
    assert found == await splitter.acreate_documents(long_texts, metadatas)
    starts = [one.metadata["start_index"] for one in found if one.metadata["text"] == long_texts[0]]
    assert starts == sorted(set(starts)), "repeated sentences have different places"
    for one in found:
        start, text = one.metadata["start_index"], one.metadata["text"]
        assert text[start : start + len(one.page_content)] == one.page_content
    without = ShoalTextSplitter(model=models["dense"], max_tokens=8, add_start_index=False)
    assert [one.page_content for one in found] == [
        one.page_content for one in without.create_documents(long_texts)
    ]
    assert {key for one in without.create_documents(long_texts) for key in one.metadata} == set()
    assert splitter.split_text(long_texts[0]) == await splitter.asplit_text(long_texts[0])
    assert splitter.split_text("") == await splitter.asplit_text("") == []
    assert splitter.split_documents([]) == []


@pytest.mark.parametrize("late", [False, True])
async def test_split_and_embed(
    late: bool, models: dict[str, str], client: shoal.Client, long_texts: list[str]
) -> None:
    splitter = ShoalTextSplitter(model=models["dense"], max_tokens=12, late=late)
    given = [Document(text) for text in long_texts]
    documents, vectors = splitter.split_and_embed(given)
    assert documents == splitter.split_documents(given)
    assert (documents, vectors) == await splitter.asplit_and_embed(given)
    wanted = client.encode(
        models["dense"],
        [text for text in long_texts if text],
        role="document",
        chunking=shoal.Chunking(max_tokens=12, late=late),
    )
    assert vectors == wanted.dense.tolist()
    alone = ShoalEmbeddings(model=models["dense"]).embed_documents(
        [one.page_content for one in documents]
    )
    assert np.allclose(vectors, alone, atol=1e-5) is not late


@pytest.mark.parametrize("kind", ALL)
def test_written_and_read_again_without_the_token(
    kind: Any, token: str, models: dict[str, str]
) -> None:
    one = kind(
        model=models["hybrid"],
        tenant="search",
        token=SecretStr(token),
        options={"truncation": "none"},
    )
    text = dumps(one)
    assert token not in text
    assert token not in repr(one)
    again = loads(
        text,
        allowed_objects=[kind],
        valid_namespaces=["shoal_langchain"],
        secrets_map={"SHOAL_TOKEN": token},
    )
    assert type(again) is kind
    assert (again.model, again.tenant, again.options) == (
        models["hybrid"],
        "search",
        {"truncation": "none"},
    )
    assert again.token.get_secret_value() == token


def test_each_event_loop_has_its_client(models: dict[str, str]) -> None:
    embeddings = ShoalEmbeddings(model=models["dense"])
    first, second = (
        asyncio.run(embeddings.aembed_query("fish")),
        asyncio.run(embeddings.aembed_query("fish")),
    )
    assert first == second == embeddings.embed_query("fish")


def test_in_a_vector_store(models: dict[str, str], texts: list[str]) -> None:
    store = InMemoryVectorStore(ShoalEmbeddings(model=models["dense"]))
    store.add_texts(texts)
    assert store.similarity_search("a shoal of fish", k=1)[0].page_content == texts[0]
    assert np.isclose(store.similarity_search_with_score("ships at sea", k=1)[0][1], 1.0)


def test_options_reach_the_mesh(models: dict[str, str]) -> None:
    assert (
        len(ShoalEmbeddings(model=models["dense"], options={"dimensions": 64}).embed_query("fish"))
        == 64
    )
    assert "SHOAL_TOKEN" not in os.environ
