"""Memory of the bodies and answers in flight, and the share that each caller may hold. Pure.

No caller can fill the budget. Each may hold as much as is still free (dynamic thresholds: Choudhury
and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998): a single tenant holds at most half of
the budget, two hold a third each, and the same amount stays free for the next one. A peer address
may hold ADDRESS_FACTOR times the free memory, since many tenants may share a proxy. Callers that no
router has identified share a small allowance.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final

from services.edge.messages.base import HttpError

ADDRESS_FACTOR: Final = 4
"""The free memory times this factor is an address's limit: four fifths of an otherwise unused
budget.
"""
UNIDENTIFIED_BYTES: Final = 24 << 20
"""The maximum that all unidentified callers may hold together."""
UNIDENTIFIED_DIVISOR: Final = 8
"""Unidentified callers may hold at most an eighth of a small budget."""
IDENTIFY_DIVISOR: Final = 3
"""Divisor of that allowance: above this share of it, even small requests are identified first."""
UNIDENTIFIED_REQUEST_BYTES: Final = 256 << 10
"""The maximum that one request may hold before its caller is identified, including decoded objects.
"""
_NETWORK_BITS: Final = 64
RETRY_AFTER_SECONDS: Final = 1.0


class _Holder:
    """A tenant or an address with requests in flight.

    Attributes:
        bytes: Memory that its requests hold.
        unidentified_bytes: The part held by requests that no router has identified.
        requests: The number of requests that refer to it.
    """

    __slots__ = ("bytes", "requests", "unidentified_bytes")

    def __init__(self) -> None:
        self.bytes = 0
        self.unidentified_bytes = 0
        self.requests = 0


class Budget:
    """The memory in flight of an edge.

    Attributes:
        held_bytes: The memory held now.
        unidentified_bytes: The part held by unidentified callers.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.held_bytes = 0
        self.unidentified_bytes = 0
        self.limit_bytes = limit_bytes
        self.unidentified_limit = min(UNIDENTIFIED_BYTES, limit_bytes // UNIDENTIFIED_DIVISOR)
        # The state: tenants and addresses of the requests in flight.
        self._tenants: dict[str, _Holder] = {}
        self._addresses: dict[str, _Holder] = {}

    def enter(self, address: str) -> BodyReservation:
        """Return the reservation of a new request, which the caller must release. An empty address
        is unknown.
        """
        return BodyReservation(self, network_key(address))

    def held_by_tenants(self) -> dict[str, int]:
        """Return the bytes that each tenant with requests in flight holds."""
        return {name: holder.bytes for name, holder in self._tenants.items()}


class BodyReservation:
    """The memory that one request holds. `tenant` is None until a router has identified the caller.

    A request takes memory five times, so its holders are looked up once and counted in place.
    """

    __slots__ = ("_address_holder", "_budget", "_network", "_tenant_holder", "bytes", "tenant")

    def __init__(self, budget: Budget, network: str) -> None:
        self._budget = budget
        self._network = network
        self._address_holder = _acquire_holder(budget._addresses, network)
        self._tenant_holder: _Holder | None = None
        self.tenant: str | None = None
        self.bytes = 0

    def take(self, size: int) -> None:
        """Hold `size` more bytes. Raises HttpError QUEUE_FULL above the caller's limit. If no other
        request holds memory, an identified caller has no limit.
        """
        if size and (self._tenant_holder is None or self._budget.held_bytes > self.bytes):
            self._check(size)
        self._add(size)

    def must_identify(self, size: int) -> bool:
        """Return whether the caller must be identified before the request holds `size` more
        bytes.
        """
        if self._tenant_holder is not None:
            return False
        budget = self._budget
        return (
            self.bytes + size > UNIDENTIFIED_REQUEST_BYTES
            or budget.unidentified_bytes + size > budget.unidentified_limit // IDENTIFY_DIVISOR
        )

    def identify(self, tenant: str) -> None:
        """Charge the held bytes to the tenant. Raises HttpError QUEUE_FULL if the tenant holds too
        much.
        """
        size = self.bytes
        self._add(-size)
        self.tenant, self._tenant_holder = tenant, _acquire_holder(self._budget._tenants, tenant)
        self.take(size)

    def give(self, size: int) -> None:
        """Release `size` bytes."""
        self._add(-size)

    def release(self) -> None:
        """Release everything when the request ends."""
        self._add(-self.bytes)
        _release_holder(self._budget._addresses, self._network, self._address_holder)
        if self.tenant is not None and self._tenant_holder is not None:
            _release_holder(self._budget._tenants, self.tenant, self._tenant_holder)

    def _check(self, size: int) -> None:
        budget, address = self._budget, self._address_holder
        free = budget.limit_bytes - budget.held_bytes
        if size > free:
            raise _full("requests in flight use all memory for bodies and answers: try again later")
        if address.bytes + size > free * ADDRESS_FACTOR:
            raise _full(
                "requests in flight from this address use the memory limit of one address: send "
                "fewer at a time"
            )
        if self._tenant_holder is not None:
            if self._tenant_holder.bytes + size > free:
                raise _full(
                    "requests in flight of this tenant use the memory limit of one tenant: send "
                    "fewer at a time"
                )
        elif (
            address.unidentified_bytes + size
            > budget.unidentified_limit - budget.unidentified_bytes
        ):
            raise _full(
                "requests of unidentified callers use all memory reserved for them: try again later"
            )

    def _add(self, size: int) -> None:
        """Add `size` bytes, which may be negative, to the request, its tenant and its address."""
        budget, address = self._budget, self._address_holder
        self.bytes += size
        budget.held_bytes += size
        address.bytes += size
        if self._tenant_holder is not None:
            self._tenant_holder.bytes += size
        else:
            budget.unidentified_bytes += size
            address.unidentified_bytes += size


def _acquire_holder(holders: dict[str, _Holder], name: str) -> _Holder:
    holder = holders.get(name)
    if holder is None:
        holder = holders[name] = _Holder()
    holder.requests += 1
    return holder


def _release_holder(holders: dict[str, _Holder], name: str, holder: _Holder) -> None:
    holder.requests -= 1
    if not holder.requests:
        del holders[name]


def _full(message: str) -> HttpError:
    return HttpError("QUEUE_FULL", message, retry_after=RETRY_AFTER_SECONDS)


@lru_cache(maxsize=4096)
def network_key(address: str) -> str:
    """Return the key of an address. For IPv6 it is the first 64 bits, the block that one customer
    has.
    """
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return f"{int(found) >> _NETWORK_BITS:x}::"
