"""Shared code of all client scripts, which run in separate environments with only the standard
library.

Each prints a line of JSON per call: its name, and the largest difference to the result of
shoal.Client, or an error.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

BASE = os.environ["INTEROP_BASE"]
LIMITED = os.environ["INTEROP_LIMITED"]
"""The same edge for a tenant that gets one request per two seconds; the others receive 429 with
Retry-After.
"""
EXPECTED: dict[str, Any] = json.loads(Path(os.environ["INTEROP_EXPECTED"]).read_text())
MODEL: str = EXPECTED["model"]
TEXTS: list[str] = EXPECTED["texts"]
QUERY: str = EXPECTED["query"]
VECTORS: list[list[float]] = EXPECTED["vectors"]
ALONE: list[list[float]] = EXPECTED["alone"]
"""The vector of the first text, requested alone."""
PROMPTED: str = EXPECTED["prompted"]
"""A model with a prompt for queries."""
QUERIES: list[list[float]] = EXPECTED["queries"]
"""PROMPTED's vectors of the texts as queries."""
SCORES: list[float] = EXPECTED["scores"]
CLASSIFIER: str = EXPECTED["classifier"]
TAGGER: str = EXPECTED["tagger"]
WRITER: str = EXPECTED["writer"]
CALLER: str = EXPECTED["caller"]
"""A generative model, and the text that shoal.Client generates with at most `TOKENS` tokens."""
SYSTEM, USER, TOKENS = (EXPECTED["asked"][name] for name in ("system", "user", "tokens"))
WRITTEN: str = EXPECTED["written"]
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
CONVERSATION = [MESSAGES[0], *EXPECTED["turns"], MESSAGES[1]]
CONVERSED: str = EXPECTED["conversed"]
WAITED = "(rate limited)"
"""The suffix of calls for which at least one response with 429 is counted."""
TRIES = 10


def check(name: str, call: Callable[[], float | None]) -> None:
    """Run a check. `call` returns the largest difference, or None without numbers."""
    try:
        found = call()
        print(json.dumps({"call": name, "difference": found, "error": ""}), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(
            json.dumps(
                {
                    "call": name,
                    "difference": None,
                    "error": f"{type(error).__name__}: {error}"[:300],
                }
            ),
            flush=True,
        )


def distance(found: Iterable[Iterable[float]], wanted: Iterable[Iterable[float]]) -> float:
    """Return the largest difference of two tables."""
    pairs = zip(found, wanted, strict=True)
    return max(
        abs(float(one) - float(other))
        for row, expected in pairs
        for one, other in zip(row, expected, strict=True)
    )


def ranked(results: Iterable[tuple[int, float]], count: int = len(TEXTS)) -> float:
    """Return the largest difference of scores by index; these must be the `count` best texts in
    descending order.
    """
    found = list(results)
    best = sorted(range(len(SCORES)), key=SCORES.__getitem__, reverse=True)[:count]
    assert [index for index, _ in found] == best, f"{found}, not in the order of {best}"
    return max(abs(score - SCORES[index]) for index, score in found)


def labelled(found: dict[str, float], wanted: dict[str, float]) -> float:
    """Return the largest difference of labels' scores."""
    assert set(found) == set(wanted), f"{sorted(found)}, not {sorted(wanted)}"
    return max(abs(found[label] - wanted[label]) for label in wanted)


def is_written(text: str | None) -> None:
    """Check that the text is that of shoal.Client."""
    assert text == WRITTEN, f"{text!r}, not {WRITTEN!r}"


def is_streamed(parts: Iterable[str | None], check_text: Callable[[str], None]) -> None:
    """Check the text of a stream, and that it arrived in several parts."""
    found = [part for part in parts if part]
    check_text("".join(found))
    assert len(found) > 1, f"{found} arrived at once"


def is_conversed(text: str | None) -> None:
    """Check that the answer to CONVERSATION is that of shoal.Client."""
    assert text == CONVERSED != WRITTEN, f"{text!r}, not {CONVERSED!r}"


def refusal(kind: type[Exception], call: Callable[[], object]) -> Any:
    """Check that the call raises this exception, and return it."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("nothing was raised")


def refused(
    kind: type[Exception], call: Callable[[], object], *attributes: tuple[str, object]
) -> None:
    """Check that the call raises this exception with these attributes."""
    raised = refusal(kind, call)
    for name, value in attributes:
        assert getattr(raised, name) == value, f"{name} is {getattr(raised, name)!r}"


def waits(call: Callable[[], float | None]) -> float | None:
    """Check clients that retry: of consecutive calls only the first succeeds at once."""
    return [call() for _ in range(3)][-1]


def reports_retry_after(
    kind: type[Exception], call: Callable[[], float | None], seconds: Callable[[Any], float]
) -> float | None:
    """Check clients that leave retries to their caller: repeat the call after the error's `seconds`
    until it succeeds.
    """
    was_limited = False
    for _ in range(TRIES):
        try:
            found = call()
        except kind as error:
            was_limited = True
            time.sleep(seconds(error))
        else:
            if was_limited:
                return found
    raise AssertionError("no call was refused" if not was_limited else "no call passed")
