"""The JSON schema of a card for editors, generated from `cards.CARD` by `coverage.py`.

An editor uses it with a line `# yaml-language-server: $schema=.../card.schema.json` at the top of a card.
"""

from __future__ import annotations

import json
from pathlib import Path

from libs.catalog.cards import CARD

FILE = Path(__file__).parent / "card.schema.json"


def text() -> str:
    """Draft 7, which editors' YAML extensions know."""
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A card of Shoal's catalog"}
    return json.dumps(head | CARD.schema(), indent=2) + "\n"
