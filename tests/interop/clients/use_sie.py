"""sie-sdk."""

from checking import BASE, MODEL, QUERY, SCORES, TEXTS, VECTORS, answered, check, distance, refused
from sie_sdk import SIEClient
from sie_sdk.client.errors import RequestError

client = SIEClient(BASE)
items = [{"text": text, "id": str(index)} for index, text in enumerate(TEXTS)]


def encode() -> float:
    return distance((result["dense"] for result in client.encode(MODEL, items)), VECTORS)


def score() -> float:
    found = client.score(MODEL, {"text": QUERY}, items)["scores"]
    assert [entry["rank"] for entry in found] == list(range(len(items)))
    return max(abs((1 + entry["score"]) / 2 - SCORES[int(entry["item_id"])]) for entry in found)


def models() -> None:
    assert MODEL in [model["name"] for model in client.list_models()]
    assert client.get_model(MODEL)["dims"]["dense"] == len(VECTORS[0])


check("encode", encode)
check("encode, one", lambda: distance([client.encode(MODEL, {"text": TEXTS[0]})["dense"]], VECTORS[:1]))
check(
    "encode, query and float16",
    lambda: answered(client.encode(MODEL, items[:2], output_dtype="float16", options={"is_query": True})),
)
check("score", score)
check("list_models, get_model", models)
check("errors", lambda: refused(RequestError, lambda: client.encode("nobody/has-this", items[:1])))
