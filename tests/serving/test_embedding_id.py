"""The ids of vectors: fixed values, which indexes keep for years, and how ids are compared."""

from __future__ import annotations

import re

import pytest

from libs.embedding_id import (
    EmbeddingRecipe,
    check_expected,
    embedding_id,
    is_expected,
    is_valid_expectation,
    merge_ids,
)
from libs.errors import EmbeddingIdMismatch

FILES = "00" * 32
PLAIN = EmbeddingRecipe(FILES)
FULL = EmbeddingRecipe(
    "ab" * 32,
    card={"kind": "dense", "pooling": ["mean"], "pool_prompt": False},
    prompt="Suche: „Straße“ ",
    role="query",
    adapter="cd" * 32,
    dimensions=128,
    normalize=True,
    max_tokens=512,
    truncation="end",
    pooling_factor=2,
    late_chunking=True,
)
ID, OTHER = "0123456789abcdef", "fedcba9876543210"


def test_canonical_form_is_fixed() -> None:
    assert PLAIN.canonical() == f'{{"files":"{FILES}","version":1}}'
    assert FULL.canonical() == (
        f'{{"adapter":"{"cd" * 32}",'
        '"card":{"kind":"dense","pool_prompt":false,"pooling":["mean"]},'
        f'"dimensions":128,"files":"{"ab" * 32}","late_chunking":true,"max_tokens":512,'
        '"normalize":true,"pooling_factor":2,'
        '"prompt":"Suche: \\u201eStra\\u00dfe\\u201c ","role":"query","truncation":"end",'
        '"version":1}'
    )


@pytest.mark.parametrize(
    ("recipe", "number_format", "expected"),
    [
        (PLAIN, "float32", "a837f812e2007cae.float32"),
        (PLAIN, "bfloat16", "a837f812e2007cae.bfloat16-1"),
        (PLAIN, "int8", "a837f812e2007cae.int8-1"),
        (FULL, "float32", "d279359ad3dfcd4c.float32"),
        (FULL, "float16", "d279359ad3dfcd4c.float16-1"),
    ],
)
def test_ids_never_change(recipe: EmbeddingRecipe, number_format: str, expected: str) -> None:
    assert embedding_id(recipe, number_format) == expected


@pytest.mark.parametrize("name", [name for name in EmbeddingRecipe.__slots__ if name != "files"])
def test_every_field_changes_the_id(name: str) -> None:
    values = {"files": "ab" * 32, name: getattr(FULL, name)}
    assert embedding_id(EmbeddingRecipe(**values), "float32") != embedding_id(
        EmbeddingRecipe("ab" * 32), "float32"
    )


def test_order_of_the_cards_fields_does_not_matter() -> None:
    turned = dict(reversed(list(FULL.card.items())))
    assert (
        EmbeddingRecipe(FILES, card=turned).canonical()
        == EmbeddingRecipe(FILES, card=FULL.card).canonical()
    )


@pytest.mark.parametrize(
    ("expected", "found", "accepted"),
    [
        ("", "", True),
        ("", f"{ID}.float32", True),
        (f"{ID}.float32", f"{ID}.float32", True),
        (ID, f"{ID}.bfloat16-1", True),
        (ID, ID, True),
        (f"{ID}.float32", f"{ID}.bfloat16-1", False),
        (f"{ID}.float32", ID, False),
        (f"{ID}.float32", f"{OTHER}.float32", False),
        (ID, f"{OTHER}.float32", False),
        (ID, "", False),
        (ID[:8], f"{ID}.float32", False),
    ],
)
def test_expectations(expected: str, found: str, *, accepted: bool) -> None:
    assert is_expected(expected, found) == accepted
    if accepted:
        check_expected(expected, found)
        return
    with pytest.raises(EmbeddingIdMismatch) as raised:
        check_expected(expected, found)
    assert expected in raised.value.message
    assert found in raised.value.message
    assert raised.value.field == "expect_embedding_id"
    assert raised.value.code == "FAILED_PRECONDITION"


@pytest.mark.parametrize("text", [ID, f"{ID}.float32", f"{ID}.bfloat16-1", f"{ID}.int8-12"])
def test_valid_expectations(text: str) -> None:
    assert is_valid_expectation(text)


@pytest.mark.parametrize(
    "text", ["", ID[:-1], ID.upper(), f"{ID}.", f"{ID}.float32\n", f"{ID} ", f"{ID}.{'a' * 40}"]
)
def test_invalid_expectations(text: str) -> None:
    assert not is_valid_expectation(text)


@pytest.mark.parametrize(
    ("ids", "merged"),
    [
        ([f"{ID}.float32"] * 3, f"{ID}.float32"),
        ([f"{ID}.float32", f"{ID}.bfloat16-1"], ID),
        ([ID, f"{ID}.float32"], ID),
        (["", ""], ""),
        (["", f"{ID}.float32"], ""),
    ],
)
def test_merged_ids(ids: list[str], merged: str) -> None:
    assert merge_ids(ids) == merged


@pytest.mark.parametrize("more", [[], [""]])
def test_vectors_of_two_recipes_are_not_merged(more: list[str]) -> None:
    ids = [f"{ID}.float32", f"{OTHER}.float32", *more]
    with pytest.raises(EmbeddingIdMismatch, match=re.escape(f"{ids[0]} and {ids[1]}")):
        merge_ids(ids)
