"""The audit log, `shoal.audit`: one line for each call that changes the location of models, and for
each refused call.

A flood of refused calls must not fill a disk: their lines are rate-limited, and the number of
omitted lines is logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from libs.serving.security.identity import Identity
from libs.telemetry.logs import MODEL, REQUEST_ID, Value, fields

log = logging.getLogger("shoal.audit")

REFUSALS_A_SECOND: Final = 20


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One audited call. `peer` is the caller's address, `outcome` `OK` or an error's reason."""

    caller: Identity
    peer: str
    method: str
    outcome: str


class Audit:
    """Writes the audit log.

    Args:
        later: Schedules a call after some seconds.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
        most_a_second: int = REFUSALS_A_SECOND,
    ) -> None:
        self._later = later
        self._clock = clock
        self._most = most_a_second
        # Mutable state: when the current second began, the lines written in it, and the omitted
        # lines.
        self._begun = -1.0
        self._written = 0
        self._omitted = 0

    def changed(self, record: AuditRecord) -> None:
        """Log a call that changes the location of models, whatever its outcome."""
        log.info("change", extra=_values(record))

    def refused(self, record: AuditRecord) -> None:
        """Log a call that failed authentication or authorisation."""
        now = self._clock()
        if now >= self._begun + 1.0:
            self._begun, self._written = now, 0
        if self._written < self._most:
            self._written += 1
            log.warning("refused", extra=_values(record))
            return
        if not self._omitted:
            self._later(1.0, self._log_omitted)
        self._omitted += 1

    def _log_omitted(self) -> None:
        count, self._omitted = self._omitted, 0
        log.warning("refused calls were omitted from the log", extra=fields({"count": count}))


def _values(record: AuditRecord) -> dict[str, object]:
    values: dict[str, Value] = {
        "subject": record.caller.subject,
        "role": record.caller.role,
        "tenant": record.caller.tenant,
        "peer": record.peer,
        "method": record.method,
        "model": MODEL.get(),
        "outcome": record.outcome,
        "request_id": REQUEST_ID.get(),
    }
    return dict(fields(values))
