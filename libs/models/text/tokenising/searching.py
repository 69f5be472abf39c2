"""A standalone program that `regexes.py` runs in a subprocess: it tries a tokenizer's patterns on
adversarial texts.

It imports nothing of Shoal, reads a JSON list of patterns from stdin, and prints a line for each as
soon as it is tried: `{"pattern", "slow"}`, with the reason for rejection in `slow`, or empty.
Resource limits (setrlimit) kill it if it takes too long.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

MEMORY_BYTES: Final = 1 << 30
CPU_SECONDS: Final = 5
LENGTH: Final = 16_384
MAX_SECONDS: Final = 0.08
"""CPU time for a text of LENGTH; for a linear pattern, five seconds for a megabyte. Published
patterns took 0.001 to 0.026 (0.12 once on a busy core, so the minimum of three counts), most
quadratic ones 0.19 to 1.3."""

_RUN: Final = 24
"""Repetitions of a unit: enough to expose exponential time, and few enough to stay below the
library's limit of steps.
"""
_LETTERS: Final = " a\nA1.\t'é中\u0301-_,"
_SYNTAX: Final = re.compile(r"\\[A-Za-z]\{?\^?\w*\}?|[\\\[\](){}|*+?^$]")
_MAX_LETTERS: Final = 24
_MAX_WORDS: Final = 16


def main() -> None:
    patterns = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for pattern in patterns:
        used = int(time.process_time()) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_SECONDS, resource.RLIM_INFINITY))
        print(json.dumps({"pattern": pattern, "slow": slow_for(pattern)}), flush=True)


def slow_for(pattern: str) -> str:
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(pattern), "removed")
    split.pre_tokenize_str("a")
    for text in texts(pattern):
        try:
            spent = _seconds(split, text)
        except BaseException as error:  # the library's panic is not an Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            return "takes more steps than the library allows for a text of 16,384 characters"
        if (
            spent > MAX_SECONDS
            and (spent := min(spent, _seconds(split, text), _seconds(split, text))) > MAX_SECONDS
        ):
            return (
                f"takes {spent:.2f} s for a text of {LENGTH:,} characters, and far longer for "
                "longer texts"
            )
    return ""


def _seconds(split: Any, text: str) -> float:
    begin = time.process_time()
    split.pre_tokenize_str(text)
    return time.process_time() - begin


def texts(pattern: str) -> Iterator[str]:
    """Yield adversarial texts: short and long runs of repeatable characters, then a mismatch,
    then every letter once.
    """
    own = list(dict.fromkeys(_SYNTAX.sub("", pattern)))[:_MAX_LETTERS]
    letters = list(dict.fromkeys([*own, *_LETTERS]))
    words = list(dict.fromkeys(re.findall(r"\w{2,}", pattern)))[:_MAX_WORDS]
    pairs = [one + other for one in own[:8] for other in own[:8] if one != other]
    every = "".join(letters)
    for unit in [*letters, *words, *pairs]:
        yield (unit * _RUN + "\x01" + every) * (LENGTH // (len(unit) * _RUN + len(every)))
        for end in ("\x01", "_"):  # the first ends a word, the second does not
            yield unit * (LENGTH // len(unit)) + end + every


if __name__ == "__main__":
    main()
