"""What models write of jobs whose clients read along (ExtractStream), on its way to a router while
it is written.

Beside the request path: the runner hands over the tokens so far, the newest alone are kept of each
text, and every 50 ms what has come is turned into text in a thread and sent. What is lost on the
way comes with the answer.
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
"""Faster than anybody reads, and a hundredth of the messages that tokens alone would be."""
FAILED_SECONDS: Final = 1.0
MAX_CHARACTERS: Final = 16_384
"""Of one part; the rest goes with the next one."""


@runtime_checkable
class ReadAlong(Protocol):
    """A model whose texts can be read while they are written."""

    def places(self, prepared: Prepared) -> Sequence[tuple[int, int]]:
        """The item and the page (0: none) of each sequence; empty: what is written is no text
        yet.
        """

    def text(self, prepared: Prepared, ids: Sequence[int]) -> str:
        """The text of the tokens so far of a sequence of the job. It begins with that of any first
        part of them.
        """


@dataclass(frozen=True, slots=True)
class _Grown:
    """A text that is being written: all of its tokens so far."""

    held: HeldJob
    index: int
    ids: list[int]


class WrittenParts:
    """Event loop only."""

    def __init__(self, link: Link, tasks: asyncio.TaskGroup, threads: ThreadPoolExecutor) -> None:
        self._link = link
        self._senders = Tasks(tasks)
        self._threads = threads
        # The state: the newest of each text that is not sent yet, and whether it is being sent.
        self._grown: dict[tuple[int, int], _Grown] = {}
        self._is_sending = False

    def add(self, held: HeldJob, index: int, ids: list[int]) -> None:
        """All tokens so far of a job's sequence."""
        self._grown[(held.number, index)] = _Grown(held, index, ids)
        if not self._is_sending:
            self._is_sending = True
            self._senders.start(self._send())

    def give_up(self) -> None:
        """Sends nothing more."""
        self._senders.cancel()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while self._grown:
            grown, self._grown = self._grown, {}
            wanted = [each for each in grown.values() if not each.held.unwanted]
            parts = await loop.run_in_executor(self._threads, _parts, wanted)
            pause = INTERVAL_SECONDS
            if parts:
                request = worker_pb2.WrittenRequest(
                    worker_id=self._link.identity.worker_id, texts=[part for _, _, part in parts]
                )
                try:
                    await self._link.written(request)
                except ShoalError as error:
                    log.debug("what is written could not be told: %s", error)
                    pause = FAILED_SECONDS
                else:
                    for held, index, part in parts:
                        held.told[index] = held.told.get(index, "") + part.text
            await asyncio.sleep(pause)
        self._is_sending = False


def _parts(grown: Iterable[_Grown]) -> list[tuple[HeldJob, int, worker_pb2.WrittenText]]:
    """What is new of each text. Runs in a thread."""
    found = []
    for each in grown:
        held, model = each.held, each.held.resident.model
        places = model.places(held.ready) if isinstance(model, ReadAlong) else ()
        if not isinstance(model, ReadAlong) or not places:
            continue
        told, text = held.told.get(each.index, ""), model.text(held.ready, each.ids)
        if not text.startswith(told) or len(text) == len(told):
            continue
        (item, page), job = places[each.index], held.job
        part = worker_pb2.WrittenText(
            job_id=job.job_id,
            router=job.written_to,
            batch_id=held.lease.batch_id,
            item=item,
            page=page,
            offset=len(told),
            text=text[len(told) :][:MAX_CHARACTERS],
        )
        found.append((held, each.index, part))
    return found
