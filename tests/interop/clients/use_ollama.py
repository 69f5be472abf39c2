"""ollama."""

import ollama
from checking import BASE, MODEL, TEXTS, VECTORS, answered, check, distance, refused

client = ollama.Client(host=BASE)


def listed() -> None:
    assert MODEL in [model.model for model in client.list().models]
    assert MODEL in [model.model for model in client.ps().models]


def shown() -> None:
    found = client.show(MODEL)
    assert found.capabilities == ["embedding"]
    assert found.modelinfo["bert.embedding_length"] == len(VECTORS[0])


def errors() -> None:
    refused(ollama.ResponseError, lambda: client.embed(model="nobody", input="a"), ("status_code", 404))
    refused(ollama.ResponseError, lambda: client.embed(model=MODEL, input=["a", ""]), ("error", "input[1] is empty"))
    refused(ollama.ResponseError, lambda: client.embed(model=MODEL, input="word " * 1000, truncate=False), ("status_code", 400))


check("embed", lambda: distance(client.embed(model=MODEL, input=TEXTS).embeddings, VECTORS))
check("embed, one, :latest", lambda: distance(client.embed(model=f"{MODEL}:latest", input=TEXTS[0]).embeddings, VECTORS[:1]))
check("embed, query, dimensions", lambda: answered(client.embed(model=f"{MODEL}:query", input=TEXTS, dimensions=64).embeddings))
check("embeddings", lambda: distance([client.embeddings(model=MODEL, prompt=TEXTS[0]).embedding], VECTORS[:1]))
check("list, ps", listed)
check("show", shown)
check("errors", errors)
