"""Runs models on evaluation data: encodes, searches every document, reranks, and measures what that
takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import typer

from shoal.cli.evaluation.data import Retrieval, SimilarityPairs
from shoal.client import Client
from shoal.results import EncodeResult

BATCH_TEXTS: Final = 512
"""The default of one call; the client splits it further and keeps several requests in flight."""

RANKING_DEPTH: Final = 100
"""Documents that a ranking keeps, and that a reranker scores."""

Scores = Callable[[int], npt.NDArray[Any]]
"""Takes a query's number and returns its score for each document."""

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EvaluationRun:
    """A model, or a model and a reranker, on all queries.

    Args:
        name: the model's id; with a reranker `model + reranker`.
        rankings: the ids of the best documents of each query, best first.
        tokens_per_second: of documents, or of a reranker's pairs, through the mesh.
        p50_seconds: the median of the time to encode one query, or to rerank its documents, one
            call at a time.
        bytes: the memory of the models on a worker.
    """

    name: str
    rankings: Mapping[str, Sequence[str]]
    tokens_per_second: float
    p50_seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class PairRun:
    """A model on pairs: the similarity of each."""

    name: str
    similarities: Sequence[float]
    tokens_per_second: float
    bytes: int


def retrieve(
    client: Client, model: str, data: Retrieval, on_progress: OnProgress, batch: int = BATCH_TEXTS
) -> EvaluationRun:
    """Rank all documents for each query by the model's vectors."""
    keys, texts = list(data.documents), list(data.documents.values())
    started, tokens, parts = time.perf_counter(), 0, []
    for begin in range(0, len(texts), batch):
        on_progress(f"{model}: {begin:,} of {len(texts):,} documents")
        parts.append(client.encode(model, texts[begin : begin + batch], role="document"))
        tokens += parts[-1].usage.input_tokens
    speed = tokens / (time.perf_counter() - started)
    seconds, rankings = [], {}
    for number, (query, text) in enumerate(data.queries.items()):
        if number % 100 == 0:
            on_progress(f"{model}: {number:,} of {len(data.queries):,} queries")
        started = time.perf_counter()
        encoded = client.encode(model, [text], role="query")
        seconds.append(time.perf_counter() - started)
        scores = np.concatenate([_scores(encoded, part) for part in parts])
        rankings[query] = _best(scores, keys, query)
    return EvaluationRun(model, rankings, speed, float(np.median(seconds)), _bytes(client, model))


def rerank(
    client: Client, reranker: str, run: EvaluationRun, data: Retrieval, on_progress: OnProgress
) -> EvaluationRun:
    """Order the documents of another run by a reranker's scores."""
    seconds, rankings, tokens = [], {}, 0
    for number, (query, found) in enumerate(run.rankings.items()):
        if number % 10 == 0:
            on_progress(f"{reranker}: {number:,} of {len(run.rankings):,} queries")
        started = time.perf_counter()
        result = client.score(reranker, data.queries[query], [data.documents[key] for key in found])
        seconds.append(time.perf_counter() - started)
        tokens += result.usage.input_tokens
        rankings[query] = [found[place] for place in result.ranking.tolist()]
    name, memory = f"{run.name} + {reranker}", run.bytes + _bytes(client, reranker)
    return EvaluationRun(name, rankings, tokens / sum(seconds), float(np.median(seconds)), memory)


def compare_pairs(
    client: Client,
    model: str,
    data: SimilarityPairs,
    on_progress: OnProgress,
    batch: int = BATCH_TEXTS,
) -> PairRun:
    """Return the cosine (of token vectors: MaxSim) of each pair."""
    on_progress(f"{model}: {len(data.scores):,} pairs")
    started = time.perf_counter()
    similarities: list[float] = []
    tokens = 0
    for begin in range(0, len(data.scores), batch):
        first, second = data.first[begin : begin + batch], data.second[begin : begin + batch]
        # Sets pair the same sentences again and again: each is encoded once.
        places = {text: place for place, text in enumerate(dict.fromkeys((*first, *second)))}
        encoded = client.encode(model, list(places))
        tokens += encoded.usage.input_tokens
        similarities += _similarities(
            encoded, [places[text] for text in first], [places[text] for text in second]
        )
    return PairRun(
        model, similarities, tokens / (time.perf_counter() - started), _bytes(client, model)
    )


def _best(scores: npt.NDArray[Any], keys: Sequence[str], query: str) -> list[str]:
    """Return the ids of the best documents. One with the query's own id is left out, as BEIR does:
    it is the query itself.
    """
    order = np.argsort(-scores, kind="stable")[: RANKING_DEPTH + 1].tolist()
    return [keys[place] for place in order if keys[place] != query][:RANKING_DEPTH]


def _scores(query: EncodeResult, documents: EncodeResult) -> npt.NDArray[Any]:
    """Return the score of the first row of `query` with each row of `documents`."""
    form = _form(documents)
    if form == "dense":
        return np.asarray(_rows(documents) @ _rows(query)[0])
    if form == "sparse":
        (columns, weights), found = query.sparse[0], documents.sparse
        wanted = np.zeros(found.shape[1], np.float32)
        wanted[columns] = weights
        rows = np.repeat(np.arange(len(found)), np.diff(found.indptr))
        return np.bincount(rows, wanted[found.indices] * found.data, minlength=len(found))
    mine, theirs = query.multi_vector[0], documents.multi_vector
    best = np.asarray(theirs.values, np.float32) @ np.asarray(mine, np.float32).T
    return np.asarray(
        [best[begin:end].max(0, initial=-1).sum() for begin, end in pairwise(theirs.offsets)]
    )


def _similarities(
    encoded: EncodeResult, first: Sequence[int], second: Sequence[int]
) -> Iterator[float]:
    """Yield the similarity of each two rows."""
    form, places = _form(encoded), zip(first, second, strict=True)
    if form == "dense":
        rows = _rows(encoded)
        rows = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
        yield from (rows[first] * rows[second]).sum(-1).tolist()
    elif form == "sparse":
        for (columns, weights), (others, theirs) in (
            (encoded.sparse[one], encoded.sparse[two]) for one, two in places
        ):
            _, mine, yours = np.intersect1d(columns, others, return_indices=True)
            scale = float(np.linalg.norm(weights) * np.linalg.norm(theirs))
            yield float(weights[mine] @ theirs[yours]) / max(scale, 1e-12)
    else:
        for tokens, other_tokens in (
            (encoded.multi_vector[one], encoded.multi_vector[two]) for one, two in places
        ):
            yield float((tokens @ other_tokens.T).max(1, initial=-1).mean())


def _form(result: EncodeResult) -> str:
    """Return the representation that is compared: dense vectors if there are any."""
    found = result.representations
    form = next((form for form in ("dense", "sparse", "multi_vector") if form in found), "")
    if not form:
        raise typer.BadParameter("the model returns no vectors")
    return form


def _rows(result: EncodeResult) -> npt.NDArray[Any]:
    return np.asarray(result.dense, np.float32)


def _bytes(client: Client, model: str) -> int:
    """Return the memory of the model on the worker where it takes most; 0 if no worker
    reports it.
    """
    found = [
        one
        for one in client.models.list()
        if one.card is not None and one.card.model == model.partition("@")[0]
    ]
    return max((place.bytes for one in found for place in one.places), default=0)
