"""The progress of a running job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a running job.

    Attributes:
        total: Number of input rows, or an estimate; None if unknown.
        seconds_left: An estimate; None if unknown.
        in_flight: Number of chunks in flight.
        waiting_for: The last error of chunks that are sent again; empty while chunks are answered.
        cost: The cost by pool, of pools with a price.
        whole_cost: An estimate of the cost of all rows; None if unknown.
        size: Number of bytes of all parts.
        overdue_seconds: Seconds since the job should have read a chunk or received an answer. They
            grow without limit if it hangs, for example after a thread has died for lack of memory.
    """

    rows: int
    total: int | None
    failed: int
    tokens: int
    rows_per_second: float
    tokens_per_second: float
    seconds_left: float | None
    in_flight: int
    waiting_for: str = ""
    cost: Mapping[str, float] = field(default_factory=dict)
    whole_cost: float | None = None
    size: int = 0
    overdue_seconds: float = 0.0

    def rates(self) -> dict[str, float]:
        """Return the rates and estimates for the manifest."""
        found = {
            "rows_per_second": round(self.rows_per_second, 1),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "chunks_in_flight": float(self.in_flight),
        }
        if self.seconds_left is not None:
            found["seconds_left"] = round(self.seconds_left, 1)
        if self.whole_cost is not None:
            found["whole_cost"] = round(self.whole_cost, 6)
        return found
