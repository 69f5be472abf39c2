"""The deadline of a call: computed once when the call arrives, and checked anywhere after."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on a monotonic clock (the event loop's), in seconds. The clock is the caller's:
    `now` comes in as an argument.
    """

    at: float

    @classmethod
    def after(cls, seconds: float, now: float) -> Deadline:
        """The moment `seconds` from `now`."""
        return cls(now + seconds)

    def remaining(self, now: float) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at - now)
