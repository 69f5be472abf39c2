"""Read a request's body within limits of size, time and its caller's memory.

All paths use this mechanism. Until a router has identified the caller (`callers.py`), a request
holds at most UNIDENTIFIED_BODY_BYTES of a body, inflated or not; then its tenant pays for it
(`budget.py`). The objects that decoding will create are counted and paid for before decoding
(`counting.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from shoal.transport.wire import Metadata

from services.edge.compression import Inflater
from services.edge.intake.budget import BodyReservation, Budget
from services.edge.intake.callers import Callers
from services.edge.intake.counting import count_objects
from services.edge.messages.base import HttpError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

UNIDENTIFIED_BODY_BYTES: Final = 64 * 1024
"""Bytes of a body that are read or inflated before a router has identified the caller, in addition
to one socket read. It is also the size from which a body is processed in a thread: for smaller ones
the switch takes longer than decoding.
"""

UNCOUNTED_BODY_BYTES: Final = 16 * 1024
"""Bytes of a body that may wait, uncounted, for the caller's identification: 4 MiB over all pending
lookups.
"""

MAX_WALKED_BYTES: Final = 4 * 1024
"""The largest MessagePack body that is counted on the event loop before its caller is identified,
at 0.5 microseconds per byte.
"""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one body, as in `Settings`: sizes in bytes, times in seconds. `pause_seconds`
    limits the time between two pieces.
    """

    body_bytes: int = 64 << 20
    body_seconds: float = 60.0
    pause_seconds: float = 10.0


class Payer:
    """Pays for one request: its reservation, and how its caller is identified."""

    __slots__ = ("_address", "_callers", "_metadata", "_owed", "_reservation")

    def __init__(
        self, reservation: BodyReservation, callers: Callers, metadata: Metadata, address: str
    ) -> None:
        self._address = address
        self._reservation = reservation
        self._callers = callers
        self._metadata = metadata
        self._owed = 0

    async def take_head(self, size: int) -> None:
        """Hold the `size` bytes of a request's head. No router is asked, since the part of the body
        that has arrived must be counted first. A small head that does not fit is charged with the
        body. Raises HttpError as `take`.
        """
        if self._reservation.must_identify(size) and self._callers.knows(self._metadata):
            await self.identify()
        try:
            self._reservation.take(size)
        except HttpError:
            if self._reservation.tenant is not None or size > UNCOUNTED_BODY_BYTES:
                raise
            self._owed = size

    async def take(self, size: int) -> None:
        """Hold `size` more bytes that are already in memory. Raises HttpError for a refused caller
        or one that holds too much.
        """
        if (
            size <= UNCOUNTED_BODY_BYTES
            or not self._reservation.must_identify(size)
            or self._callers.knows(self._metadata)
        ):
            # Not held during the lookup: other unidentified callers may need the whole allowance.
            await self.reserve(size)
            return
        self._take(size)
        await self.identify()

    async def reserve(self, size: int, *, is_accepted: bool = False) -> None:
        """Hold `size` bytes that are not in memory yet; identify the caller first if necessary.
        Raises HttpError as `take`.

        Args:
            size: The number of bytes.
            is_accepted: Whether a router has answered the request.
        """
        if not self.try_reserve(size):
            await self.identify(is_accepted=is_accepted)
            self._take(size)

    def try_reserve(self, size: int) -> bool:
        """Hold `size` more bytes unless the caller must be identified first. Raises HttpError
        QUEUE_FULL.

        This is the fast path of most requests: awaiting `reserve` for each part would take twice as
        long.
        """
        if self._reservation.must_identify(size):
            return False
        self._take(size)
        return True

    async def identify(self, *, is_accepted: bool = False) -> None:
        """Identify the caller. Raises HttpError for a caller that routers refuse."""
        if self._reservation.tenant is None:
            tenant = await self._callers.tenant(
                self._metadata, self._address, is_accepted=is_accepted
            )
            self._reservation.identify(tenant)

    def _take(self, size: int) -> None:
        """Hold `size` more bytes and those of the head that did not fit. Raises HttpError
        QUEUE_FULL.
        """
        self._reservation.take(size + self._owed)
        self._owed = 0

    def give(self, size: int) -> None:
        """Release `size` bytes."""
        self._reservation.give(size)

    def close(self) -> None:
        """Release everything when the request ends."""
        self._reservation.release()


class BodyIntake:
    """Reads bodies within `bounds` and charges them to their callers' share of `budget`."""

    def __init__(self, budget: Budget, callers: Callers, bounds: BodyLimits | None = None) -> None:
        self._budget = budget
        self._callers = callers
        self._bounds = bounds or BodyLimits()

    def payer(self, address: str, metadata: Metadata) -> Payer:
        """Return the payer of a request.

        Args:
            address: The peer's address; empty if unknown.
            metadata: The metadata of the router call, without a trace.
        """
        return Payer(self._budget.enter(address), self._callers, metadata, address)

    async def body(
        self,
        receive: Receive,
        headers: Mapping[str, str],
        payer: Payer,
        *,
        is_whole: bool,
        limit: int = 0,
    ) -> bytes:
        """Return the whole body, inflated. Raises HttpError, or CancelledError if the client
        disconnects.

        Args:
            receive: The ASGI receive function.
            headers: The request's headers.
            payer: Pays for the body's bytes.
            is_whole: Whether the body has arrived, so that no timer is needed.
            limit: The maximum bytes; 0 for the bound's.
        """
        limit = limit or self._bounds.body_bytes
        encoding = headers.get("content-encoding", "identity").strip().lower()
        inflating = Inflater(encoding) if encoding not in ("", "identity") else None
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and len(length) < 20:
            if int(length) > limit:
                raise _too_large(limit)
            if int(length) > UNIDENTIFIED_BODY_BYTES:
                # Check before the first read, which sends 100 Continue to a client that waits for
                # it.
                await payer.identify()
        reading = _Reading(receive, payer, inflating, limit)
        if is_whole:
            return await reading.all()
        bounds = self._bounds
        end = asyncio.get_running_loop().time() + bounds.body_seconds
        timer = asyncio.timeout_at(end)
        try:
            async with timer:
                return await reading.all(timer, bounds.pause_seconds, end)
        except TimeoutError:
            pause = (timer.when() or end) < end
            seconds = bounds.pause_seconds if pause else bounds.body_seconds
            text = (
                f"no data of the request's body arrived for {seconds:g} s"
                if pause
                else (f"the request's body did not arrive within {seconds:g} s")
            )
            raise HttpError("REQUEST_TIMEOUT", text) from None

    async def admit(self, body: bytes, payer: Payer, *, is_msgpack: bool) -> None:
        """Count what decoding the body creates and charge it. Raises HttpError."""
        is_slow = is_msgpack and len(body) > MAX_WALKED_BYTES
        if is_slow:
            await payer.identify()
        if is_slow or len(body) > UNIDENTIFIED_BODY_BYTES:
            count = await asyncio.to_thread(count_objects, body, is_msgpack=is_msgpack)
        else:
            count = count_objects(body, is_msgpack=is_msgpack)
        if not payer.try_reserve(count.bytes):
            await payer.reserve(count.bytes)


class _Reading:
    """The state of reading one body."""

    def __init__(
        self, receive: Receive, payer: Payer, inflating: Inflater | None, limit: int
    ) -> None:
        self._receive = receive
        self._payer = payer
        self._inflating = inflating
        self._limit = limit
        # The state: the number of bytes that have arrived, and the pieces that are kept.
        self._arrived = 0
        self._size = 0
        self._parts: list[bytes] = []

    async def all(
        self, timer: asyncio.Timeout | None = None, pause_seconds: float = 0.0, end: float = 0.0
    ) -> bytes:
        """Return the body.

        Args:
            timer: Ends the reading. It is set to `pause_seconds` before each piece.
            pause_seconds: The time limit of a piece.
            end: The latest time of the timer.
        """
        while True:
            if timer is not None:
                timer.reschedule(min(end, asyncio.get_running_loop().time() + pause_seconds))
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise asyncio.CancelledError
            if timer is not None:
                timer.reschedule(end)  # the lookup is not a pause of the client
            part = event.get("body", b"")
            await (
                self._keep(part)
                if self._inflating is None
                else self._inflate(self._inflating, part)
            )
            if not event.get("more_body"):
                if self._inflating is not None:
                    self._inflating.end()
                return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    async def _inflate(self, inflating: Inflater, part: bytes) -> None:
        """Inflate and keep a compressed part of the body. Raises HttpError."""
        self._arrived += len(part)
        if self._arrived > UNIDENTIFIED_BODY_BYTES:
            await self._payer.identify()
        for piece in inflating.feed(part):
            await self._keep(piece)
            await asyncio.sleep(0)

    async def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._limit:
            raise _too_large(self._limit)
        if not self._payer.try_reserve(len(piece)):
            await self._payer.take(len(piece))
        self._parts.append(piece)
        if self._size > UNIDENTIFIED_BODY_BYTES:
            await self._payer.identify()


def _too_large(limit: int) -> HttpError:
    return HttpError(
        "TOO_LARGE",
        f"the body is larger than the limit of {limit:,} bytes: send fewer items at a time",
    )
