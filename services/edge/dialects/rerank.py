"""`POST /rerank`, `/v1/rerank` and `/v2/rerank` of Cohere, Jina, vLLM, Voyage and Infinity. Pure.

One request type, a superset, serves all of them; the answer depends on the client:

- Cohere, Jina and vLLM read `results`.
- Voyage, the only one that sends `top_k` or `truncation`, reads `data`.
- Infinity, which sends `raw_scores`, reads `results` with documents as plain texts.
- TEI's form of the path has `texts` instead of `documents` (tei.py).

Scores are 0…1: probabilities, or for models without them (sums of maxima and of products) x / (1 +
|x|), shifted to that range, which keeps the order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from shoal.requests import codec
from shoal.transport.methods import SCORE
from shoal.v1 import inference_pb2 as pb

from services.edge.dialects.openai import OPENAI
from services.edge.dialects.tei import TEI, has_texts
from services.edge.dialects.tei import rerank as rerank_texts
from services.edge.messages.base import (
    Answer,
    Fields,
    HttpError,
    MeshCall,
    Received,
    Route,
    encode_json,
    invalid,
    item_fields,
)
from services.edge.messages.limits import ITEMS, PARTS
from services.edge.messages.numbers import decoded
from services.edge.messages.reading import (
    named_or_default,
    read,
    read_priority,
    read_truncation,
    text_item,
)

DEFAULT_NAME: Final = "rerank"
"""The alias for requests that name no model, which Cohere's v1 allows."""


class RerankRequest(msgspec.Struct, kw_only=True):
    """The union of Cohere's, Jina's, Voyage's, vLLM's, Infinity's and Shoal's fields. Others are
    ignored.
    """

    query: str
    documents: Annotated[list[str | dict[str, Any]], ITEMS]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    # Cohere.
    rank_fields: Annotated[list[str], PARTS] | None = None
    # Voyage.
    top_k: int | msgspec.UnsetType | None = msgspec.UNSET
    truncation: bool | str | msgspec.UnsetType | None = msgspec.UNSET
    # vLLM.
    truncate_prompt_tokens: int | None = None
    # Infinity.
    raw_scores: bool | msgspec.UnsetType | None = msgspec.UNSET
    # Shoal's.
    truncate: bool | str | None = None
    window_overlap: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    instruction: str | None = None
    adapter: str | None = None
    pool: str | None = None
    priority: str | int | None = None

    @property
    def is_voyage(self) -> bool:
        return self.top_k is not msgspec.UNSET or self.truncation is not msgspec.UNSET

    @property
    def is_infinity(self) -> bool:
        return self.raw_scores is not msgspec.UNSET


class RerankDocument(msgspec.Struct, kw_only=True):
    """A document of the request."""

    text: str


class RerankResult(msgspec.Struct, kw_only=True):
    """`index` is the position in the request's list; `relevance_score` is 0…1."""

    index: int
    relevance_score: float
    document: RerankDocument | str | msgspec.UnsetType = msgspec.UNSET


class RerankAnswer(msgspec.Struct, kw_only=True):
    """The results, best first: `results` for Cohere, Jina, vLLM and Infinity, `data` for Voyage."""

    object: str
    model: str
    usage: dict[str, int]
    id: str | msgspec.UnsetType = msgspec.UNSET
    results: list[RerankResult] | msgspec.UnsetType = msgspec.UNSET
    data: list[RerankResult] | msgspec.UnsetType = msgspec.UNSET
    meta: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def rerank(received: Received) -> MeshCall:
    """Rerank in any of the forms. Raises HttpError."""
    if not received.is_msgpack and has_texts(received.body):
        try:
            return rerank_texts(received)
        except HttpError as problem:
            problem.dialect = TEI
            raise
    return make_call(read(RerankRequest, received), received)


def make_call(request: RerankRequest, received: Received) -> MeshCall:
    """Return the call of a parsed body. Raises HttpError."""
    name = request.model if request.model is not None else DEFAULT_NAME
    named = named_or_default(received, request.model, DEFAULT_NAME)
    if request.truncate_prompt_tokens not in (None, -1):
        raise invalid(
            "truncate_prompt_tokens must be -1, the model's limit, or be omitted",
            "truncate_prompt_tokens",
        )
    if len(set(request.rank_fields or ())) != len(request.rank_fields or ()):
        raise invalid("rank_fields names a field twice", "rank_fields")
    texts = [
        _text(document, f"documents[{index}]", request.rank_fields)
        for index, document in enumerate(request.documents)
    ]
    cut = (
        request.truncate
        if isinstance(request.truncation, msgspec.UnsetType)
        else request.truncation
    )
    message = pb.ScoreRequest(
        model=named.model,
        query=text_item(request.query, "query"),
        documents=[text_item(text, f"documents[{index}]") for index, text in enumerate(texts)],
        instruction=request.instruction or "",
        scale=pb.SCORE_SCALE_LOGIT if request.raw_scores is True else pb.SCORE_SCALE_PROBABILITY,
        top_n=_top(request),
        truncation=read_truncation(cut, "truncation" if request.is_voyage else "truncate"),
        adapter=request.adapter or named.adapter,
        pool=request.pool or "",
        priority=read_priority(request.priority),
        window_overlap=request.window_overlap,
    )
    write = _voyage if request.is_voyage else _infinity if request.is_infinity else _cohere
    is_plain = request.is_voyage or request.is_infinity

    def convert(reply: pb.ScoreResponse, *, squash: bool = False) -> Answer:
        results = _results(
            reply, texts if request.return_documents else None, squash=squash, plain=is_plain
        )
        return Answer(encode_json(write(name, results, reply.usage.input_tokens, received)))

    fields = item_fields("documents", "documents")
    if request.raw_scores is True:
        return MeshCall(SCORE, message, convert, fields={**fields, "scale": "raw_scores"})
    return score_probabilities(message, convert, fields)


def score_probabilities(
    message: pb.ScoreRequest, convert: Callable[..., Answer], fields: Fields
) -> MeshCall:
    """Request probabilities; if the model has none, request its raw scores and squash them."""

    def fallback(problem: HttpError) -> MeshCall | None:
        if problem.field != "scale":
            return None
        own = pb.ScoreRequest()
        own.CopyFrom(message)
        own.scale = pb.SCORE_SCALE_UNSPECIFIED
        return MeshCall(SCORE, own, lambda reply: convert(reply, squash=True), fields=fields)

    return MeshCall(SCORE, message, convert, fields=fields, fallback=fallback)


def squash_scores(scores: Any) -> Any:
    """Map any range to 0…1 in the same order."""
    wide = scores.astype(np.float64)
    return ((1 + wide / (1 + np.abs(wide))) / 2).astype(np.float32)


def scored(reply: pb.ScoreResponse, *, squash: bool) -> tuple[Any, Any]:
    """Return the scores, float32 [documents], and the indices of the best. Raises HttpError for an
    invalid reply.
    """
    found = decoded(codec.score_result, reply)
    return (squash_scores(found.scores) if squash else found.scores), found.ranking


def _text(document: str | dict[str, Any], field: str, rank_fields: list[str] | None) -> str:
    """Return a document's text, or the fields that `rank_fields` names, one per line."""
    if isinstance(document, str):
        return document
    wanted = rank_fields or ["text"]
    for name in wanted:
        if not isinstance(document.get(name), (str, int, float)):
            raise invalid(f"{field}.{name} is required and must be text", f"{field}.{name}")
    if wanted == ["text"]:
        return str(document["text"])
    return "\n".join(f"{name}: {document[name]}" for name in wanted)


def _top(request: RerankRequest) -> int:
    """Return the number of results; 0 for all."""
    top, field = request.top_n, "top_n"
    if top is None and isinstance(request.top_k, int):
        top, field = request.top_k, "top_k"
    if top is None:
        return 0
    if top < 0:
        raise invalid(f"{field} is {top}; it must be at least 1, or 0 for all", field)
    return min(top, len(request.documents))


def _results(
    reply: pb.ScoreResponse, texts: list[str] | None, *, squash: bool, plain: bool
) -> list[dict[str, Any]]:
    scores, ranking = scored(reply, squash=squash)
    results: list[dict[str, Any]] = [
        {"index": int(index), "relevance_score": scores[index]} for index in ranking
    ]
    if texts is not None:
        for result in results:
            text = texts[result["index"]]
            result["document"] = text if plain else {"text": text}
    return results


def _cohere(
    model: str, results: list[dict[str, Any]], tokens: int, received: Received
) -> dict[str, Any]:
    return {
        "id": received.request_id,
        "object": "list",
        "model": model,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": tokens},
        },
    }


def _infinity(
    model: str, results: list[dict[str, Any]], tokens: int, received: Received
) -> dict[str, Any]:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {
        "object": "rerank",
        "results": results,
        "model": model,
        "usage": usage,
        "id": received.request_id,
        "created": received.received_at,
    }


def _voyage(
    model: str, results: list[dict[str, Any]], tokens: int, received: Received
) -> dict[str, Any]:
    return {"object": "list", "data": results, "model": model, "usage": {"total_tokens": tokens}}


ROUTES: Final = tuple(
    Route(
        "POST",
        path,
        OPENAI,
        rerank,
        "Ranks documents by relevance to a query",
        RerankRequest,
        RerankAnswer,
    )
    for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/openai/v1/rerank")
)
