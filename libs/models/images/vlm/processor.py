"""Encode and score with a vision-language model: each item of ordered parts is one sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from libs.catalog.card import Card
from libs.errors import InvalidInput, TaskNotSupported
from libs.models.images.vlm.parts import PartsInput, Recalled
from libs.models.interface.output_cache import JobOutputCache, OutputCache
from libs.models.interface.results import EncodeResult, Result, ScoreResult
from libs.models.interface.sequences import Head, InputSequence, Output, Prepared, SparseRow
from libs.models.interface.work import (
    CancelCheck,
    EncodeWork,
    Parts,
    Role,
    ScoreWork,
    Work,
    items_as_parts,
    never_cancelled,
    query_as_parts,
    without_images,
)
from libs.models.text.checks import need_task, refuse_chunks, select_prompt, unsupported
from libs.models.text.processing import answers
from libs.models.text.processing.embedding import asked_forms, check_encode, check_pooled
from libs.models.text.processing.static import TokenWeights

Array = NDArray[np.float32]


class PartsProcessor:
    """The processor of one model. Its head is "multi_vector", "dense", "sparse" or, for models that
    score pairs, "score".

    `weights`: token weights of a model with queries that need no forward.
    """

    def __init__(
        self,
        card: Card,
        given: PartsInput,
        output_cache: OutputCache | None = None,
        weights: TokenWeights | None = None,
    ) -> None:
        self._card, self._input, self._weights = card, given, weights
        self._recall = output_cache or OutputCache()

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        need_task(work, self._card)
        refuse_chunks(work, self._card)
        match work:
            case EncodeWork():
                (head,) = asked_forms(work, self._card)
                check_encode(work, (head,), self._card)
                items = items_as_parts(work)
                return self._vectors(work, head, items, [work.role] * len(items), check_cancelled)
            case ScoreWork() if self._card.scoring == "yes_no":
                return self._pairs(work, check_cancelled)
            case ScoreWork():
                (head,) = self._card.representations
                if work.scale == "probability" and self._card.scoring != "cosine":
                    raise InvalidInput(
                        f"scores of {head} vectors have no probability: leave `scale` empty",
                        field="scale",
                    )
                items = [query_as_parts(work), *items_as_parts(work)]
                return self._vectors(
                    work,
                    head,
                    items,
                    ["query", *["document"] * (len(items) - 1)],  # type: ignore[list-item]
                    check_cancelled,
                )
        raise unsupported(work, self._card)

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        work, head, found = prepared.work, prepared.head, _in_order(prepared, outputs)
        if head == "sparse":
            return self._sparse(work, cast("list[SparseRow]", found), prepared.answer_bytes)
        rows = cast("list[Array]", found)
        match work:
            case EncodeWork() if head == "dense":
                return EncodeResult(dense=answers.dense_rows(work, self._card, rows))
            case EncodeWork():
                return EncodeResult(
                    multi_vector=answers.token_rows(work, self._card, rows, check_cancelled)
                )
            case ScoreWork() if head == "score":
                return ScoreResult(answers.pair_scores(np.stack(rows), self._card, work.scale))
            case ScoreWork() if head == "dense":
                return ScoreResult(answers.cosine_scores(rows[0], np.stack(rows[1:]), work.scale))
            case ScoreWork():
                return ScoreResult(answers.maxsim_scores(rows[0], rows[1:], self._card))
        raise unsupported(work, self._card)

    def _sparse(self, work: Work, rows: Sequence[SparseRow], most_bytes: int) -> Result:
        most, columns = (
            (0, 0)
            if self._card.sparse is None
            else (self._card.sparse.strongest, self._card.sparse.columns)
        )
        rows = [answers.strongest(row, most) for row in rows]
        match work:
            case EncodeWork():
                return EncodeResult(sparse=answers.sparse_rows(work, columns, rows, most_bytes))
            case ScoreWork():
                cosine = self._card.scoring == "sparse_cosine"
                return ScoreResult(answers.dot_scores(rows[0], rows[1:], columns, cosine=cosine))
        raise unsupported(work, self._card)

    def _vectors(
        self,
        work: EncodeWork | ScoreWork,
        head: Head,
        items: Sequence[Parts],
        roles: Sequence[Role],
        check_cancelled: CancelCheck,
    ) -> Prepared:
        """Prepare items with one result each. Texts that need no forward are looked up and have no
        sequence.
        """
        known = self._recall.job()
        looked_up: dict[int, SparseRow] = {}
        seen: list[Parts] = []
        sequences, tokens = [], 0
        for number, (parts, role) in enumerate(zip(items, roles, strict=True)):
            sequence = self._sequence(work, parts, role, check_cancelled, Recalled(head, known))
            if self._weights is not None and sequence.rows is None:
                looked_up[number] = self._weights.row(sequence.ids)
                tokens += sequence.tokens
            else:
                seen.append(parts)
                sequences.append(sequence)
        if isinstance(work, EncodeWork):
            check_pooled(work, sequences, lambda index: _path(seen[index]))
        return _prepared(work, head, seen, sequences, known, looked_up, tokens)

    def _pairs(self, work: ScoreWork, check_cancelled: CancelCheck) -> Prepared:
        items, query, known = items_as_parts(work), query_as_parts(work), self._recall.job()
        asked, cut, recalled = (
            self._instruction(work, "query"),
            work.truncation,
            Recalled("score", known, {}),
        )
        sequences = [
            self._input.encode_pair(
                query, parts, _path(parts), cut, check_cancelled, asked, recalled
            )
            for parts in items
        ]
        return _prepared(work, "score", items, sequences, known)

    def _sequence(
        self,
        work: EncodeWork | ScoreWork,
        parts: Parts,
        role: Role,
        check_cancelled: CancelCheck,
        recalled: Recalled,
    ) -> InputSequence:
        check_cancelled()
        if (
            self._weights is not None
            and role == "document"
            and all(isinstance(part.content, str) for part in parts)
        ):
            message = f"the texts of {self._card.model} are queries: its documents need images"
            raise TaskNotSupported(message, field=_path(parts))
        return self._input.encode_parts(
            parts,
            _path(parts),
            role,
            work.truncation,
            check_cancelled,
            self._instruction(work, role),
            recalled,
        )

    def _instruction(self, work: EncodeWork | ScoreWork, role: Role) -> str:
        """Return the request's instruction (in a score only for the query), or the card's; empty
        for the model's default.
        """
        asked = work.instruction if isinstance(work, EncodeWork) or role == "query" else ""
        return asked or (select_prompt(self._card, role) if self._input.prompts.instruction else "")


def _path(parts: Parts) -> str:
    """Return the item's path in the job: a single part's path, else the prefix before `.parts`."""
    return (
        parts[0].field
        if len(parts) == 1
        else parts[0].field.rpartition(".parts")[0] or parts[0].field
    )


def _prepared(
    work: EncodeWork | ScoreWork,
    head: Head,
    items: Sequence[Parts],
    sequences: list[InputSequence],
    known: JobOutputCache,
    looked_up: Mapping[int, SparseRow] | None = None,
    tokens: int = 0,
) -> Prepared:
    """Build the prepared job.

    Args:
        items: Indices of the items with sequences.
        looked_up: Vectors of the others by index.
        tokens: Their tokens.
    """
    return Prepared(
        without_images(work),
        head,
        sequences,
        looked_up,
        looked_up=tokens,
        fields=tuple(map(_path, items)),
        image_tokens=sum(len(one.rows.places) for one in sequences if one.rows is not None),
        known=known.known(sequences),
    )


def _in_order(prepared: Prepared, outputs: Sequence[Output]) -> list[Output]:
    """Return the outputs of all items, including those that were looked up."""
    looked_up = cast("Mapping[int, SparseRow]", prepared.notes or {})
    computed = iter(outputs)
    places = range(len(looked_up) + len(outputs))
    return [looked_up[place] if place in looked_up else next(computed) for place in places]
