"""Sends the rows of a chunk to the mesh, and isolates rows that fail.

1. Rows without a text are not sent.
2. Rows that the mesh refuses (too long, invalid) are skipped by the client.
3. If a request fails for a cause that one of its rows may have, such as memory, each half of its
   rows is sent again, until the row is alone.
4. All other errors concern the whole chunk and are raised: the engine repeats it or stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from shoal.bulk.inputs import RowChunk
from shoal.bulk.spec import BulkRecipe
from shoal.client import AsyncClient
from shoal.errors import (
    InputTooLong,
    InternalError,
    InvalidInput,
    OutOfMemory,
    ShoalError,
    WorkerLost,
)
from shoal.results import EncodeResult, ExtractResult, ScoreResult, Skipped

Result = EncodeResult | ScoreResult | ExtractResult
_CAUSED_BY_ROW: Final = (OutOfMemory, WorkerLost, InternalError, InputTooLong)


@dataclass(slots=True)
class ChunkResults:
    """The results of a chunk's rows.

    Attributes:
        pieces: Indices of rows in the chunk, and the result of these rows in this order.
        errors: Reasons of rows without a result, by their index.
    """

    pieces: list[tuple[list[int], Result]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of rows with a result or an error."""
        return len(self.done)

    @property
    def done(self) -> set[int]:
        """The indices of these rows."""
        return {*self.errors, *(row for rows, _ in self.pieces for row in rows)}

    @property
    def tokens(self) -> int:
        return sum(result.usage.input_tokens for _, result in self.pieces)

    @property
    def truncated(self) -> int:
        """The number of rows with a text that was cut; all rows of a query that was cut."""
        return sum(
            len(rows) if result.usage.truncated_query else result.usage.truncated_items
            for rows, result in self.pieces
        )

    @property
    def revisions(self) -> list[str]:
        """The revisions of the model, each once."""
        found = (result.revision for _, result in self.pieces)
        return list(dict.fromkeys(revision for revision in found if revision))

    @property
    def embedding_ids(self) -> list[str]:
        """The embedding ids of results with vectors."""
        return [
            result.embedding_id
            for rows, result in self.pieces
            if isinstance(result, EncodeResult) and len(result.skipped) < len(rows)
        ]


class Sender:
    """Sends chunks with the recipe of a job."""

    def __init__(self, client: AsyncClient, recipe: BulkRecipe) -> None:
        self._client, self._recipe = client, recipe
        self._arguments = recipe.arguments()
        self._task = recipe.extract_task() if recipe.verb == "extract" else None

    async def send(
        self,
        chunk: RowChunk,
        rows: Iterable[int] | None,
        answer: ChunkResults,
        *,
        expected: str = "",
        timeout: float | None = None,
        on_reply: Callable[[], None] = lambda: None,
    ) -> None:
        """Add the results of a chunk, or some of its rows, to an answer. Rows that it has are not
        sent, so a call that failed may be repeated.

        Args:
            expected: The embedding id that vectors must have; empty for any.
            timeout: Seconds for one request; None for the client's.
            on_reply: Called after each request, of which a chunk may need many.

        Raises:
            ShoalError: A request failed for a cause that concerns more than a row.
        """
        wanted, done, valid = range(len(chunk)) if rows is None else rows, answer.done, []
        for row in wanted:
            if row in chunk.problems:
                answer.errors[row] = chunk.problems[row]
            elif row not in done:
                valid.append(row)
        for query, same in self._by_query(chunk, valid):
            required = {"expected": expected, "timeout": timeout, "on_reply": on_reply}
            await self._send(chunk, query, same, required, answer)

    def _by_query(self, chunk: RowChunk, rows: list[int]) -> list[tuple[str, list[int]]]:
        """Group rows by their query; all rows are one group without a column of queries."""
        if not self._recipe.query_column:
            return [(self._recipe.query, rows)] if rows else []
        groups: dict[str, list[int]] = {}
        for row in rows:
            groups.setdefault(chunk.queries[row], []).append(row)
        return list(groups.items())

    async def _send(
        self,
        chunk: RowChunk,
        query: str,
        rows: list[int],
        required: dict[str, Any],
        answer: ChunkResults,
    ) -> None:
        try:
            result = await self._ask(query, [chunk.texts[row] for row in rows], **required)
        except ShoalError as error:
            if not _may_be_caused_by_row(error):
                raise
            if len(rows) == 1:
                answer.errors[rows[0]] = f"{error.message} [{error.reason}]"
                return
            for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
                await self._send(chunk, query, half, required, answer)
            return
        answer.pieces.append((rows, result))
        answer.errors |= {rows[one.index]: _reason(one) for one in result.skipped}

    async def _ask(
        self,
        query: str,
        texts: Sequence[str],
        *,
        expected: str,
        timeout: float | None,
        on_reply: Callable[[], None],
    ) -> Result:
        common: dict[str, Any] = {
            **self._arguments,
            "priority": "bulk",
            "on_invalid": "skip",
            "timeout": timeout,
            "on_progress": lambda done, total: on_reply(),
        }
        model, client = self._recipe.model, self._client
        if self._recipe.verb == "encode":
            required = expected or common.pop("expect_embedding_id", "")
            return await client.encode(model, texts, **{**common, "expect_embedding_id": required})
        if self._recipe.verb == "score":
            return await client.score(model, query, texts, **common)
        assert self._task is not None  # noqa: S101  # for the type checker
        return await client.extract(model, texts, self._task, **common)


def _may_be_caused_by_row(error: ShoalError) -> bool:
    """Return True if another division of the rows into requests may succeed.

    InvalidInput is caused by a row only if its field names one; the client skips these itself.
    """
    if isinstance(error, InvalidInput):
        return isinstance(error, InputTooLong) and error.index("query") is None
    return isinstance(error, _CAUSED_BY_ROW)


def _reason(skipped: Skipped) -> str:
    return f"{skipped.message} [{skipped.reason}]"
