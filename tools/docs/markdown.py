"""Helpers that write Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells may hold Markdown, and their line breaks become spaces."""
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(map(cell, row)) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


def cell(text: str) -> str:
    """Return the text as one line that cannot end a cell."""
    return escape(" ".join(text.split())).replace("|", "\\|")


def escape(text: str) -> str:
    """Escape angle brackets outside of code, which Markdown would take for HTML."""
    parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.DOTALL)
    return "".join(
        part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts)
    )


def code(text: str) -> str:
    """Return the text as inline code, or nothing if it is empty."""
    return f"`{text}`" if text else ""
