"""The outcomes of the leader's last orders, as notes on models that `shoal explain` shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from libs.fleet import COMING, FleetSnapshot
from services.scheduler.placement import RESIDENT, Order

NOTE_SECONDS: Final = 600.0
"""How long the note on an order is kept."""


@dataclass(frozen=True, slots=True)
class _Deed:
    order: Order
    note: str
    at: float
    end: str = ""
    """The order's outcome and when; empty while it is in progress."""


class Deeds:
    """The last order for each model, and its outcome. `at`: seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._deeds: dict[str, _Deed] = {}

    def ordered(self, orders: Iterable[Order], notes: Mapping[str, str], at: float) -> None:
        """Records a plan's orders and its notes on their models."""
        self._deeds |= {order.model: _Deed(order, notes[order.model], at) for order in orders if order.model in notes}

    def notes(self, fleet: FleetSnapshot, at: float) -> dict[str, str]:
        """The note on each model now."""
        deeds = {model: deed for model, deed in self._deeds.items() if at - deed.at < NOTE_SECONDS}
        self._deeds = {model: deed if deed.end else replace(deed, end=_end(deed.order, fleet)) for model, deed in deeds.items()}
        return {model: f"{deed.note}; {deed.end}" if deed.end else deed.note for model, deed in self._deeds.items()}


def _end(order: Order, fleet: FleetSnapshot) -> str:
    when = datetime.fromtimestamp(fleet.now_ms / 1000, UTC).strftime("%H:%M:%S UTC")
    worker = fleet.workers.get(order.worker_id)
    if worker is None or worker.epoch != order.epoch:
        return f"the worker was gone at {when}"
    state = worker.state(order.model)
    if state == RESIDENT if order.kind == "load" else state not in (*COMING, RESIDENT):
        return f"done at {when}"
    is_failed = order.kind == "load" and order.worker_id in fleet.failures.get(order.model, {})
    return f"failed at {when}" if is_failed else ""
