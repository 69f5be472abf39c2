"""Graphs for steps: real ones on a GPU; in a rehearsal on a CPU the tests' fake, which runs the
forward again at each replay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from libs.models.runtime.graphs.cuda import CudaCapture
from libs.models.runtime.graphs.graphs import Event, Graphs, Owner
from tests.support.graphs import FakeCapture

MAX_GRAPHS = 64
NEVER = 1 << 30


@dataclass(slots=True)
class GraphTally:
    """Counts of graphs. All memory that they request is granted.

    Attributes:
        bytes: Bytes of the last reservation.
    """

    reported: Counter[Event] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    bytes: int = 0

    def graphs(self, device: torch.device, *, check_every: int) -> Graphs:
        """Each shape waits for its capture from its first batch on
        (`PackedModel.capture_graph`).
        """
        capture = CudaCapture(device) if device.type == "cuda" else FakeCapture()
        return Graphs(
            capture,
            Owner(self._reserve, self._record),
            most=MAX_GRAPHS,
            after=0,
            check_every=check_every,
        )

    def _reserve(self, size: int) -> bool:
        self.bytes = size
        return True

    def _record(self, event: Event, detail: str) -> None:
        self.reported[event] += 1
        self.details += [detail] if detail else []
