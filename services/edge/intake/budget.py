"""Memory of the bodies and answers in flight, and who may take how much of it. Pure.

No caller can fill the budget. Each may hold as much as is still free (dynamic thresholds: Choudhury
and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998): one tenant alone holds at most half of
the budget, two hold a third each, and as much as each of them holds is left for the next one. A
peer address may hold ADDRESS_SHARE times what is free, since many tenants may be behind one proxy.
Callers that no router has identified share a small allowance.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final

from services.edge.messages.base import HttpError

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


class _Holder:
    """A tenant or an address: `bytes` that its requests in flight hold, those that no router has
    identified among them (`unidentified_bytes`), and how many `requests` refer to it."""

    __slots__ = ("bytes", "requests", "unidentified_bytes")

    def __init__(self) -> None:
        self.bytes = 0
        self.unidentified_bytes = 0
        self.requests = 0


class Budget:
    """All memory in flight of an edge. `held_bytes`: what is held now; `unidentified_bytes`: by
    callers that are not identified.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.held_bytes = 0
        self.unidentified_bytes = 0
        self.limit_bytes = limit_bytes
        self.unidentified_limit = min(UNIDENTIFIED_BYTES, limit_bytes // UNIDENTIFIED_SHARE)
        # The state: tenants and addresses of the requests in flight.
        self._tenants: dict[str, _Holder] = {}
        self._addresses: dict[str, _Holder] = {}

    def enter(self, address: str) -> Reservation:
        """A request from a peer address (empty: unknown), which holds nothing yet. It must be
        released.
        """
        return Reservation(self, network_of(address))

    def held_by_tenants(self) -> dict[str, int]:
        """Return the bytes that each tenant with requests in flight holds."""
        return {name: holder.bytes for name, holder in self._tenants.items()}


class Reservation:
    """What one request holds. `tenant`: whose it is; None: no router has identified the caller.

    A request takes memory five times, so the holders are looked up once, and what they hold is
    counted in place.
    """

    __slots__ = ("_budget", "_network", "_of_address", "_of_tenant", "bytes", "tenant")

    def __init__(self, budget: Budget, network: str) -> None:
        self._budget = budget
        self._network = network
        self._of_address = _joined(budget._addresses, network)
        self._of_tenant: _Holder | None = None
        self.tenant: str | None = None
        self.bytes = 0

    def take(self, size: int) -> None:
        """Holds `size` bytes more. Raises HttpError QUEUE_FULL for more than the caller may hold. A
        request that is alone may take what it needs, once its caller is identified."""
        if size and (self._of_tenant is None or self._budget.held_bytes > self.bytes):
            self._check(size)
        self._add(size)

    def must_identify(self, size: int) -> bool:
        """Whether the caller must be identified before the request holds `size` bytes more."""
        if self._of_tenant is not None:
            return False
        budget = self._budget
        return (
            self.bytes + size > ONE_BYTES
            or budget.unidentified_bytes + size > budget.unidentified_limit // FREE_SHARE
        )

    def identify(self, tenant: str) -> None:
        """What is held is the tenant's from now on. Raises HttpError QUEUE_FULL where the tenant
        holds too much.
        """
        size = self.bytes
        self._add(-size)
        self.tenant, self._of_tenant = tenant, _joined(self._budget._tenants, tenant)
        self.take(size)

    def give(self, size: int) -> None:
        """Hold `size` bytes less."""
        self._add(-size)

    def release(self) -> None:
        """The request has ended."""
        self._add(-self.bytes)
        _left(self._budget._addresses, self._network, self._of_address)
        if self.tenant is not None and self._of_tenant is not None:
            _left(self._budget._tenants, self.tenant, self._of_tenant)

    def _check(self, size: int) -> None:
        budget, address = self._budget, self._of_address
        free = budget.limit_bytes - budget.held_bytes
        if size > free:
            raise _full(
                "the bodies and answers of requests in flight take as much memory as they may here: try again later"
            )
        if address.bytes + size > free * ADDRESS_SHARE:
            raise _full(
                "requests in flight from this address take as much memory as one address may: send fewer at a time"
            )
        if self._of_tenant is not None:
            if self._of_tenant.bytes + size > free:
                raise _full(
                    "requests in flight of this tenant take as much memory as one tenant may: send fewer at a time"
                )
        elif (
            address.unidentified_bytes + size
            > budget.unidentified_limit - budget.unidentified_bytes
        ):
            raise _full(
                "requests whose callers are not identified yet take as much memory as they may: try again later"
            )

    def _add(self, size: int) -> None:
        """Add to what the request, its tenant and its address hold; `size` may be negative."""
        budget, address = self._budget, self._of_address
        self.bytes += size
        budget.held_bytes += size
        address.bytes += size
        if self._of_tenant is not None:
            self._of_tenant.bytes += size
        else:
            budget.unidentified_bytes += size
            address.unidentified_bytes += size


def _joined(holders: dict[str, _Holder], name: str) -> _Holder:
    holder = holders.get(name)
    if holder is None:
        holder = holders[name] = _Holder()
    holder.requests += 1
    return holder


def _left(holders: dict[str, _Holder], name: str, holder: _Holder) -> None:
    holder.requests -= 1
    if not holder.requests:
        del holders[name]


def _full(message: str) -> HttpError:
    return HttpError("QUEUE_FULL", message, retry_after=RETRY_SECONDS)


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
