"""openai."""

import base64
import struct

import openai
from checking import BASE, MODEL, TEXTS, VECTORS, answered, check, distance, refused

client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="any")


def embed(**more: object) -> float:
    data = client.embeddings.create(model=MODEL, input=TEXTS, **more).data
    return distance((entry.embedding for entry in data), VECTORS)


def raw() -> float:
    data = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="base64").data
    rows = (struct.unpack(f"<{len(VECTORS[0])}f", base64.b64decode(entry.embedding)) for entry in data)
    return distance(rows, VECTORS)


def one() -> float:
    return distance([client.embeddings.create(model=MODEL, input=TEXTS[0]).data[0].embedding], VECTORS[:1])


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def request_id() -> None:
    answer = client.embeddings.with_raw_response.create(model=MODEL, input="a", extra_headers={"x-request-id": "mine"})
    assert answer.parse()._request_id == "mine"


def errors() -> None:
    refused(
        openai.NotFoundError,
        lambda: client.embeddings.create(model="gpt-4o", input="a"),
        ("code", "model_not_found"),
        ("param", "model"),
    )
    refused(openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input=["a", ""]), ("param", "input[1]"))
    refused(openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input=[[1, 2]]), ("param", "input"))


check("embeddings (base64 unasked)", embed)
check("embeddings (float)", lambda: embed(encoding_format="float"))
check("embeddings (base64 asked)", raw)
check("embeddings (one text, role)", one)
check("extra_body role", lambda: answered(client.embeddings.create(model=MODEL, input="a", extra_body={"role": "query"})))
check("models.list, retrieve", models)
check("request id", request_id)
check("errors", errors)
