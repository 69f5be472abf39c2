"""Reads `uncovered.yaml`: models without a card, and the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from libs.catalog.shapes import At, Choice, Key, List, Record, Text

FILE = Path(__file__).parent / "uncovered.yaml"
NOT_SERVED: Final = "not yet"


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Models without a card."""

    models: tuple[str, ...]
    status: str
    reason: str


_GROUPS = List(
    Record(
        Uncovered,
        {
            "models": Key(List(Text()), "ids", needed=True),
            "status": Key(
                Choice((NOT_SERVED, "unknown")),
                "not yet: they cannot be served; unknown: they may be",
                needed=True,
            ),
            "reason": Key(Text(), "why", needed=True),
        },
    )
)


def read_uncovered(file: Path) -> tuple[Uncovered, ...]:
    """Return the groups of models in the file. Raises InvalidInput naming file, line and key."""
    nodes = yaml.compose_all(file.read_text(encoding="utf-8"), yaml.SafeLoader)
    return tuple(group for node in nodes for group in _GROUPS.read(node, At(str(file))))
