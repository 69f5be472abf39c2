"""Build the result of an extraction item by item, limit each item's bytes, and check for
cancellation between items.

This is the last step of `finish` for every kind of model. A router sets how many bytes the results
of one item may take (`Prepared.answer_bytes`). If an item has more, the results with the lowest
scores are dropped and `truncated` is set. The results that are kept depend only on the item and its
share, not on the rest of the job or batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Entity, Extraction, PageText, Region, Relation, Structure

from libs.models.interface.results import ExtractResult
from libs.models.interface.work import CancelCheck

MAX_RELATIONS: Final = 10_000
"""Maximum relations of an item: with a threshold of 0, every pair of entities has every label."""

ENTITY_BYTES: Final = 32
"""Maximum serialized size of an entity without its label and text: tags, lengths, two offsets and a
score.
"""
RELATION_BYTES: Final = 16
"""Maximum serialized size of a relation without its label and its two entities."""
REGION_BYTES: Final = 36
COORDINATE_BYTES: Final = 4
STRUCTURE_BYTES: Final = 16
"""Maximum size of a structure, one of its fields, a page, or a scored label, each without its
texts.
"""
NUMBER_BYTES: Final = 16
"""Maximum size of one JSON value as google.protobuf.Value, without its text."""

Scored = tuple[float, int, tuple[str, int]]
"""The score of a result, its bytes, and its position: the field of Extraction and the index there.
"""


def build_result(
    items: Iterable[Extraction],
    answer_bytes: int,
    check_cancelled: CancelCheck,
    output_tokens: int = 0,
) -> ExtractResult:
    """Build the result of a job.

    `items` is consumed lazily; `check_cancelled` is called before each item, and its exception ends
    the job.
    """
    found: list[Extraction] = []
    rest = iter(items)
    while True:
        check_cancelled()
        if (item := next(rest, None)) is None:
            return ExtractResult(found, output_tokens)
        found.append(fit_to_bytes(item, answer_bytes))


def fit_to_bytes(item: Extraction, answer_bytes: int) -> Extraction:
    """Keep the best results of an item that fit `answer_bytes`, in their original order.

    Labels, classifications and generated text are never dropped, since their size was known before
    the forward pass; they are counted first.
    """
    left = answer_bytes - _fixed_bytes(item)
    scored = list(_scored(item))
    if (
        sum(size for _, size, _ in scored) + _layer_bytes(item.pages) + _json_bytes(item.form)
        <= left
    ):
        return item
    kept: dict[str, list[int]] = {"entities": [], "relations": [], "regions": [], "structures": []}
    for _, size, (name, index) in sorted(scored, key=lambda one: -one[0]):
        left -= size
        if left < 0:
            break
        kept[name].append(index)
    form = item.form if _json_bytes(item.form) <= left else None
    pages = tuple(_cut(item.pages, max(0, left)))
    return dataclasses.replace(
        item,
        entities=tuple(item.entities[index] for index in sorted(kept["entities"])),
        relations=tuple(item.relations[index] for index in sorted(kept["relations"])),
        regions=tuple(item.regions[index] for index in sorted(kept["regions"])),
        structures=tuple(item.structures[index] for index in sorted(kept["structures"])),
        pages=pages,
        form=form,
        truncated=True,
    )


def select_best(
    scores: NDArray[np.float32], threshold: float, most: int
) -> tuple[NDArray[np.int64], bool]:
    """Return the flat indices of the `most` highest scores that reach the threshold, best first.

    Ties keep their order. The second value is True if more scores reach the threshold.
    """
    flat = scores.reshape(-1)
    reached = np.flatnonzero(flat >= np.float32(threshold))
    is_cut = len(reached) > most
    if is_cut:
        own = flat[reached]
        last = np.partition(own, len(own) - most)[len(own) - most]
        above = reached[own > last]
        reached = np.sort(np.concatenate([above, reached[own == last][: most - len(above)]]))
    return reached[np.argsort(-flat[reached], kind="stable")], is_cut


def max_relations(answer_bytes: int, most: int) -> int:
    """Return how many relations an item's share can hold, at most `most`; others need not be
    built.
    """
    return max(1, min(most, answer_bytes // (RELATION_BYTES + 2 * ENTITY_BYTES)))


def _scored(item: Extraction) -> Iterator[Scored]:
    for index, entity in enumerate(item.entities):
        yield entity.score, _entity_bytes(entity), ("entities", index)
    for index, relation in enumerate(item.relations):
        yield relation.score, _relation_bytes(relation), ("relations", index)
    for index, region in enumerate(item.regions):
        yield region.score, _region_bytes(region), ("regions", index)
    for index, structure in enumerate(item.structures):
        score = max((value.score for _, value in structure.values()), default=0.0)
        yield score, _structure_bytes(structure), ("structures", index)


def _fixed_bytes(item: Extraction) -> int:
    labels = [one for question in item.classifications for one in question.labels]
    names = sum(STRUCTURE_BYTES + _utf8(question.name) for question in item.classifications)
    written = sum(_utf8(page.text) for page in item.pages if not page.is_text_layer)
    written += sum(
        STRUCTURE_BYTES + _utf8(call.name) + _utf8(call.arguments) for call in item.tool_calls
    )
    written += sum(
        STRUCTURE_BYTES + _utf8(part.text) for token in item.tokens for part in (token, *token.top)
    )
    return (
        names
        + sum(STRUCTURE_BYTES + _utf8(one.label) for one in (*item.labels, *labels))
        + _utf8(item.text)
        + written
    )


def _entity_bytes(entity: Entity) -> int:
    return ENTITY_BYTES + _utf8(entity.label) + _utf8(entity.text)


def _relation_bytes(relation: Relation) -> int:
    return (
        RELATION_BYTES
        + _utf8(relation.label)
        + _entity_bytes(relation.head)
        + _entity_bytes(relation.tail)
    )


def _region_bytes(region: Region) -> int:
    return REGION_BYTES + _utf8(region.label) + COORDINATE_BYTES * len(region.polygon)


def _structure_bytes(structure: Structure) -> int:
    size = sum(STRUCTURE_BYTES + _utf8(name) for name in (structure.name, *structure.fields))
    return size + sum(ENTITY_BYTES + _utf8(value.text) for _, value in structure.values())


def _layer_bytes(pages: Iterable[PageText]) -> int:
    return sum(STRUCTURE_BYTES + (_utf8(page.text) if page.is_text_layer else 0) for page in pages)


def _cut(pages: Iterable[PageText], left: int) -> Iterator[PageText]:
    """Yield all pages, with the text of their layers cut to `left` bytes in total, at a character
    boundary.
    """
    for page in pages:
        left = max(0, left - STRUCTURE_BYTES)
        if not page.is_text_layer:
            yield page
            continue
        size = _utf8(page.text)
        yield (
            page
            if size <= left
            else dataclasses.replace(page, text=page.text.encode()[:left].decode("utf-8", "ignore"))
        )
        left = max(0, left - size)


def _json_bytes(value: object) -> int:
    """Return an upper bound of the bytes as a google.protobuf.Value; 0 for None, which is not
    set.
    """
    if value is None:
        return 0
    size, rest = 0, [value]
    while rest:
        one = rest.pop()
        size += NUMBER_BYTES
        if isinstance(one, str):
            size += _utf8(one)
        elif isinstance(one, Mapping):
            size += sum(NUMBER_BYTES + _utf8(str(key)) for key in one)
            rest.extend(one.values())
        elif isinstance(one, list | tuple):
            rest.extend(one)
    return size


def _utf8(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
