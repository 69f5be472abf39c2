"""Logs as lines of JSON on stderr, over the standard library's logging.

A message is a constant; variable values are fields: `log.info("model loaded",
extra=fields({"model": name}))`. Every line written while an RPC is handled also has its request id,
and its trace and span ids if it is traced. Never log texts of clients.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final

from opentelemetry import trace

Value = str | int | float | bool | None

REQUEST_ID: ContextVar[str] = ContextVar("shoal_request_id", default="")
"""The request that the current task works for; empty outside of requests."""

MODEL: ContextVar[str] = ContextVar("shoal_model", default="")
"""The model that the current task works with; empty if it is none."""

_ATTRIBUTE = "shoal_fields"
_ENCODER: Final = json.JSONEncoder(default=str)


def fields(values: Mapping[str, Value]) -> dict[str, Mapping[str, Value]]:
    """Return `values` in the form of the argument `extra` of logging's methods."""
    return {_ATTRIBUTE: values}


def configure(service: str, level: str = "INFO") -> None:
    """Write every log record of this process to stderr as JSON, and remove earlier handlers.

    Args:
        service: The name of the service, which is in each line.
        level: The lowest level to write, by its name in `logging`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Do not collect the source location and the names of thread and process: no line has them, and
    # each takes a few µs per record.
    logging._srcfile = ""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


class JsonFormatter(logging.Formatter):
    """Formats a record as one line with a JSON object: time, level, service, logger, message,
    request_id, trace_id, the record's fields, exception.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Value] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        if model := MODEL.get():
            line["model"] = model
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"], line["span_id"] = f"{span.trace_id:032x}", f"{span.span_id:016x}"
        line.update(getattr(record, _ATTRIBUTE, {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # In ASCII, so that no character controls the reader's terminal. U+009B does, although it is
        # not one of the C0 control characters, which JSON escapes.
        return _ENCODER.encode(line)
