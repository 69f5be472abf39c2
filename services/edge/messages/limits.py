"""The maximum lengths of a request's lists. They equal the router's, so that nothing longer is
converted to messages. Pure.

The annotations are part of the request types and appear in the OpenAPI document.
tests/edge/hostile/test_intake.py compares the numbers with the router's
(services/router/admission/validation/limits.py).
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Final

from msgspec import Meta

from services.edge.messages.base import HttpError, invalid

MAX_ITEMS: Final = 10_000
"""Texts, documents, images or pairs per request."""
MAX_LABELS: Final = 256
"""Labels per list."""
MAX_PARTS: Final = 64
"""Parts per item, such as the contents of one message of a conversation."""
MAX_SPANS: Final = 8192
"""Spans per item that is divided into chunks."""
MAX_MESSAGES: Final = 130
"""Messages per conversation: an instruction, 128 turns, and the message that is answered."""
MAX_IDS: Final = 131_072
"""Token ids per request."""

ITEMS: Final = Meta(max_length=MAX_ITEMS)
LABELS: Final = Meta(max_length=MAX_LABELS)
PARTS: Final = Meta(max_length=MAX_PARTS)
SPANS: Final = Meta(max_length=MAX_SPANS)
MESSAGES: Final = Meta(max_length=MAX_MESSAGES)
IDS: Final = Meta(max_length=MAX_IDS)


def too_many(field: str, limit: int) -> HttpError:
    """Return the error for a list that exceeds its limit."""
    return invalid(
        f"{field or 'the body'} has more than {limit:,} entries, which is the limit", field
    )


def check_items(given: Sized, field: str) -> None:
    """Raise HttpError above MAX_ITEMS entries, for types that cannot declare the limit."""
    if len(given) > MAX_ITEMS:
        raise too_many(field, MAX_ITEMS)
