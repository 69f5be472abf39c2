"""Compute, compare and merge the ids of vectors (`EncodeResponse.embedding_id`). Pure.

An id is `RECIPE.FORMAT`, such as `3f0c9a1be24d5768.float32`:

- RECIPE: the first 16 hexadecimal digits of the SHA-256 digest of the recipe's canonical form,
  which is JSON with sorted keys, without white space and in ASCII. Values that are empty, zero or
  false are left out, so a new field does not change the ids of requests that do not use it.
- FORMAT: the number format of the computation. Formats other than float32 have the generation of
  their kernels, because these kernels' results may differ beyond rounding in another release.

Vectors with one recipe differ by the rounding of their formats only. The form is documented in
docs/api.md; tests/serving/test_embedding_id.py has fixed vectors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from libs.errors import EmbeddingIdMismatch

VERSION: Final = 1
"""Part of every canonical form. Increase it when the form changes, or when the code changes the
vectors of unchanged files and options.
"""

KERNEL_GENERATIONS: Final[Mapping[str, int]] = {"bfloat16": 1, "float16": 1, "int8": 1}
"""Increase a format's number when its kernels' results change beyond rounding."""

MAX_ID_CHARACTERS: Final = 64
FIELD: Final = "expect_embedding_id"

_RECIPE_DIGITS: Final = 16
_EXPECTED: Final = re.compile(r"[0-9a-f]{16}(\.[a-z0-9][a-z0-9-]{0,30})?")


@dataclass(frozen=True, slots=True)
class EmbeddingRecipe:
    """Everything that decides the numbers of a request's vectors, except the number format.

    Attributes:
        files: SHA-256 digest of the model's files (`libs/store/digests.py`).
        card: Facts of the card that files do not decide alone, such as the pooling.
        prompt: Text before each item.
        role: The role, for models that read queries and documents differently.
        adapter: SHA-256 digest of the LoRA adapter's files, or `own:` and the name of an adapter
            that is part of the model.
        dimensions: Number of leading values of a dense vector; 0 for all.
        normalize: Whether vectors are scaled to length 1.
        max_tokens: Length at which inputs are cut.
        truncation: The end at which inputs are cut.
        pooling_factor: Divisor of the number of vectors of a multi-vector; 0 for none.
        late_chunking: Whether the states of whole texts are pooled by chunk.
    """

    files: str
    card: Mapping[str, object] = field(default_factory=dict)
    prompt: str = ""
    role: str = ""
    adapter: str = ""
    dimensions: int = 0
    normalize: bool = False
    max_tokens: int = 0
    truncation: str = ""
    pooling_factor: int = 0
    late_chunking: bool = False

    def canonical(self) -> str:
        """Return the JSON that is digested."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps(
            {"version": VERSION, **{name: value for name, value in values.items() if value}},
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=True,
        )


def embedding_id(recipe: EmbeddingRecipe, number_format: str) -> str:
    """Return the id of vectors that were computed in a number format, such as "bfloat16"."""
    digest = hashlib.sha256(recipe.canonical().encode()).hexdigest()[:_RECIPE_DIGITS]
    generation = KERNEL_GENERATIONS.get(number_format)
    return f"{digest}.{number_format}" + ("" if generation is None else f"-{generation}")


def recipe_digest(found: str) -> str:
    """Return the part of an id that digests the recipe."""
    return found.partition(".")[0]


def is_valid_expectation(expected: str) -> bool:
    """Return whether a text is an id, or the digits of its recipe alone."""
    return _EXPECTED.fullmatch(expected) is not None


def is_expected(expected: str, found: str) -> bool:
    """Return whether an id satisfies a request's `expect_embedding_id`; an empty one asks for
    nothing.
    """
    return not expected or (bool(found) and expected in (found, recipe_digest(found)))


def check_expected(expected: str, found: str, reason: str = "") -> None:
    """Raise EmbeddingIdMismatch with both ids unless the vectors have the expected one.

    `reason`: what differs, as far as it is known.
    """
    if is_expected(expected, found):
        return
    if not reason:
        reason = (
            "the worker that answered is too old to report one, or could not hash the model's files"
            if not found
            else "only the number format differs: the digits before the point require any"
            if recipe_digest(expected) == recipe_digest(found)
            else "the vectors cannot be compared"
        )
    raise EmbeddingIdMismatch(
        f"{FIELD} is {expected}, and the vectors have the id {found or 'of no kind'}: {reason}",
        field=FIELD,
    )


def merge_ids(found: Iterable[str]) -> str:
    """Return the id of vectors that were computed by several workers.

    That is the recipe alone if their number formats differ, and empty if a worker reports none.
    Raises EmbeddingIdMismatch if their recipes differ.
    """
    ids = list(dict.fromkeys(found))
    if len(ids) == 1:
        return ids[0]
    recipes = list(dict.fromkeys(recipe_digest(each) for each in ids if each))
    if len(recipes) > 1:
        raise EmbeddingIdMismatch(
            "workers with different files, cards or adapters of the model answered parts of this "
            f"request: their vectors have the ids {' and '.join(each for each in ids if each)}. "
            "Give all workers of the pool the same files, or name the revision in the model's id"
        )
    return "" if "" in ids else recipes[0]
