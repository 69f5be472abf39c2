"""Counting the objects of a body before it is decoded."""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random
from typing import Any

import msgspec
import pytest

from services.edge.intake import counting
from services.edge.intake.counting import (
    MAX_DEPTH,
    MAX_OBJECTS,
    MAX_VALUES,
    ContentCount,
    count_objects,
)
from services.edge.messages import limits
from services.edge.messages.base import HttpError
from services.router.admission.validation import limits as router_limits

TEXTS = ("", 'a"b\\', '[{,"', '\\\\"', "],}", "x" * 20, 'é\\"', "\\", "\\" * 5 + '"', "\n", "🐟")


def value(random: Random, depth: int = 0) -> Any:
    kind = random.random()
    if depth > 6 or kind < 0.4:
        return random.choice((*TEXTS, 5, 1.5, -3, 300, 1 << 40, None, True))
    if kind < 0.7:
        return [value(random, depth + 1) for _ in range(random.randrange(5))]
    return {
        random.choice(TEXTS) + str(at): value(random, depth + 1)
        for at in range(random.randrange(4))
    }


def true_count(found: Any) -> ContentCount:
    """Return the count of a decoded value."""
    if not isinstance(found, list | dict):
        return ContentCount(int(isinstance(found, str)), 0)
    within = [true_count(one) for one in (found.values() if isinstance(found, dict) else found)]
    keys = len(found) if isinstance(found, dict) else 0
    return ContentCount(
        1 + keys + sum(one.objects for one in within),
        len(found) + sum(one.values for one in within),
        1 + max((one.depth for one in within), default=0),
    )


@pytest.mark.parametrize("piece_bytes", [8, 64, 1 << 16])
def test_exact_counts_match_the_decoded_value(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "_PIECE_BYTES", piece_bytes)
    for number in range(1500):
        random = Random(number)
        content = value(random)
        expected = true_count(content)
        body = json.dumps(
            content, ensure_ascii=random.random() < 0.5, indent=random.choice((None, 1))
        ).encode()
        exact, fast = counting._count_exactly(body), count_objects(body, is_msgpack=False)
        assert (exact.objects, exact.depth) == (expected.objects, expected.depth), content
        assert exact.values >= expected.values
        assert fast.objects >= expected.objects
        assert fast.values >= expected.values
        walked = count_objects(msgspec.msgpack.encode(content), is_msgpack=True)
        assert (walked.objects, walked.depth) == (expected.objects, expected.depth), content
        assert walked.values >= expected.values


@pytest.mark.parametrize("shortest", [1, 16])
def test_runs_of_short_values_count_like_the_values_one_by_one(
    shortest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(500):
        random = Random(number)
        run: list[Any] = random.choices((1, True, None, {}, [], ""), k=random.randrange(60))
        body = msgspec.msgpack.encode([value(random), *run, [value(random), *run]])
        body = body[: random.choice((len(body), random.randrange(len(body))))]  # some are cut
        monkeypatch.setattr(counting, "_MIN_RUN", shortest)
        in_runs = count_objects(body, is_msgpack=True)
        monkeypatch.setattr(counting, "_MIN_RUN", len(body) + 1)
        assert in_runs == count_objects(body, is_msgpack=True), body


def test_punctuation_within_texts_is_not_counted() -> None:
    text = '[{",' * MAX_OBJECTS
    count = count_objects(json.dumps([text, "\\" * 99_999, text]).encode(), is_msgpack=False)
    assert (count.objects, count.depth) == (4, 1)


def test_source_code_is_charged_by_its_exact_count() -> None:
    code = 'if (names["key"] == "a") { list[0] = {"b": [1, 2]}; }\n' * 20_000
    body = json.dumps({"model": "org/model", "input": code}).encode()
    assert count_objects(body, is_msgpack=False).bytes < 4 * 1024


@pytest.mark.parametrize("is_msgpack", [False, True])
def test_limits_of_a_body_are_exact(is_msgpack: bool) -> None:
    def refusal(content: Any) -> str:
        body = msgspec.msgpack.encode(content) if is_msgpack else msgspec.json.encode(content)
        with pytest.raises(HttpError) as raised:
            count_objects(body, is_msgpack=is_msgpack)
        return f"{raised.value.reason}: {raised.value.message}"

    def nested(depth: int) -> Any:
        content: Any = []
        for _ in range(depth - 1):
            content = [content, "]" * 10]
        return content

    encode = msgspec.msgpack.encode if is_msgpack else msgspec.json.encode
    for content in (["a"] * (MAX_OBJECTS - 1), [300] * (MAX_VALUES - 1), nested(MAX_DEPTH)):
        count_objects(encode(content), is_msgpack=is_msgpack)
    assert "TOO_LARGE: the body has more than 200,000 texts" in refusal(["a"] * (MAX_OBJECTS + 1))
    assert "TOO_LARGE: the body has more than 200,000 texts" in refusal([{}] * (MAX_OBJECTS + 1))
    assert "TOO_LARGE: the body has more than 1,000,000 values" in refusal([300] * (MAX_VALUES + 1))
    assert "INVALID_INPUT: the body is nested more than 100 levels deep" in refusal(
        nested(MAX_DEPTH + 1)
    )


def test_msgpack_list_is_refused_by_its_declared_length() -> None:
    with pytest.raises(HttpError, match="values"):
        count_objects(b"\xdd\xff\xff\xff\xff", is_msgpack=True)


def test_invalid_bodies_are_left_to_the_decoder() -> None:
    random = Random(5)
    for _ in range(2000):
        body = random.randbytes(random.randrange(200))
        for is_msgpack in (False, True):
            with suppress(HttpError):
                count_objects(body, is_msgpack=is_msgpack)


def test_list_limits_equal_the_routers() -> None:
    assert router_limits.ITEMS.most == limits.MAX_ITEMS
    assert router_limits.LABELS.most == limits.MAX_LABELS
    assert router_limits.IDS.most == limits.MAX_IDS
    assert router_limits.PARTS.most == limits.MAX_PARTS
    assert router_limits.CHUNKS.most == limits.MAX_SPANS
    assert router_limits.TURNS.most + 2 == limits.MAX_MESSAGES
