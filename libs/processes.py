"""The file in which a supervisor (`shoal up`) reports the states of its processes to the router
(SHOAL_PROCESSES).

From it `shoal status` shows dead processes, which cannot report themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from libs.errors import InvalidInput

ProcessState = Literal["running", "restarting", "given up"]
STATES: Final[tuple[ProcessState, ...]] = ("running", "restarting", "given up")
MAX_PROCESSES: Final = 4096
MAX_LETTERS: Final = 1000
"""The most characters of `name` and of `detail`."""


@dataclass(frozen=True, slots=True)
class Process:
    """The state of a process."""

    name: str
    state: ProcessState
    restarts: int = 0
    """Number of restarts since the supervisor started."""
    detail: str = ""
    """The status with which it last ended, and the end of its log; empty if it never ended."""


def to_text(processes: Iterable[Process]) -> str:
    return json.dumps([asdict(process) for process in processes])


def read(path: Path) -> tuple[Process, ...]:
    """Return the processes in the file; none if it does not exist (yet). Raises InvalidInput for
    other content.
    """
    try:
        entries = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}", field="SHOAL_PROCESSES") from None
    if not isinstance(entries, list) or len(entries) > MAX_PROCESSES:
        raise InvalidInput(
            f"{path} must hold a list of at most {MAX_PROCESSES} processes", field="SHOAL_PROCESSES"
        )
    return tuple(_process(entry, path) for entry in entries)


def _process(entry: object, path: Path) -> Process:
    match entry:
        case {
            "name": str(name),
            "state": str(state),
            "restarts": int(restarts),
            "detail": str(detail),
        }:
            if state in STATES and restarts >= 0:
                return Process(name[:MAX_LETTERS], state, restarts, detail[:MAX_LETTERS])
    raise InvalidInput(
        f"{path} must hold for each process its name, state, restarts and detail",
        field="SHOAL_PROCESSES",
    )
