"""Generations that wait for memory: their order, what a worker counts of them, and how many it
takes in.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.kernels.attention.paged import pages_for
from libs.models import InputSequence, Unfinished
from libs.models.generation.model import GenerativeModel
from libs.models.interface.work import TextWork, never_cancelled
from tests.generation.served import write
from tests.generation.test_serving import load

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GenerativeModel:
    """A model of which a forward runs one step."""
    write("qwen3", tmp_path)
    monkeypatch.setattr("libs.models.generation.model.STEPS_SECONDS", 0.0)
    return load(tmp_path)


def prepared(model: GenerativeModel, most: int) -> InputSequence:
    (sequence,) = model.prepare(TextWork(["a"], max_tokens=most), never_cancelled).sequences
    return sequence


def test_long_answer_is_not_overtaken_for_ever(model: GenerativeModel) -> None:
    model.pages = 4
    long = prepared(model, 100)
    assert pages_for(long.tokens + 100) == model.pages
    waiting = [prepared(model, 2 + number) for number in range(3)]
    model.forward("write", waiting)  # they end one after another
    waiting.append(long)
    for _ in range(20):
        waiting.append(prepared(model, 4))
        outcomes = dict(zip(map(id, waiting), model.forward("write", waiting), strict=True))
        found = outcomes[id(long)]
        assert isinstance(found, Unfinished)
        if found.ids:
            return
        waiting = [each for each in waiting if isinstance(outcomes[id(each)], Unfinished)]
    pytest.fail("later answers took the memory that it waited for")
