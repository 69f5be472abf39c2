"""Memory of the bodies and answers in flight, and who may take how much of it. Pure.

No caller can fill the budget. Each may hold as much as is still free (dynamic thresholds: Choudhury and Hahne, IEEE/ACM
Transactions on Networking 6(2), 1998): one tenant alone holds at most half of the budget, two hold a third each, and as much as
each of them holds is left for the next one. A peer address may hold ADDRESS_SHARE times what is free, since many tenants may be
behind one proxy. Callers that no router has identified share a small allowance.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final

from services.edge.messages.base import Problem

ADDRESS_SHARE: Final = 4
"""An address may hold four fifths of the budget while no other holds any."""
UNIDENTIFIED_BYTES: Final = 24 << 20
"""What all callers together may hold that no router has identified."""
UNIDENTIFIED_SHARE: Final = 8
"""Of a small budget they may hold an eighth."""
FREE_SHARE: Final = 3
"""From a third of that allowance on, a caller is identified however little it sends."""
ONE_BYTES: Final = 256 << 10
"""What one request may hold before its caller is identified, its decoded objects included."""
_NETWORK_BITS: Final = 64
RETRY_SECONDS: Final = 1.0


class Budget:
    """All memory in flight of an edge. `held_bytes`: what is held now."""

    def __init__(self, limit_bytes: int) -> None:
        self.held_bytes = 0
        self.limit_bytes = limit_bytes
        self.unidentified_limit = min(UNIDENTIFIED_BYTES, limit_bytes // UNIDENTIFIED_SHARE)
        # The state: what tenants, addresses, and callers that are not identified hold, these by their addresses, too.
        self._tenants: Counter[str] = Counter()
        self._addresses: Counter[str] = Counter()
        self._unidentified = 0
        self._unidentified_addresses: Counter[str] = Counter()

    def enter(self, address: str) -> Reservation:
        """A request from a peer address (empty: unknown), which holds nothing yet."""
        return Reservation(self, network_of(address))

    def must_identify(self, reservation: Reservation, size: int) -> bool:
        """Whether the caller must be identified before its request holds `size` bytes more."""
        if reservation.tenant is not None:
            return False
        return reservation.bytes + size > ONE_BYTES or self._unidentified + size > self.unidentified_limit // FREE_SHARE

    def check(self, reservation: Reservation, size: int) -> None:
        """Raises Problem QUEUE_FULL for more than the caller may hold. A request that is alone may take what it needs, once its
        caller is identified."""
        if not size or (reservation.tenant is not None and self.held_bytes <= reservation.bytes):
            return
        free = self.limit_bytes - self.held_bytes
        if size > free:
            raise _full("the bodies and answers of requests in flight take as much memory as they may here: try again later")
        if self._addresses[reservation.address] + size > free * ADDRESS_SHARE:
            raise _full("requests in flight from this address take as much memory as one address may: send fewer at a time")
        if reservation.tenant is not None:
            if self._tenants[reservation.tenant] + size > free:
                raise _full("requests in flight of this tenant take as much memory as one tenant may: send fewer at a time")
            return
        free = self.unidentified_limit - self._unidentified
        if self._unidentified_addresses[reservation.address] + size > free:
            raise _full("requests whose callers are not identified yet take as much memory as they may: try again later")

    def count(self, reservation: Reservation, size: int) -> None:
        """Adds to what the reservation's tenant and address hold; `size` may be negative."""
        self.held_bytes += size
        _add(self._addresses, reservation.address, size)
        if reservation.tenant is not None:
            _add(self._tenants, reservation.tenant, size)
        else:
            self._unidentified += size
            _add(self._unidentified_addresses, reservation.address, size)


class Reservation:
    """What one request holds. `tenant`: whose it is; None: no router has identified the caller."""

    __slots__ = ("_budget", "address", "bytes", "tenant")

    def __init__(self, budget: Budget, address: str) -> None:
        self._budget = budget
        self.address = address
        self.tenant: str | None = None
        self.bytes = 0

    def take(self, size: int) -> None:
        """Holds `size` bytes more. Raises Problem QUEUE_FULL."""
        self._budget.check(self, size)
        self._add(size)

    def must_identify(self, size: int) -> bool:
        """Whether the caller must be identified before the request holds `size` bytes more."""
        return self._budget.must_identify(self, size)

    def identify(self, tenant: str) -> None:
        """What is held is the tenant's from now on. Raises Problem QUEUE_FULL where the tenant holds too much."""
        size = self.bytes
        self._add(-size)
        self.tenant = tenant
        self.take(size)

    def give(self, size: int) -> None:
        """Hold `size` bytes less."""
        self._add(-size)

    def release(self) -> None:
        """The request has ended."""
        self._add(-self.bytes)

    def _add(self, size: int) -> None:
        self._budget.count(self, size)
        self.bytes += size


def _add(counter: Counter[str], key: str, size: int) -> None:
    total = counter[key] + size
    if total:
        counter[key] = total
    else:
        counter.pop(key, None)


def _full(message: str) -> Problem:
    return Problem("QUEUE_FULL", message, retry_after=RETRY_SECONDS)


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Whose an address is: of IPv6 the first 64 bits, of which one customer has all addresses."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return f"{int(found) >> _NETWORK_BITS:x}::"
