"""Encode, score and classify with an embedding model that has a separate encoder for queries
(sentence-transformers' Router).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from libs.catalog.card import Card
from libs.models.interface.results import EncodeResult, Result
from libs.models.interface.sequences import Head, Output, Prepared
from libs.models.interface.work import CancelCheck, EncodeWork, ScoreWork, Work, never_cancelled
from libs.models.text.checks import need_task
from libs.models.text.processing.embedding import EmbeddingProcessor

QUERY_HEAD: Final[Head] = "query"
_HEAD: Final[Head] = "dense"


class AsymmetricProcessor:
    """The processor of one model. The encoder for queries has the head QUERY_HEAD, that for
    documents "dense".
    """

    def __init__(
        self, card: Card, documents: EmbeddingProcessor, queries: EmbeddingProcessor
    ) -> None:
        self._card, self._documents, self._queries = card, documents, queries

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        need_task(work, self._card)
        if isinstance(work, ScoreWork):
            query = self._queries.prepare(replace(work, documents=[]), check_cancelled)
            documents = self._documents.prepare(work, check_cancelled)
            sequences = [*query.sequences, *documents.sequences[1:]]
            heads = (QUERY_HEAD, *(_HEAD for _ in sequences[1:]))
            return replace(documents, head=QUERY_HEAD, sequences=sequences, heads=heads)
        if self._is_query(work):
            return replace(self._queries.prepare(work, check_cancelled), head=QUERY_HEAD)
        return self._documents.prepare(work, check_cancelled)

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        processor = self._queries if self._is_query(prepared.work) else self._documents
        return processor.finish(replace(prepared, head=_HEAD, heads=()), outputs, check_cancelled)

    def prepare_parts(
        self, work: EncodeWork, check_cancelled: CancelCheck = never_cancelled
    ) -> Iterator[Prepared]:
        """Implement `PreparesParts.prepare_parts`."""
        if not self._is_query(work):
            yield from self._documents.prepare_parts(work, check_cancelled)
            return
        for prepared in self._queries.prepare_parts(work, check_cancelled):
            yield replace(prepared, head=QUERY_HEAD)

    def finish_rows(
        self, prepared: Prepared, outputs: Mapping[int, Output], first: int, most_bytes: int
    ) -> EncodeResult | None:
        """Implement `PreparesParts.finish_rows`."""
        processor = self._queries if self._is_query(prepared.work) else self._documents
        return processor.finish_rows(replace(prepared, head=_HEAD), outputs, first, most_bytes)

    def _is_query(self, work: Work) -> bool:
        role = work.role if isinstance(work, EncodeWork) else ""
        return role == "query" or (
            not role and self._card.query_default and not isinstance(work, ScoreWork)
        )
