"""ollama."""

import asyncio

import ollama
from checking import (
    ALONE,
    BASE,
    CONVERSATION,
    EXPECTED,
    LIMITED,
    MESSAGES,
    MODEL,
    PROMPTED,
    SYSTEM,
    TEXTS,
    TOKENS,
    USER,
    VECTORS,
    WAITED,
    WRITER,
    check,
    distance,
    is_conversed,
    is_streamed,
    is_written,
    refused,
    reports_retry_after,
)

client = ollama.Client(host=BASE)
limited = ollama.Client(host=LIMITED)


def listed() -> None:
    assert MODEL in [model.model for model in client.list().models]
    assert MODEL in [model.model for model in client.ps().models]


def short_queries() -> float:
    wanted = EXPECTED["short_queries"]
    found = client.embed(model=f"{PROMPTED}:query", input=TEXTS, dimensions=len(wanted[0]))
    return distance(found.embeddings, wanted)


def shown() -> None:
    found = client.show(MODEL)
    assert found.capabilities == ["embedding"]
    assert found.modelinfo["bert.embedding_length"] == len(VECTORS[0])


def asynchronous() -> float:
    return distance(
        asyncio.run(ollama.AsyncClient(host=BASE).embed(model=MODEL, input=TEXTS)).embeddings,
        VECTORS,
    )


def chat() -> None:
    options = {"num_predict": TOKENS, "temperature": 0}
    is_written(client.chat(model=WRITER, messages=MESSAGES, options=options).message.content)
    parts = client.chat(model=WRITER, messages=MESSAGES, options=options, stream=True)
    *found, last = parts
    is_streamed((part.message.content for part in (*found, last)), is_written)
    assert (last.done, last.done_reason) == (True, "length")


def conversation() -> None:
    is_conversed(
        client.chat(
            model=WRITER, messages=CONVERSATION, options={"num_predict": TOKENS}
        ).message.content
    )


def generate() -> None:
    options = {"num_predict": TOKENS}
    is_written(client.generate(model=WRITER, prompt=USER, system=SYSTEM, options=options).response)
    parts = client.generate(
        model=f"{WRITER}:latest", prompt=USER, system=SYSTEM, options=options, stream=True
    )
    is_streamed((part.response for part in parts), is_written)
    assert client.show(WRITER).capabilities == ["completion"]


def seconds(error: ollama.ResponseError) -> float:
    assert error.status_code == 429
    return 2.0  # it shows no headers


def errors() -> None:
    refused(
        ollama.ResponseError, lambda: client.embed(model="nobody", input="a"), ("status_code", 404)
    )
    refused(
        ollama.ResponseError,
        lambda: client.embed(model=MODEL, input=["a", ""]),
        ("error", "input[1] is empty"),
    )
    refused(
        ollama.ResponseError,
        lambda: client.embed(model=MODEL, input="word " * 1000, truncate=False),
        ("status_code", 400),
    )


check("embed", lambda: distance(client.embed(model=MODEL, input=TEXTS).embeddings, VECTORS))
check(
    "embed, one, :latest",
    lambda: distance(client.embed(model=f"{MODEL}:latest", input=TEXTS[0]).embeddings, ALONE),
)
check("embed, query, dimensions", short_queries)
check(
    "embeddings",
    lambda: distance([client.embeddings(model=MODEL, prompt=TEXTS[0]).embedding], ALONE),
)
check("list, ps", listed)
check("show", shown)
check("chat, stream", chat)
check("chat, a conversation", conversation)
check("generate, stream; show", generate)
check("errors", errors)
check("AsyncClient.embed", asynchronous)
check(
    f"embed, repeated by its caller {WAITED}",
    lambda: reports_retry_after(
        ollama.ResponseError,
        lambda: distance(limited.embed(model=MODEL, input=TEXTS).embeddings, VECTORS),
        seconds,
    ),
)
