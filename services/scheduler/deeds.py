"""What the leader's last orders did to models, in the words that `shoal explain` tells. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from libs.fleet import COMING, FleetSnapshot
from services.scheduler.placement import RESIDENT, Order

NOTE_SECONDS: Final = 600.0
"""For how long what was done with a model is told."""


@dataclass(frozen=True, slots=True)
class _Deed:
    order: Order
    note: str
    at: float
    end: str = ""
    """How it ended and when; empty while it is under way."""


class Deeds:
    """The last order of each model, and how it ended. `at`: seconds of a clock that rises."""

    def __init__(self) -> None:
        self._deeds: dict[str, _Deed] = {}

    def ordered(self, orders: Iterable[Order], notes: Mapping[str, str], at: float) -> None:
        """A plan's orders and what it says of their models."""
        self._deeds |= {order.model: _Deed(order, notes[order.model], at) for order in orders if order.model in notes}

    def notes(self, fleet: FleetSnapshot, at: float) -> dict[str, str]:
        """What to tell of each model now."""
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
