"""cohere and voyageai."""

import asyncio
import base64
import struct

import cohere
import voyageai
from checking import (
    BASE,
    CLASSIFIER,
    EXPECTED,
    LIMITED,
    MODEL,
    PROMPTED,
    QUERIES,
    QUERY,
    TEXTS,
    VECTORS,
    WAITED,
    check,
    distance,
    labelled,
    ranked,
    refused,
    waits,
)
from cohere import ClassifyExample

second = cohere.ClientV2(api_key="any", base_url=BASE)
first = cohere.Client(api_key="any", base_url=BASE)
voyage = voyageai.Client(api_key="any", base_url=f"{BASE}/v1")
slow = cohere.ClientV2(api_key="any", base_url=LIMITED)
slow_voyage = voyageai.Client(api_key="any", base_url=f"{LIMITED}/v1", max_retries=5)


def rerank_v2() -> float:
    results = second.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=5).results
    return ranked(((result.index, result.relevance_score) for result in results), 5)


def rerank_v1() -> float:
    results = first.rerank(
        model=MODEL,
        query=QUERY,
        documents=[{"text": text} for text in TEXTS],
        return_documents=True,
    ).results
    assert all(result.document.text == TEXTS[result.index] for result in results)
    return ranked((result.index, result.relevance_score) for result in results)


def embed_v2() -> float:
    found = second.embed(
        model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=["float"]
    )
    assert found.texts == TEXTS
    return distance(found.embeddings.float_, VECTORS)


def embed_types() -> float:
    found = second.embed(
        model=MODEL,
        texts=TEXTS,
        input_type="classification",
        embedding_types=["float", "int8", "binary", "ubinary", "base64"],
    ).embeddings
    rows = [struct.unpack(f"<{len(VECTORS[0])}f", base64.b64decode(row)) for row in found.base64]
    assert found.int8 == EXPECTED["int8"]
    assert [[byte + 128 for byte in row] for row in found.binary] == found.ubinary
    assert [byte >> 7 for byte in found.ubinary[0]] == [
        int(number > 0) for number in VECTORS[0][::8]
    ]
    return max(distance(rows, VECTORS), distance(found.float_, VECTORS))


def embed_inputs() -> float:
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    return distance(
        second.embed(model=MODEL, inputs=inputs, input_type="search_document").embeddings.float_,
        VECTORS,
    )


def embed_v1() -> float:
    found = first.embed(model=MODEL, texts=TEXTS * 40, input_type="search_document")
    assert found.response_type == "embeddings_floats"
    assert found.texts == TEXTS * 40
    return distance(found.embeddings, VECTORS * 40)


def embed_v1_types() -> float:
    found = first.embed(
        model=MODEL, texts=TEXTS, input_type="search_query", embedding_types=["int8"]
    )
    assert found.response_type == "embeddings_by_type"
    return distance(found.embeddings.int8, EXPECTED["int8"])


def classify_labels() -> float:
    found = first.classify(model=CLASSIFIER, inputs=TEXTS).classifications
    pairs = zip(found, EXPECTED["classes"], strict=True)
    return max(
        labelled({label: one.confidence for label, one in row.labels.items()}, wanted)
        for row, wanted in pairs
    )


def classify_examples() -> None:
    examples = [
        ClassifyExample(text=text, label=label)
        for text, label in (("a shark", "fish"), ("trout", "fish"), ("a chair", "wood"))
    ]
    found = first.classify(model=MODEL, inputs=TEXTS[:2], examples=examples).classifications
    assert [row.prediction for row in found] == ["fish", "wood"]
    assert all(abs(sum(one.confidence for one in row.labels.values()) - 1) < 1e-6 for row in found)
    assert [row.input for row in found] == TEXTS[:2]


def models() -> None:
    assert MODEL in [model.name for model in first.models.list().models]


def rerank_async() -> float:
    async def ask() -> float:
        async with cohere.AsyncClientV2(api_key="any", base_url=BASE) as client:
            found = await client.rerank(model=MODEL, query=QUERY, documents=TEXTS)
        return ranked((result.index, result.relevance_score) for result in found.results)

    return asyncio.run(ask())


def rerank_slow() -> float:
    found = slow.rerank(model=MODEL, query=QUERY, documents=TEXTS).results
    return ranked((result.index, result.relevance_score) for result in found)


def voyage_errors() -> None:
    refused(voyageai.error.InvalidRequestError, lambda: voyage.embed(["a", ""], model=MODEL))
    refused(voyageai.error.VoyageError, lambda: voyage.embed(["a"], model="nobody"))


def errors() -> None:
    refused(cohere.NotFoundError, lambda: second.rerank(model="nobody", query="a", documents=["b"]))
    refused(cohere.BadRequestError, lambda: second.rerank(model=MODEL, query="a", documents=[]))
    refused(
        cohere.NotFoundError,
        lambda: second.embed(model="nobody", texts=["a"], input_type="search_query"),
    )
    refused(
        cohere.BadRequestError,
        lambda: second.embed(model=MODEL, texts=["a", ""], input_type="search_query"),
        ("body", {"message": "texts[1] is empty"}),
    )


def voyage_rerank() -> float:
    results = voyage.rerank(QUERY, TEXTS, model=MODEL, top_k=4).results
    assert [result.document for result in results] == [TEXTS[result.index] for result in results]
    return ranked(((result.index, result.relevance_score) for result in results), 4)


check("cohere ClientV2.rerank", rerank_v2)
check("cohere Client.rerank (maps, documents back)", rerank_v1)
check("cohere ClientV2.embed", embed_v2)
check("cohere ClientV2.embed (five types at once)", embed_types)
check("cohere ClientV2.embed (inputs)", embed_inputs)
check("cohere Client.embed (240 texts)", embed_v1)
check("cohere Client.embed (int8)", embed_v1_types)
check("cohere Client.classify (own labels)", classify_labels)
check("cohere Client.classify (examples)", classify_examples)
check("cohere models.list", models)
check("cohere errors", errors)
check("voyageai embed", lambda: distance(voyage.embed(TEXTS, model=MODEL).embeddings, VECTORS))
check(
    "voyageai embed (query)",
    lambda: distance(voyage.embed(TEXTS, model=PROMPTED, input_type="query").embeddings, QUERIES),
)
check("voyageai rerank", voyage_rerank)
check("voyageai errors", voyage_errors)
check("cohere AsyncClientV2.rerank", rerank_async)
check(f"cohere ClientV2.rerank {WAITED}", lambda: waits(rerank_slow))
check(
    f"voyageai embed {WAITED}",
    lambda: waits(lambda: distance(slow_voyage.embed(TEXTS, model=MODEL).embeddings, VECTORS)),
)
