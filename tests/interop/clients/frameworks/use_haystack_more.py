"""Haystack's components for OpenAI, Cohere and Jina."""

from typing import Any

import openai
from checking import (
    ALONE,
    BASE,
    LIMITED,
    MODEL,
    QUERY,
    TEXTS,
    VECTORS,
    WAITED,
    check,
    distance,
    ranked,
    refused,
    waits,
)
from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret
from haystack_integrations.components.embedders.cohere import (
    CohereDocumentEmbedder,
    CohereTextEmbedder,
)
from haystack_integrations.components.embedders.jina import JinaDocumentEmbedder, JinaTextEmbedder
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.jina import JinaRanker

TOKEN = Secret.from_token("any")
documents = [Document(content=text, id=str(index)) for index, text in enumerate(TEXTS)]
OPENAI = {"api_key": TOKEN, "api_base_url": f"{BASE}/v1", "model": MODEL}
COHERE = {"api_key": TOKEN, "api_base_url": BASE, "model": MODEL}
JINA = {"api_key": TOKEN, "model": MODEL, "base_url": f"{BASE}/v1/embeddings"}


def warm(component: Any) -> Any:
    if hasattr(component, "warm_up"):
        component.warm_up()
    return component


def one(embedder: Any) -> float:
    return distance([warm(embedder).run(TEXTS[0])["embedding"]], ALONE)


def many(embedder: Any) -> float:
    return distance((one.embedding for one in warm(embedder).run(documents)["documents"]), VECTORS)


def rank(ranker: Any) -> float:
    return ranked(
        (int(one.id), one.score) for one in warm(ranker).run(QUERY, documents)["documents"]
    )


slow = OpenAIDocumentEmbedder(
    **(OPENAI | {"api_base_url": f"{LIMITED}/v1"}), progress_bar=False, raise_on_failure=True
)

check("OpenAITextEmbedder", lambda: one(OpenAITextEmbedder(**OPENAI)))
check("OpenAIDocumentEmbedder", lambda: many(OpenAIDocumentEmbedder(**OPENAI, progress_bar=False)))
check(f"OpenAIDocumentEmbedder {WAITED}", lambda: waits(lambda: many(slow)))
check("CohereTextEmbedder", lambda: one(CohereTextEmbedder(**COHERE)))
check("CohereDocumentEmbedder", lambda: many(CohereDocumentEmbedder(**COHERE)))
check("CohereRanker", lambda: rank(CohereRanker(**COHERE)))
check("JinaTextEmbedder", lambda: one(JinaTextEmbedder(**JINA)))
check("JinaDocumentEmbedder", lambda: many(JinaDocumentEmbedder(**JINA, progress_bar=False)))
check(
    "JinaRanker", lambda: rank(JinaRanker(api_key=TOKEN, model=MODEL, base_url=f"{BASE}/v1/rerank"))
)
check(
    "errors",
    lambda: refused(
        openai.NotFoundError, lambda: one(OpenAITextEmbedder(**(OPENAI | {"model": "nobody"})))
    ),
)
