"""Named entity recognition with a token classification model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Entity, Extraction

from libs.catalog.card import Card
from libs.kinds.token_labels.card import entity_kind
from libs.models.interface.results import Result
from libs.models.interface.sequences import Output, Prepared
from libs.models.interface.work import CancelCheck, EntitiesWork, Work, never_cancelled
from libs.models.runtime.answer_budget import build_result
from libs.models.text.checks import item_path, known_labels, need_task, need_work
from libs.models.text.processing.entities import find_entities
from libs.models.text.tokenising.text import Spans, TextProcessor


class TaggingProcessor:
    """The processor of one model."""

    def __init__(self, card: Card, text: TextProcessor) -> None:
        self._card, self._text = card, text

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        need_task(work, self._card)
        work = need_work(work, EntitiesWork, self._card)
        known_labels(work.labels, self._card, "entities.labels")
        sequences, spans = self._text.encode_spans(
            work.texts, work.truncation, item_path, check_cancelled
        )
        return Prepared(work, "token_logits", sequences, spans)

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        work = need_work(prepared.work, EntitiesWork, self._card)
        logits, spans = (
            cast("Sequence[NDArray[np.float32]]", outputs),
            cast("list[Spans]", prepared.notes),
        )
        found = (
            find_entities(text, rows, places, self._card.classes, work.aggregation)
            for text, rows, places in zip(work.texts, logits, spans, strict=True)
        )
        items = (
            Extraction(entities=tuple(one for one in entities if _wanted(one, work)))
            for entities in found
        )
        return build_result(items, prepared.answer_bytes, check_cancelled)


def _wanted(entity: Entity, work: EntitiesWork) -> bool:
    enough = work.threshold is None or entity.score >= work.threshold
    return enough and (not work.labels or entity_kind(entity.label) in work.labels)
