"""Account for the memory of requests in flight in this process, and refuse new ones beyond a limit.

A request counts from the start of its handler until its answer has been sent. A client that does
not read therefore holds its answer here until it reads or its connection ends (the server's
keepalive ends a dead or frozen peer's after 40 s). Answers are larger than requests, and arrive
after these were admitted, so there are limits for those that clients have not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import grpc

from libs.errors import QueueFull
from services.router.admission.validation.answer_bounds import check_divided
from services.router.admission.validation.limits import ENCODED

COPIES: Final = 5
"""Copies of a request or an answer in memory at the same time: as bytes, parsed, in jobs, and in
transit. Measured: 4.0 to 5.2, and 4.6 where jobs repeat a long query as often as allowed.
"""
SENT_COPIES: Final = 2
"""Further copies of a streamed answer, which waits parsed, while it is sent: its numbers as bytes,
and a message in transit.
"""
PART_BYTES: Final = 256
"""Memory of each item in addition to its bytes: its message, price and size. Measured: 210."""
EMPTY_REQUEST_BYTES: Final = 16 * 1024
"""Memory of an empty request: its asyncio task, its call, its map entries."""
TENANT_SHARE: Final = 0.5
"""Maximum share of the limit for one tenant, so that it cannot keep all others out."""


class AnswersUnread(QueueFull):
    """Clients of a tenant have not read too many of its answers, which were computed."""


Rpc: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class InFlightMemory:
    """All requests in flight of this router."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        # The state: sums over all requests, in memory and of answers that clients have not read.
        self.held_bytes = 0
        self._by_tenant: Counter[str] = Counter()
        self.unread_bytes = 0
        self._unread_by_tenant: Counter[str] = Counter()

    def reserve(self, size: int, tenant: str, rpc: Rpc, parts: int = 0) -> Reservation:
        """Admit a request of `size` bytes with `parts` items. Raises QueueFull, but never while no
        other is in flight.
        """
        cost = COPIES * size + PART_BYTES * parts + EMPTY_REQUEST_BYTES
        own = self._by_tenant.get(tenant, 0)
        if self.held_bytes and self.held_bytes + cost > self._limit_bytes:
            raise QueueFull(
                f"requests in flight at this router hold {self.held_bytes:,} bytes;"
                f" at most {self._limit_bytes:,} are allowed"
            )
        if own and own + cost > self._limit_bytes * TENANT_SHARE:
            raise QueueFull(
                f"requests in flight of this tenant hold {own:,} bytes, and those of all tenants"
                f" may hold {self._limit_bytes:,} at this router"
            )
        if self._unread_by_tenant.get(tenant):  # Its answer would be computed in vain.
            room = min(ENCODED.most, int(self._limit_bytes * TENANT_SHARE) // 2)
            self.check_unread(tenant, room)
        reservation = Reservation(self, tenant)
        reservation.take(cost)
        rpc.add_done_callback(reservation.release)  # type: ignore[arg-type]  # the stubs expect their class
        return reservation

    def count(self, tenant: str, size: int) -> None:
        self.held_bytes += size
        _add(self._by_tenant, tenant, size)

    def count_unread(self, tenant: str, size: int) -> None:
        self.unread_bytes += size
        _add(self._unread_by_tenant, tenant, size)

    def check_unread(self, tenant: str, cost: int) -> None:
        """Raise AnswersUnread if an answer that takes `cost` bytes exceeds what may wait for
        clients, but never for a tenant's only one.
        """
        own, total = self._unread_by_tenant.get(tenant, 0), self.unread_bytes
        share = int(self._limit_bytes * TENANT_SHARE)
        if own and (own + cost > share or total + cost > self._limit_bytes):
            raise AnswersUnread(
                f"answers that clients of this tenant have not read hold {own:,} bytes at this"
                f" router, and those of all tenants {total:,}; at most {share:,} and"
                f" {self._limit_bytes:,} are allowed: read faster, or request fewer items at a time"
            )


class Reservation:
    """The memory that one request holds."""

    def __init__(self, in_flight: InFlightMemory, tenant: str) -> None:
        self._in_flight = in_flight
        self._tenant = tenant
        # The state: held bytes, and those of answers that were not read; 0 once the call has ended.
        self._bytes = 0
        self._unread = 0
        self._has_ended = False

    def take(self, size: int) -> None:
        if not self._has_ended:
            self._bytes += size
            self._in_flight.count(self._tenant, size)

    def hold_answer(self, size: int) -> None:
        """Count the answer to one of its jobs."""
        self.take(COPIES * size)

    def hold_streamed(self, size: int) -> None:
        """Count the answer to one of its jobs, to be streamed separately. Raises AnswersUnread if
        clients have not read too much already.
        """
        self._in_flight.check_unread(self._tenant, size)
        self._take_unread(size)
        self.take(size)

    @contextmanager
    def sending(self, size: int) -> Iterator[None]:
        """Count the copies of a streamed answer while it is sent, and release it afterwards."""
        self.take(SENT_COPIES * size)
        yield
        self.take(-SENT_COPIES * size)
        self.release_streamed(size)

    def release_streamed(self, size: int) -> None:
        """Release a streamed answer that has been sent, or is not sent."""
        self._take_unread(-size)
        self.take(-size)

    def hold_response(self, size: int) -> None:
        """Reduce the reservation to the answer of `size` bytes that is being sent. Raises
        AnswersUnread if clients have not read too much already; the answer is not sent then.
        """
        self.take(EMPTY_REQUEST_BYTES - self._bytes)
        self._in_flight.check_unread(self._tenant, size)
        self._take_unread(size)
        self.take(size)

    def release(self, context: Rpc) -> None:
        """Release everything: the call has ended."""
        self._take_unread(-self._unread)
        self.take(-self._bytes)
        self._has_ended = True

    def _take_unread(self, size: int) -> None:
        if not self._has_ended:
            self._unread += size
            self._in_flight.count_unread(self._tenant, size)


def _add(counter: Counter[str], tenant: str, size: int) -> None:
    """Add to the sum of one tenant, which is not kept if it is 0."""
    counter[tenant] += size
    if not counter[tenant]:
        del counter[tenant]


class DividedAnswers:
    """Adds up the answers to the jobs of a request with chunks, and refuses them beyond a limit.

    Args:
        hold: Counts an accepted answer, of the given bytes, as held.
        most_bytes: Maximum bytes of all answers.
        is_streamed: Many messages answer the request.
    """

    def __init__(self, hold: Callable[[int], None], most_bytes: int, *, is_streamed: bool) -> None:
        self._hold = hold
        self._most_bytes = most_bytes
        self._is_streamed = is_streamed
        # The state: bytes received so far.
        self._bytes = 0

    def add(self, size: int) -> None:
        """Count an answer that has arrived. Raises InvalidInput beyond the limit."""
        self._bytes += size
        check_divided(self._bytes, self._most_bytes, is_streamed=self._is_streamed)
        self._hold(size)
