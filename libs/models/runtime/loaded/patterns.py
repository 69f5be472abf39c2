"""Match regular expressions of untrusted checkpoints in linear time and bounded memory.

PEFT matches them with Python's `re`, which backtracks: forty times `.?` does not end on a short
name, while the GIL is held. RE2 never backtracks. A pattern must be within a syntax that means the
same to both, and valid in both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import re2

MAX_CHARACTERS: Final = 200
_MAX_BYTES: Final = 1 << 16
"""Memory of RE2 per pattern. A pattern that needs more is refused, as it repeats too often."""

_ESCAPE: Final = r"\\[dDwWsS!-/:-@\[-`{-~]"
_TOKEN: Final = re.compile(
    rf"""
    (?![\\\[\](){{}}])[\ -~]  # a character, or one of . | ^ $ * + ?
    | {_ESCAPE}
    | \((?!\?) | \(\?: | \)
    # Repetition counts. RE2 reads {{,3}} and {{03}} as characters.
    | \{{ (?:0|[1-9]\d{{0,2}}) (?:,(?:[1-9]\d{{0,2}})?)? \}}
    # Classes, without sequences that a later Python may read as operations on sets.
    | \[\^?+\]?+ (?:(?!--|&&|~~|\|\||[\\\[\]])[\ -~] | {_ESCAPE})* \]
    """,
    re.ASCII | re.VERBOSE,
)


class UnsupportedPattern(Exception):
    """A pattern is invalid or outside the supported syntax. The message is a predicate of it."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern."""

    _whole: Any
    """The pattern as PEFT completes it (`re2` has no types)."""

    def matches_end(self, name: str) -> bool:
        """Return True if the pattern matches all of `name`, or all that follows one of its dots.

        This is PEFT's `re.match(rf"(.*\\.)?({pattern})$", name)`, except that names with other
        characters than printable ASCII, which no served module has, match nothing.
        """
        return (
            name.isascii()
            and name.isprintable()
            and self._whole.fullmatch(name.encode()) is not None
        )


def compile_pattern(pattern: str) -> Pattern:
    """Compile a pattern. Raises UnsupportedPattern."""
    if len(pattern) > MAX_CHARACTERS:
        raise UnsupportedPattern(f"has {len(pattern):,} characters, more than {MAX_CHARACTERS}")
    end = 0
    while token := _TOKEN.match(pattern, end):
        end = token.end()
    if end < len(pattern):
        raise UnsupportedPattern(f"has {pattern[end : end + 8]!r}, which is not supported")
    options = re2.Options()
    options.max_mem, options.never_capture, options.log_errors = _MAX_BYTES, True, False
    try:
        re.compile(pattern)
        return Pattern(re2.compile(rf"(.*\.)?({pattern})$".encode(), options))
    except re.error as error:
        raise UnsupportedPattern(f"is invalid: {error}") from None
    except re2.error as error:
        raise UnsupportedPattern(f"is refused by RE2: {error.args[0].decode()}") from None
