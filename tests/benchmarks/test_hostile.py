"""The hostile tenant sends what it says it sends, and what its benchmark finds is judged by its bounds."""

from __future__ import annotations

from collections import Counter

import pytest
from shoal.v1 import inference_pb2 as pb

from benchmarks.stress.hostile import Asked, Found, Memory
from benchmarks.stress.hostile_client import Attack, attacks
from libs.errors import InvalidInput
from services.router.admission.validation import requests

ATTACKS = {f"{attack.name}, {'legal' if attack.legal else 'too large'}": attack for attack in attacks()}


def check(attack: Attack) -> None:
    if attack.method == "Encode":
        requests.check_encode(pb.EncodeRequest.FromString(attack.body), None)
    elif attack.method == "Score":
        requests.check_score(pb.ScoreRequest.FromString(attack.body), None)
    else:
        requests.check_extract(pb.ExtractRequest.FromString(attack.body), None)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_as_legal_as_it_says(name: str) -> None:
    if ATTACKS[name].legal:
        check(ATTACKS[name])
    else:
        with pytest.raises(InvalidInput):
            check(ATTACKS[name])


def test_there_is_one_of_each_product_at_its_limit_and_one_beyond() -> None:
    names = {name: {attack.legal for attack in ATTACKS.values() if attack.name == name} for name in {one.name for one in attacks()}}
    assert len(names) >= 8
    assert sum(legal == {True, False} for legal in names.values()) >= 4


@pytest.mark.parametrize(
    ("beside", "errors", "peak", "faults"),
    [
        (20.0, Counter[str](), 100, []),
        (20.1, Counter[str](), 100, ["the light tenant's p99 is 2.0 times what it is alone; at most 2 is allowed"]),
        (10.0, Counter({"RESOURCE_EXHAUSTED": 1}), 100, ["the light tenant's requests failed: {'RESOURCE_EXHAUSTED': 1}"]),
        (10.0, Counter[str](), 101, ["router took more memory than it may"]),
    ],
)
def test_what_is_found_is_judged_by_its_bounds(beside: float, errors: Counter[str], peak: int, faults: list[str]) -> None:
    found = Found(Asked([10.0]), Asked([beside], errors), {}, {"router": Memory(10, peak, 100)})
    assert found.faults == faults
