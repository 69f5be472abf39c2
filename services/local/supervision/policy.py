"""The restart policy: when a child process that ended is restarted, and when it is given up. Pure:
the clock is an argument.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from libs.processes import ProcessState

WINDOW_SECONDS: Final = 60.0
PAUSES_SECONDS: Final = (0.0, 1.0, 4.0)
"""The backoff before the first, second and third restart within WINDOW_SECONDS; a child that then
ends once more is given up.
"""
SETTLED_SECONDS: Final = 10.0
"""A child that ran longer than this since its last restart is restarted without backoff: it was
killed, its start does not fail.
"""

Role = Literal["redis", "router", "scheduler", "worker", "edge"]
_FAULTS: Final = ("WARNING", "ERROR", "CRITICAL")
NEEDED: Final[tuple[Role, ...]] = ("redis", "router")
"""Roles without which no request is answered. One worker must be left, too; without a scheduler
workers claim models themselves, and gRPC needs no edge."""


@dataclass(frozen=True, slots=True)
class ChildHistory:
    """The history of one child.

    Attributes:
        ends: The times, in monotonic seconds, at which it ended within the last WINDOW_SECONDS.
        restarts: Number of restarts since the mesh started.
        since: The start of its last run.
        was_settled: Whether its last run was longer than SETTLED_SECONDS.
    """

    ends: tuple[float, ...] = ()
    restarts: int = 0
    is_running: bool = True
    since: float = -math.inf
    was_settled: bool = False

    def ended(self, now: float) -> ChildHistory:
        ends = (*(end for end in self.ends if now - end < WINDOW_SECONDS), now)
        return replace(
            self, ends=ends, is_running=False, was_settled=now - self.since > SETTLED_SECONDS
        )

    def started(self, now: float) -> ChildHistory:
        return replace(self, restarts=self.restarts + 1, is_running=True, since=now)

    @property
    def is_given_up(self) -> bool:
        return len(self.ends) > len(PAUSES_SECONDS)

    @property
    def pause_seconds(self) -> float:
        """The backoff before the next start. Only for a child that ended and is not given up."""
        return 0.0 if self.was_settled else PAUSES_SECONDS[len(self.ends) - 1]

    @property
    def state(self) -> ProcessState:
        if self.is_running:
            return "running"
        return "given up" if self.is_given_up else "restarting"


def can_serve(roles: Mapping[str, Role], given_up: Collection[str]) -> bool:
    """Return True if the children that are not given up can answer requests.

    Args:
        roles: The role of each child, by name.
    """
    left = [role for name, role in roles.items() if name not in given_up]
    return "worker" in left and all(role in left for role in NEEDED)


def ending(status: int | None) -> str:
    """Describe the end of a process in words. None: it could not be started."""
    if status is None:
        return "could not be started"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def last_fault(lines: Sequence[str]) -> str:
    """Return the last line of a process that reports a fault: in our log one at WARNING or above,
    as text; in other output any line. Empty if there is none: a killed process reports nothing, and
    its first log line with the settings is not a fault.
    """
    for line in reversed(lines):
        record = _record(line)
        if record is None:
            if line.strip():
                return line.strip()
        elif record.get("level") in _FAULTS:
            parts = [str(record[key]) for key in ("message", "reason") if record.get(key)]
            return ": ".join([*parts, *str(record.get("exception", "")).splitlines()[-1:]])
    return ""


def _record(line: str) -> dict[str, object] | None:
    """Return a line of our log (`libs/telemetry/logs.py`); None for anything else."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "level" in found else None


def next_step(history: ChildHistory) -> str:
    """Describe the supervisor's next step for a child that has just ended."""
    if history.is_given_up:
        return (
            f"it is given up, because it ended {len(history.ends)} times within "
            f"{WINDOW_SECONDS:.0f} s"
        )
    pause = history.pause_seconds
    when = f"in {pause:.0f} s" if pause else "now"
    return (
        f"it is restarted {when} (restart {len(history.ends)} of at most {len(PAUSES_SECONDS)} "
        f"within {WINDOW_SECONDS:.0f} s)"
    )
