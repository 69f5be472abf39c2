"""The oracle of `amplification`: recipes describe requests of limited size, and a process's
resources are compared with its budget.
"""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shoal.v1 import inference_pb2 as pb

from tests.fuzz import amplification, http_products, products, tiny_kinds
from tests.fuzz.amplification import BUDGETS, Budget, Caller, Spent
from tests.fuzz.http_products import HttpRecipe
from tests.fuzz.products import Recipe
from tests.fuzz.target import Broken

MIB = 1 << 20
SPENDER = (
    "import sys, time\nprint(flush=True)\nsys.stdin.readline()\nbegin = time.process_time()\n"
    "held = bytearray(b'x') * (64 << 20)\n"
    "while time.process_time() < begin + 0.5: pass\nprint(flush=True)\nsys.stdin.readline()\n"
)


def test_recipes_round_trip_and_stay_small() -> None:
    chance, known = random.Random(3), list[bytes]()
    for _ in range(200):
        data = products.make(chance, known)
        recipe = products.read(data)
        assert recipe is not None
        assert recipe.to_json() == data
        assert len(data) < 500
        assert len(recipe.body()) < 32 * MIB
        known.append(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{", b'{"verb": "gone"}', b'{"items": 1e99}', b'{"shared": ["words", 99999999]}'],
)
def test_invalid_recipe_is_not_a_request(data: bytes) -> None:
    assert products.read(data) is None


def test_http_recipes_round_trip_within_their_limits() -> None:
    chance, known = random.Random(5), list[bytes]()
    for _ in range(100):
        data = http_products.make(chance, known)
        recipe = http_products.read(data)
        assert recipe is not None
        assert recipe.to_json() == data
        assert products.read(data) is None, "an input is of one kind"
        assert (
            recipe.connections * len(recipe.request("token"))
            <= 2 * http_products.MAX_WIRE_BYTES + MIB
        )
        known.append(data)


def test_http_recipe_produces_a_request_of_its_size() -> None:
    recipe = HttpRecipe(
        "/v1/embeddings", body=4000, encoding="gzip", credential="valid", headers=3, header_bytes=10
    )
    head, _, body = recipe.request("a-token").partition(b"\r\n\r\n")
    assert b"authorization: Bearer a-token" in head
    assert head.count(b"vvvvvvvvvv") == 3
    assert len(json.loads(gzip.decompress(body))["input"]) == 1000


def test_recipe_produces_the_described_request() -> None:
    recipe = Recipe(
        "hypotheses",
        items=3,
        text=("one word", 4),
        shared=("spaces", 6),
        labels=2,
        unknown=(3, 200),
    )
    request = pb.ExtractRequest.FromString(recipe.body())
    assert request.model == tiny_kinds.HYPOTHESES
    assert [item.text for item in request.items] == ["aaaa"] * 3
    assert request.classify.hypothesis == "{}       "
    assert len(request.classify.labels) == 2
    assert recipe.sequences == 6
    texts = HttpRecipe(body=400, credential="valid", connections=3)
    assert texts.sequences == 3 * texts.content().count(b'"a"')
    assert (
        replace(texts, credential="none").sequences
        == replace(texts, shape="msgpack maps").sequences
        == 0
    )


def test_resources_of_a_process_are_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SPENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        spent = Spent(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert 60 * MIB <= spent.memory <= 80 * MIB
        assert 0.45 <= spent.seconds <= 0.75
        process.stdin.write(b"\n")


def test_request_above_its_budget_is_found_and_the_mesh_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The mesh that is started again shares the cores with other tests.
    monkeypatch.setattr(amplification, "_GOOD_SECONDS", 60.0)
    caller = Caller(tmp_path)
    ordinary = Recipe(items=200).to_json()
    try:
        with monkeypatch.context() as patch:
            patch.setitem(amplification.BUDGETS, "worker-0", Budget(1 << 40, 0, 0.0, 0.0, -1.0))
            with pytest.raises(Broken, match="encode: worker-0 has computed for"):
                caller.one(ordinary)
        caller.one(ordinary)
    finally:
        caller.close()
    assert BUDGETS["worker-0"].sequence_seconds > 0
