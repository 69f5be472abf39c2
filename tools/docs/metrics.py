"""The page of metrics: every series of libs/telemetry/metrics.py."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Final

from prometheus_client import Counter, Histogram

from libs.telemetry import metrics
from tools.docs.markdown import code, table

HEAD: Final = """# Metrics

Generated from `libs/telemetry/metrics.py` by `python -m tools.docs`.
Every process also exports the series of `prometheus_client` for its process, platform and garbage collector.
[Observability](../observability.md) explains where the series are served and which alerts use them.
"""


def page() -> str:
    return HEAD + "".join(f"\n## {title}\n\n{text}" for title, text in _sections())


def _sections() -> Iterator[tuple[str, str]]:
    """Yield the title and the table of each run of metrics below a comment that begins with
    `Of`.
    """
    source = inspect.getsource(metrics)
    rows: dict[str, list[tuple[str, str, str, str]]] = {}
    title = "All processes"
    for found in re.finditer(
        (
            r"^# Of (?P<section>\w+[\w ]*)[.:]?|^(?P<name>[A-Z_]+): Final = "
            r"(?:Counter|Histogram|Series)\b"
        ),
        source,
        re.M,
    ):
        if found["section"]:
            title = found["section"].strip().capitalize()
        else:
            rows.setdefault(title, []).append(_row(getattr(metrics, found["name"])))
    for section, lines in rows.items():
        yield section, table(("series", "type", "labels", "description"), lines)


def _row(metric: Counter | Histogram | metrics.Series) -> tuple[str, str, str, str]:
    if isinstance(metric, metrics.Series):
        name, text, labels = metric.name, metric.help, metric.labels
        kind = "counter" if metric.is_counter else "gauge"
    else:
        family = next(iter(metric.describe()))
        name, text, labels, kind = (
            family.name,
            family.documentation,
            metric._labelnames,
            family.type,
        )
    suffix = "_total" if kind == "counter" else ""
    return code(name + suffix), kind, ", ".join(map(code, labels)), text
