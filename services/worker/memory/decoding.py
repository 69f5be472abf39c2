"""Memory of images that are being decoded: claims of the worker's memory, held from before the
first pixel until it was resized.

Used by preparing threads, through `libs/models/images/memory.py`. A small image takes it from an
allowance, so that it never waits for models. A large one claims it from what models leave, waits
for it, and is refused if it gets none in time: so the number of images that are decoded at once is
bounded by memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from libs.errors import InvalidInput, NoCapacity
from services.worker.memory.budget import Claim, Ledger, Size

ALLOWANCE_BYTES: Final = 128 << 20
"""For all images that are decoded at once, in addition to the models' memory: 8,000,000 pixels."""

ACCELERATOR_ALLOWANCE_BYTES: Final = 1 << 30
"""As ALLOWANCE_BYTES, beside an accelerator, where the ledger of host memory is for warm models and
may be empty.
"""

MAX_WAIT_SECONDS: Final = 10.0
"""How long an image may wait for memory before its job is refused."""

_POLL_SECONDS: Final = 0.05
"""How often a waiting image tries again: models free memory without a notification."""

_NAME: Final = "images being decoded"


class DecodingMemory:
    """`make_room` is called on the event loop with the bytes of a claim that does not fit. `clock`
    is monotonic (seconds).
    """

    def __init__(
        self,
        ledger: Ledger,
        allowance_bytes: int,
        *,
        make_room: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._allowance = allowance_bytes
        self._make_room = make_room
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        # Mutable state, guarded by the condition, which is notified when memory is released.
        # `_used`: bytes of the allowance.
        self._released = threading.Condition()
        self._used = 0

    @contextmanager
    def reserve(self, needed: int, field: str, *, check: Callable[[], None]) -> Iterator[None]:
        """Holds `needed` bytes; waits for them on the calling thread. `field`: the item's path, for
        errors.

        Raises InvalidInput for more than this worker's memory, NoCapacity if they did not become
        free within MAX_WAIT_SECONDS, and what `check` raises, which is called while it waits.
        """
        if needed > max(self._allowance, self._ledger.limit_bytes):
            message = f"decoding the image takes {needed:,} bytes, more than the {self._ledger.limit_bytes:,} that this worker has"
            raise InvalidInput(f"{message} for models and images: send a smaller copy", field=field)
        claim = self._wait(needed, field, check)
        try:
            yield
        finally:
            with self._released:
                if claim is None:
                    self._used -= needed
                else:
                    self._ledger.release(claim)
                self._released.notify_all()

    def _wait(self, needed: int, field: str, check: Callable[[], None]) -> Claim | None:
        """The claim; None: the bytes are from the allowance."""
        until = self._clock() + MAX_WAIT_SECONDS
        while True:
            with self._released:
                if self._used + needed <= self._allowance:
                    self._used += needed
                    return None
                claim = self._ledger.claim(_NAME, Size(needed))
                if claim is not None:
                    return claim
                if self._clock() >= until:
                    waited = f"the worker did not have the {needed:,} bytes within {MAX_WAIT_SECONDS:g} s"
                    raise NoCapacity(
                        f"decoding the image takes memory: {waited}", field=field, retry_after=1.0
                    )
            check()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._make_room, needed)
            with self._released:
                self._released.wait(_POLL_SECONDS)
