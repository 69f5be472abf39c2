"""Words of arguments and results, and their values in messages."""

from collections.abc import Mapping
from typing import Any, get_args

import pytest
from shoal import results, tasks
from shoal.requests import words

TABLES: list[tuple[Mapping[Any, object], object]] = [
    (words.ROLES, tasks.Role),
    (words.REPRESENTATIONS, results.Form),
    (words.DATA_TYPES, results.DataType),
    (words.TRUNCATIONS, tasks.LongText),
    (words.PRIORITIES, tasks.Priority),
    (words.SCALES, tasks.Scale),
    (words.AGGREGATIONS, tasks.Aggregation),
    (words.TEXT_KINDS, tasks.TextKind),
    (words.TEXT_LAYERS, tasks.TextLayer),
    (words.SPEAKERS, tasks.Speaker),
    (words.CHUNK_METHODS, tasks.ChunkMethod),
]


@pytest.mark.parametrize(("table", "literal"), TABLES)
def test_words_of_arguments_are_those_of_the_protocol(
    table: Mapping[Any, object], literal: object
) -> None:
    assert set(table) == set(get_args(literal))
    assert words.inverse(table) == {value: word for word, value in table.items()}
    assert 0 not in table.values(), "the unspecified value has no word"
