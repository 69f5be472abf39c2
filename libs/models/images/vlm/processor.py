"""Encode and score with a vision-language model: items of ordered parts, one sequence each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from libs.catalog.card import Card
from libs.errors import InvalidInput
from libs.models.images.vlm.parts import PartsInput, Recalled
from libs.models.recall import Recall
from libs.models.results import EncodeResult, Result, ScoreResult
from libs.models.text.checks import need_task, prompt_of, unsupported
from libs.models.text.processing import answers
from libs.models.text.processing.embedding import asked_forms, check_encode, check_pooled
from libs.models.work import (
    EncodeWork,
    GoOn,
    Head,
    InputSequence,
    Output,
    Parts,
    Prepared,
    Role,
    ScoreWork,
    Work,
    go_on_anyway,
    items_as_parts,
    query_as_parts,
    without_images,
)

Array = NDArray[np.float32]


class PartsProcessor:
    """The processor of one model. Its head is "multi_vector", "dense" or, of a model that judges pairs, "score"."""

    def __init__(self, card: Card, given: PartsInput, recall: Recall | None = None) -> None:
        self._card, self._input = card, given
        self._recall = recall or Recall()

    def prepare(self, work: Work, go_on: GoOn = go_on_anyway) -> Prepared:
        need_task(work, self._card)
        head: Head
        known = self._recall.job()
        match work:
            case EncodeWork():
                (head,) = asked_forms(work, self._card)
                check_encode(work, (head,), self._card)
                items = items_as_parts(work)
                recalled = Recalled(head, known)
                sequences = [self._sequence(work, parts, work.role, go_on, recalled) for parts in items]
                check_pooled(work, sequences, lambda index: _path(items[index]))
            case ScoreWork() if self._card.scoring == "yes_no":
                head, items, query = "score", items_as_parts(work), query_as_parts(work)
                asked, cut, recalled = self._instruction(work, "query"), work.truncation, Recalled(head, known, {})
                sequences = [self._input.of_pair(query, parts, _path(parts), cut, go_on, asked, recalled) for parts in items]
            case ScoreWork():
                if work.scale == "probability" and self._card.scoring != "cosine":
                    raise InvalidInput("scores of multi_vector vectors have no probability: leave `scale` empty", field="scale")
                (head,) = self._card.representations
                items = [query_as_parts(work), *items_as_parts(work)]
                roles: list[Role] = ["query", *["document"] * (len(items) - 1)]  # type: ignore[list-item]
                recalled = Recalled(head, known)
                sequences = [self._sequence(work, parts, role, go_on, recalled) for parts, role in zip(items, roles, strict=True)]
            case _:
                raise unsupported(work, self._card)
        fields = tuple(map(_path, items))
        images = sum(len(one.rows.places) for one in sequences if one.rows is not None)
        outputs = known.known(sequences)
        return Prepared(without_images(work), head, sequences, fields=fields, image_tokens=images, known=outputs)

    def finish(self, prepared: Prepared, outputs: Sequence[Output]) -> Result:
        work, rows = prepared.work, cast("Sequence[Array]", outputs)
        match work:
            case EncodeWork() if prepared.head == "dense":
                return EncodeResult(dense=answers.dense_rows(work, self._card, rows))
            case EncodeWork():
                return EncodeResult(multi_vector=answers.token_rows(work, self._card, rows))
            case ScoreWork() if prepared.head == "score":
                return ScoreResult(answers.pair_scores(np.stack(rows), self._card, work.scale))
            case ScoreWork() if prepared.head == "dense":
                return ScoreResult(answers.cosine_scores(rows[0], np.stack(rows[1:]), work.scale))
            case ScoreWork():
                return ScoreResult(answers.maxsim_scores(rows[0], rows[1:], self._card))
        raise unsupported(work, self._card)

    def _sequence(self, work: EncodeWork | ScoreWork, parts: Parts, role: Role, go_on: GoOn, recalled: Recalled) -> InputSequence:
        go_on()
        return self._input.of_parts(parts, _path(parts), role, work.truncation, go_on, self._instruction(work, role), recalled)

    def _instruction(self, work: EncodeWork | ScoreWork, role: Role) -> str:
        """The request's, which in a score is for the query alone, or the card's; empty: the model's usual one."""
        asked = work.instruction if isinstance(work, EncodeWork) or role == "query" else ""
        return asked or (prompt_of(self._card, role) if self._input.prompts.instruction else "")


def _path(parts: Parts) -> str:
    """The item's path in the job: of a single part its own, else what stands before `.parts`."""
    return parts[0].field if len(parts) == 1 else parts[0].field.rpartition(".parts")[0] or parts[0].field
