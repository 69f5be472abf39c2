"""The hostile tenant sends the documented load, and its benchmark judges results by the bounds."""

from __future__ import annotations

from collections import Counter

import pytest
from shoal.v1 import inference_pb2 as pb

from benchmarks.stress.hostile import HostileResult, LightAnswers, ProcessMemory
from benchmarks.stress.hostile_kinds import KINDS, Attack, texts
from libs.errors import InvalidInput
from services.router.admission.validation import requests

ATTACKS = {
    f"{attack.name}, {'legal' if attack.legal else 'too large'}": attack for attack in texts()
}


def check(attack: Attack) -> None:
    if attack.method == "Encode":
        requests.check_encode(pb.EncodeRequest.FromString(attack.body), None)
    elif attack.method == "Score":
        requests.check_score(pb.ScoreRequest.FromString(attack.body), None)
    else:
        requests.check_extract(pb.ExtractRequest.FromString(attack.body), None)


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_as_legal_as_it_says(name: str) -> None:
    if ATTACKS[name].legal:
        check(ATTACKS[name])
    else:
        with pytest.raises(InvalidInput):
            check(ATTACKS[name])


def test_there_is_one_of_each_product_at_its_limit_and_one_beyond() -> None:
    names = {
        name: {attack.legal for attack in ATTACKS.values() if attack.name == name}
        for name in {one.name for one in texts()}
    }
    assert len(names) >= 8
    assert sum(legal == {True, False} for legal in names.values()) >= 4


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "texts"])
def test_attacks_of_the_other_kinds_are_named_and_have_a_body(kind: str) -> None:
    for attack in KINDS[kind]():
        assert attack.name
        assert attack.body
        assert attack.is_read == (kind != "slow-readers")


@pytest.mark.parametrize(
    ("beside", "errors", "peak", "faults"),
    [
        (400.0, Counter[str](), 100, []),
        (
            401.0,
            Counter[str](),
            100,
            ["texts: the light tenant's p99 is 401 ms; at most 400 ms is allowed"],
        ),
        (
            10.0,
            Counter({"RESOURCE_EXHAUSTED": 1}),
            100,
            ["texts: the light tenant's requests failed: {'RESOURCE_EXHAUSTED': 1}"],
        ),
        (10.0, Counter[str](), 101, ["texts: router took more memory than it may"]),
    ],
)
def test_bounds_that_are_not_met_are_reported(
    beside: float, errors: Counter[str], peak: int, faults: list[str]
) -> None:
    found = HostileResult(
        "texts",
        1.0,
        LightAnswers([200.0]),
        LightAnswers([beside], errors),
        {},
        {"router": ProcessMemory(10, peak, 100)},
    )
    assert found.faults == faults


def test_short_latency_alone_leaves_the_floor_as_the_bound() -> None:
    found = HostileResult("texts", 1.0, LightAnswers([10.0]), LightAnswers([299.0]), {}, {})
    assert found.faults == []
