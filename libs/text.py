"""Characters that a terminal or a reader of logs obeys instead of showing them. Pure.

They are refused where a name comes in and replaced where a text goes out. `shoal.text` is the client's: its distribution imports
nothing of ours, and models run without it.
"""

from __future__ import annotations

import re
from typing import Final

# C0, DEL, C1 (U+009B begins an escape sequence as ESC [ does), separators of lines, and what turns the direction of writing around.
_TURNING: Final = "\u2028\u2029\u202a-\u202e\u2066-\u2069"
_IN_NAMES: Final = re.compile(f"[\x00-\x1f\x7f-\x9f{_TURNING}]")
_IN_TEXTS: Final = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_TURNING}]")

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def control_character(text: str, *, lines: bool = False) -> str:
    """The first control character of a text, as `U+001B`; empty if it has none. `lines`: tabs and ends of lines are none."""
    if text.isprintable():
        return ""
    found = _IN_TEXTS.search(text.replace("\r\n", "\n")) if lines else _IN_NAMES.search(text)
    return f"U+{ord(found[0]):04X}" if found else ""


def without_controls(text: str, *, lines: bool = False) -> str:
    """The text with U+FFFD for each control character. `lines`: tabs and newlines stay."""
    return text if text.isprintable() else (_IN_TEXTS if lines else _IN_NAMES).sub(REPLACEMENT, text)
