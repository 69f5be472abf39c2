"""Memory for decoding images: reservations of the worker's memory, held from before an image is
decoded until it is resized.

The threads that prepare jobs use it through `libs/models/images/memory.py`. A small image takes its
memory from a fixed allowance, so that it never waits for models. A large one claims memory that
models do not use, waits for it, and is refused after a timeout. So the available memory limits the
number of images that are decoded at the same time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from libs.errors import InvalidInput, NoCapacity
from services.worker.memory.budget import Ledger, LedgerClaim, ModelSize

ALLOWANCE_BYTES: Final = 128 << 20
"""Bytes for all images that use the allowance, in addition to the memory of models. They suffice
for an image of 8,000,000 pixels.
"""

ACCELERATOR_ALLOWANCE_BYTES: Final = 1 << 30
"""ALLOWANCE_BYTES of a worker with an accelerator. Its ledger of host memory is for warm models
(those evicted to host memory) and may have a limit of 0.
"""

MAX_WAIT_SECONDS: Final = 10.0
"""Maximum time for which an image waits for memory before its job is refused."""

_MEMORY_POLL_SECONDS: Final = 0.05
"""Interval at which a waiting image retries: models free memory without a notification."""

_NAME: Final = "images being decoded"


class DecodingMemory:
    """Reserves memory for decoding images.

    Args:
        ledger: The memory of models, of which a large image claims a part.
        allowance_bytes: Bytes for all images that make no claim.
        free_memory: Called on the event loop with the bytes of a claim that does not fit.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        allowance_bytes: int,
        *,
        free_memory: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._allowance = allowance_bytes
        self._free_memory = free_memory
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        # Mutable state, guarded by the condition, which is notified when memory is released.
        # `_used` is in bytes of the allowance.
        self._released = threading.Condition()
        self._used = 0

    @contextmanager
    def reserve(self, needed: int, field: str, *, check: Callable[[], None]) -> Iterator[None]:
        """Reserve memory within the context. Blocks the calling thread until it is available.

        Raises InvalidInput if this worker can never have as much, NoCapacity if it is not free
        within MAX_WAIT_SECONDS, and the errors of `check`.

        Args:
            needed: Bytes.
            field: The item's path in the request, for errors.
            check: Called regularly during the wait; raises if the job was cancelled.
        """
        if needed > max(self._allowance, self._ledger.limit_bytes):
            raise InvalidInput(
                f"decoding the image needs {needed:,} bytes, but this worker has "
                f"{self._ledger.limit_bytes:,} for models and images: send a smaller copy",
                field=field,
            )
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

    def _wait(self, needed: int, field: str, check: Callable[[], None]) -> LedgerClaim | None:
        """Return the claim, or None if the bytes are from the allowance."""
        until = self._clock() + MAX_WAIT_SECONDS
        while True:
            with self._released:
                if self._used + needed <= self._allowance:
                    self._used += needed
                    return None
                claim = self._ledger.claim(_NAME, ModelSize(needed))
                if claim is not None:
                    return claim
                if self._clock() >= until:
                    raise NoCapacity(
                        f"decoding the image needs {needed:,} bytes, which were not free within "
                        f"{MAX_WAIT_SECONDS:g} s",
                        field=field,
                        retry_after=1.0,
                    )
            check()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._free_memory, needed)
            with self._released:
                self._released.wait(_MEMORY_POLL_SECONDS)
