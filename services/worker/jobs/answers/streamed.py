"""Streams text to clients of ExtractStream while the model is still generating it.

Not on the request path of the final answer. The runner passes on all tokens so far. Only the newest
tokens of each text are kept; every 50 ms, a thread decodes them to text, which is sent to the
router. The final answer contains any text that was not streamed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from shoal.v1 import worker_pb2

from libs.errors import ShoalError
from libs.models import Prepared
from services.worker.jobs.held import HeldJob
from services.worker.machine.tasks import Tasks
from services.worker.mesh.link import Link

log = logging.getLogger(__name__)

INTERVAL_SECONDS: Final = 0.05
"""Faster than a person reads, and about a hundredth of the messages that one per token would be."""
FAILED_SECONDS: Final = 1.0
MAX_PART_CHARACTERS: Final = 16_384
"""Maximum length of one part. The next part carries the rest."""


@runtime_checkable
class StreamsText(Protocol):
    """A model with texts that can be streamed during generation."""

    def places(self, prepared: Prepared) -> Sequence[tuple[int, int]]:
        """Return the item and page (0: none) of each sequence, or nothing if no text is being
        generated yet.
        """

    def text(self, prepared: Prepared, ids: Sequence[int]) -> str:
        """Decode the tokens so far of a sequence. The result begins with that of any prefix of
        `ids`.
        """


@dataclass(frozen=True, slots=True)
class _GrowingText:
    """A text that is being generated, and all its tokens so far."""

    held: HeldJob
    index: int
    ids: list[int]


class StreamedParts:
    """Streams growing texts to routers. Event loop only."""

    def __init__(self, link: Link, tasks: asyncio.TaskGroup, threads: ThreadPoolExecutor) -> None:
        self._link = link
        self._senders = Tasks(tasks)
        self._threads = threads
        # Mutable state: the newest tokens of each text that are not sent yet, and whether a send is
        # in progress.
        self._growing: dict[tuple[int, int], _GrowingText] = {}
        self._is_sending = False

    def add(self, held: HeldJob, index: int, ids: list[int]) -> None:
        """Set all tokens so far of a job's sequence."""
        self._growing[(held.number, index)] = _GrowingText(held, index, ids)
        if not self._is_sending:
            self._is_sending = True
            self._senders.start(self._send())

    def give_up(self) -> None:
        """Stop sending."""
        self._senders.cancel()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while self._growing:
            growing, self._growing = self._growing, {}
            wanted = [progress for progress in growing.values() if not progress.held.unwanted]
            parts = await loop.run_in_executor(self._threads, _parts, wanted)
            pause = INTERVAL_SECONDS
            if parts:
                request = worker_pb2.WrittenRequest(
                    worker_id=self._link.identity.worker_id, texts=[part for _, _, part in parts]
                )
                try:
                    await self._link.send_texts(request)
                except ShoalError as error:
                    log.debug("text could not be streamed: %s", error)
                    pause = FAILED_SECONDS
                else:
                    for held, index, part in parts:
                        held.streamed[index] = held.streamed.get(index, "") + part.text
            await asyncio.sleep(pause)
        self._is_sending = False


def _parts(growing: Iterable[_GrowingText]) -> list[tuple[HeldJob, int, worker_pb2.WrittenText]]:
    """Return the text of each sequence that is not streamed yet. Runs in a thread."""
    found = []
    for progress in growing:
        held, model = progress.held, progress.held.resident.model
        places = model.places(held.ready) if isinstance(model, StreamsText) else ()
        if not isinstance(model, StreamsText) or not places:
            continue
        streamed, text = (
            held.streamed.get(progress.index, ""),
            model.text(held.ready, progress.ids),
        )
        if not text.startswith(streamed) or len(text) == len(streamed):
            continue
        (item, page), job = places[progress.index], held.job
        part = worker_pb2.WrittenText(
            job_id=job.job_id,
            router=job.written_to,
            batch_id=held.lease.batch_id,
            item=item,
            page=page,
            offset=len(streamed),
            text=text[len(streamed) :][:MAX_PART_CHARACTERS],
        )
        found.append((held, progress.index, part))
    return found
