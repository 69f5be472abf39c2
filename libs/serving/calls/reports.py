"""Reports each call when it has ended: its span, two metrics, one log line, and an audit line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import grpc
from google.protobuf.message import Message
from opentelemetry import trace
from prometheus_client import Counter, Histogram

from libs.errors import PermissionDenied, ShoalError, Unauthenticated
from libs.serving.security.audit import Audit, AuditRecord
from libs.serving.security.identity import UNKNOWN, Identity
from libs.serving.security.roles import CHANGES
from libs.telemetry import metrics, traces
from libs.telemetry.logs import REQUEST_ID, fields

log = logging.getLogger(__name__)

_REFUSED: Final = (Unauthenticated.reason, PermissionDenied.reason)


@dataclass(slots=True)
class CallRecord:
    """One call, from its arrival on."""

    caller: Identity = UNKNOWN
    span: trace.Span = traces.NONE
    outcome: str = "CANCELLED"
    """`OK`, or an error's reason."""
    begin: float = field(default_factory=time.perf_counter)
    """The beginning, in seconds of a monotonic clock."""

    def fail(self, error: ShoalError) -> None:
        self.outcome = error.reason
        traces.failed(self.span, error)


class Reporter:
    """Reports the calls of one method.

    Args:
        is_internal: Log calls at DEBUG and do not count them.
        has_end: The method ends by itself, so it has a span and a latency.
    """

    def __init__(self, audit: Audit, method: str, *, is_internal: bool, has_end: bool) -> None:
        self._audit = audit
        self._method = method
        self._is_internal = is_internal
        self._has_end = has_end
        self._level = logging.DEBUG if is_internal else logging.INFO
        # Metrics of this method, cached because a lookup by labels takes as long as counting;
        # counters by outcome.
        self._latency: Histogram | None = None
        self._counters: dict[str, Counter] = {}

    def span(self, headers: Mapping[str, str]) -> trace.Span:
        """Return the span of a client's call, or of a worker's call for a traced request. Return
        NONE otherwise, and for endless streams.
        """
        if not self._has_end or (self._is_internal and not headers.get(traces.TRACEPARENT)):
            return traces.NONE
        return traces.rpc(self._method, headers, {"shoal.request_id": REQUEST_ID.get()})

    def report(
        self, record: CallRecord, context: grpc.aio.ServicerContext[Message, Message]
    ) -> None:
        """End the span. Report the rest after the answer was passed to gRPC: a log line takes a
        tenth of a millisecond.
        """
        loop, seconds = asyncio.get_running_loop(), time.perf_counter() - record.begin
        record.span.set_attribute("shoal.outcome", record.outcome)
        record.span.end()
        audited = None
        if record.outcome in _REFUSED or self._method in CHANGES:
            audited = AuditRecord(record.caller, context.peer(), self._method, record.outcome)
        if audited is not None or not self._is_internal or log.isEnabledFor(self._level):
            loop.call_soon(self._report, record, seconds, audited)

    def _report(self, record: CallRecord, seconds: float, audited: AuditRecord | None) -> None:
        if not self._is_internal:
            self._count(record, seconds)
        if audited is not None and record.outcome in _REFUSED:
            # Unauthenticated callers must not fill the log: the audit rate-limits these lines.
            self._audit.refused(audited)
            return
        self._log(record, seconds)
        if audited is not None:
            self._audit.changed(audited)

    def _count(self, record: CallRecord, seconds: float) -> None:
        counter = self._counters.get(record.outcome)
        if counter is None:
            counter = self._counters[record.outcome] = metrics.REQUESTS.labels(
                self._method, record.outcome
            )
        counter.inc()
        if self._has_end:
            if self._latency is None:
                self._latency = metrics.REQUEST_SECONDS.labels(self._method)
            self._latency.observe(seconds, traces.exemplar(record.span))

    def _log(self, record: CallRecord, seconds: float) -> None:
        if log.isEnabledFor(self._level):
            values = fields(
                {"method": self._method, "outcome": record.outcome, "seconds": round(seconds, 6)}
            )
            with traces.entered(record.span):
                log.log(self._level, "call", extra=values)
