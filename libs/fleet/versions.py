"""Which versions work together, during a rolling upgrade and otherwise.

Most changes of the wire only add, and protobuf passes over fields that it does not know: versions mix in both directions. Where one
does not, OLDEST_WIRE_VERSION rises, and routers refuse workers below it in words. Routers and schedulers share what is in Redis, so
they need one LAYOUT_VERSION: `Lanes.check` refuses another.
"""

from __future__ import annotations

from libs.errors import Outdated
from libs.versions import LAYOUT_VERSION, OLDEST_WIRE_VERSION, WIRE_VERSION

__all__ = ["LAYOUT_VERSION", "OLDEST_WIRE_VERSION", "WIRE_VERSION", "check_worker"]


def check_worker(wire_version: int, worker_id: str, *, oldest: int = OLDEST_WIRE_VERSION) -> None:
    """Outdated, with what to upgrade, if this router does not understand the worker. One newer than the router is welcome."""
    if wire_version < oldest:
        raise Outdated(
            f"worker {worker_id} speaks wire version {wire_version}, and this router (wire version {WIRE_VERSION}) needs {oldest} "
            "or newer: upgrade the worker"
        )
