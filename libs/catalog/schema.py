"""The JSON schemas of a card and of pools.yaml for editors, from `cards.CARD` and `pools.POOLS`;
`coverage.py` writes them.

An editor uses one if a file begins with a line such as `# yaml-language-server:
$schema=.../card.schema.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

from libs.catalog.cards import CARD
from libs.catalog.pools import POOLS
from libs.catalog.shapes import Schema

FILE = Path(__file__).parent / "card.schema.json"
POOLS_FILE = Path(__file__).parent / "pools.schema.json"


def text() -> str:
    """Return the JSON schema of a card, in draft 7, which editors' YAML extensions support."""
    return _print("A card of Shoal's catalog", CARD.schema())


def pools_text() -> str:
    """Return the JSON schema of pools.yaml, in draft 7."""
    return _print("The pools of a Shoal mesh", POOLS.schema())


def _print(title: str, schema: Schema) -> str:
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title}
    return json.dumps(head | schema, indent=2) + "\n"
