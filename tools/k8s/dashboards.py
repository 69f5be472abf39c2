"""`python -m tools.k8s.dashboards [--check]`: generate Grafana's dashboards
(k8s/components/dashboards/*.json) from the definitions in this file.

`--check` fails if they are stale. `tests/telemetry/test_prometheus.py` runs every query in a real
Prometheus.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "k8s" / "components" / "dashboards"
WIDTH, HEIGHT, COLUMNS = 12, 8, 2
SCHEMA_VERSION = 39  # of Grafana 10.4 and later, which migrates older ones


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    """Grafana's name of the unit: s, bytes, percentunit, short, reqps."""
    queries: Mapping[str, str]
    """PromQL queries, by legend."""
    what: str = ""


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    panels: Sequence[Panel]


def quantile(share: float, series: str, *by: str) -> str:
    labels = ", ".join(("le", *by))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({series}_seconds_bucket[5m])))"


def rate(series: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) (rate({series}[5m]))" if by else f"sum(rate({series}[5m]))"


LANE = "{{pool}} {{model}} {{adapter}}"

MESH = Dashboard(
    "shoal-mesh",
    "Shoal: mesh",
    [
        Panel("Requests", "reqps",
        {"{{method}} {{reason}}": rate("shoal_requests_total", "method", "reason")},
              "Finished calls per second, by reason."),
        Panel("Failed", "percentunit",
        {"{{reason}}": 'sum by (reason) (rate(shoal_requests_total{reason!="OK"}[5m])) '
              "/ ignoring(reason) group_left sum(rate(shoal_requests_total[5m]))"},
              "Share of all calls that ended in an error, by its reason."),
        Panel("Latency", "s", {"p50 {{method}}": quantile(0.5, "shoal_request", "method"),
              "p99 {{method}}": quantile(0.99, "shoal_request", "method")},
              "In the router; exemplars lead to traces."),
        Panel("Where the time goes (p50)", "s", {
            "queue": quantile(0.5, "shoal_queue"), "prepare": quantile(0.5, "shoal_prepare"),
            "forward": quantile(0.5, "shoal_forward"), "finish": quantile(0.5, "shoal_finish")}),
        Panel("Tokens", "short", {"{{model}}": rate("shoal_batch_tokens_sum", "model")},
        "Computed tokens per second."),
        Panel("Processes", "short", {"{{job}}": "sum by (job) (up{job=~\"shoal/.*\"})",
              "redis seen": "min(shoal_redis_up)"}),
        Panel("Memory", "bytes",
        {"{{job}} {{instance}}": 'process_resident_memory_bytes{job=~"shoal/.*"}'}),
        Panel("Requests in flight", "bytes", {"{{instance}}": "shoal_held_bytes"},
        "Memory of a router that requests in flight take."),
    ],
)  # fmt: skip

LANES = Dashboard(
    "shoal-lanes",
    "Shoal: lanes and fairness",
    [
        Panel("Queued", "short", {LANE: "max by (pool, model, adapter) (shoal_lane_queued_tokens)"},
        "Waiting tokens."),
        Panel("Leased", "short", {LANE: "max by (pool, model, adapter) (shoal_lane_leased_tokens)"},
        "Tokens of jobs that workers have leased."),
        Panel("Oldest job", "s",
        {LANE: "max by (pool, model, adapter) (shoal_lane_oldest_seconds)"}),
        Panel("Jobs queued", "short",
        {LANE: "max by (pool, model, adapter) (shoal_lane_queued_jobs)"}),
        Panel("Arrivals", "short",
        {LANE: "max by (pool, model, adapter) (rate(shoal_lane_enqueued_tokens_total[5m]))"},
              "Tokens per second."),
        Panel("Jobs", "short", {
            "answered": "sum(max by (pool, model, adapter) (rate(shoal_lane_done_jobs_total[5m])))",
            "enqueued": "sum(max by (pool, model, adapter) "
            "(rate(shoal_lane_enqueued_jobs_total[5m])))",
            "cancelled": "sum(max by (pool, model, adapter) "
            "(rate(shoal_lane_cancelled_jobs_total[5m])))",
            "expired": "sum(max by (pool, model, adapter) "
            "(rate(shoal_lane_expired_jobs_total[5m])))",
            "given up": "sum(max by (pool, model, adapter) (rate(shoal_lane_dead_jobs_total[5m])))",
            "queued again": rate("shoal_jobs_queued_again_total")}, "Per second."),
        Panel("Device time by model", "percentunit",
        {"{{model}}": "sum by (model) (rate(shoal_forward_seconds_sum[5m])) "
              "/ ignoring(model) group_left sum(rate(shoal_forward_seconds_sum[5m]))"},
              "Share of device time."),
        Panel("Tokens by tenant", "short",
        {"{{tenant}}": rate("shoal_tenant_tokens_total", "tenant")}, "Computed tokens per second."),
    ],
)  # fmt: skip

WORKERS = Dashboard(
    "shoal-workers",
    "Shoal: workers and residency",
    [
        Panel("Device busy", "percentunit",
        {"{{instance}}": "rate(shoal_device_busy_seconds_total[5m])"}),
        Panel("Device stalled", "percentunit",
        {"{{cause}} {{instance}}": "rate(shoal_device_stalled_seconds_total[5m]) "
              "/ ignoring(cause) group_left () (rate(shoal_device_busy_seconds_total[5m]) "
              "+ sum without (cause) (rate(shoal_device_stalled_seconds_total[5m])))"},
              (
                  "Share of time with pending work: starved (no batch was ready for the device), "
                  "turnaround (between two batches)."
              )),
        Panel("Device wasted", "percentunit",
        {"{{pool}}": "sum by (pool) (rate(shoal_device_wasted_seconds_total[5m])) "
              "/ sum by (pool) (rate(shoal_device_busy_seconds_total[5m]))"},
              "Computed for results that no caller received."),
        Panel("Batch size", "short", {"p50 {{model}}":
              "histogram_quantile(0.5, sum by (le, model) (rate(shoal_batch_tokens_bucket[5m])))"},
              "Tokens."),
        Panel("Batch fill", "percentunit",
        {"{{model}}": "sum by (model) (rate(shoal_batch_fill_ratio_sum[5m])) "
              "/ sum by (model) (rate(shoal_batch_fill_ratio_count[5m]))"},
              "Share of the token budget."),
        Panel("Speed", "short", {"{{model}} {{instance}}": "shoal_model_tokens_per_second"},
        "Measured tokens per second."),
        Panel("Resident", "bytes", {"{{model}} {{instance}}": "shoal_resident_bytes"}),
        Panel("Device memory", "bytes",
        {"used {{instance}}": "shoal_device_used_bytes", "limit {{instance}}":
              "shoal_device_memory_bytes", "warm {{instance}}": "shoal_host_used_bytes"}),
        Panel("Loads and evictions", "short",
        {"loads, {{outcome}}": rate("shoal_model_loads_total", "outcome"),
              "evictions to {{to}}": rate("shoal_evictions_total", "to")}, "Per second."),
        Panel("Swap", "s", {"p50 from {{source}}": quantile(0.5, "shoal_swap", "source"),
              "p99 from {{source}}": quantile(0.99, "shoal_swap", "source")},
              "From the load order until the model is resident."),
        Panel("Waiting pulls", "short", {"{{instance}}": "shoal_waiting_pulls"}),
    ],
)  # fmt: skip

SCALING = Dashboard(
    "shoal-scaling",
    "Shoal: scaling",
    [
        Panel("Workers", "short",
        {"desired {{pool}}": "max by (pool) (shoal_desired_workers)", "ready {{pool}}":
              "max by (pool) (shoal_ready_workers)",
              "starting {{pool}}": "max by (pool) (shoal_starting_workers)"}),
        Panel("Needed", "short", {"{{pool}}": "max by (pool) (shoal_needed_workers)"},
        "Before hysteresis."),
        Panel("Offered load", "short", {"{{pool}}": "max by (pool) (shoal_offered_load_workers)"},
        "Number of busy workers."),
        Panel("Backlog", "s", {"{{pool}}": "max by (pool) (shoal_backlog_seconds)"},
        "Seconds of one worker."),
        Panel("Cold start", "s", {"{{pool}}": "max by (pool) (shoal_cold_start_seconds)"}),
        Panel("Lost workers", "short",
        {"preempting {{pool}}": "max by (pool) (shoal_preempting_workers)", "unhealthy {{pool}}":
              "max by (pool) (shoal_unhealthy_workers)",
              "live {{pool}}": "max by (pool) (shoal_live_workers)"}),
        Panel("Active", "short", {"{{pool}}": "max by (pool) (shoal_pool_active)"},
        "0: may be scaled to zero."),
        Panel("Tokens", "short",
        {"queued {{pool}}": "max by (pool) (shoal_queued_tokens)", "leased {{pool}}":
              "max by (pool) (shoal_leased_tokens)"}),
        Panel("Schedulers", "short",
        {"leaders": "sum(shoal_scheduler_leader)",
        "view age {{instance}}": "shoal_view_age_seconds"}),
        Panel("Plans", "short", {"a minute": "60 * max(deriv(shoal_plan_number[5m]))"}),
    ],
)  # fmt: skip

HTTP = Dashboard(
    "shoal-http",
    "Shoal: HTTP",
    [
        Panel("Requests", "reqps",
        {"{{route}} {{status}}": rate("shoal_http_requests_total", "route", "status")},
              "Finished requests per second; 499: the client disconnected."),
        Panel("Latency", "s", {"p50 {{route}}": quantile(0.5, "shoal_http_request", "route"),
              "p99 {{route}}": quantile(0.99, "shoal_http_request", "route")},
              "Until the response is written."),
        Panel("Connections", "short", {"{{instance}}": "shoal_http_connections"}),
        Panel("Bodies in flight", "bytes", {"{{instance}}": "shoal_http_held_bytes"},
        "Memory of an edge that bodies in flight take."),
        Panel("Routers seen", "short", {"{{instance}}": "shoal_http_router_up"},
        "0: the edge reaches no serving router."),
        Panel("Batches running", "short", {"{{instance}}": "shoal_http_batches_active"},
        "Batches of OpenAI's API that each edge runs; an edge without storage for them has none."),
        Panel("Batches ended", "short",
        {"{{status}}": "sum by (status) (increase(shoal_http_batches_ended_total[1h]))"},
              "In the last hour, by status."),
        Panel("Requests of batches", "reqps",
        {"{{outcome}}": rate("shoal_http_batch_requests_total", "outcome")},
              "Results stored per second; failed includes requests of expired batches."),
        Panel("Requests of batches in flight", "short",
        {"{{instance}}": "shoal_http_batch_requests_in_flight"},
              "Requests of batches that each edge waits for."),
        Panel("Submitted jobs running", "short",
        {"{{model}}": "sum by (model) (shoal_http_jobs_active)"},
              "By model; an edge runs at most four jobs and batches at a time."),
        Panel("Rows of jobs left", "short",
        {"{{model}}": "sum by (model) (shoal_http_job_rows_left)"},
              "Rows of running jobs that are not written yet."),
        Panel("Rows of jobs", "short",
        {"{{outcome}}": rate("shoal_http_job_rows_total", "outcome")},
              "Rows written per second; failed rows have an error."),
        Panel("Submitted jobs stopped", "short",
        {"{{status}}": "sum by (status) (increase(shoal_http_jobs_ended_total[1h]))"},
              "In the last hour, by status."),
    ],
)  # fmt: skip

FAILED = (
    'shoal_requests_total{reason=~"INTERNAL|WORKER_LOST|MODEL_LOAD_FAILED|DEADLINE_PASSED'
    '|NO_CAPACITY"}'
)
SHORT = 'method=~"(.*/)?(Encode|Score)"'
"""Calls with a latency objective."""


def failed_share(window: str) -> str:
    return f"sum(rate({FAILED}[{window}])) / sum(rate(shoal_requests_total[{window}]))"


def slow_share(window: str) -> str:
    fast = f'sum(rate(shoal_request_seconds_bucket{{{SHORT},le="2.0"}}[{window}]))'
    return f"1 - {fast} / sum(rate(shoal_request_seconds_count{{{SHORT}}}[{window}]))"


OBJECTIVES = Dashboard(
    "shoal-objectives",
    "Shoal: objectives",
    [
        Panel("Error budget used", "percentunit",
        {"of 30 days": f"({failed_share('30d')}) / 0.001"},
              "1: all of what 99.9 % leaves."),
        Panel("Latency budget used", "percentunit", {"of 30 days": f"({slow_share('30d')}) / 0.01"},
              "1: all of what 99 % within 2 s leaves."),
        Panel("Error budget burn rate", "short",
        {window: f"({failed_share(window)}) / 0.001" for window in ("5m", "1h", "6h")},
              "1 uses the budget in 30 days; alerts fire at 14.4 (1h and 5m) and 6 (6h and 30m)."),
        Panel("Latency budget burn rate", "short",
        {window: f"({slow_share(window)}) / 0.01" for window in ("5m", "1h", "6h")},
              "As for errors."),
        Panel("Errors by reason", "percentunit",
        {"{{reason}}": f"sum by (reason) (rate({FAILED}[1h])) "
              "/ ignoring(reason) group_left sum(rate(shoal_requests_total[1h]))"},
              "Share of all calls in an hour."),
        Panel("Slower than 2 s", "percentunit", {"5m": slow_share("5m"), "1h": slow_share("1h")},
        "Share of Encode and Score calls."),
    ],
)  # fmt: skip

DASHBOARDS = {
    "mesh-overview": MESH,
    "objectives": OBJECTIVES,
    "http": HTTP,
    "lanes": LANES,
    "workers": WORKERS,
    "scaling": SCALING,
}


def render(dashboard: Dashboard) -> str:
    """Render a dashboard that Grafana can import; a variable chooses the data source."""
    panels = [_panel(number, panel) for number, panel in enumerate(dashboard.panels)]
    whole = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["shoal"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Prometheus",
                }
            ]
        },
        "panels": panels,
    }
    return json.dumps(whole, indent=1) + "\n"


def _panel(number: int, panel: Panel) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {
            "refId": chr(ord("A") + index),
            "expr": query,
            "legendFormat": legend,
            "exemplar": True,
            "datasource": source,
        }
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.what,
        "datasource": source,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": row * HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]},
            "tooltip": {"mode": "multi"},
        },
        "targets": targets,
    }


def queries() -> Iterator[tuple[str, str]]:
    """Return all dashboards, by path."""
    for dashboard in DASHBOARDS.values():
        for panel in dashboard.panels:
            for query in panel.queries.values():
                yield f"{dashboard.title}, {panel.title}", query


def main() -> int:
    check = "--check" in sys.argv[1:]
    for name, dashboard in DASHBOARDS.items():
        path, text = FOLDER / f"{name}.json", render(dashboard)
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path} is not current: run make dashboards", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
