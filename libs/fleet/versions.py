"""Decide which versions are compatible, in a rolling upgrade and otherwise.

Most changes of the wire protocol only add fields, and protobuf skips unknown ones: versions mix in
both directions. A breaking change raises OLDEST_WIRE_VERSION, and routers refuse workers below it
with an explanation. Routers and schedulers share the data in Redis, so they need the same
LAYOUT_VERSION: `Lanes.check` refuses another.
"""

from __future__ import annotations

from libs.errors import Outdated
from libs.versions import LAYOUT_VERSION, OLDEST_WIRE_VERSION, WIRE_VERSION

__all__ = ["LAYOUT_VERSION", "OLDEST_WIRE_VERSION", "WIRE_VERSION", "check_worker"]


def check_worker(wire_version: int, worker_id: str, *, oldest: int = OLDEST_WIRE_VERSION) -> None:
    """Raise Outdated, with the fix, for a worker too old for this router. A worker newer than the
    router is accepted.
    """
    if wire_version < oldest:
        raise Outdated(
            f"worker {worker_id} speaks wire version {wire_version}, but this router (wire version"
            f" {WIRE_VERSION}) needs {oldest} or newer: upgrade the worker"
        )
