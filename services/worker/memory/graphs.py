"""Device memory of CUDA graphs: a part of their model's claim that grows only into free memory and
is released first.

Used by `space.py`. The runner captures graphs between batches (`runner.IdleWork`). A model requests
memory on the device thread before each capture; everything else runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, get_args, runtime_checkable

from libs.models.runtime.graphs.graphs import Event, Graphs, Owner
from libs.telemetry import metrics
from libs.telemetry.logs import fields
from services.worker.machine.device import Device
from services.worker.machine.threads import in_thread
from services.worker.memory.budget import Ledger, LedgerClaim
from services.worker.memory.resident import Resident

log = logging.getLogger(__name__)

_GRANT_SECONDS: Final = 1.0
"""Maximum time for which a forward pass waits for a grant of memory before it runs eagerly."""


@runtime_checkable
class KeepsGraphs(Protocol):
    """A model with forward passes that can be captured. All methods but `awaits_capture` block
    during a pass.
    """

    def keep_graphs(self, graphs: Graphs) -> None: ...

    def drop_graphs(self) -> None: ...

    @property
    def awaits_capture(self) -> bool: ...

    def capture_graph(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Kept:
    resident: Resident
    model: KeepsGraphs
    claim: LedgerClaim


class GraphMemory:
    """Grants memory for CUDA graphs. Does nothing on a device without them.

    Args:
        may_grow: Returns whether graphs may take free memory now.
    """

    def __init__(self, device: Device, ledger: Ledger, *, may_grow: Callable[[], bool]) -> None:
        self._graphs, self._trim = device.graphs, device.trim
        self._ledger = ledger
        self._may_grow = may_grow
        self._loop = asyncio.get_running_loop()
        self._kept: dict[str, _Kept] = {}
        for event in get_args(Event):
            metrics.GRAPH_EVENTS.labels(event)

    def keep(self, resident: Resident, claim: LedgerClaim) -> None:
        """Let a model that has become resident with this claim capture graphs."""
        model = resident.model
        if self._graphs is None or not isinstance(model, KeepsGraphs):
            return
        self._kept[resident.name] = _Kept(resident, model, claim)
        # By name: a reference from its graphs would keep a dropped model alive.
        reserve, report = partial(self._reserve, resident.name), partial(_report, resident.name)
        model.keep_graphs(self._graphs(Owner(reserve, report, resident.activation_bytes_per_token)))

    @property
    def is_pending(self) -> bool:
        """Return whether a model has a graph to capture. Any thread."""
        return any(_is_waiting(one) for one in list(self._kept.values()))

    def run(self) -> None:
        """Capture one graph, on the device thread while no batch waits or runs. Failures are
        logged.
        """
        waiting = next((one for one in list(self._kept.values()) if _is_waiting(one)), None)
        if waiting is None:
            return
        try:
            waiting.model.capture_graph()
        except Exception:
            # The queue is shorter by one, so this ends. The next batch shows whether the device is
            # lost.
            log.exception(
                "capturing a CUDA graph failed", extra=fields({"model": waiting.resident.name})
            )

    def forget(self, model: str) -> None:
        """Remove a model that leaves the device, with its graphs."""
        self._kept.pop(model, None)

    async def shed(self) -> bool:
        """Free the memory of all graphs. Return whether any existed."""
        holding = [one.model.drop_graphs for one in self._kept.values() if one.resident.graph_bytes]
        for drop in holding:
            await in_thread(drop)
        if holding:
            await in_thread(self._trim)
        return bool(holding)

    def _reserve(self, model: str, size: int) -> bool:
        """Implement `Owner.reserve`. Any thread except the event loop's."""
        if self._loop.is_closed():
            return False
        asked = asyncio.run_coroutine_threadsafe(self._resize(model, size), self._loop)
        try:
            return asked.result(_GRANT_SECONDS)
        except (TimeoutError, CancelledError):
            asked.cancel()
            return False

    async def _resize(self, model: str, size: int) -> bool:
        kept = self._kept.get(model)
        if kept is None or (
            size > kept.resident.graph_bytes and (kept.resident.leaving or not self._may_grow())
        ):
            return False
        before = kept.claim.size
        if not self._ledger.resize(
            kept.claim, replace(before, bytes=before.bytes - kept.resident.graph_bytes + size)
        ):
            return False
        kept.resident.graph_bytes = size
        return True


def _is_waiting(one: _Kept) -> bool:
    return one.model.awaits_capture and not one.resident.leaving


def _report(model: str, event: Event, detail: str) -> None:
    metrics.GRAPH_EVENTS.labels(event).inc()
    if event in ("failed", "differed"):
        why = {
            "failed": "making or running a CUDA graph failed",
            "differed": "a CUDA graph's outputs differ from the eager pass",
        }
        log.error(
            f"{why[event]}: graphs are disabled for this model",
            extra=fields({"model": model, "detail": detail}),
        )
    elif event == "captured":
        log.info("captured a CUDA graph", extra=fields({"model": model}))
