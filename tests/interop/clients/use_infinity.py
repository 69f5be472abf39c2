"""infinity-client, which is generated from Infinity's OpenAPI document."""

from checking import (
    BASE,
    CLASSIFIER,
    EXPECTED,
    LIMITED,
    MODEL,
    QUERY,
    TEXTS,
    VECTORS,
    WAITED,
    check,
    distance,
    labelled,
    ranked,
    reports_retry_after,
)
from infinity_client import Client
from infinity_client.api.default import classify, embeddings, health, rerank
from infinity_client.models import ClassifyInput, OpenAIEmbeddingInputText, RerankInput

client = Client(base_url=BASE, timeout=60)
limited = Client(base_url=LIMITED, timeout=60)


class Refused(Exception):
    """A status other than 200: the client raises no errors."""


def embed(to: Client, model: str = MODEL) -> float:
    found = embeddings.sync_detailed(
        client=to, body=OpenAIEmbeddingInputText(input_=TEXTS, model=model)
    )
    if found.status_code != 200:
        raise Refused(int(found.status_code), found.headers)
    return distance((entry.embedding for entry in found.parsed.data), VECTORS)


def scores() -> float:
    found = rerank.sync(client=client, body=RerankInput(query=QUERY, documents=TEXTS, model=MODEL))
    return ranked((result.index, result.relevance_score) for result in found.results)


def classes() -> float:
    found = classify.sync(client=client, body=ClassifyInput(input_=TEXTS, model=CLASSIFIER))
    pairs = zip(found.data, EXPECTED["classes"], strict=True)
    return max(labelled({one.label: one.score for one in row}, wanted) for row, wanted in pairs)


def described() -> None:
    """Its model type requires the owner "infinity", so it can only read Infinity's list."""
    assert health.sync_detailed(client=client).status_code == 200


def errors() -> None:
    status = 0
    try:
        embed(client, "nobody")
    except Refused as refused:
        status = refused.args[0]
    assert status == 404, status


def seconds(error: Refused) -> float:
    status, headers = error.args
    assert status == 429, status
    return int(headers["retry-after"])


check("embeddings", lambda: embed(client))
check("rerank", scores)
check("classify", classes)
check("health", described)
check("errors", errors)
check(
    f"embeddings, repeated by its caller {WAITED}",
    lambda: reports_retry_after(Refused, lambda: embed(limited), seconds),
)
