"""Every metric of Shoal, in this one file: counters and histograms updated where things happen, and
series read at each scrape.

Names are `shoal_<what>_<unit>`, times in seconds. Labels are bounded: pools, methods and reasons
are few by themselves; models are those that a worker has (others are `other`, because clients can
make up names), tenants the first 64 that a process has seen. `exposition.py` serves them.
`tests/telemetry` checks in a real Prometheus every series that a dashboard or an alert uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from libs.text import without_controls

REGISTRY: Final = CollectorRegistry(auto_describe=False)
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)

SECONDS: Final = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
)
TOKENS: Final = tuple(float(1 << power) for power in range(5, 17))
SHARES: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

OTHER: Final = "other"
MAX_TENANTS: Final = 64

# Of every process that answers calls.

REQUESTS: Final = Counter("shoal_requests",
"Calls answered, by method and reason (OK, or one of libs/errors.py).",
                          ("method", "reason"), registry=REGISTRY)  # fmt: skip
REQUEST_SECONDS: Final = Histogram("shoal_request_seconds",
"From a call's start until its answer is ready; traces as exemplars.",
                                   ("method",), buckets=SECONDS, registry=REGISTRY)  # fmt: skip

# Of edges. Routes are those of the table, so a path that is none of them is `other`.

HTTP_REQUESTS: Final = Counter("shoal_http_requests",
"Requests over HTTP answered, by route and status (499: the client left).",
                               ("route", "status"), registry=REGISTRY)  # fmt: skip
HTTP_REQUEST_SECONDS: Final = Histogram("shoal_http_request_seconds",
"From a request's head until its answer is written.",
                                        ("route",), buckets=SECONDS, registry=REGISTRY)  # fmt: skip
HTTP_BATCHES_ENDED: Final = Counter("shoal_http_batches_ended",
"Batches of OpenAI's API that this edge ended, by status: completed, failed, cancelled, expired.",
                                    ("status",), registry=REGISTRY)  # fmt: skip
HTTP_BATCH_REQUESTS: Final = Counter("shoal_http_batch_requests",
"Requests of batches that got a result from this edge, by outcome: ok, failed (also by expiry).",
                                     ("outcome",), registry=REGISTRY)  # fmt: skip
HTTP_JOBS_ENDED: Final = Counter("shoal_http_jobs_ended",
"Submitted jobs that stopped at this edge: completed, failed, paused, cancelled or expired.",
                                 ("status",), registry=REGISTRY)  # fmt: skip
HTTP_JOB_ROWS: Final = Counter("shoal_http_job_rows",
"Rows of submitted jobs that this edge has written, by outcome: ok, failed (rows with an error).",
                               ("outcome",), registry=REGISTRY)  # fmt: skip

# Of routers.

JOBS_QUEUED_AGAIN: Final = Counter(
    "shoal_jobs_queued_again", "Jobs queued again because Redis had lost them.", registry=REGISTRY
)

# Of workers. The device thread observes those of a forward pass after the pass.

QUEUE_SECONDS: Final = Histogram("shoal_queue_seconds", "Of one job: waiting in its lane.",
("model",),
                                 buckets=SECONDS, registry=REGISTRY)  # fmt: skip
PREPARE_SECONDS: Final = Histogram("shoal_prepare_seconds", "Of one job: reading and tokenising.",
("model",),
                                   buckets=SECONDS, registry=REGISTRY)  # fmt: skip
FORWARD_SECONDS: Final = Histogram("shoal_forward_seconds",
"Of one batch: its forward pass on the device.", ("model",),
                                   buckets=SECONDS, registry=REGISTRY)  # fmt: skip
FINISH_SECONDS: Final = Histogram("shoal_finish_seconds",
"Of one job: from outputs to the serialised answer.", ("model",),
                                  buckets=SECONDS, registry=REGISTRY)  # fmt: skip
BATCH_TOKENS: Final = Histogram(
    "shoal_batch_tokens", "Tokens of one batch.", ("model",), buckets=TOKENS, registry=REGISTRY
)
BATCH_FILL: Final = Histogram("shoal_batch_fill_ratio",
"Tokens of a batch, as a share of the token budget.", ("model",),
                              buckets=SHARES, registry=REGISTRY)  # fmt: skip
BATCH_PREEMPTIONS: Final = Counter(
    "shoal_batch_preemptions",
    "Batches that ran between two layers of another one.",
    registry=REGISTRY,
)
TENANT_TOKENS: Final = Counter(
    "shoal_tenant_tokens", "Tokens computed, by tenant.", ("tenant",), registry=REGISTRY
)
LOADS: Final = Counter("shoal_model_loads",
"Loads of models that have ended, by outcome (OK, or the reason of the failure).",
                       ("outcome",), registry=REGISTRY)  # fmt: skip
SWAP_SECONDS: Final = Histogram("shoal_swap_seconds",
"From the order to load a model until it is resident, by source.",
                                ("source",), buckets=SECONDS, registry=REGISTRY)  # fmt: skip
EVICTIONS: Final = Counter("shoal_evictions",
"Models evicted from the device, by destination (warm: host memory; cold).",
                           ("to",), registry=REGISTRY)  # fmt: skip
GRAPH_EVENTS: Final = Counter("shoal_graph_events",
"Of CUDA graphs: captured, refused, failed, replayed, checked, differed.",
                              ("event",), registry=REGISTRY)  # fmt: skip
IMAGE_CACHE_EVENTS: Final = Counter(
    "shoal_image_cache_events",
    (
        "Of items with images: hit (the output was kept), shared (another of the batch had it), "
        "miss "
        "(computed), evicted."
    ),
    ("event",),
    registry=REGISTRY,
)


class LabelValues:
    """Keep the first `most` values of a label and replace all others by `other`. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: set[str] = set()

    def bounded(self, value: str) -> str:
        """Return the value, or `other` if the label has `most` values already.

        Control characters become U+FFFD: the exposition format escapes only newlines.
        """
        value = without_controls(value)
        if value in self._known:
            return value
        with self._lock:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(value)
        return value


TENANTS: Final = LabelValues(MAX_TENANTS)


@dataclass(frozen=True, slots=True)
class Series:
    """One family of metrics that is read at each scrape."""

    name: str
    help: str
    labels: Sequence[str] = ()
    is_counter: bool = False

    def family(self, samples: Mapping[tuple[str, ...], float]) -> Metric:
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        for labels, value in samples.items():
            family.add_metric([without_controls(label) for label in labels], float(value))
        return family


LANE_LABELS: Final = ("pool", "model", "adapter")
POOL_LABELS: Final = ("pool",)

# Of routers: lanes belong to the mesh, so every router reports the same; `oldest` covers its own
# jobs only.

LANE_QUEUED_JOBS: Final = Series(
    "shoal_lane_queued_jobs", "Jobs that wait in the lane.", LANE_LABELS
)
LANE_QUEUED_TOKENS: Final = Series(
    "shoal_lane_queued_tokens", "Tokens that wait in the lane (estimated from bytes).", LANE_LABELS
)
LANE_LEASED_TOKENS: Final = Series(
    "shoal_lane_leased_tokens", "Tokens of jobs that workers have leased.", LANE_LABELS
)
LANE_OLDEST_SECONDS: Final = Series(
    "shoal_lane_oldest_seconds", "Age of the oldest job that this router waits for.", LANE_LABELS
)
LANE_ENQUEUED_TOKENS: Final = Series(
    "shoal_lane_enqueued_tokens", "Tokens ever enqueued.", LANE_LABELS, True
)
LANE_ENQUEUED: Final = Series("shoal_lane_enqueued_jobs", "Jobs ever enqueued.", LANE_LABELS, True)
LANE_DONE: Final = Series("shoal_lane_done_jobs", "Jobs answered.", LANE_LABELS, True)
LANE_EXPIRED: Final = Series(
    "shoal_lane_expired_jobs", "Jobs that expired in the lane.", LANE_LABELS, True
)
LANE_DEAD: Final = Series(
    "shoal_lane_dead_jobs",
    "Jobs given up after the workers that leased them died.",
    LANE_LABELS,
    True,
)
LANE_CANCELLED: Final = Series("shoal_lane_cancelled_jobs", "Jobs cancelled.", LANE_LABELS, True)
HELD_BYTES: Final = Series(
    "shoal_held_bytes", "Memory of this router that requests in flight take."
)
WAITING_PULLS: Final = Series("shoal_waiting_pulls", "Pulls of workers that wait at this router.")
REDIS_UP: Final = Series("shoal_redis_up", "1: Redis answered the last check of this process.")

# Of schedulers.

DESIRED_WORKERS: Final = Series(
    "shoal_desired_workers", "Workers that the pool should have, as answered to KEDA.", POOL_LABELS
)
NEEDED_WORKERS: Final = Series(
    "shoal_needed_workers",
    "Workers that the pool needs at this moment, before hysteresis.",
    POOL_LABELS,
)
POOL_ACTIVE: Final = Series(
    "shoal_pool_active", "1: the pool may not be scaled to zero.", POOL_LABELS
)
LIVE_WORKERS: Final = Series(
    "shoal_live_workers", "Workers that exist, those about to be preempted included.", POOL_LABELS
)
READY_WORKERS: Final = Series("shoal_ready_workers", "Workers that accept work.", POOL_LABELS)
STARTING_WORKERS: Final = Series(
    "shoal_starting_workers", "Workers that were requested and are not overdue.", POOL_LABELS
)
PREEMPTING_WORKERS: Final = Series(
    "shoal_preempting_workers", "Workers on machines that are about to be preempted.", POOL_LABELS
)
UNHEALTHY_WORKERS: Final = Series(
    "shoal_unhealthy_workers", "Workers that have missed three heartbeats.", POOL_LABELS
)
QUEUED_TOKENS: Final = Series(
    "shoal_queued_tokens", "Tokens that wait for models that the pool can serve.", POOL_LABELS
)
LEASED_TOKENS: Final = Series(
    "shoal_leased_tokens", "Tokens of such models that workers have leased.", POOL_LABELS
)
OFFERED_LOAD: Final = Series(
    "shoal_offered_load_workers", "Workers that the arriving work keeps busy.", POOL_LABELS
)
BACKLOG_SECONDS: Final = Series(
    "shoal_backlog_seconds", "Seconds that one worker would take for the waiting work.", POOL_LABELS
)
COLD_START_SECONDS: Final = Series(
    "shoal_cold_start_seconds", "From requesting a worker to its first heartbeat.", POOL_LABELS
)
PLAN_NUMBER: Final = Series("shoal_plan_number", "Number of the leader's last plan.")
SCHEDULER_LEADER: Final = Series(
    "shoal_scheduler_leader", "1: this scheduler is the leader, which places models."
)
VIEW_AGE_SECONDS: Final = Series(
    "shoal_view_age_seconds", "Age of the last look at the mesh; infinite before the first."
)

# Of edges.

HTTP_CONNECTIONS: Final = Series("shoal_http_connections", "Open connections of HTTP clients.")
HTTP_HELD_BYTES: Final = Series(
    "shoal_http_held_bytes", "Memory of this edge that the bodies of requests in flight take."
)
HTTP_ROUTER_UP: Final = Series(
    "shoal_http_router_up", "1: a router answered this edge's last check."
)
HTTP_BATCHES_ACTIVE: Final = Series(
    "shoal_http_batches_active", "Batches of OpenAI's API that this edge runs."
)
HTTP_BATCH_REQUESTS_IN_FLIGHT: Final = Series(
    "shoal_http_batch_requests_in_flight", "Requests of batches that this edge waits for."
)
HTTP_JOBS_ACTIVE: Final = Series(
    "shoal_http_jobs_active", "Submitted jobs that this edge runs.", ("model",)
)
HTTP_JOB_ROWS_LEFT: Final = Series(
    "shoal_http_job_rows_left",
    "Rows of the submitted jobs that this edge runs that are not written yet, as far as known.",
    ("model",),
)

# Of workers.

DEVICE_BUSY_SECONDS: Final = Series(
    "shoal_device_busy_seconds", "Seconds that the device has computed.", POOL_LABELS, True
)
DEVICE_STALLED_SECONDS: Final = Series(
    "shoal_device_stalled_seconds",
    "Seconds in which the device did not compute although there was work, by cause: starved "
    "(jobs were queued or in preparation), "
    "turnaround (between two batches).",
    ("pool", "cause"),
    True,
)
DEVICE_CPU_SECONDS: Final = Series(
    "shoal_device_cpu_seconds",
    "CPU seconds of the device thread in forward passes, without those of threads that help it.",
    POOL_LABELS,
    True,
)
DEVICE_WASTED_SECONDS: Final = Series(
    "shoal_device_wasted_seconds",
    "Device seconds spent on results that no caller received.",
    POOL_LABELS,
    True,
)
DEVICE_MEMORY_BYTES: Final = Series(
    "shoal_device_memory_bytes", "Device memory that models may take.", POOL_LABELS
)
DEVICE_USED_BYTES: Final = Series(
    "shoal_device_used_bytes", "Device memory that weights take and loads reserve.", POOL_LABELS
)
HOST_USED_BYTES: Final = Series(
    "shoal_host_used_bytes", "Host memory that warm models and host copies take.", POOL_LABELS
)
RESIDENT_BYTES: Final = Series(
    "shoal_resident_bytes", "Weights of a resident model.", ("pool", "model")
)
GRAPH_BYTES: Final = Series(
    "shoal_graph_bytes", "Device memory of a resident model's CUDA graphs.", ("pool", "model")
)
KEY_VALUE_BYTES: Final = Series(
    "shoal_key_value_bytes",
    "Memory of keys and values that the sequences of a generative model have claimed.",
    ("pool", "model"),
)
IMAGE_CACHE_BYTES: Final = Series(
    "shoal_image_cache_bytes", "Memory that kept outputs of images take.", POOL_LABELS
)
MODEL_TOKENS_PER_SECOND: Final = Series(
    "shoal_model_tokens_per_second", "Measured on recent batches.", ("pool", "model")
)


class ReadCollector(Collector):
    """Collects the families that `read` builds at each scrape, on the scrape's thread: it may only
    read data that is replaced as a whole."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Nothing: so the registry does not check these names against others."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._read()
