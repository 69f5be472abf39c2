"""Haystack's components for TEI: over gRPC with server reflection, and over HTTP at a port with a
fixed model.
"""

import os
from typing import Any

import grpc
from checking import (
    ALONE,
    QUERY,
    TEXTS,
    VECTORS,
    WAITED,
    check,
    distance,
    ranked,
    refusal,
    reports_retry_after,
    waits,
)
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from huggingface_hub.errors import HfHubHTTPError

DOOR = os.environ["INTEROP_DOOR"]
LIMITED_DOOR = os.environ["INTEROP_LIMITED_DOOR"]
GRPC = os.environ["INTEROP_TEI_GRPC"]
TOKEN = Secret.from_token("any")
KIND = "text_embeddings_inference"
documents = [Document(content=text, id=str(index)) for index, text in enumerate(TEXTS)]


def embedder(kind: Any, url: str, **more: Any) -> Any:
    found = kind(KIND, {"url": url}, token=TOKEN, normalize=True, **more)
    found.warm_up()
    return found


def many(url: str, **more: Any) -> float:
    found = embedder(HuggingFaceAPIDocumentEmbedder, url, progress_bar=False, **more).run(
        documents
    )["documents"]
    return distance((one.embedding for one in found), VECTORS)


def rank(url: str, **more: Any) -> float:
    ranker = HuggingFaceTEIRanker(url=url, token=TOKEN, top_k=len(TEXTS), **more)
    ranker.warm_up()
    return ranked((int(one.id), one.score) for one in ranker.run(QUERY, documents)["documents"])


def one(url: str, **more: Any) -> float:
    return distance(
        [embedder(HuggingFaceAPITextEmbedder, url, **more).run(TEXTS[0])["embedding"]], ALONE
    )


def errors() -> None:
    client = embedder(HuggingFaceAPITextEmbedder, GRPC, use_grpc=True)
    error = refusal(grpc.RpcError, lambda: client.run(""))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error


def seconds(error: HfHubHTTPError) -> float:
    assert error.response.status_code == 429
    return int(error.response.headers["retry-after"])


check("text embedder (gRPC)", lambda: one(GRPC, use_grpc=True))
check("document embedder (gRPC stream)", lambda: many(GRPC, use_grpc=True))
check("ranker (gRPC)", lambda: rank(GRPC, use_grpc=True))
check("text embedder (a port for a model)", lambda: one(DOOR))
check("document embedder (a port for a model)", lambda: many(DOOR))
check("ranker (a port for a model)", lambda: rank(DOOR))
check("errors (gRPC)", errors)
check(f"ranker {WAITED}", lambda: waits(lambda: rank(LIMITED_DOOR, max_retries=8)))
check(
    f"document embedder, repeated by its caller {WAITED}",
    lambda: reports_retry_after(HfHubHTTPError, lambda: many(LIMITED_DOOR), seconds),
)
