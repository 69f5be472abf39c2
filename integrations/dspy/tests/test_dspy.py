"""shoal-dspy in DSPy's retriever and modules, and against the numbers of `shoal.Client`."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import dspy
import numpy as np
import pytest
import shoal
from shoal_dspy import ShoalEmbedder, ShoalExtractor, ShoalReranker, ShoalRetriever


@pytest.mark.parametrize("kind", ["dense", "prompted"])
async def test_roles_are_those_of_the_client(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    for role in (None, "query", "document"):
        embedder = ShoalEmbedder(models[kind], role=role)
        wanted = client.encode(models[kind], texts, role=role).dense
        for found in (embedder(texts), await embedder.acall(texts)):
            np.testing.assert_array_equal(found, wanted)
            assert found.dtype == np.float32
        np.testing.assert_array_equal(embedder(texts[0]), wanted[0])
        np.testing.assert_array_equal(await embedder.acall(texts[0]), wanted[0])
    query, document = (
        ShoalEmbedder(models[kind], role="query"),
        ShoalEmbedder(models[kind]).for_role("document"),
    )
    assert np.array_equal(query(texts), document(texts)) is (kind == "dense")


def test_cache_of_dspy_mixes_up_no_models(models: dict[str, str]) -> None:
    one, other = ShoalEmbedder(models["prompted"]), ShoalEmbedder(models["hybrid"])
    assert not np.array_equal(one("fish", caching=True), other("fish", caching=True))


@pytest.mark.parametrize("kind", ["dense", "prompted"])
async def test_retrieved_passages(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str], tmp_path: Path
) -> None:
    retriever = ShoalRetriever(texts, ShoalEmbedder(models[kind]), k=3)
    found = retriever("fish")
    scores = (
        client.encode(models[kind], texts, role="document").dense
        @ client.encode(models[kind], "fish", role="query").dense[0]
    )
    assert found.indices == np.argsort(-scores, kind="stable")[:3].tolist()
    assert found.passages == [texts[index] for index in found.indices]
    assert (await retriever.acall("fish")).indices == found.indices
    retriever.save(str(tmp_path))
    assert (
        ShoalRetriever.from_saved(str(tmp_path), ShoalEmbedder(models[kind]))("fish").indices
        == found.indices
    )


@pytest.mark.parametrize("kind", ["dense", "reranker"])
async def test_reranked_passages(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    reranker = ShoalReranker(models[kind], k=3)
    found = reranker(query="fish", passages=texts)
    wanted = client.score(models[kind], "fish", texts, top_n=3)
    assert (found.indices, found.scores) == (
        wanted.ranking.tolist(),
        wanted.scores[wanted.ranking].tolist(),
    )
    assert found.passages == [texts[index] for index in found.indices]
    assert (await reranker.acall(query="fish", passages=texts)).toDict() == found.toDict()
    assert reranker(query="fish", passages=texts, k=0).indices[:3] == found.indices
    assert reranker(query="fish", passages=[]).passages == []


async def test_extraction(models: dict[str, str], client: shoal.Client, texts: list[str]) -> None:
    extractor = ShoalExtractor(models["entities"], options={"aggregation": "none"})
    wanted = client.entities(models["entities"], texts, aggregation="none")
    found = [extractor(text=text).found for text in texts]
    assert [[one["start"] for one in each] for each in found] == [
        [one.start for one in each.entities] for each in wanted
    ]
    assert (await extractor.acall(text=texts[0])).found == found[0]
    assert dspy.Tool(extractor.tool)(text=texts[0]) == found[0]
    labels = ShoalExtractor(models["dense"], find="labels", labels=["animals", "finance"])(
        text=texts[0]
    ).found
    assert (
        labels[0]["label"]
        == client.classify(models["dense"], texts[0], ["animals", "finance"])[0].labels[0].label
    )


class Program(dspy.Module):
    def __init__(self, retriever: ShoalRetriever, reranker: ShoalReranker) -> None:
        super().__init__()
        self.retriever, self.reranker = retriever, reranker

    def forward(self, query: str) -> dspy.Prediction:
        return self.reranker(query=query, passages=self.retriever(query).passages)


def test_in_a_program(models: dict[str, str], texts: list[str]) -> None:
    program = Program(
        ShoalRetriever(texts, ShoalEmbedder(models["dense"]), k=3),
        ShoalReranker(models["dense"], k=1),
    )
    best = program(query="fish").passages
    assert len(best) == 1
    assert program.reranker.deepcopy()(query="fish", passages=texts).passages == best


def test_pickle_has_no_token(token: str, models: dict[str, str], texts: list[str]) -> None:
    for one in (
        ShoalReranker(models["dense"], token=token),
        ShoalEmbedder(models["dense"], token=token),
    ):
        assert token.encode() not in pickle.dumps(one)
    reranker = pickle.loads(
        pickle.dumps(ShoalReranker(models["dense"], token=token, options={"truncation": "end"}))
    )
    assert reranker.handle.options == {"truncation": "end"}
    assert len(reranker(query="fish", passages=texts).passages) == len(texts)


def test_each_event_loop_has_its_client(models: dict[str, str]) -> None:
    embedder = ShoalEmbedder(models["dense"])
    np.testing.assert_array_equal(
        asyncio.run(embedder.acall("fish")), asyncio.run(embedder.acall("fish"))
    )
