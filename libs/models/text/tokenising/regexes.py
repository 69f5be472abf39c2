"""Reject regular expressions of a tokenizer.json that are open to catastrophic backtracking (ReDoS)
when a model is loaded.

The `tokenizers` library runs them on a backtracking engine that stops a search only after ten
million steps at one position of a text. Three checks prevent abuse:

1. The form of a pattern (`slow`).
2. An allow-list of published patterns.
3. For all others, a trial (`searching.py`) in a subprocess.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PUBLISHED: Final = frozenset(
    {
        " {2,}", r"\s+", r"\s", r"\s{2,}", r"\n", r"[\n\r\t]", r"\d", r"\p{N}", r"\p{N}{1,3}",
        r"[\r\n]", r"\s?\p{L}+",
        r"\s?\p{P}+", r"\w+|[^\w\s]+", r"\s+|\w+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
        # GPT-2, CLIP
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        # Llama 3, Qwen 2 and 3, o200k
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)  # fmt: skip
"""Patterns that are allowed without a trial at each load. A test tries them."""

_MAX_PATTERN: Final = 20_000
_TRIAL_SECONDS: Final = 30.0
"""Wall-clock limit of a trial, which includes a slow start of Python on a busy machine.
`searching.py` limits the computation.
"""
_SEARCHING: Final = Path(__file__).with_name("searching.py")
_PIECE: Final = re.compile(
    r"\\(?P<escaped>.)|(?P<open>\((?:\?(?:[:>=!]|<[=!]|<\w+>|[imx-]+:?))?)|(?P<close>\))|(?P<class>\[)"
    r"|(?P<many>[*+]|\{\d+,\d*\})(?P<greed>[+?]?)|(?P<other>.)",
    re.DOTALL,
)


def tried(patterns: Sequence[str]) -> tuple[str, str] | None:
    """Try patterns on adversarial texts. Returns the first pattern that took too long, and the
    reason; None if none did.
    """
    try:
        # Our program, without arguments from the checkpoint.
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-I", str(_SEARCHING)],
            input=json.dumps(patterns).encode(),
            capture_output=True,
            env={},
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return patterns[0], "takes too long"
    reported = [json.loads(line) for line in done.stdout.splitlines()]
    bad = next((one for one in reported if one["slow"]), None)
    if bad is not None:
        return bad["pattern"], bad["slow"]
    return (
        None
        if len(reported) == len(patterns)
        else (patterns[len(reported)], "takes more time or memory than a pattern is allowed")
    )


def slow(pattern: str) -> str:
    """Return why a regular expression may take exponential time; empty for no known reason.

    The cause is nested unbounded repetition, as in `(a+)+`, which can divide a text in
    exponentially many ways. Possessive and atomic groups never backtrack. Other slow patterns reach
    the library's limit.
    """
    if len(pattern) > _MAX_PATTERN:
        return f"has {len(pattern):,} characters; the maximum is {_MAX_PATTERN:,}"
    # Whether each open group, and the previous item, has an unbounded repetition.
    groups, last = [False], False
    position = 0
    atomic: list[bool] = []
    while position < len(pattern) and (found := _PIECE.match(pattern, position)) is not None:
        position = found.end()
        if found["class"]:
            position, last = _after_class(pattern, position), False
        elif found["open"]:
            groups.append(False)
            atomic.append(found["open"] == "(?>")
            last = False
        elif found["close"]:
            inner = groups.pop() if len(groups) > 1 else False
            last = inner and not (atomic.pop() if atomic else False)
            groups[-1] = groups[-1] or last
        elif found["many"]:
            if not _is_many(found["many"]) or found["greed"] == "+":
                continue
            if last:
                return (
                    "nests unbounded repetitions, which can take exponential time: remove the "
                    "inner repetition"
                )
            groups[-1] = last = True
        else:
            escaped = found["escaped"] or ""
            if escaped in ("g", "k") or (escaped.isdigit() and escaped != "0"):
                return "has a backreference, which can take exponential time"
            last = False
    return ""


def _is_many(quantifier: str) -> bool:
    """Return whether a quantifier is unbounded, or practically so."""
    if quantifier in "*+":
        return True
    least, _, most = quantifier.strip("{}").partition(",")
    return not most or int(most[:9]) - int(least[:9]) > 32


def _after_class(pattern: str, position: int) -> int:
    """Return the position after the `]` of a character class that began before `position`. Classes
    may be nested.
    """
    depth = 1
    is_first = True
    while position < len(pattern) and depth:
        letter = pattern[position]
        if letter == "\\":
            position += 1
        elif letter == "[":
            depth += 1
        elif letter == "]" and not is_first:
            depth -= 1
        is_first = (is_first and letter == "^") or letter == "["
        position += 1
    return position
