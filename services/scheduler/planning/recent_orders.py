"""The outcomes of the leading scheduler's last orders, as notes on models that `shoal explain`
prints. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from libs.fleet import LOADING_STATES, FleetSnapshot
from services.scheduler.planning.placement import RESIDENT, Order

NOTE_SECONDS: Final = 600.0
"""Time for which the note on an order is kept."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """An order and the note on it."""

    order: Order
    note: str
    at: float
    end: str = ""
    """The order's outcome and time; empty while it is in progress."""


class RecentOrders:
    """The last order for each model, and its outcome. In all methods `at` is the current time in
    seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._last: dict[str, _Sent] = {}

    def ordered(self, orders: Iterable[Order], notes: Mapping[str, str], at: float) -> None:
        """Record a plan's orders and its notes on their models."""
        self._last |= {
            order.model: _Sent(order, notes[order.model], at)
            for order in orders
            if order.model in notes
        }

    def notes(self, fleet: FleetSnapshot, at: float) -> dict[str, str]:
        """Return the current note on each model."""
        recent = {model: sent for model, sent in self._last.items() if at - sent.at < NOTE_SECONDS}
        self._last = {
            model: sent if sent.end else replace(sent, end=_end(sent.order, fleet))
            for model, sent in recent.items()
        }
        return {
            model: f"{sent.note}; {sent.end}" if sent.end else sent.note
            for model, sent in self._last.items()
        }


def _end(order: Order, fleet: FleetSnapshot) -> str:
    when = datetime.fromtimestamp(fleet.now_ms / 1000, UTC).strftime("%H:%M:%S UTC")
    worker = fleet.workers.get(order.worker_id)
    if worker is None or worker.epoch != order.epoch:
        return f"the worker was gone at {when}"
    state = worker.state(order.model)
    if state == RESIDENT if order.kind == "load" else state not in (*LOADING_STATES, RESIDENT):
        return f"done at {when}"
    is_failed = order.kind == "load" and order.worker_id in fleet.failures.get(order.model, {})
    return f"failed at {when}" if is_failed else ""
