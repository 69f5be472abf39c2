"""Splits a long list of items into requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def spans(lengths: Sequence[int], *, max_items: int, max_characters: int) -> list[range]:
    """Consecutive ranges of item indices, each of at most `max_items` items and, unless it is a
    single item, `max_characters`.

    Ranges are of even size where the lengths allow, so that no small remainder is sent alone. None
    for an empty list.
    """
    if not lengths:
        return []
    parts = -(-len(lengths) // max_items)
    even = -(-len(lengths) // parts)
    found, begin, characters = [], 0, 0
    for index, length in enumerate(lengths):
        if index > begin and (index - begin == even or characters + length > max_characters):
            found.append(range(begin, index))
            begin, characters = index, 0
        characters += length
    return [*found, range(begin, len(lengths))]
