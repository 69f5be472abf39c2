"""How many entries lists of a request have at most: the router's own limits, so that nothing longer
is made into messages. Pure.

The annotations are of the types of requests, and stand in the OpenAPI document.
tests/edge/hostile/test_intake.py compares the numbers with the router's
(services/router/admission/validation/limits.py).
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Final

from msgspec import Meta

from services.edge.messages.base import HttpError, invalid

MAX_ITEMS: Final = 10_000
"""Texts, documents, images or pairs of a request."""
MAX_LABELS: Final = 256
"""Labels of a list."""
MAX_PARTS: Final = 64
"""Parts of an item: what one message of a conversation has."""
MAX_SPANS: Final = 8192
"""Spans of an item that is divided into chunks."""
MAX_MESSAGES: Final = 130
"""Messages of a conversation: an instruction, 128 turns, and the message that is answered."""
MAX_IDS: Final = 131_072
"""Ids of tokens of a request."""

ITEMS: Final = Meta(max_length=MAX_ITEMS)
LABELS: Final = Meta(max_length=MAX_LABELS)
PARTS: Final = Meta(max_length=MAX_PARTS)
SPANS: Final = Meta(max_length=MAX_SPANS)
MESSAGES: Final = Meta(max_length=MAX_MESSAGES)
IDS: Final = Meta(max_length=MAX_IDS)


def too_many(field: str, limit: int) -> HttpError:
    """The problem of a list with more entries than it may have."""
    return invalid(
        f"{field or 'the body'} has more than {limit:,} entries, which is the limit", field
    )


def check_items(given: Sized, field: str) -> None:
    """Raises HttpError for more than MAX_ITEMS entries, where the type of the request cannot say
    it.
    """
    if len(given) > MAX_ITEMS:
        raise too_many(field, MAX_ITEMS)
