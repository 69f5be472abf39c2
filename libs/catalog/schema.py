"""The JSON schemas of a card and of pools.yaml for editors, generated from `cards.CARD` and `pools.POOLS` by `coverage.py`.

An editor uses one with a line `# yaml-language-server: $schema=.../card.schema.json` at the top of a file.
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
    """Of a card; draft 7, which editors' YAML extensions know."""
    return _print("A card of Shoal's catalog", CARD.schema())


def pools_text() -> str:
    """Of pools.yaml."""
    return _print("The pools of a Shoal mesh", POOLS.schema())


def _print(title: str, schema: Schema) -> str:
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title}
    return json.dumps(head | schema, indent=2) + "\n"
