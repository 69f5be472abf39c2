"""Trace spans of jobs. Jobs that are not traced have none. `libs/telemetry/traces.py` shows the
tree of spans.

Not on the request path. `intake.py` begins a job's span; preparing threads, the device thread and
finishing threads add stages in turn; `delivery.py` ends it. Times are seconds of the worker's
monotonic clock. The spans of stages are made once their times are known.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from opentelemetry.trace import Span, SpanKind
from shoal.v1 import worker_pb2

from libs.errors import ShoalError
from libs.telemetry import traces

CLOCK_READS: Final = 5
"""Maximum number of times that both clocks are read."""
MAX_CLOCK_GAP_SECONDS: Final = 0.001
"""Maximum time between the reads of both clocks that belong together."""


class JobSpan:
    """The span `process <lane>`, from the pull until the answer is queued for sending. Does nothing
    if the job is not traced.
    """

    def __init__(self, span: Span | None = None) -> None:
        self.span = span

    @property
    def traceparent(self) -> str:
        return "" if self.span is None else traces.format_traceparent(self.span)

    def stage(self, name: str, started: float, ended: float) -> None:
        """Add a child span for one stage of the job."""
        if self.span is not None:
            traces.begin(name, self.span, start_ns=_unix_ns(started)).end(_unix_ns(ended))

    def failed(self, error: ShoalError) -> None:
        if self.span is not None:
            traces.failed(self.span, error)

    def end(self) -> None:
        if self.span is not None:
            self.span.end()


UNTRACED: Final = JobSpan()


def begin(job: worker_pb2.Job, lane: worker_pb2.Lane, worker_id: str, *, waited: float) -> JobSpan:
    """Begin the span of a job that was just pulled, after `waited` seconds in its lane."""
    context = traces.parse_traceparent(job.traceparent)
    if context is None:
        return UNTRACED
    now, name = time.time_ns(), traces.lane_name(lane.pool, lane.model, lane.adapter)
    traces.begin(f"wait {name}", context, start_ns=now - int(waited * 1e9)).end(now)
    attributes = {
        **traces.messaging(name, "process"),
        "messaging.message.id": job.job_id,
        "shoal.request_id": job.request_id,
        "shoal.worker_id": worker_id,
        "shoal.model": lane.model,
    }
    return JobSpan(
        traces.begin(
            f"process {name}", context, kind=SpanKind.CONSUMER, attributes=attributes, start_ns=now
        )
    )


def batch(
    model: str,
    jobs: Iterable[JobSpan],
    started: float,
    ended: float,
    *,
    tokens: int,
    sequences: int,
) -> None:
    """Make the span of one forward pass, in the trace of its first traced job and linked with all
    traced jobs.
    """
    spans = [job.span for job in jobs if job.span is not None]
    if not spans:
        return
    attributes: traces.Attributes = {
        "shoal.model": model,
        "shoal.batch.tokens": tokens,
        "shoal.batch.sequences": sequences,
    }
    forward = traces.begin(
        "forward", spans[0], attributes=attributes, links=spans, start_ns=_unix_ns(started)
    )
    forward.end(_unix_ns(ended))
    for one in spans[1:]:
        one.add_link(forward.get_span_context())


def _unix_ns(moment: float) -> int:
    """Return the Unix time of a moment of the monotonic clock.

    The clocks are read again if this thread was suspended between them, which would make the moment
    seem earlier.
    """
    for _ in range(CLOCK_READS):
        before, now, after = time.monotonic(), time.time_ns(), time.monotonic()
        if after - before < MAX_CLOCK_GAP_SECONDS:
            break
    return now - int((before - moment) * 1e9)
