"""litellm's routes to the APIs of OpenAI, vLLM, Infinity, Cohere and Jina.

Its route to Hugging Face requests the model's task from the hub; without the hub it sends texts as
one text to compare with others.
"""

import asyncio
import json
import time
from typing import Any

import litellm
import openai
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


OPENAI = {"custom_llm_provider": "openai", "api_base": f"{BASE}/v1", "api_key": "any"}


def start_batch(*inputs: object) -> Any:
    rows = [
        {
            "custom_id": f"id-{number}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": MODEL, "input": given},
        }
        for number, given in enumerate(inputs)
    ]
    content = "\n".join(map(json.dumps, rows)).encode()
    file = litellm.create_file(file=("in.jsonl", content), purpose="batch", **OPENAI)
    assert litellm.file_retrieve(file.id, **OPENAI).bytes == len(content)
    assert litellm.file_content(file.id, **OPENAI).content == content
    assert file.id in [one.id for one in litellm.file_list(purpose="batch", **OPENAI)]
    return litellm.create_batch(
        completion_window="24h",
        endpoint="/v1/embeddings",
        input_file_id=file.id,
        metadata={"job": "a"},
        **OPENAI,
    )


def ended(batch: Any) -> Any:
    for _ in range(600):
        batch = litellm.retrieve_batch(batch.id, **OPENAI)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.1)
    raise AssertionError(batch.status)


def results(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in litellm.file_content(file, **OPENAI).text.splitlines()]


def batches() -> float:
    batch = ended(start_batch(TEXTS, "", *TEXTS))
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.failed) == ("completed", len(TEXTS) + 2, 1), batch
    done = {one["custom_id"]: one["response"] for one in results(batch.output_file_id)}
    assert set(done) == {f"id-{number}" for number in range(len(TEXTS) + 2)} - {"id-1"}
    (failed,) = results(batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("id-1", 400)
    assert batch.id in [one.id for one in litellm.list_batches(limit=100, **OPENAI)]
    for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        assert litellm.file_delete(file, **OPENAI).deleted
    refused(
        openai.NotFoundError,
        lambda: litellm.file_retrieve(batch.input_file_id, **OPENAI),
        ("param", "id"),
    )
    return distance((entry["embedding"] for entry in done["id-0"]["body"]["data"]), VECTORS)


def cancelled_batch() -> None:
    batch = start_batch(*[TEXTS] * 50)
    assert litellm.cancel_batch(batch.id, **OPENAI).status in ("cancelling", "cancelled")
    batch = ended(batch)
    assert (batch.status, batch.cancelled_at > 0) == ("cancelled", True), batch


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
check("openai/ files and batches", batches)
check("openai/ batches, cancelled", cancelled_batch)
check("errors", errors)
