"""openai, new and old."""

import asyncio
import base64
import json
import struct
import time
from typing import Any

import openai
from checking import (
    ALONE,
    BASE,
    CALLER,
    CONVERSATION,
    EXPECTED,
    LIMITED,
    MESSAGES,
    MODEL,
    PROMPTED,
    QUERIES,
    TEXTS,
    TOKENS,
    VECTORS,
    WAITED,
    WRITER,
    check,
    distance,
    is_conversed,
    is_streamed,
    is_written,
    refused,
    waits,
)

client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="any")
limited = openai.OpenAI(base_url=f"{LIMITED}/v1", api_key="any")
OLD = openai.__version__.startswith("1.40.")


def embed(**more: object) -> float:
    data = client.embeddings.create(model=MODEL, input=TEXTS, **more).data
    return distance((entry.embedding for entry in data), VECTORS)


def queries() -> float:
    data = client.embeddings.create(
        model=PROMPTED, input=TEXTS, extra_body={"role": "query"}, encoding_format="float"
    ).data
    return distance((entry.embedding for entry in data), QUERIES)


def raw() -> float:
    data = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="base64").data
    rows = (
        struct.unpack(f"<{len(VECTORS[0])}f", base64.b64decode(entry.embedding)) for entry in data
    )
    return distance(rows, VECTORS)


def one() -> float:
    return distance(
        [client.embeddings.create(model=MODEL, input=TEXTS[0]).data[0].embedding], ALONE
    )


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def request_id() -> None:
    answer = client.embeddings.with_raw_response.create(
        model=MODEL, input="a", extra_headers={"x-request-id": "mine"}
    )
    assert answer.headers["x-request-id"] == "mine"
    assert OLD or answer.parse()._request_id == "mine"


def many_at_once() -> float:
    async def ask() -> float:
        async with openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key="any") as several:
            answers = await asyncio.gather(
                *(several.embeddings.create(model=MODEL, input=[text]) for text in TEXTS)
            )
        return distance((answer.data[0].embedding for answer in answers), VECTORS)

    return asyncio.run(ask())


def slow() -> float:
    return distance(
        (entry.embedding for entry in limited.embeddings.create(model=MODEL, input=TEXTS).data),
        VECTORS,
    )


def not_repeated() -> None:
    once = limited.with_options(max_retries=0)

    def twice() -> None:
        for _ in range(2):
            once.embeddings.create(model=MODEL, input="a")

    refused(openai.RateLimitError, twice, ("code", "rate_limit_exceeded"), ("status_code", 429))


def errors() -> None:
    refused(
        openai.NotFoundError,
        lambda: client.embeddings.create(model="gpt-4o", input="a"),
        ("code", "model_not_found"),
        ("param", "model"),
    )
    refused(
        openai.BadRequestError,
        lambda: client.embeddings.create(model=MODEL, input=["a", ""]),
        ("param", "input[1]"),
    )
    refused(
        openai.BadRequestError,
        lambda: client.embeddings.create(model=MODEL, input=[[1, 2]]),
        ("param", "input"),
    )


def chat() -> None:
    answer = client.chat.completions.create(
        model=WRITER, messages=MESSAGES, max_tokens=TOKENS, temperature=0
    )
    is_written(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == EXPECTED["written_tokens"]


def chat_stream() -> None:
    options = {"include_usage": True}
    events = list(
        client.chat.completions.create(
            model=WRITER, messages=MESSAGES, max_tokens=TOKENS, stream=True, stream_options=options
        )
    )
    is_streamed((event.choices[0].delta.content for event in events if event.choices), is_written)
    assert events[-1].usage.completion_tokens == EXPECTED["written_tokens"]
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "length"


def chat_at_once() -> None:
    async def one(several: openai.AsyncOpenAI) -> list[str | None]:
        stream = await several.chat.completions.create(
            model=WRITER, messages=MESSAGES, max_tokens=TOKENS, stream=True
        )
        return [event.choices[0].delta.content async for event in stream]

    async def ask() -> list[list[str | None]]:
        async with openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key="any") as several:
            return await asyncio.gather(*(one(several) for _ in range(6)))

    for parts in asyncio.run(ask()):
        is_streamed(parts, is_written)


def conversation() -> None:
    asked = {"model": WRITER, "messages": CONVERSATION, "max_tokens": TOKENS}
    is_conversed(client.chat.completions.create(**asked).choices[0].message.content)
    events = client.chat.completions.create(**asked, stream=True)
    is_streamed((event.choices[0].delta.content for event in events), is_conversed)


def sampled() -> None:
    asked = {
        "model": WRITER,
        "messages": MESSAGES,
        "max_tokens": TOKENS,
        "temperature": 1,
        "top_p": 0.9,
        "seed": 4,
    }
    alone = client.chat.completions.create(**asked).choices[0].message.content
    found = client.chat.completions.create(**asked, n=3, logprobs=True, top_logprobs=2).choices
    texts = [choice.message.content for choice in found]
    assert (texts[0], len(set(texts))) == (alone, 3)
    assert all(
        len(token.top_logprobs) == 2 for choice in found for token in choice.logprobs.content
    )
    cut = client.chat.completions.create(**asked, stop=[alone[10:14]]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (
        alone[: alone.index(alone[10:14])].strip(),
        "stop",
    )


def completions() -> None:
    asked = {"model": WRITER, "prompt": ["a text", "another"], "max_tokens": 8}
    whole = [choice.text for choice in client.completions.create(**asked).choices]
    parts: tuple[list[str], list[str]] = ([], [])
    for event in client.completions.create(**asked, stream=True):
        for choice in event.choices:
            parts[choice.index].append(choice.text)
    assert all(whole)
    assert whole == ["".join(part) for part in parts]
    assert all(len(part) > 1 for part in parts), f"{parts} arrived at once"


def tools() -> None:
    place = {"enum": ["here", "there"]}
    places = {
        "type": "object",
        "properties": {"place": place},
        "required": ["place"],
        "additionalProperties": False,
    }
    weather = {
        "type": "function",
        "function": {"name": "weather", "description": "The weather.", "parameters": places},
    }
    asked = {"model": CALLER, "tools": [weather], "max_tokens": 200, "seed": 1}
    messages = [{"role": "user", "content": "a text"}]
    required = {
        **asked,
        "messages": messages,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    choice = client.chat.completions.create(**required).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert json.loads(call.function.arguments)["place"] in ("here", "there")
    arguments = ""
    for event in client.chat.completions.create(**required, stream=True):
        for part in event.choices[0].delta.tool_calls or ():
            arguments += part.function.arguments
    assert arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    answer = client.chat.completions.create(**asked, messages=[*messages, choice.message, result])
    assert answer.usage.completion_tokens > 0


def chat_errors() -> None:
    def ask(**more: object) -> object:
        return client.chat.completions.create(**({"model": WRITER, "messages": MESSAGES} | more))

    refused(
        openai.NotFoundError, lambda: ask(model="gpt-4o", stream=True), ("code", "model_not_found")
    )
    refused(openai.BadRequestError, lambda: ask(model=MODEL), ("code", "model_not_supported"))
    refused(
        openai.BadRequestError,
        lambda: ask(messages=CONVERSATION[:-1]),
        ("param", "messages[2].role"),
    )
    refused(openai.BadRequestError, lambda: ask(n=17), ("param", "n"))


def embedding_rows(*inputs: object) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"id-{number}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": MODEL, "input": given},
        }
        for number, given in enumerate(inputs)
    ]


def batch_file(rows: list[dict[str, Any]]) -> str:
    """Upload the input of a batch; return the file's id."""
    content = "\n".join(map(json.dumps, rows)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert client.files.content(file.id).read() == content
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    return file.id


def run_batch(file: str, *statuses: str, endpoint: str = "/v1/embeddings") -> openai.types.Batch:
    batch = client.batches.create(
        input_file_id=file,
        endpoint=endpoint,
        completion_window="24h",
        metadata={"job": "a"},
    )
    if "cancelled" in statuses:
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    for _ in range(600):
        batch = client.batches.retrieve(batch.id)
        if batch.status in statuses:
            return batch
        time.sleep(0.1)
    raise AssertionError(batch.status)


def results(file: str | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]


def batches() -> float:
    file = batch_file(embedding_rows(TEXTS, "", *TEXTS))
    batch = run_batch(file, "completed")
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (len(TEXTS) + 2, len(TEXTS) + 1, 1)
    assert batch.metadata == {"job": "a"}
    done = {one["custom_id"]: one["response"] for one in results(batch.output_file_id)}
    (failed,) = results(batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("id-1", 400)
    assert set(done) == {f"id-{number}" for number in range(len(TEXTS) + 2)} - {"id-1"}
    assert batch.id in [one.id for one in client.batches.list()]
    for one in (file, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(one).deleted
    refused(openai.NotFoundError, lambda: client.files.retrieve(file), ("param", "id"))
    return distance((entry["embedding"] for entry in done["id-0"]["body"]["data"]), VECTORS)


def batches_of_chats() -> None:
    bodies: dict[str, dict[str, Any]] = {
        "one": {"messages": MESSAGES},
        "other": {"messages": CONVERSATION},
        "sampled": {"messages": MESSAGES, "n": 2, "temperature": 1, "seed": 4},
        "unknown": {"messages": MESSAGES, "model": "gpt-4o"},
        "unfinished": {"messages": CONVERSATION[:-1]},
    }
    rows = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": WRITER, "max_tokens": TOKENS, **body},
        }
        for name, body in bodies.items()
    ]
    batch = run_batch(batch_file(rows), "completed", endpoint="/v1/chat/completions")
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 3, 2), counts
    answers = {}
    for line in results(batch.output_file_id):
        assert line["response"]["status_code"] == 200
        answers[line["custom_id"]] = openai.types.chat.ChatCompletion(**line["response"]["body"])
    assert set(answers) == {"one", "other", "sampled"}
    is_written(answers["one"].choices[0].message.content)
    is_conversed(answers["other"].choices[0].message.content)
    sampled = client.chat.completions.create(model=WRITER, max_tokens=TOKENS, **bodies["sampled"])
    texts = [choice.message.content for choice in answers["sampled"].choices]
    assert texts == [choice.message.content for choice in sampled.choices]
    assert answers["one"].usage.completion_tokens == EXPECTED["written_tokens"]
    assert batch.usage.output_tokens == sum(one.usage.completion_tokens for one in answers.values())
    errors = {line["custom_id"]: line["response"] for line in results(batch.error_file_id)}
    codes = {
        name: (one["status_code"], one["body"]["error"]["code"]) for name, one in errors.items()
    }
    assert codes["unknown"] == (404, "model_not_found")
    assert codes["unfinished"][0] == 400
    assert errors["unfinished"]["body"]["error"]["param"] == "messages[2].role"


def batches_that_end_early() -> None:
    assert run_batch(batch_file(embedding_rows(*TEXTS * 50)), "cancelled").cancelled_at
    file = client.files.create(file=("in.jsonl", b'{"custom_id": "a"}\n{'), purpose="batch")
    failed = run_batch(file.id, "failed")
    assert [(error.line, error.code) for error in failed.errors.data] == [
        (1, "invalid_method"),
        (2, "invalid_json_line"),
    ]
    refused(openai.ConflictError, lambda: client.batches.cancel(failed.id))


check("embeddings (base64 unasked)", embed)
check("embeddings (float)", lambda: embed(encoding_format="float"))
check("embeddings (base64 asked)", raw)
check("embeddings (one text)", one)
check("extra_body role", queries)
check("models.list, retrieve", models)
check("request id", request_id)
check("AsyncOpenAI, six at once", many_at_once)
check("errors", errors)
check("chat.completions", chat)
check("chat.completions, stream", chat_stream)
check("chat.completions, six streams at once (AsyncOpenAI)", chat_at_once)
check("chat.completions, a conversation", conversation)
check("chat.completions, n, seed, stop and logprobs", sampled)
check("chat.completions, tools", tools)
check("completions", completions)
check("chat.completions, errors", chat_errors)
if not OLD:
    check("files and batches", batches)
    check("batches of chat.completions", batches_of_chats)
    check("batches, cancelled and failed", batches_that_end_early)
check(f"embeddings {WAITED}", lambda: waits(slow))
check(f"RateLimitError with max_retries=0 {WAITED}", not_repeated)
