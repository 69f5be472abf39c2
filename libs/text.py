"""Control characters, which a terminal or log viewer interprets instead of showing them. Pure.

They are refused in received names and replaced in printed texts. `shoal.cli.text` is the client's
version: its distribution imports no other package of Shoal, and models run without it.
"""

from __future__ import annotations

import re
from typing import Final

# C0, DEL, C1 (U+009B begins an escape sequence as ESC [ does), line separators, and controls of
# writing direction.
_TURNING: Final = "\u2028\u2029\u202a-\u202e\u2066-\u2069"
_IN_NAMES: Final = re.compile(f"[\x00-\x1f\x7f-\x9f{_TURNING}]")
_IN_TEXTS: Final = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_TURNING}]")

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def control_character(text: str, *, lines: bool = False) -> str:
    """Return the first control character of a text, as `U+001B`; empty if it has none. `lines`:
    tabs and line ends are allowed.
    """
    if text.isprintable():
        return ""
    found = _IN_TEXTS.search(text.replace("\r\n", "\n")) if lines else _IN_NAMES.search(text)
    return f"U+{ord(found[0]):04X}" if found else ""


def without_controls(text: str, *, lines: bool = False) -> str:
    """Return the text with U+FFFD for each control character. `lines`: tabs and newlines stay."""
    return (
        text if text.isprintable() else (_IN_TEXTS if lines else _IN_NAMES).sub(REPLACEMENT, text)
    )
