"""sie-sdk."""

import asyncio

from checking import (
    ALONE,
    BASE,
    CLASSIFIER,
    EXPECTED,
    LIMITED,
    MODEL,
    PROMPTED,
    QUERIES,
    QUERY,
    TAGGER,
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
from sie_sdk import SIEAsyncClient, SIEClient
from sie_sdk.client.errors import RequestError

client = SIEClient(BASE)
limited = SIEClient(LIMITED)
HALF = 2**-11
"""The largest rounding error of a float16 below 1."""
items = [{"text": text, "id": str(index)} for index, text in enumerate(TEXTS)]


def encode() -> float:
    return distance((result["dense"] for result in client.encode(MODEL, items)), VECTORS)


def half_queries() -> None:
    found = client.encode(PROMPTED, items, output_dtype="float16", options={"is_query": True})
    assert {str(result["dense"].dtype) for result in found} == {"float16"}
    assert distance((result["dense"] for result in found), QUERIES) < HALF


def score() -> float:
    found = client.score(MODEL, {"text": QUERY}, items)["scores"]
    assert [entry["rank"] for entry in found] == list(range(len(items)))
    return ranked((int(entry["item_id"]), (1 + entry["score"]) / 2) for entry in found)


def classes() -> float:
    found = client.extract(CLASSIFIER, items)
    pairs = zip(found, EXPECTED["classes"], strict=True)
    return max(
        labelled({one["label"]: one["score"] for one in row["classifications"]}, wanted)
        for row, wanted in pairs
    )


def entities() -> float:
    largest = 0.0
    for item, wanted in zip(items, EXPECTED["entities"], strict=True):
        found = client.extract(TAGGER, item)["entities"]
        assert [(one["label"], one["start"], one["end"]) for one in found] == [
            (one[0], one[2], one[3]) for one in wanted
        ]
        largest = max(
            [
                largest,
                *(
                    abs(one["score"] - expected[1])
                    for one, expected in zip(found, wanted, strict=True)
                ),
            ]
        )
    return largest


def asynchronous() -> float:
    async def ask() -> float:
        async with SIEAsyncClient(BASE) as several:
            return distance(
                (result["dense"] for result in await several.encode(MODEL, items)), VECTORS
            )

    return asyncio.run(ask())


def models() -> None:
    assert MODEL in [model["name"] for model in client.list_models()]
    assert client.get_model(MODEL)["dims"]["dense"] == len(VECTORS[0])


check("encode", encode)
check("encode, one", lambda: distance([client.encode(MODEL, {"text": TEXTS[0]})["dense"]], ALONE))
check("encode, query and float16", half_queries)
check("score", score)
check("list_models, get_model", models)
check("errors", lambda: refused(RequestError, lambda: client.encode("nobody/has-this", items[:1])))
check("extract, a classifier", classes)
check("extract, entities", entities)
check("SIEAsyncClient.encode", asynchronous)
check(
    f"encode {WAITED}",
    lambda: waits(
        lambda: distance((result["dense"] for result in limited.encode(MODEL, items)), VECTORS)
    ),
)
