"""Relation extraction between the entities that a request provides, with GLiREL, as by the glirel
package's `predict_relations`.

Entities are given in characters and mapped to the words that they overlap. A text with fewer than
two entities left after truncation has no relations and skips the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Entity, Extraction, Relation

from libs.catalog.card import Card
from libs.errors import InvalidInput
from libs.kinds.gliner.processor import THRESHOLD
from libs.kinds.glirel.card import LABEL_MARKER, TEXT_MARKER, Glirel
from libs.kinds.glirel.head import PairPlaces, Places
from libs.models.interface.results import Result
from libs.models.interface.sequences import InputSequence, Output, Prepared, SparseRow
from libs.models.interface.work import (
    CancelCheck,
    Given,
    ModelWork,
    RelationsWork,
    Span,
    Work,
    in_slices,
    never_cancelled,
)
from libs.models.runtime.answer_budget import (
    MAX_RELATIONS,
    build_result,
    max_relations,
    select_best,
)
from libs.models.text.checks import need_labels, need_task, need_work
from libs.models.text.heads.extraction.words import WordPlaces
from libs.models.text.processing.answers import sigmoid
from libs.models.text.processing.extraction.words import WordFrame, Words, WordSequence

_LABELS = "relations.labels"
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _EntityWords:
    """Entities as words of a text."""

    rows: Ids
    """The remaining entities among the request's."""
    firsts: Ids
    """Their first words."""
    lasts: Ids
    """Their last words."""


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The pairs of entities of a text."""

    rows: Ids
    """The request's entities that the text contains."""
    heads: Places
    """The head of each pair among `rows`."""
    tails: Places
    """The tail of each pair among `rows`."""


@dataclass(frozen=True, slots=True)
class _Notes:
    """The labels without duplicates, and each text's pairs. Texts without pairs have no
    sequence."""

    labels: tuple[str, ...]
    pairs: list[_Pairs]


class GlirelProcessor:
    """The processor of one model."""

    def __init__(self, card: Card, settings: Glirel, frame: WordFrame) -> None:
        self._card, self._settings, self._frame = card, settings, frame

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        need_task(work, self._card)
        work = need_work(work, RelationsWork, self._card)
        need_labels(work.labels, self._card, _LABELS)
        if work.entity_labels:
            message = (
                f"{self._card.model} does not find entities: send them with the items "
                "(`items[i].entities`)"
            )
            raise InvalidInput(message, field="relations.entity_labels")
        labels = tuple(dict.fromkeys(work.labels))
        prompt = _prompt(labels)
        sequences, pairs = [], []
        found = self._frame.encode(work.texts, prompt, work.truncation, _LABELS, check_cancelled)
        for sequence, given in zip(found, _given(work), strict=True):
            entities = _entity_words(sequence.words, given)
            heads, tails = self._pairs(entities.firsts)
            pairs.append(_Pairs(entities.rows, heads, tails))
            if len(heads):
                places = PairPlaces(
                    self._words(sequence, labels), entities.firsts, entities.lasts, heads, tails
                )
                sequences.append(InputSequence(sequence.ids, input=places))
        cut = tuple(sequence.cut for sequence in found if sequence.cut)
        return Prepared(work, "relations", sequences, _Notes(labels, pairs), cut=cut)

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        work, notes = prepared.work, cast("_Notes", prepared.notes)
        work = need_work(work, RelationsWork, self._card)
        logits = iter(cast("Sequence[NDArray[np.float32] | SparseRow]", outputs))
        threshold = THRESHOLD if work.threshold is None else work.threshold
        most = max_relations(prepared.answer_bytes, MAX_RELATIONS)
        items = (
            _relations(
                text, given, pairs, notes.labels, next(logits), threshold, most, check_cancelled
            )
            if len(pairs.heads)
            else Extraction()
            for text, given, pairs in zip(work.texts, _given(work), notes.pairs, strict=True)
        )
        return build_result(items, prepared.answer_bytes, check_cancelled)

    def word_windows(
        self,
        work: ModelWork,
        index: int,
        overlap: int | None,
        path: str,
        check_cancelled: CancelCheck,
    ) -> list[Span]:
        """Return the windows of text `index`, as `WordWindows` says."""
        work = need_work(work, RelationsWork, self._card)
        prompt = _prompt(tuple(dict.fromkeys(work.labels)))
        return self._frame.windows(work.texts[index], prompt, overlap, path, check_cancelled)

    def _words(self, sequence: WordSequence, labels: Sequence[str]) -> WordPlaces:
        """Return the rows of words and of the tokens that represent labels: markers, the labels'
        first tokens, or both.
        """
        markers, names = (
            sequence.prompt[: 2 * len(labels) : 2],
            sequence.prompt[1 : 2 * len(labels) : 2],
        )
        states = self._settings.label_states
        if states == "ent_token":
            return WordPlaces(sequence.pieces, sequence.sizes, markers, names[:0])
        for number, row in enumerate(names):
            if row < 0:
                field = f"{_LABELS}[{number}]"
                raise InvalidInput(f"{field} has no token in the model's tokenizer", field=field)
        if states == "label":
            return WordPlaces(sequence.pieces, sequence.sizes, names, names[:0])
        return WordPlaces(sequence.pieces, sequence.sizes, markers, names)

    def _pairs(self, firsts: Ids) -> tuple[Places, Places]:
        """Return heads and tails of all pairs of two entities. Pairs from a later to an earlier
        entity exist only within the model's distance.

        Later and earlier follow the request's order, and the distance is between first words, as in
        the package's `generate_entity_pairs_indices`.
        """
        count = len(firsts)
        wanted = ~np.eye(count, dtype=bool)
        if self._settings.farthest is not None:
            near = np.abs(firsts[:, None] - firsts) <= self._settings.farthest
            wanted &= near | np.triu(np.ones_like(wanted))
        heads, tails = np.nonzero(wanted)
        # A request has at most 128 entities for a text.
        return heads.astype(np.int16), tails.astype(np.int16)


def _prompt(labels: Sequence[str]) -> list[str]:
    return [word for label in labels for word in (LABEL_MARKER, label)] + [TEXT_MARKER]


def _given(work: RelationsWork) -> Sequence[Sequence[Given]]:
    return work.entities or ((),) * len(work.texts)


def _entity_words(words: Words, given: Sequence[Given]) -> _EntityWords:
    """Return the words that each entity of the request overlaps. Entities that overlap no word,
    because they were truncated or contain only spaces, are dropped.
    """
    firsts = np.searchsorted(words.ends, [one.start for one in given], side="right").astype(
        np.int32
    )
    lasts = (
        np.searchsorted(words.starts, [one.end for one in given], side="left").astype(np.int32) - 1
    )
    rows = np.flatnonzero(firsts <= lasts).astype(np.int32)
    return _EntityWords(rows, firsts[rows], lasts[rows])


def _relations(
    text: str,
    given: Sequence[Given],
    pairs: _Pairs,
    labels: Sequence[str],
    logits: NDArray[np.float32] | SparseRow,
    threshold: float,
    most: int,
    check_cancelled: CancelCheck,
) -> Extraction:
    """Return the best relations of one text first, `most` at most.

    Args:
        logits: [pairs, labels], or the largest of them.
    """
    scores = sigmoid(logits.values if isinstance(logits, SparseRow) else logits)
    ranked, is_cut = select_best(scores, threshold, most)
    places = logits.indices[ranked] if isinstance(logits, SparseRow) else ranked
    known = [Entity(one.start, one.end, one.label, 1.0, text[one.start : one.end]) for one in given]
    entities = [known[row] for row in pairs.rows]
    found = tuple(
        Relation(entities[pairs.heads[pair]], entities[pairs.tails[pair]], labels[label], score)
        for pair, label, score in in_slices(
            zip(*divmod(places, len(labels)), scores.reshape(-1)[ranked].tolist(), strict=True),
            check_cancelled,
        )
    )
    return Extraction(relations=found, truncated=is_cut)
