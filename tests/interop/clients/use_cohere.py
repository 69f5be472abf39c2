"""cohere and voyageai."""

import cohere
import voyageai
from checking import BASE, MODEL, QUERY, TEXTS, VECTORS, answered, check, distance, ranked, refused

second = cohere.ClientV2(api_key="any", base_url=BASE)
first = cohere.Client(api_key="any", base_url=BASE)
voyage = voyageai.Client(api_key="any", base_url=f"{BASE}/v1")


def rerank_v2() -> float:
    results = second.rerank(model=MODEL, query=QUERY, documents=TEXTS, top_n=5).results
    assert len(results) == 5
    return ranked((result.index, result.relevance_score) for result in results)


def rerank_v1() -> float:
    results = first.rerank(model=MODEL, query=QUERY, documents=[{"text": text} for text in TEXTS], return_documents=True).results
    assert all(result.document.text == TEXTS[result.index] for result in results)
    return ranked((result.index, result.relevance_score) for result in results)


def models() -> None:
    assert MODEL in [model.name for model in first.models.list().models]


def errors() -> None:
    refused(cohere.NotFoundError, lambda: second.rerank(model="nobody", query="a", documents=["b"]))
    refused(cohere.BadRequestError, lambda: second.rerank(model=MODEL, query="a", documents=[]))


def voyage_rerank() -> float:
    results = voyage.rerank(QUERY, TEXTS, model=MODEL, top_k=4).results
    assert [result.document for result in results] == [TEXTS[result.index] for result in results]
    return ranked((result.index, result.relevance_score) for result in results)


check("cohere ClientV2.rerank", rerank_v2)
check("cohere Client.rerank (maps, documents back)", rerank_v1)
check("cohere models.list", models)
check("cohere errors", errors)
check("voyageai embed", lambda: distance(voyage.embed(TEXTS, model=MODEL).embeddings, VECTORS))
check("voyageai embed (query)", lambda: answered(voyage.embed(TEXTS, model=MODEL, input_type="query").embeddings))
check("voyageai rerank", voyage_rerank)
