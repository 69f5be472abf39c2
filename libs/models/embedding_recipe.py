"""The recipe of a loaded model's vectors, and the difference from the one that a client requires.

`libs/embedding_id.py` turns a recipe into an id. The worker keeps one `EmbeddingIdentity` for each
resident model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

from libs.catalog.card import Card
from libs.embedding_id import (
    EmbeddingRecipe,
    check_expected,
    embedding_id,
    is_expected,
    recipe_digest,
)
from libs.models.interface.work import EncodeWork, Role, Truncation
from libs.models.text.checks import select_adapter, select_prompt

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_CACHED_IDS: Final = 64
"""Option sets of a model with a cached id. Each may have an instruction of 16 KiB."""

MAX_CACHED_DIFFERENCES: Final = 64
"""Mismatches with a cached explanation: one computes the ids of tens of options."""

_CARD_FIELDS: Final = (
    "kind",
    "encoder_folder",
    "pooling",
    "pool_prompt",
    "modules",
    "lowercase",
    "late",
    "sparse",
    "template",
    "template_values",
)
"""Fields of the card that decide numbers and that the catalog may set, or the code reads from files
by its own rules. All others are decided by the files, are part of the options, or only describe.
"""

_Adapters = tuple[tuple[str, str], ...]
"""Names of loaded adapters and digests of their files."""

_MATRYOSHKA: Final = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Usual dimensions, of which a mismatch is explained."""


@runtime_checkable
class HasDataType(Protocol):
    """A model that reports the number format of its weights."""

    data_type: str


@runtime_checkable
class HasDefaultRole(Protocol):
    """A model that reads queries differently and reports its role of texts without one; empty if it
    ignores roles.
    """

    default_role: Role


class VectorOptions(NamedTuple):
    """The options of an EncodeWork that decide its vectors.

    A tuple, because one is made and hashed for each job.

    Attributes:
        adapter: Empty for none.
    """

    role: Role = ""
    instruction: str = ""
    adapter: str = ""
    dimensions: int = 0
    normalize: bool | None = None
    truncation: Truncation = "default"
    pooling_factor: int = 0
    late_chunking: bool = False

    @staticmethod
    def from_work(work: EncodeWork) -> VectorOptions:
        return VectorOptions(
            work.role,
            work.instruction,
            work.adapter,
            work.dimensions,
            work.normalize,
            work.truncation,
            work.pooling_factor,
            work.chunking is not None and work.chunking.late,
        )


class EmbeddingIdentity:
    """The identity of one loaded model's vectors. Thread-safe."""

    def __init__(self, card: Card, files: str, number_format: str, default_role: Role = "") -> None:
        """Create the identity.

        Args:
            card: The card of the loaded model.
            files: SHA-256 digest of its files.
            number_format: The format that it computes in, such as "bfloat16".
            default_role: Role of a text without one in an image model; empty if that ignores roles.
        """
        self._card, self._files, self._format = card, files, number_format
        self._default_role = default_role
        self._facts = _card_facts(card)
        self._query_facts = None if card.queries is None else _card_facts(card.queries)
        self._cached = lru_cache(MAX_CACHED_IDS)(self._compute)
        self._reasons = lru_cache(MAX_CACHED_DIFFERENCES)(self._difference)

    def compute_id(self, options: VectorOptions, adapter_files: str = "") -> str:
        """Return the id of vectors with these options.

        `adapter_files`: SHA-256 digest of the files of the adapter in `options`; empty if that is
        part of the model.
        """
        return self._cached(options, adapter_files)

    def check(self, options: VectorOptions, expected: str, adapters: Mapping[str, str]) -> None:
        """Raise EmbeddingIdMismatch with both ids, and the difference as far as it is known, unless
        vectors with these options have the expected id.

        `adapters`: digests of the files of all loaded adapters, by name.
        """
        found = self.compute_id(options, adapters.get(options.adapter, ""))
        if not is_expected(expected, found):
            loaded = tuple(sorted(adapters.items()))
            check_expected(expected, found, self._reasons(options, expected, found, loaded))

    def _compute(self, options: VectorOptions, adapter_files: str) -> str:
        return embedding_id(self.recipe(options, adapter_files), self._format)

    def recipe(self, options: VectorOptions, adapter_files: str = "") -> EmbeddingRecipe:
        """Return the recipe of vectors with these options."""
        card, facts = self._card, self._facts
        if card.queries is not None and self._query_facts is not None and self._is_query(options):
            card, facts = card.queries, self._query_facts
        cut = options.truncation in ("end", "start")
        return EmbeddingRecipe(
            files=self._files,
            card=facts,
            prompt=options.instruction or select_prompt(card, options.role, options.adapter),
            role="query" if self._reads_as_query(options.role) else "",
            adapter=adapter_files or _own(select_adapter(card, options.role, options.adapter)),
            dimensions=0 if options.dimensions == card.dimensions else options.dimensions,
            normalize=card.normalize if options.normalize is None else options.normalize,
            max_tokens=card.max_tokens,
            # A Router's default is that of its documents: `with_truncation` knows the outer card.
            truncation=options.truncation if cut else self._card.truncation,
            pooling_factor=options.pooling_factor if options.pooling_factor > 1 else 0,
            late_chunking=options.late_chunking,
        )

    def _is_query(self, options: VectorOptions) -> bool:
        """Return whether a Router's encoder for queries computes the vectors."""
        return options.role == "query" or (not options.role and self._card.query_default)

    def _reads_as_query(self, role: Role) -> bool:
        """Return whether the model reads texts of a role as queries, in other ways than by a
        prompt, an adapter or a Router's encoder.
        """
        sparse = self._card.sparse
        if sparse is not None and sparse.queries is not None:
            return role == "query" or (not role and sparse.queries.default)
        if self._card.late is not None:
            return role == "query"
        return bool(self._default_role) and (role or self._default_role) == "query"

    def _difference(
        self, options: VectorOptions, expected: str, found: str, loaded: _Adapters
    ) -> str:
        """Describe what differs: one option, if another value of it gives the expected id."""
        adapters = dict(loaded)
        if recipe_digest(expected) == recipe_digest(found):
            stem = recipe_digest(expected)
            return f"only the number format differs. {stem} alone accepts every format"
        for what, other in self._variants(options, adapters):
            candidate = self._compute(other, adapters.get(other.adapter, ""))
            if recipe_digest(candidate) == recipe_digest(expected):
                return f"the expected id is that of {what}"
        return (
            f"the files of {self._card.model}, its card (pooling, prompts, maximum tokens) or "
            "several options changed, or the expected id is another model's"
        )

    def _variants(
        self, options: VectorOptions, adapters: Mapping[str, str]
    ) -> Iterator[tuple[str, VectorOptions]]:
        """Yield the options with another value of one of them, and that value's name."""
        roles: tuple[Role, ...] = ("", "query", "document")
        for role in roles:
            yield f"role {role!r}" if role else "no role", options._replace(role=role)
        if options.instruction:
            yield "no instruction", options._replace(instruction="")
        for size in (0, *_MATRYOSHKA):
            if size < max(self._card.dimensions, 1):
                name = f"{size} dimensions" if size else "all dimensions"
                yield name, options._replace(dimensions=size)
        for normalize in (True, False):
            name = "normalized vectors" if normalize else "vectors that are not normalized"
            yield name, options._replace(normalize=normalize)
        for adapter in ("", *adapters, *self._card.own_adapters):
            name = f"the adapter {adapter!r}" if adapter else "the model without an adapter"
            yield name, options._replace(adapter=adapter)
        sides: tuple[Truncation, ...] = ("end", "start")
        for side in sides:
            yield f"texts cut at their {side}", options._replace(truncation=side)
        late = not options.late_chunking
        yield (
            "late chunks" if late else "other than late chunks",
            options._replace(late_chunking=late),
        )
        yield "all vectors of an item", options._replace(pooling_factor=0)


def identity_maker(model: object, card: Card) -> Callable[[str], EmbeddingIdentity]:
    """Return a function that makes the identity of a loaded model's vectors from the digest of its
    files. It keeps no reference to the model.
    """
    return partial(
        EmbeddingIdentity,
        card,
        number_format=model.data_type if isinstance(model, HasDataType) else "float32",
        default_role=model.default_role if isinstance(model, HasDefaultRole) else "",
    )


def _own(adapter: str) -> str:
    return f"own:{adapter}" if adapter else ""


def _card_facts(card: Card) -> dict[str, object]:
    """Return the facts of `_CARD_FIELDS`. The form of an image model's vectors is one too: the
    catalog may choose it.
    """
    found = _facts(card)
    names = (*_CARD_FIELDS, "representations") if card.kind == "images" else _CARD_FIELDS
    return {name: found[name] for name in names if name in found}


def _facts(value: DataclassInstance) -> dict[str, object]:
    """Return the fields of a dataclass that differ from their defaults, as JSON values."""
    found = {}
    for each in fields(value):
        own = getattr(value, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if default is MISSING or own != default:
            found[each.name] = _plain(own)
    return found


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return _facts(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
