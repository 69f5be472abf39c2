"""LlamaIndex's embeddings and rerankers of OpenAI, TEI, Jina and Cohere.

Its JinaEmbedding ignores its base_url and always calls api.jina.ai.
"""

import asyncio
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
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.cohere import CohereEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

KNOWN = "embed-english-v3.0"
"""An alias, because the client has a fixed table of names."""
many = len(TEXTS)
TEI = f"{BASE}/tei/{MODEL}"
nodes = [
    NodeWithScore(node=TextNode(text=text, id_=str(index)), score=0.0)
    for index, text in enumerate(TEXTS)
]


def like_openai(base: str, model: str = MODEL) -> OpenAILikeEmbedding:
    return OpenAILikeEmbedding(
        model_name=model, api_base=f"{base}/v1", api_key="any", max_retries=3
    )


def embed(embedding: Any) -> float:
    found = embedding.get_text_embedding_batch(TEXTS)
    return max(distance(found, VECTORS), distance([embedding.get_query_embedding(TEXTS[0])], ALONE))


def asynchronous() -> float:
    return distance(asyncio.run(like_openai(BASE).aget_text_embedding_batch(TEXTS)), VECTORS)


def rerank(ranker: Any) -> float:
    return ranked(
        (int(one.node.node_id), one.score)
        for one in ranker.postprocess_nodes(nodes, query_str=QUERY)
    )


def errors() -> None:
    refused(
        openai.NotFoundError,
        lambda: like_openai(BASE, "nobody").get_text_embedding("a"),
        ("status_code", 404),
    )
    refused(
        Exception,
        lambda: rerank(
            JinaRerank(top_n=many, model="nobody", base_url=f"{BASE}/v1", api_key="any")
        ),
    )


slow = like_openai(LIMITED)
check("OpenAILikeEmbedding", lambda: embed(like_openai(BASE)))
check("OpenAILikeEmbedding, asynchronous", asynchronous)
check(
    f"OpenAILikeEmbedding {WAITED}",
    lambda: waits(lambda: distance(slow.get_text_embedding_batch(TEXTS), VECTORS)),
)
check(
    "TextEmbeddingsInference",
    lambda: embed(TextEmbeddingsInference(model_name=MODEL, base_url=TEI)),
)
check(
    "CohereEmbedding (an alias)",
    lambda: embed(CohereEmbedding(api_key="any", model_name=KNOWN, base_url=BASE)),
)
check(
    "CohereRerank",
    lambda: rerank(CohereRerank(top_n=many, model=MODEL, api_key="any", base_url=BASE)),
)
check(
    "TEI's rerank",
    lambda: rerank(TextEmbeddingInference(top_n=many, base_url=TEI, model_name=MODEL)),
)
check(
    "JinaRerank",
    lambda: rerank(JinaRerank(top_n=many, model=MODEL, base_url=f"{BASE}/v1", api_key="any")),
)
check("errors", errors)
