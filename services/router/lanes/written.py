"""What models write of ExtractStream's requests while they write it: the texts of one request so far, and what its client has not
been sent of them.

Parts may be lost or come twice. A part that does not follow what is there is dropped, and the answer completes the text. A client
that reads slowly makes the next delta longer: what waits for it is never more than the texts themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.v1 import inference_pb2 as pb
from shoal.v1 import worker_pb2

MOST_CHARACTERS: Final = 1 << 17
"""Of one text. The longest answer has 4,096 tokens; what is beyond comes with the answer."""


@dataclass(slots=True)
class _Text:
    """`lease`: under which it is written. `sent`: characters that the client has been sent. `restarted`: it is to be told so."""

    lease: str
    text: str = ""
    sent: int = 0
    restarted: bool = False


class WrittenTexts:
    """Of one request. `firsts`: the first item of each of its jobs, once they are known."""

    def __init__(self) -> None:
        self.firsts: Sequence[int] = ()
        # The state: texts by item and page; those with news; whether no more parts are wanted.
        self._texts: dict[tuple[int, int], _Text] = {}
        self._grown: dict[tuple[int, int], None] = {}
        self._is_ended = False
        self._news = asyncio.Event()

    def add(self, job: int, part: worker_pb2.WrittenText) -> None:
        """A part of a text of the request's job `job`."""
        if self._is_ended or job >= len(self.firsts):
            return
        key = (self.firsts[job] + part.item, part.page)
        known = self._texts.get(key)
        if known is None:
            known = self._texts[key] = _Text(part.batch_id)
        elif known.lease != part.batch_id:  # another worker begins anew
            restarted = known.restarted or known.sent > 0
            known = self._texts[key] = _Text(part.batch_id, restarted=restarted)
        have = len(known.text)
        if part.offset > have or part.offset + len(part.text) <= have or part.offset + len(part.text) > MOST_CHARACTERS:
            return
        known.text += part.text[have - part.offset :]
        self._grown[key] = None
        self._news.set()

    def end(self) -> None:
        """The answer, or an error, has come."""
        self._is_ended = True
        self._news.set()

    async def deltas(self) -> AsyncIterator[list[pb.ExtractDelta]]:
        """What has been written, as it comes, until the end."""
        while not self._is_ended:
            await self._news.wait()
            self._news.clear()
            if self._grown and not self._is_ended:
                yield [self._delta(key) for key in self._take()]

    def rest(self, response: pb.ExtractResponse) -> list[pb.ExtractDelta]:
        """What the client of a text that was begun lacks of it, so that its deltas together are the answer's text."""
        found = []
        for key, known in self._texts.items():
            whole = _answered(response, *key)
            if whole is None:
                continue
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
        made = pb.ExtractDelta(item=key[0], page=key[1], text=known.text[known.sent :], restarted=known.restarted)
        known.sent, known.restarted = len(known.text), False
        return made


def _answered(response: pb.ExtractResponse, item: int, page: int) -> str | None:
    """The text of an item, or of a page of it; None: there is none, such as where the part was wrong."""
    if item >= len(response.results):
        return None
    result = response.results[item]
    if not page:
        return result.text
    return next((each.text for each in result.pages if each.page == page), None)
