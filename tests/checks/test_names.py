"""`make check` finds names in pages, alerts and dashboards that the code does not have."""

from __future__ import annotations

import pytest

from libs.telemetry import metrics
from tools import names

KNOWN = names.KnownNames.from_repository(
    {
        "libs/a.py": 'A = "v1:wakeup"\nKEY = f"v1:{{{slot}}}:lane:{name}"\nenviron["SHOAL_POOL"]',
        "protos/a.proto": "TASK_ENCODE = 1;",
        "CHANGELOG.md": "OLD_NAME",
    }
)


@pytest.mark.parametrize(
    ("file", "line", "problem"),
    [
        ("docs/a.md", "`MODEL_BROKEN`: no such file", "no name MODEL_BROKEN"),
        ("docs/a.md", "`OLD_NAME`", "no name OLD_NAME"),
        ("docs/a.md", "`TASK_ENCODE` and SHOAL_POOL", ""),
        ("k8s/a.yaml", "SHOAL_POOLE: a", "no name SHOAL_POOLE"),
        ("k8s/a.yaml", "SHOAL_POOL: a, POD_NAME: b", ""),
        ("k8s/rules.yaml", 'x{reason=~"INTERNAL|MODEL_BROKEN"}', "no reason MODEL_BROKEN"),
        ("k8s/board.json", r"x{reason!=\"BROKEN\"}", "no reason BROKEN"),
        ("k8s/rules.yaml", 'x{reason=~"INTERNAL|MODEL_LOAD_FAILED",outcome="OK"}', ""),
        ("k8s/rules.yaml", "shoal_requests[5m]", "no metric shoal_requests"),
        ("k8s/rules.yaml", "shoal_requests_total[5m] / shoal_request_seconds_count", ""),
        ("docs/a.md", "`shoal_request_seconds_total`", "no metric shoal_request_seconds_total"),
        ("docs/a.md", "`shoal_request_seconds`, shoal_mesh", ""),
        ("docs/a.md", "`v1:{fleet}:nothing`", "no Redis key nothing"),
        ("docs/a.md", "`v1:wakeup`, `v1:{0}:lane:a`", ""),
        ("docs/design/queue.md", "`whose` maps jobs to tenants", "no Redis key whose"),
        ("docs/design/queue.md", "`tenant_of` maps jobs to tenants", ""),
        ("docs/a.md", "`whose` is a word here", ""),
    ],
)
def test_unknown_name_is_reported_with_its_line(file: str, line: str, problem: str) -> None:
    expected = [f"{file}:2: {problem}"] if problem else []
    assert list(names.unknown(file, f"\n{line}\n", KNOWN)) == expected


def test_every_metric_of_the_code_is_known() -> None:
    assert {"shoal_requests_total", f"{metrics.LANE_QUEUED_JOBS.name}"} <= KNOWN.series
