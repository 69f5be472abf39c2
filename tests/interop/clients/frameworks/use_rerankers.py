"""rerankers: five APIs in one package. It does not check statuses."""

from typing import Any

from checking import (
    BASE,
    LIMITED,
    MODEL,
    QUERY,
    TEXTS,
    WAITED,
    check,
    ranked,
    refused,
    reports_retry_after,
)
from rerankers import Reranker


def ranker(provider: str, url: str, model: str = MODEL) -> Any:
    return Reranker(
        model, model_type="APIRanker", api_provider=provider, api_key="any", url=url, verbose=0
    )


def rank(provider: str, url: str) -> float:
    found = ranker(provider, url).rank(QUERY, TEXTS, doc_ids=list(range(len(TEXTS))))
    return ranked((result.document.doc_id, result.score) for result in found.results)


check("cohere", lambda: rank("cohere", f"{BASE}/v1/rerank"))
check("jina", lambda: rank("jina", f"{BASE}/v1/rerank"))
check("voyage", lambda: rank("voyage", f"{BASE}/v1/rerank"))
check(
    "text-embeddings-inference",
    lambda: rank("text-embeddings-inference", f"{BASE}/tei/{MODEL}/rerank"),
)
check(
    "errors",
    lambda: refused(
        KeyError, lambda: ranker("cohere", f"{BASE}/v1/rerank", "nobody").rank(QUERY, TEXTS)
    ),
)
check(
    f"cohere, repeated by its caller {WAITED}",
    # It does not recognise the body of a 429, and it ignores headers.
    lambda: reports_retry_after(
        KeyError, lambda: rank("cohere", f"{LIMITED}/v1/rerank"), lambda _: 2.0
    ),
)
