"""The deadline of a call, computed when the call arrives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time on a monotonic clock (the event loop's), in seconds. Callers pass `now`."""

    at: float

    @classmethod
    def after(cls, seconds: float, now: float) -> Deadline:
        """Return the deadline `seconds` from `now`."""
        return cls(now + seconds)

    def remaining(self, now: float) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self.at - now)
