"""Fixtures of all integrations: the mesh that `make integrations` runs, and a `shoal.Client`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import shoal

TOKEN = "a-secret-that-no-log-may-contain"
TEXTS = ["a shoal of fish", "a table of wood", "ships at sea", "Überraschung 🐟", "the fish market"]


LONG_TEXTS = [
    "Fish swim in shoals. Ships sail at sea. " * 3 + "Überraschung 🐟 im Netz.\r\n\r\nDas Ende.",
    "",
    "第一句话。第二句话。 Cafe\u0301 fish.\fA second page has wood. A table of wood stands there.",
]
"""Texts of several chunks: repeated sentences, an empty text, and characters of several bytes."""


@pytest.fixture(scope="session")
def address() -> str:
    return os.environ["SHOAL_ADDRESS"]


@pytest.fixture(scope="session")
def models() -> dict[str, str]:
    """`dense`: the bundled all-MiniLM-L6-v2. With random weights: `prompted`, dense, and `hybrid`,
    of all three forms, both with prompts for queries and documents; `reranker`, `entities` and
    `classes`."""
    found: dict[str, str] = json.loads(os.environ["SHOAL_TEST_MODELS"])
    return found


@pytest.fixture(scope="session")
def client(address: str) -> Iterator[shoal.Client]:
    with shoal.Client(address) as connected:
        yield connected


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS


@pytest.fixture(scope="session")
def long_texts() -> list[str]:
    return LONG_TEXTS


@pytest.fixture
def token() -> str:
    return TOKEN
