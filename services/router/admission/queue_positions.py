"""Read the queue positions of a busy lane from Redis, in one call for all concurrent requests that
need them.

On the request path before `rules.py`, for lanes with work that may make a request late. While one
call is in flight for a lane, new requests wait for the next: under overload a call serves many
requests, and none is decided on stale data.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from libs.errors import InternalError, ShoalError
from libs.queue import LaneKey
from libs.queue.queue_position import QueuePosition, QueuePositions
from services.router.state.background import Background


@dataclass(slots=True, eq=False)
class Round:
    """One call to Redis, shared by all requests that wait for it."""

    tenants: dict[str, asyncio.Future[QueuePosition]] = field(default_factory=dict)
    admitted: Counter[str] = field(default_factory=Counter)
    """Tokens of each tenant admitted on this result, which does not include them."""


@dataclass(frozen=True, slots=True)
class TenantPosition:
    """The queue position of a tenant's next job in the lane."""

    position: QueuePosition
    round: Round
    tenant: str

    @property
    def since(self) -> int:
        """Return the tenant's tokens admitted on the same result."""
        return self.round.admitted[self.tenant]

    def admit(self, tokens: int) -> None:
        self.round.admitted[self.tenant] += tokens


class QueuePositionReader:
    """Batches the reads of one router. Raises NoCapacity while Redis is unavailable."""

    def __init__(self, positions: QueuePositions, background: Background) -> None:
        self._positions = positions
        self._background = background
        # The state: tenants that wait for the next call, by lane; lanes with a call in flight.
        self._next: dict[LaneKey, Round] = {}
        self._reading: set[LaneKey] = set()

    async def read(self, lane: LaneKey, tenant: str) -> TenantPosition:
        current = self._next.setdefault(lane, Round())
        future = current.tenants.get(tenant)
        if future is None:
            future = current.tenants[tenant] = asyncio.get_running_loop().create_future()
        if lane not in self._reading:
            self._reading.add(lane)
            self._background.spawn(self._read(lane))
        return TenantPosition(await asyncio.shield(future), current, tenant)

    async def _read(self, lane: LaneKey) -> None:
        try:
            while (current := self._next.pop(lane, None)) is not None:
                await self._read_round(lane, current)
        finally:
            self._reading.discard(lane)

    async def _read_round(self, lane: LaneKey, current: Round) -> None:
        error: ShoalError = InternalError("the queue position of a lane could not be read")
        try:
            positions = await self._positions.read(lane, list(current.tenants))
            for future, position in zip(current.tenants.values(), positions, strict=True):
                future.set_result(position)
        except ShoalError as refused:
            error = refused
        finally:
            for future in current.tenants.values():
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # all waiting requests may have ended
