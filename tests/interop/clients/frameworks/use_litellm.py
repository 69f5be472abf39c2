"""litellm's routes to the APIs of OpenAI, vLLM, Infinity, Cohere and Jina.

Its route to Hugging Face requests the model's task from the hub; without the hub it sends texts as
one text to compare with others.
"""

import asyncio
from typing import Any

import litellm
from checking import (
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

litellm.suppress_debug_info = True


def embed(model: str, base: str, **more: Any) -> float:
    found = litellm.embedding(model=model, input=TEXTS, api_base=base, api_key="any", **more)
    return distance((entry["embedding"] for entry in found.data), VECTORS)


def asynchronous() -> float:
    found = asyncio.run(
        litellm.aembedding(
            model=f"openai/{MODEL}", input=TEXTS, api_base=f"{BASE}/v1", api_key="any"
        )
    )
    return distance((entry["embedding"] for entry in found.data), VECTORS)


def rerank(model: str, base: str, **more: Any) -> float:
    found = litellm.rerank(
        model=model,
        query=QUERY,
        documents=TEXTS,
        api_base=base,
        api_key="any",
        top_n=len(TEXTS),
        **more,
    )
    return ranked((result["index"], result["relevance_score"]) for result in found.results)


def errors() -> None:
    refused(
        litellm.NotFoundError, lambda: embed("openai/nobody", f"{BASE}/v1"), ("status_code", 404)
    )
    refused(
        litellm.BadRequestError,
        lambda: litellm.embedding(
            f"openai/{MODEL}", ["a", ""], api_base=f"{BASE}/v1", api_key="any"
        ),
    )


check("openai/ embedding", lambda: embed(f"openai/{MODEL}", f"{BASE}/v1", encoding_format="float"))
check("openai/ aembedding", asynchronous)
check("hosted_vllm/ embedding", lambda: embed(f"hosted_vllm/{MODEL}", f"{BASE}/v1"))
check("infinity/ embedding", lambda: embed(f"infinity/{MODEL}", BASE))
check(
    "cohere/ embedding",
    lambda: embed(f"cohere/{MODEL}", f"{BASE}/v2/embed", input_type="search_document"),
)
check("jina_ai/ embedding", lambda: embed(f"jina_ai/{MODEL}", f"{BASE}/v1"))
check("cohere/ rerank", lambda: rerank(f"cohere/{MODEL}", f"{BASE}/v2/rerank"))
check("hosted_vllm/ rerank", lambda: rerank(f"hosted_vllm/{MODEL}", BASE))
check("infinity/ rerank", lambda: rerank(f"infinity/{MODEL}", BASE, return_documents=False))
check("jina_ai/ rerank", lambda: rerank(f"jina_ai/{MODEL}", f"{BASE}/v1/rerank"))
check(
    f"openai/ embedding {WAITED}",
    lambda: waits(lambda: embed(f"openai/{MODEL}", f"{LIMITED}/v1", max_retries=3)),
)
check("errors", errors)
