"""The chunks of one EncodeStream request while workers compute later ones, and its answers.

A part may be lost, repeated, or arrive after the answer. A part that does not continue the chunks
of its job is dropped, and so is one beyond what may wait for the client: the answer has all chunks
of its job, of which those that were sent are left out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from shoal.v1 import inference_pb2 as pb
from shoal.v1 import worker_pb2

from libs.errors import InternalError, QueueFull
from services.router.lanes import codec
from services.router.lanes.chunks import rows_from
from services.router.lanes.dispatch import JobAnswer

MAX_WAITING_BYTES: Final = 4 << 20
"""Maximum size of the parts of a request that wait for the client."""


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Chunks that follow those before them of the same job."""

    chunks: pb.EncodeResponse
    size: int
    """Bytes in which they arrived."""


Found: TypeAlias = ChunkPart | JobAnswer


@dataclass(slots=True)
class _Job:
    """A job without an answer: its chunks that arrived, and parts that wait for earlier jobs."""

    chunks: int = 0
    waiting: deque[ChunkPart] = field(default_factory=deque)


class StreamedChunks:
    """The chunks of one request.

    Args:
        hold: Counts a part of this size as held, or raises QueueFull. The caller releases it once
            it was sent.
        release: Releases a part of this size that is not sent.
    """

    def __init__(self, hold: Callable[[int], None], release: Callable[[int], None]) -> None:
        self._hold = hold
        self._release = release
        # The state: the first job without an answer; those with chunks; the parts and answers that
        # can be sent, in order; the bytes of all parts that wait; whether a part was taken to be
        # sent; whether the request has ended.
        self._current = 0
        self._jobs: dict[int, _Job] = {}
        self._ready: deque[Found] = deque()
        self._bytes = 0
        self._has_sent = False
        self._is_ended = False
        self._news = asyncio.Event()

    def add(self, job: int, part: worker_pb2.JobDelta) -> None:
        """Add a part of the chunks of the request's job `job`."""
        size, known = len(part.chunks), self._jobs.setdefault(max(job, self._current), _Job())
        is_wanted = not self._is_ended and job >= self._current and size
        if not is_wanted or self._bytes + size > MAX_WAITING_BYTES or part.offset > known.chunks:
            return
        try:
            chunks = codec.encode_part(part.chunks)
            end = part.offset + len(chunks.chunks.starts)
            if end <= known.chunks:
                return
            chunks = rows_from(chunks, known.chunks - part.offset)
        except InternalError:
            return  # the answer is checked too, and fails the request
        try:
            self._hold(size)
        except QueueFull:
            return  # the answer has these chunks too, and is refused if nothing is read until then
        known.chunks = end
        self._bytes += size
        found = ChunkPart(chunks, size)
        if job == self._current:
            self._ready.append(found)
            self._news.set()
        else:
            known.waiting.append(found)

    def add_answer(self, found: JobAnswer) -> None:
        """Add the answer to the first job without one."""
        self._jobs.pop(self._current, None)
        self._current += 1
        self._ready.append(found)
        self._ready += self._jobs.setdefault(self._current, _Job()).waiting
        self._jobs[self._current].waiting = deque()
        self._news.set()

    def restart(self) -> bool:
        """Drop all parts before the request is repeated, which may divide it into other jobs.
        Return False if the client has already received chunks, so that it must not be repeated.
        """
        waiting = [part for job in self._jobs.values() for part in job.waiting]
        ready = [found for found in self._ready if isinstance(found, ChunkPart)]
        for part in [*waiting, *ready]:
            self._release(part.size)
        self._jobs.clear()
        self._ready.clear()
        self._bytes = 0
        return not self._has_sent

    def end(self) -> None:
        """End the chunks: all answers, or an error, have arrived."""
        self._is_ended = True
        self._news.set()

    async def read(self) -> AsyncIterator[Found]:
        """Yield parts and answers in order, until the end."""
        while self._ready or not self._is_ended:
            while self._ready:
                yield self._take()
            if not self._is_ended:
                await self._news.wait()
                self._news.clear()

    def _take(self) -> Found:
        found = self._ready.popleft()
        if isinstance(found, ChunkPart):
            self._bytes -= found.size
            self._has_sent = True
        return found
