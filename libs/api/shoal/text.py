"""Characters that a terminal obeys instead of showing them, in what a mesh answers. Pure."""

from __future__ import annotations

import json
import re

# C0 but tab and newline, DEL, C1 (U+009B begins an escape sequence as ESC [ does), separators of lines, what turns the direction
# of writing around.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """The text for people: U+FFFD stands for each control character; tabs and newlines stay."""
    return text if text.isprintable() else _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def document(value: object) -> str:
    """The value for programs: JSON on one line, nothing lost. Control characters, which stand in its strings only, are escaped."""
    line = json.dumps(value, ensure_ascii=False)
    return line if line.isprintable() else _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", line)
