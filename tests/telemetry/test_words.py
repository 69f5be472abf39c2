"""Text in log lines and series cannot steer a terminal, and programs read it exactly."""

from __future__ import annotations

import json
import logging

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from libs.telemetry.logs import JsonFormatter, fields
from libs.telemetry.metrics import LANE_QUEUED_JOBS, LabelValues, ReadCollector
from tests.api.hostile import CONTROLS, WORDS


def test_log_line_escapes_non_ascii() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, f"ü {WORDS}", (), None)
    for name, value in fields({"device": WORDS}).items():
        setattr(record, name, value)
    line = JsonFormatter("worker").format(record)
    assert line.isascii()
    assert line.isprintable()
    read = json.loads(line)
    assert (read["message"], read["device"]) == (f"ü {WORDS}", WORDS)


def test_series_has_no_control_characters() -> None:
    registry = CollectorRegistry(auto_describe=False)
    labels = ("cpu\n", f'quote"back\\{WORDS}', LabelValues(1).bounded(WORDS))
    registry.register(ReadCollector(lambda: [LANE_QUEUED_JOBS.family({labels: 3.0})]))
    text = generate_latest(registry).decode()
    assert not set(text) & set(CONTROLS)
    (family,) = text_string_to_metric_families(text)
    (sample,) = family.samples
    assert sample.value == 3.0
    assert sample.labels["model"].startswith('quote"back\\�]0;owned')
