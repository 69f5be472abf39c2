"""Control characters in texts from a mesh, which a terminal would interpret. Pure."""

from __future__ import annotations

import json
import re

# C0 except tab and newline, DEL, C1 (U+009B begins an escape sequence as ESC [ does), line
# separators, and controls of writing direction.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return the text with U+FFFD for each control character; tabs and newlines stay."""
    return text if text.isprintable() else _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def document(value: object) -> str:
    """Return the value as JSON on one line. Control characters, which are only in its strings, are
    escaped.
    """
    line = json.dumps(value, ensure_ascii=False)
    return (
        line if line.isprintable() else _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", line)
    )
