"""Every kept input causes no failure, and each target still works on a few hundred inputs of one
seed.
"""

from __future__ import annotations

import random

import pytest

from tests.fuzz.run import CORPUS
from tests.fuzz.target import all_targets

TARGETS = all_targets()
INPUTS = {
    "models": 15,
    "templates": 2,
    "encoders": 60,
    "directories": 60,
    "calls": 150,
    "wire": 25,
    "amplification": 12,
    "documents": 12,
}
"""The number of inputs of slow targets; 200 for all others."""


@pytest.mark.parametrize("name", TARGETS)
def test_kept_and_new_inputs_are_taken_or_refused(name: str) -> None:
    """An exception of a target is a finding. Details: `python -m tests.fuzz --replay FILE --target
    NAME`.
    """
    chance = random.Random(20261122)
    kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    with TARGETS[name].open() as attempt:
        for data in kept:
            attempt(data)
        for _ in range(INPUTS.get(name, 200)):
            attempt(TARGETS[name].make(chance, kept))


def test_corpus_is_small_and_has_existing_targets() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= set(TARGETS)
    assert sum(path.stat().st_size for path in files) <= 300_000
