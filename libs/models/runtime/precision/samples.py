"""Built-in texts and images, and a job for each task of a model, for self-tests without the model's
domain texts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

from shoal.schema import Schema, SchemaClassification, SchemaField, SchemaLabel, SchemaStructure

from libs.catalog.card import Card
from libs.models.interface.work import (
    ClassifyWork,
    EncodeWork,
    EntitiesWork,
    Given,
    Part,
    Parts,
    RegionsWork,
    RelationsWork,
    Sampling,
    ScoreWork,
    StructureWork,
    TextWork,
    Work,
)

TEXTS: Final = (
    "Ada Lovelace wrote the first program in London.",
    "Herring",
    "A shoal of fish turns as one, though each of them follows only its neighbours; no leader "
    "says where it should go. " * 3,
    "Ada Lovelace wrote the first program in London.",
)
"""Short and long texts; one occurs twice."""

_LABELS = ("person", "place")

_SCHEMA: Final = Schema(
    entities=(SchemaLabel("person"), SchemaLabel("place", "a town or a country")),
    classifications=(
        SchemaClassification("topic", (SchemaLabel("computing"), SchemaLabel("fish"))),
    ),
    relations=(SchemaLabel("wrote"),),
    structures=(
        SchemaStructure(
            "work",
            (
                SchemaField("author", "str"),
                SchemaField("place"),
                SchemaField("kind", choices=("program", "book")),
            ),
        ),
    ),
)

_SIZES: Final = ((64, 96), (300, 40), (64, 96))
"""Heights and widths of the built-in images; the last one equals the first."""


def works(card: Card, texts: list[str]) -> Iterator[Work]:
    """Yield a job for each task of the model.

    Items of an image model are the built-in images, and then texts if it reads texts. If texts can
    only be queries, the documents of a score are images.
    """
    if "image" in card.inputs:
        yield from _image_works(card, texts if "text" in card.inputs else [])
        return
    for task in card.tasks:
        match task:
            case "encode":
                yield EncodeWork(texts, role="document", representations=card.representations)
            case "score":
                yield ScoreWork("Who wrote the first program?", texts)
            case "entities":
                yield EntitiesWork(texts, labels=() if card.labels else _LABELS)
            case "classify":
                yield ClassifyWork(texts, labels=() if card.labels else _LABELS)
            case "relations":
                given = tuple(map(_ends, texts)) if card.given_entities else ()
                named = () if card.labels or card.given_entities else _LABELS
                yield RelationsWork(
                    texts, labels=("lived in", "wrote"), entity_labels=named, entities=given
                )
            case "structure":
                yield StructureWork(texts, _SCHEMA)


def generation_work(card: Card, max_tokens: int, *, has_probabilities: bool) -> TextWork:
    """Return a greedy job for a generative model: short texts, or images if it reads only these.
    The last item repeats the first.
    """
    texts = [TEXTS[0], TEXTS[1], TEXTS[3]]
    parts = {}
    if "image" in card.inputs:
        texts = [""] * len(_SIZES)
        parts = {
            index: (Part(_png(*size), f"items[{index}].image"),)
            for index, size in enumerate(_SIZES)
        }
    if not has_probabilities:
        return TextWork(texts, max_tokens=max_tokens, parts=parts)
    likeliest = Sampling(
        temperature=1.0, top_k=1
    )  # Temperature 0 would keep beams, which have no probabilities.
    return TextWork(texts, max_tokens=max_tokens, parts=parts, sampling=likeliest, top_logprobs=0)


def _image_works(card: Card, texts: list[str]) -> Iterator[Work]:
    queries_alone = card.sparse is not None and card.sparse.queries is not None
    items = [*[""] * len(_SIZES), *texts]
    images = [_png(*size) for size in _SIZES]

    def parts(name: str) -> dict[int, Parts]:
        return {index: (Part(data, f"{name}[{index}].image"),) for index, data in enumerate(images)}

    for task in card.tasks:
        match task:
            case "encode":
                yield EncodeWork(items, representations=card.representations, parts=parts("items"))
            case "score":
                documents = items[: len(_SIZES)] if queries_alone else items
                yield ScoreWork(
                    "",
                    documents,
                    query_parts=(Part(images[1], "query.image"),),
                    parts=parts("documents"),
                )
            case "classify":
                yield ClassifyWork(items, labels=_LABELS, parts=parts("items"))
            case "regions":
                yield RegionsWork(items, labels=_LABELS, parts=parts("items"))


def _png(height: int, width: int) -> bytes:
    """Return an image of gradients in three colours."""
    rows = [
        b"\0" + b"".join(bytes((x * 255 // width, y * 255 // height, 90)) for x in range(width))
        for y in range(height)
    ]
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    body = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def _ends(text: str) -> tuple[Given, ...]:
    """Return a text's first and last three characters, for models that relate given entities."""
    return Given(0, 3), Given(len(text) - 3, len(text))
