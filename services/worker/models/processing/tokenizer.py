"""tokenizer.json, which the `tokenizers` library runs: what of it is refused, and the library's own ways to fail.

Whoever wrote the file is not trusted. The library bounds a single search of a regular expression and panics beyond that; patterns
that are known to take exponentially long, and replacements that make gigabytes of a text, are refused here before one is tried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, normalizers

from libs.catalog.files import read_file, shortened
from libs.errors import ModelBroken, ShoalError

FILE: Final = "tokenizer.json"
MAX_BYTES: Final = 128 << 20

_MOST_SPECIAL: Final = 64
"""Tokens that are put around a pair of texts."""
_MOST_GROWTH: Final = 1024
"""Characters that a normaliser may make of one, all its replacements taken together."""
_MOST_PATTERN: Final = 20_000
_PIECE: Final = re.compile(
    r"\\(?P<escaped>.)|(?P<open>\((?:\?(?:[:>=!]|<[=!]|<\w+>|[imx-]+:?))?)|(?P<close>\))|(?P<class>\[)"
    r"|(?P<many>[*+]|\{\d+,\d*\})(?P<greed>[+?]?)|(?P<other>.)",
    re.DOTALL,
)


def load_tokenizer(directory: Path, *, lowercase: bool) -> Tokenizer:
    """tokenizer.json of a directory. `lowercase`: lower case first, whatever its own normaliser does.

    Raises ModelBroken for one that cannot be read, or that could make the smallest text take very long or become very large.
    """
    data = read_file(directory, FILE, MAX_BYTES)
    if data is None:
        raise ModelBroken(f"{FILE}: cannot be read: there is no such file in {directory}")
    with failing(_broken):
        try:
            tokenizer: Tokenizer = Tokenizer.from_buffer(data)
        except ValueError as error:
            raise _broken(f"cannot be read: {error}") from error
        _refuse_bombs(tokenizer)
    if lowercase:
        own = [tokenizer.normalizer] if tokenizer.normalizer is not None else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return tokenizer


@contextmanager
def failing(error_of: Callable[[str], ShoalError]) -> Iterator[None]:
    """The library panics, or raises a bare Exception, where a tokenizer asks for what cannot be done: `error_of` that instead.

    A panic is no Exception: it would pass every handler and end the thread that it meets.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise error_of(shortened(str(error), 200)) from None
        raise


def largest_id(tokenizer: Tokenizer) -> int:
    """Of the vocabulary; ids need not follow each other."""
    return max(tokenizer.get_vocab().values(), default=-1)


def _broken(problem: str) -> ModelBroken:
    return ModelBroken(shortened(f"{FILE}: {problem}"))


def _refuse_bombs(tokenizer: Tokenizer) -> None:
    special = tokenizer.num_special_tokens_to_add(True)
    if special > _MOST_SPECIAL:
        raise _broken(f"`post_processor` puts {special:,} tokens around a pair of texts; at most {_MOST_SPECIAL} are served")
    growth = 1
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer):
        if part is None:
            continue
        for one in _objects(json.loads(part.__getstate__())):
            growth *= _growth(one)
            pattern = one.get("Regex")
            if isinstance(pattern, str) and (problem := slow(pattern)):
                raise _broken(f"the pattern {shortened(pattern, 100)!r} {problem}")
    if growth > _MOST_GROWTH:
        raise _broken(f"`normalizer` can make {growth:,} characters of one; at most {_MOST_GROWTH:,} are served")


def _objects(value: object) -> Iterator[dict[str, object]]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _growth(part: dict[str, object]) -> int:
    """By how much a replacement can lengthen a text: each character may be found."""
    content = part.get("content") if part.get("type") == "Replace" else part.get("prepend")
    return max(1, len(content)) if isinstance(content, str) else 1


def slow(pattern: str) -> str:
    """Why a regular expression may take exponentially long; empty if it is not known to.

    That is a repetition of what is itself repeated without end, as in `(a+)+`, where a text can be shared out in very many ways.
    Possessive and atomic forms never look back. Other slow patterns meet the library's own limit.
    """
    if len(pattern) > _MOST_PATTERN:
        return f"has {len(pattern):,} characters, more than {_MOST_PATTERN:,}"
    groups, last, position = [False], False, 0  # whether each open group, and what stands just before, repeats without end
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
                return "repeats what is itself repeated without end, which can take for ever: write it without the inner repetition"
            groups[-1] = last = True
        else:
            escaped = found["escaped"] or ""
            if escaped in ("g", "k") or (escaped.isdigit() and escaped != "0"):
                return "refers to what it has found itself, which can take for ever"
            last = False
    return ""


def _is_many(quantifier: str) -> bool:
    """Whether it is without end, or as good as that."""
    if quantifier in "*+":
        return True
    least, _, most = quantifier.strip("{}").partition(",")
    return not most or int(most[:9]) - int(least[:9]) > 32


def _after_class(pattern: str, position: int) -> int:
    """Behind the `]` of a character class that began before `position`; classes may hold classes."""
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
