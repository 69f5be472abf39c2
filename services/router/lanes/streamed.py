"""The texts of one ExtractStream request while models generate them, and the part of each not yet
sent to the client.

A part may be lost, repeated, or arrive after the answer. A part that does not continue its text is
dropped, and the answer completes the text. A client that reads slowly gets longer deltas, so the
memory that waits for it never exceeds the texts themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.v1 import inference_pb2 as pb
from shoal.v1 import worker_pb2

MAX_STREAMED_CHARACTERS: Final = 1 << 17
"""Maximum characters streamed of one text. The longest answer has 4,096 tokens; text beyond the
limit arrives with the answer.
"""


@dataclass(slots=True)
class _Text:
    lease: str
    """The lease (batch id) under which it is generated."""
    text: str = ""
    sent: int = 0
    """Characters that were sent to the client."""
    restarted: bool = False
    """The next delta replaces the text sent before."""


class StreamedTexts:
    """The texts of one request."""

    def __init__(self) -> None:
        self.first_items: Sequence[int] = ()
        """The first item of each job, once the jobs are known."""
        # The state: texts by item and page; those with unsent text; whether the answer has arrived.
        self._texts: dict[tuple[int, int], _Text] = {}
        self._grown: dict[tuple[int, int], None] = {}
        self._is_ended = False
        self._news = asyncio.Event()

    def add(self, job: int, part: worker_pb2.JobDelta) -> None:
        """Add a part of a text of the request's job `job`."""
        if self._is_ended or job >= len(self.first_items):
            return
        key = (self.first_items[job] + part.item, part.page)
        known = self._texts.get(key)
        if known is None:
            known = self._texts[key] = _Text(part.batch_id)
        elif known.lease != part.batch_id:  # another worker starts over
            restarted = known.restarted or known.sent > 0
            known = self._texts[key] = _Text(part.batch_id, restarted=restarted)
        have = len(known.text)
        if (
            part.offset > have
            or part.offset + len(part.text) <= have
            or part.offset + len(part.text) > MAX_STREAMED_CHARACTERS
        ):
            return
        known.text += part.text[have - part.offset :]
        self._grown[key] = None
        self._news.set()

    def end(self) -> None:
        """End the deltas: the answer, or an error, has arrived."""
        self._is_ended = True
        self._news.set()

    async def deltas(self) -> AsyncIterator[list[pb.ExtractDelta]]:
        """Yield new text as it arrives, until the end."""
        while not self._is_ended:
            await self._news.wait()
            self._news.clear()
            if self._grown and not self._is_ended:
                yield [self._delta(key) for key in self._take()]

    def rest(self, response: pb.ExtractResponse) -> list[pb.ExtractDelta]:
        """Return the deltas that complete every text of the response.

        A text may be answered before any part of it arrives: parts travel through Redis where the
        worker's stream ends at another router. Its whole text is one delta then, so that the deltas
        of a text always add up to its text in the response.
        """
        found = []
        for key, whole in _item_texts(response):
            known = self._texts.setdefault(key, _Text(lease=""))
            if whole[: known.sent] != known.text[: known.sent]:
                known.restarted, known.sent = True, 0
            known.text = whole
            if known.restarted or known.sent < len(whole):
                found.append(self._delta(key))
        return found

    def _take(self) -> list[tuple[int, int]]:
        grown, self._grown = list(self._grown), {}
        return grown

    def _delta(self, key: tuple[int, int]) -> pb.ExtractDelta:
        known = self._texts[key]
        made = pb.ExtractDelta(
            item=key[0], page=key[1], text=known.text[known.sent :], restarted=known.restarted
        )
        known.sent, known.restarted = len(known.text), False
        return made


def _item_texts(response: pb.ExtractResponse) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield each text of a response with its item and page; the page is 0 where the item is not a
    document.
    """
    for item, result in enumerate(response.results):
        if not result.pages:
            yield (item, 0), result.text
        for page in result.pages:
            yield (item, page.page), page.text
