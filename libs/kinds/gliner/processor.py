"""Zero-shot entity recognition with the request's labels, and relations between the entities, with
a GLiNER model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Entity, Extraction, Relation
from tokenizers import Tokenizer

from libs.catalog.card import Card
from libs.errors import InvalidInput
from libs.kinds.gliner.card import Gliner
from libs.kinds.gliner.relations import EntityPairScorer
from libs.models.interface.results import Result
from libs.models.interface.sequences import InputSequence, Output, Prepared
from libs.models.interface.work import (
    CancelCheck,
    EntitiesWork,
    ModelWork,
    RelationsWork,
    Span,
    Work,
    never_cancelled,
)
from libs.models.runtime.answer_budget import (
    MAX_RELATIONS,
    build_result,
    max_relations,
    select_best,
)
from libs.models.text.checks import need_labels, need_task, unsupported
from libs.models.text.heads.extraction.words import Label, WordPlaces
from libs.models.text.processing.answers import sigmoid
from libs.models.text.processing.extraction.spans import (
    Candidates,
    choose,
    span_candidates,
    word_candidates,
    word_candidates_by_label,
)
from libs.models.text.processing.extraction.words import WordFrame, Words, WordSequence
from libs.models.text.tokenising.cutting import encoded

Array = NDArray[np.float32]
THRESHOLD: Final = 0.5
"""The gliner package's default, for entities and for relations."""


@dataclass(frozen=True, slots=True)
class _Notes:
    """The labels without duplicates, and the words of each text."""

    labels: tuple[str, ...]
    relations: tuple[str, ...]
    words: list[Words]


class LabelTokens:
    """Tokenises labels for a bi-encoder's encoder for labels. Labels of more than `limit` tokens
    are truncated.
    """

    def __init__(self, tokenizer: Tokenizer, limit: int) -> None:
        tokenizer.no_padding()
        tokenizer.enable_truncation(limit)
        self._tokenizer = tokenizer

    def __call__(self, labels: Sequence[str], check_cancelled: CancelCheck) -> tuple[Label, ...]:
        encodings = encoded(labels, self._tokenizer.encode_batch_fast, check_cancelled)
        return tuple(
            Label(name, np.array(item.ids, dtype=np.int32))
            for name, item in zip(labels, encodings, strict=True)
        )


class GlinerProcessor:
    """The processor of one model.

    Args:
        tokens: For models with a separate encoder for labels.
        pairs: For models that find relations.
    """

    def __init__(
        self,
        card: Card,
        settings: Gliner,
        frame: WordFrame,
        *,
        tokens: LabelTokens | None,
        pairs: EntityPairScorer | None,
    ) -> None:
        self._card, self._settings, self._frame, self._tokens, self._pairs = (
            card,
            settings,
            frame,
            tokens,
            pairs,
        )

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        need_task(work, self._card)
        if isinstance(work, EntitiesWork):
            need_labels(work.labels, self._card, "entities.labels")
            return self._prepare(work, work.labels, (), "entities.labels", check_cancelled)
        if isinstance(work, RelationsWork):
            need_labels(work.entity_labels, self._card, "relations.entity_labels")
            need_labels(work.labels, self._card, "relations.labels")
            if work.entities:
                number = next(number for number, given in enumerate(work.entities) if given)
                field = f"items[{number}].entities"
                raise InvalidInput(
                    f"{self._card.model} finds the entities itself: leave them empty", field=field
                )
            return self._prepare(
                work, work.entity_labels, work.labels, "relations.labels", check_cancelled
            )
        raise unsupported(work, self._card)

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        work, notes = prepared.work, cast("_Notes", prepared.notes)
        if isinstance(work, EntitiesWork):
            # relation models also output the states of words
            logits = [
                cast("Array", output[0] if isinstance(output, tuple) else output)
                for output in outputs
            ]
            items = (
                self._entities(work, *parts, notes)
                for parts in zip(work.texts, logits, notes.words, strict=True)
            )
            return build_result(
                (Extraction(entities=tuple(found)) for found in items),
                prepared.answer_bytes,
                check_cancelled,
            )
        if isinstance(work, RelationsWork) and self._pairs is not None:
            states = cast("Sequence[tuple[Array, Array, Array]]", outputs)
            texts = zip(work.texts, states, notes.words, strict=True)
            most, pairs = max_relations(prepared.answer_bytes, MAX_RELATIONS), self._pairs
            related = (self._relations(pairs, work, *parts, notes, most) for parts in texts)
            return build_result(related, prepared.answer_bytes, check_cancelled)
        raise unsupported(work, self._card)

    def _prepare(
        self,
        work: EntitiesWork | RelationsWork,
        labels: tuple[str, ...],
        relations: tuple[str, ...],
        path: str,
        check_cancelled: CancelCheck,
    ) -> Prepared:
        labels, relations = tuple(dict.fromkeys(labels)), tuple(dict.fromkeys(relations))
        own = () if self._tokens is None else self._tokens(labels, check_cancelled)
        found = self._frame.encode(
            work.texts, self._prompt(labels, relations), work.truncation, path, check_cancelled
        )
        sequences = [
            InputSequence(
                item.ids,
                input=self._places(item, len(labels), len(relations), own),
                cut=item.cut,
            )
            for item in found
        ]
        return Prepared(
            work, "entities", sequences, _Notes(labels, relations, [item.words for item in found])
        )

    def word_windows(
        self,
        work: ModelWork,
        index: int,
        overlap: int | None,
        path: str,
        check_cancelled: CancelCheck,
    ) -> list[Span]:
        """Return the windows of text `index`, as `WordWindows` says."""
        if isinstance(work, EntitiesWork):
            labels, relations = work.labels, tuple[str, ...]()
        elif isinstance(work, RelationsWork):
            labels, relations = work.entity_labels, work.labels
        else:
            raise unsupported(work, self._card)
        prompt = self._prompt(tuple(dict.fromkeys(labels)), tuple(dict.fromkeys(relations)))
        return self._frame.windows(work.texts[index], prompt, overlap, path, check_cancelled)

    def output_bytes(self, prepared: Prepared) -> int:
        """Return the bytes of a job's outputs: for each label a score of each span, or of each word
        as a beginning, an inner word and an end, and the words' states in models of relations.
        """
        notes = cast("_Notes", prepared.notes)
        by_label = 3 if self._settings.span_mode == "token_level" else self._settings.max_width
        floats = by_label * len(notes.labels)
        if self._pairs is not None:
            floats += self._pairs.marker.size
        return np.dtype(np.float32).itemsize * floats * sum(map(len, notes.words))

    def _prompt(self, labels: Sequence[str], relations: Sequence[str]) -> list[str]:
        """Return each label after its marker, then a separator; the same for relations in models
        that find them.
        """
        settings = self._settings
        if self._tokens is not None:
            return []
        prompt = [word for label in labels for word in (settings.ent_token, label)] + [
            settings.sep_token
        ]
        if settings.adjacency:
            prompt += [
                word for relation in relations for word in (settings.rel_token, relation)
            ] + [settings.sep_token]
        return prompt

    def _places(
        self, sequence: WordSequence, labels: int, relations: int, own: tuple[Label, ...]
    ) -> WordPlaces:
        settings = self._settings
        markers = sequence.prompt[: 2 * labels : 2] + (0 if settings.marks_entities else 1)
        begin = 2 * labels + 1
        others = sequence.prompt[begin : begin + 2 * relations : 2] + (
            0 if settings.marks_relations else 1
        )
        return WordPlaces(sequence.pieces, sequence.sizes, markers, others, own)

    def _found(self, logits: Array, words: Words, threshold: float) -> Candidates:
        if self._settings.span_mode == "token_level":
            return word_candidates(sigmoid(logits), threshold)
        return span_candidates(sigmoid(logits), len(words), self._settings.max_width, threshold)

    def _entities(
        self, work: EntitiesWork, text: str, logits: Array, words: Words, notes: _Notes
    ) -> list[Entity]:
        threshold = THRESHOLD if work.threshold is None else work.threshold
        found = self._found(logits, words, threshold)
        return _entities(text, choose(found, len(words), flat=work.flat), words, notes.labels)

    def _relations(
        self,
        pairs: EntityPairScorer,
        work: RelationsWork,
        text: str,
        states: tuple[Array, Array, Array],
        words: Words,
        notes: _Notes,
        most: int,
    ) -> Extraction:
        """Return the best relations first, `most` at most. The work's threshold applies to
        relations; the selection of entities and of candidate pairs uses the default."""
        logits, word_states, relation_states = states
        found = self._found(logits, words, THRESHOLD)
        chosen = choose(found, len(words), flat=True)
        if len(chosen) < 2:
            return Extraction()
        spans = found if pairs.whole else chosen
        if pairs.whole and self._settings.span_mode == "token_level":
            # The package counts a span once for each label.
            spans = word_candidates_by_label(sigmoid(logits), THRESHOLD)
        scores = pairs.forward(
            word_states, relation_states, spans, _row_indices(chosen, spans), THRESHOLD
        )
        entities = _entities(text, chosen, words, notes.labels)
        threshold = THRESHOLD if work.threshold is None else work.threshold
        scores[np.eye(len(entities), dtype=bool)] = -1  # an entity has no relation to itself
        ranked, is_cut = select_best(scores, threshold, most)
        related = tuple(
            Relation(
                entities[head],
                entities[tail],
                notes.relations[name],
                float(scores[head, tail, name]),
            )
            for head, tail, name in zip(*np.unravel_index(ranked, scores.shape), strict=True)
        )
        return Extraction(relations=related, truncated=is_cut)


def _row_indices(chosen: Candidates, spans: Candidates) -> NDArray[np.int64]:
    """Return the row of each chosen candidate among the spans."""
    rows = {
        (start, end): row
        for row, (start, end) in reversed(
            list(enumerate(zip(spans.starts, spans.ends, strict=True)))
        )
    }
    return np.array(
        [rows[start, end] for start, end in zip(chosen.starts, chosen.ends, strict=True)],
        dtype=np.int64,
    )


def _entities(text: str, chosen: Candidates, words: Words, labels: Sequence[str]) -> list[Entity]:
    entities = []
    for first, last, label, score in zip(
        chosen.starts, chosen.ends, chosen.labels, chosen.scores, strict=True
    ):
        start, end = int(words.starts[first]), int(words.ends[last])
        entities.append(
            Entity(
                start=start, end=end, label=labels[label], score=float(score), text=text[start:end]
            )
        )
    return entities
