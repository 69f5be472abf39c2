"""shoal-llama-index in LlamaIndex's own pipelines, and against the numbers of `shoal.Client`."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
import qdrant_client
import shoal
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.embeddings.base_sparse import BaseSparseEmbedding
from llama_index.core.extractors import BaseExtractor
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.node_parser import NodeParser
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.vector_stores.qdrant import QdrantVectorStore
from pydantic import Field, SecretStr
from shoal_llama_index import (
    ShoalEmbedding,
    ShoalExtractor,
    ShoalNodeParser,
    ShoalReranker,
    ShoalSparseEmbedding,
)

ALL = (ShoalEmbedding, ShoalExtractor, ShoalNodeParser, ShoalReranker, ShoalSparseEmbedding)


def nodes(texts: list[str]) -> list[TextNode]:
    return [TextNode(text=text, id_=str(number)) for number, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    list(
        zip(
            ALL,
            (
                BaseEmbedding,
                BaseExtractor,
                NodeParser,
                BaseNodePostprocessor,
                BaseSparseEmbedding,
            ),
            strict=True,
        )
    ),
)
def test_base_classes(ours: type, theirs: type) -> None:
    """The tests of LlamaIndex's packages check the same."""
    assert theirs.__name__ in {base.__name__ for base in ours.__mro__}
    assert "class_name" in vars(ours)


@pytest.mark.parametrize("kind", ["dense", "prompted"])
async def test_roles_are_those_of_the_client(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    embedding = ShoalEmbedding(model=models[kind])
    documents = client.encode(models[kind], texts, role="document").dense.tolist()
    query = client.encode(models[kind], texts[0], role="query").dense[0].tolist()
    assert (
        embedding.get_text_embedding_batch(texts)
        == await embedding.aget_text_embedding_batch(texts)
        == documents
    )
    assert (
        embedding.get_text_embedding(texts[0])
        == await embedding.aget_text_embedding(texts[0])
        == documents[0]
    )
    assert (
        embedding.get_query_embedding(texts[0])
        == await embedding.aget_query_embedding(texts[0])
        == query
    )
    assert (query != documents[0]) is (kind == "prompted")
    assert embedding.get_text_embedding_batch([]) == []
    assert all(type(number) is float for number in query)


async def test_sparse_vectors(
    models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    sparse = ShoalSparseEmbedding(model=models["hybrid"])
    wanted = client.encode(
        models["hybrid"], texts, role="document", representations="sparse"
    ).sparse
    rows = [
        dict(zip(columns.tolist(), weights.tolist(), strict=True)) for columns, weights in wanted
    ]
    assert (
        sparse.get_text_embedding_batch(texts)
        == await sparse.aget_text_embedding_batch(texts)
        == rows
    )
    query = sparse.get_query_embedding(texts[0])
    assert query == await sparse.aget_query_embedding(texts[0]) != rows[0]
    assert sparse.documents(texts) == (
        [list(row) for row in rows],
        [list(row.values()) for row in rows],
    )
    assert sparse.queries(texts[:1]) == ([list(query)], [list(query.values())])


def test_hybrid_search_in_qdrant(models: dict[str, str], texts: list[str]) -> None:
    sparse = ShoalSparseEmbedding(model=models["hybrid"])
    store = QdrantVectorStore(
        "texts",
        client=qdrant_client.QdrantClient(":memory:"),
        enable_hybrid=True,
        sparse_doc_fn=sparse.documents,
        sparse_query_fn=sparse.queries,
    )
    index = VectorStoreIndex(
        [TextNode(text=text) for text in texts],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=ShoalEmbedding(model=models["hybrid"]),
    )  # fmt: skip
    found = index.as_retriever(
        vector_store_query_mode="hybrid", similarity_top_k=len(texts), sparse_top_k=len(texts)
    ).retrieve("fish")
    assert {one.text for one in found} == set(texts)


class Heard(BaseEventHandler):
    names: list[str] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "Heard"

    def handle(self, event: Any, **_: Any) -> None:
        self.names.append(event.class_name())


@pytest.mark.parametrize("kind", ["dense", "reranker"])
async def test_reranked_nodes(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    heard = Heard()
    get_dispatcher().add_event_handler(heard)
    reranker = ShoalReranker(model=models[kind], top_n=3)
    given = [NodeWithScore(node=node, score=0.0) for node in nodes(texts)]
    found = reranker.postprocess_nodes(given, query_str="fish")
    wanted = client.score(models[kind], "fish", texts, top_n=3)
    assert [(one.node_id, one.score) for one in found] == [
        (str(i), float(wanted.scores[i])) for i in wanted.ranking.tolist()
    ]
    again = await reranker.apostprocess_nodes(given, query_str="fish")
    assert [one.model_dump() for one in again] == [one.model_dump() for one in found]
    assert [one.score for one in given] == [0.0] * len(texts)
    assert reranker.postprocess_nodes([], query_str="fish") == []
    assert heard.names[:2] == ["ReRankStartEvent", "ReRankEndEvent"]
    with pytest.raises(ValueError, match="a query is needed"):
        reranker.postprocess_nodes(given)


async def test_extraction_in_a_pipeline(
    models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    extractor = ShoalExtractor(model=models["entities"], options={"aggregation": "none"})
    wanted = client.entities(models["entities"], texts, aggregation="none")
    assert any(one.entities for one in wanted)
    pipeline = IngestionPipeline(
        transformations=[
            extractor,
            ShoalExtractor(model=models["dense"], find="labels", labels=["animals", "finance"]),
            ShoalEmbedding(model=models["dense"]),
        ],
        disable_cache=True,
    )
    made = await pipeline.arun(nodes=nodes(texts))
    assert [[one["start"] for one in node.metadata["entities"]] for node in made] == [
        [one.start for one in each.entities] for each in wanted
    ]
    labels = client.classify(models["dense"], texts, ["animals", "finance"])
    assert [node.metadata["labels"][0]["label"] for node in made] == [
        one.labels[0].label for one in labels
    ]
    assert all(len(node.embedding) == 384 for node in made)
    assert extractor.extract(nodes(texts)) == await extractor.aextract(nodes(texts))


@pytest.mark.parametrize("method", ["sentences", "tokens", "markdown"])
async def test_parsed_nodes(
    method: Any, models: dict[str, str], client: shoal.Client, long_texts: list[str]
) -> None:
    parser = ShoalNodeParser(model=models["dense"], method=method, max_tokens=12, overlap=4)
    documents = [
        Document(text=text, metadata={"file": str(number)})
        for number, text in enumerate(long_texts)
    ]
    wanted = client.encode(
        models["dense"],
        [text for text in long_texts if text],
        role="document",
        chunking=shoal.Chunking(method, 12, 4),
    ).chunks
    found = parser.get_nodes_from_documents(documents)
    again = await parser.aget_nodes_from_documents(documents)
    for nodes in (found, again):
        assert [(one.text, one.start_char_idx, one.end_char_idx) for one in nodes] == [
            (chunk.text, chunk.start, chunk.end) for own in wanted for chunk in own
        ]
        for one in nodes:
            text = documents[int(one.metadata["file"])].text
            assert text[one.start_char_idx : one.end_char_idx] == one.text
            assert documents[int(one.metadata["file"])].node_id == one.ref_doc_id
            assert one.embedding is None
    first, second = found[:2]
    assert first.prev_node is None
    assert first.next_node.node_id == second.node_id
    assert second.prev_node.node_id == first.node_id
    assert found[len(wanted[0])].prev_node is None
    assert parser.get_nodes_from_documents([]) == []


def test_repeated_text_has_its_place(models: dict[str, str]) -> None:
    """LlamaIndex's own search finds the second chunk, "Ab.", within the first one."""
    parser = ShoalNodeParser(model=models["dense"], max_tokens=3)
    found = parser.get_nodes_from_documents([Document(text="Ab Ab. Ab. Ab Ab. Ab.")])
    places = [(one.start_char_idx, one.end_char_idx) for one in found]
    assert places == [(0, 6), (7, 10), (11, 17), (18, 21)]


@pytest.mark.parametrize("late", [False, True])
async def test_embedded_nodes_in_an_index(
    late: bool, models: dict[str, str], client: shoal.Client, long_texts: list[str]
) -> None:
    parser = ShoalNodeParser(model=models["dense"], max_tokens=12, embed=not late, late=late)
    documents = [Document(text=text, id_=str(number)) for number, text in enumerate(long_texts)]
    found = await IngestionPipeline(transformations=[parser]).arun(documents=documents)
    wanted = client.encode(
        models["dense"],
        [text for text in long_texts if text],
        role="document",
        chunking=shoal.Chunking(max_tokens=12, late=late),
    )
    assert [one.embedding for one in found] == wanted.dense.tolist()
    index = VectorStoreIndex(found, embed_model=ShoalEmbedding(model=models["dense"]))
    stored = index.vector_store.data.embedding_dict
    assert [stored[one.node_id] for one in found] == wanted.dense.tolist()
    best = index.as_retriever(similarity_top_k=1).retrieve("a table of wood")
    assert best[0].node.ref_doc_id == "2"


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
    _ = one.handle
    if kind is ShoalSparseEmbedding:  # BaseSparseEmbedding is a plain pydantic model
        text = one.model_dump_json()
        again = kind.model_validate_json(text)
    else:
        text = one.to_json()
        again = kind.from_json(text)
    assert token not in text
    assert token not in repr(one)
    assert (again.model_name, again.tenant, again.options) == (
        models["hybrid"],
        "search",
        {"truncation": "none"},
    )
    assert again.token is None
    if kind is ShoalEmbedding:
        assert token not in str(one.to_payload())


@pytest.mark.parametrize("kind", ALL)
def test_both_names_of_the_model_are_accepted(kind: Any) -> None:
    """`model` is the name in all integrations, `model_name` the one of LlamaIndex."""
    assert kind(model="org/one").model_name == kind(model_name="org/one").model_name == "org/one"
    with pytest.raises(ValueError, match="model"):
        kind()


def test_pickled_embedding_works(models: dict[str, str]) -> None:
    embedding = ShoalEmbedding(model=models["dense"])
    vector = embedding.get_query_embedding("fish")
    assert pickle.loads(pickle.dumps(embedding)).get_query_embedding("fish") == vector


def test_each_event_loop_has_its_client(models: dict[str, str]) -> None:
    embedding = ShoalEmbedding(model=models["dense"])
    first = asyncio.run(embedding.aget_query_embedding("fish"))
    assert (
        first
        == asyncio.run(embedding.aget_query_embedding("fish"))
        == embedding.get_query_embedding("fish")
    )
