"""The checks that the clients' scripts share refuse answers that are incomplete or wrong."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.interop.environments import SCRIPTS

SCORES = [0.1, 0.9, 0.5]
TEXT = "a text about fish"


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the functions of clients/checking.py."""
    expected = tmp_path / "expected.json"
    names = ("model", "query", "classifier", "tagger", "writer", "caller", "prompted", "conversed")
    lists = ("vectors", "alone", "queries", "turns")
    numbers: dict[str, object] = {name: [] for name in lists} | dict.fromkeys(names, "")
    asked = {"system": "", "user": "", "tokens": 1}
    written = {"texts": ["a", "b", "c"], "scores": SCORES, "asked": asked, "written": TEXT}
    expected.write_text(json.dumps(numbers | written))
    monkeypatch.setenv("INTEROP_EXPECTED", str(expected))
    monkeypatch.setenv("INTEROP_BASE", "http://127.0.0.1:1")
    monkeypatch.setenv("INTEROP_LIMITED", "http://127.0.0.1:1")
    return runpy.run_path(str(SCRIPTS / "checking.py"))


def test_complete_ranking_passes(checks: dict[str, Any]) -> None:
    assert checks["ranked"]([(1, 0.9), (2, 0.5), (0, 0.1)]) == 0
    assert checks["ranked"]([(1, 0.75)], 1) == pytest.approx(0.15)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param([], id="nothing"),
        pytest.param([(1, 0.9), (2, 0.5)], id="the last is missing"),
        pytest.param([(1, 0.9), (0, 0.1), (2, 0.5)], id="another order"),
        pytest.param([(1, 0.9), (1, 0.9), (2, 0.5)], id="one twice"),
    ],
)
def test_incomplete_ranking_is_refused(
    checks: dict[str, Any], found: list[tuple[int, float]]
) -> None:
    with pytest.raises(AssertionError, match="not in the order of"):
        checks["ranked"](found)


def test_stream_of_several_parts_passes(checks: dict[str, Any]) -> None:
    checks["is_streamed"]([None, "a text", "", " about fish"], checks["is_written"])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        pytest.param(["", TEXT, None], "arrived at once", id="one part"),
        pytest.param(["a text", " about"], "not 'a text about fish'", id="the end is missing"),
    ],
)
def test_answer_that_was_not_streamed_whole_is_refused(
    checks: dict[str, Any], parts: list[str | None], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        checks["is_streamed"](parts, checks["is_written"])


def test_only_the_named_exception_is_a_refusal(checks: dict[str, Any]) -> None:
    assert isinstance(checks["refusal"](ValueError, lambda: int("a")), ValueError)
    with pytest.raises(AssertionError, match="nothing was raised"):
        checks["refused"](ValueError, lambda: None)
    with pytest.raises(TypeError):
        checks["refused"](ValueError, lambda: int(None))  # type: ignore[call-overload]


def test_attributes_of_a_refusal_are_compared(checks: dict[str, Any]) -> None:
    def call() -> None:
        raise OSError(2, "no such file")

    checks["refused"](OSError, call, ("errno", 2))
    with pytest.raises(AssertionError, match="errno is 2"):
        checks["refused"](OSError, call, ("errno", 3))
