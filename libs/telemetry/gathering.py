"""One page of Prometheus metrics for several processes of a machine: the pages of all processes,
with a label that names the process.
"""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

LABEL: Final = "process"
_FETCH_SECONDS: Final = 5.0
_MAX_PAGE_BYTES: Final = 64 << 20


def gather(sources: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the metric families of all processes, each sample with the label `process`.

    A process that does not respond is left out. The metric `up` is 1 for each process that
    responded and 0 for the others, as Prometheus would report them.

    Args:
        sources: The metrics address (host:port) of each process, by its name.
    """
    families: dict[str, Metric] = {}
    up = Metric("up", "Whether the process answered this scrape.", "gauge")
    with ThreadPoolExecutor(max(1, len(sources))) as threads:
        for name, page in zip(sources, threads.map(_fetch_metrics, sources.values()), strict=True):
            up.add_sample("up", {LABEL: name}, float(page is not None))
            for found in text_string_to_metric_families(page or ""):
                family = families.setdefault(
                    found.name, Metric(found.name, found.documentation, found.type, found.unit)
                )
                for sample in found.samples:
                    family.samples.append(sample._replace(labels={**sample.labels, LABEL: name}))
    yield up
    yield from families.values()


def _fetch_metrics(address: str) -> str | None:
    """Return the text of a process's `/metrics`; None if it does not respond."""
    try:
        with urllib.request.urlopen(
            f"http://{address}/metrics", timeout=_FETCH_SECONDS
        ) as answer:  # the address of a child process, not of a client
            content: bytes = answer.read(_MAX_PAGE_BYTES)
    except (urllib.error.URLError, OSError) as error:
        log.info(
            "cannot fetch the metrics of a process",
            extra=fields({"address": address, "error": str(error)}),
        )
        return None
    return content.decode()
