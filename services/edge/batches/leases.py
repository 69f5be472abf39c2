"""Leases: which edge runs a batch.

A lease is an object that one edge creates, if no edge has created it before, and rewrites every few
seconds. An edge that has seen the same content for LEASE_SECONDS creates the lease's next
generation; the storage lets one edge do so. No clock is compared with that of another machine.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Final

from shoal.bulk.places import OutputPlace

LEASE_SECONDS: Final = 10.0
BATCH_RENEW_SECONDS: Final = 2.0
_NAME: Final = re.compile(r"(.+)\.lease-([0-9]{8})")
_RELEASED: Final = b"released"


class LeaseLost(Exception):
    """Another edge runs the batch."""


def latest_generations(names: Iterable[str]) -> dict[str, int]:
    """Return the newest generation of each lease in a folder, by the lease's name."""
    found: dict[str, int] = {}
    for name in names:
        if match := _NAME.fullmatch(name):
            found[match[1]] = max(found.get(match[1], 0), int(match[2]))
    return found


class BatchLease:
    """The lease of one batch that this process holds. Methods block and raise StorageError."""

    def __init__(self, place: OutputPlace, name: str, generation: int) -> None:
        self._place, self._name, self._generation = place, name, generation
        self._owner = secrets.token_hex(8)
        self._renewals = 0

    @staticmethod
    def acquire(place: OutputPlace, name: str, generation: int) -> BatchLease | None:
        """Create the lease's next generation; return None if another edge has.

        Args:
            generation: The newest one, which is released or stale; 0 if there is none.
        """
        lease = BatchLease(place, name, generation + 1)
        if not place.create(lease._object(lease._generation), lease._content()):
            return None
        if generation:
            place.delete(lease._object(generation))
        return lease

    def renew(self) -> None:
        """Rewrite the lease. Raises LeaseLost."""
        if self._place.read(self._object(self._generation + 1)) is not None:
            raise LeaseLost(self._name)
        if self._place.read(self._object(self._generation)) is None:
            raise LeaseLost(self._name)  # another edge has ended the batch
        self._renewals += 1
        self._place.replace(self._object(self._generation), self._content())

    def release_if_held(self) -> None:
        """Let another edge claim the batch at once. Raises LeaseLost."""
        self.renew()
        self._place.replace(self._object(self._generation), _RELEASED)

    def delete(self) -> None:
        """Remove the lease of a batch that has ended."""
        self._place.delete(self._object(self._generation))

    def _object(self, generation: int) -> str:
        return f"{self._name}.lease-{generation:08}"

    def _content(self) -> bytes:
        return json.dumps({"owner": self._owner, "renewals": self._renewals}).encode()


class Observed:
    """The leases of other edges, as this one saw them change.

    Args:
        lease_seconds: How long a lease is valid without a change.
    """

    def __init__(self, lease_seconds: float = LEASE_SECONDS) -> None:
        self._lease_seconds = lease_seconds
        self._seen: dict[str, tuple[int, bytes | None, float]] = {}

    def is_free(self, place: OutputPlace, name: str, generation: int, now: float) -> bool:
        """Return whether a batch may be claimed. Blocks; raises StorageError.

        Args:
            now: The time on a monotonic clock.
        """
        if not generation:
            return True
        content = place.read(f"{name}.lease-{generation:08}")
        if content == _RELEASED:
            return True
        before = self._seen.get(name)
        if before is None or before[:2] != (generation, content):
            self._seen[name] = (generation, content, now)
            return False
        return now - before[2] > self._lease_seconds

    def forget_others(self, names: Iterable[str]) -> None:
        """Forget leases that are not among these."""
        kept = set(names)
        self._seen = {name: seen for name, seen in self._seen.items() if name in kept}
