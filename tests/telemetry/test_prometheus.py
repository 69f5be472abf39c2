"""Every query of dashboards and alerts, asked of a real Prometheus that scrapes a real mesh to
which all of it happens.
"""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml
from shoal import Client, ReadText, RetryPolicy, ShoalError

from libs.telemetry import metrics
from tests.generation import served
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster, lasting_port
from tests.support.texts import texts
from tests.support.waiting import wait_until
from tests.telemetry.prometheus import RULES, Prometheus, program, rules_file, scraping
from tests.telemetry.receiver import receiving
from tools.k8s import dashboards

MODEL, BROKEN, WRITER = "random/embed", "random/broken", "random/writer"
KEYS_AND_VALUES = "shoal_key_value_bytes"
"""A series of generative models, which no panel shows."""
COMPLETED_BATCH = 'shoal_http_batches_ended_total{status="completed"} > 0'
ROOT = Path(__file__).resolve().parents[2]
EXPRESSIONS: dict[str, str] = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load(RULES.read_text())["spec"]["groups"]
    for rule in group["rules"]
}
ASKED_OF_NOBODY = 12
"""More than pulls of both workers can wait."""
OF_LOAD = (
    "ShoalRequestsFail",
    "ShoalErrorBudgetBurnsFast",
    "ShoalErrorBudgetBurnsSlowly",
    "ShoalRequestsRefused",
    "ShoalModelsDoNotLoad",
    "ShoalModelsThrash",
    "ShoalDeviceTimeWasted",
    "ShoalHttpFails",
)
OF_FROZEN_WORKERS = ("ShoalJobsWait", "ShoalJobsGivenUp", "ShoalPoolTooSmall")
OF_LOST_REDIS = ("ShoalRedisAway", "ShoalSchedulerBlind", "ShoalEdgeWithoutRouter")
OF_THE_END = ("ShoalNoLeader", "ShoalRouterDown", "ShoalProcessDown")
OF_PROMTOOL = (
    "ShoalCertificateExpires",
    "ShoalLatencyBudgetBurnsFast",
    "ShoalLatencyBudgetBurnsSlowly",
)
"""Only promtool's tests make these true: cert-manager's series are not ours, and a mesh's latency
depends on the machine.
"""


@dataclass
class Seen:
    """Prometheus' results after a mesh ran the whole scenario, by query or by alert.

    `names`: of all series scraped.
    """

    queries: dict[str, list[dict[str, Any]]]
    alerts: dict[str, list[dict[str, Any]]]
    quiet: dict[str, list[dict[str, Any]]]
    """Alerts before the scenario began."""
    names: set[str]
    exemplars: list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    directory = tmp_path_factory.mktemp("prometheus")
    write_checkpoint(
        "bert", directory / "models" / MODEL, hidden=128, layers=4, sentence=SentenceFiles()
    )
    served.write("qwen3", directory / "models" / WRITER)
    (directory / "models" / BROKEN).mkdir()
    (directory / "models" / BROKEN / "config.json").write_text('{"model_type": "bert"}')
    (directory / "mesh").mkdir()
    names = ("router-0", "router-1", "scheduler-0", "scheduler-1", "worker-0", "worker-1", "edge-0")
    addresses = {name: f"127.0.0.1:{lasting_port()}" for name in names}
    kinds = ("router", "scheduler", "worker", "edge")
    targets = {
        f"shoal/{kind}": [addresses[name] for name in names if name.startswith(kind)]
        for kind in kinds
    }
    with receiving() as (_, endpoint):
        environment = {
            "SHOAL_LEASE_MS": "3000",
            "SHOAL_MAX_ATTEMPTS": "1",
            "SHOAL_MAX_QUEUED_TOKENS": "20000",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        }
        each = {name: {"SHOAL_METRICS_ADDRESS": address} for name, address in addresses.items()}
        each["edge-0"]["SHOAL_BATCHES_URL"] = str(directory / "batches")
        each["edge-0"]["SHOAL_JOBS_ROOTS"] = str(directory / "data")
        (directory / "data").mkdir()
        cluster = Cluster(
            directory / "mesh", models=str(directory / "models"), routers=2, schedulers=2,
            workers=2, edges=1,
            environment=environment, each=each,
        )  # fmt: skip
        with cluster, scraping(directory, targets, rules_file(directory)) as prometheus:
            yield _live(cluster, prometheus, directory / "data")


def _live(cluster: Cluster, prometheus: Prometheus, data: Path) -> Seen:
    alerts: dict[str, list[dict[str, Any]]] = {}

    def await_alerts(
        names: tuple[str, ...], seconds: float, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        def all_are_true() -> bool:
            meanwhile()
            alerts.update(
                {
                    name: found
                    for name in names
                    if name not in alerts and (found := prometheus.query(EXPRESSIONS[name]))
                }
            )
            return all(name in alerts for name in names)

        with suppress(AssertionError):  # the tests say which are missing
            wait_until(all_are_true, seconds, f"{names}")

    began = time.time()
    with Client(cluster.address, timeout=20.0) as client:
        client.encode(MODEL, ["a text"])
        wait_until(
            lambda: bool(prometheus.query("shoal_scheduler_leader == 1")),
            30.0,
            "a leader to be scraped",
        )
        wait_until(
            lambda: all("1" in sample["value"] for sample in prometheus.query("up")),
            30.0,
            "all to be scraped",
        )
        quiet: dict[str, list[dict[str, Any]]] = {}

        def all_are_quiet() -> (
            bool
        ):  # a scrape may take longer than its second while the machine is busy with others
            for name, query in EXPRESSIONS.items():
                if name not in quiet or quiet[name]:
                    quiet[name] = prometheus.query(query)
            return not any(quiet.values())

        with suppress(AssertionError):
            wait_until(all_are_quiet, 30.0, "no alert to be true")
        patience = cycle(
            (0.06, 0.12, 0.25, 0.5)
        )  # the first is that of a quiet machine; of a busy one, jobs reach a device later
        await_alerts(OF_LOAD, 90.0, lambda: _load(cluster, client, next(patience)))
        _start_batch(cluster, MODEL)
        job = _submit_job(cluster, MODEL, data)
        queries: dict[str, list[dict[str, Any]]] = {}

        def all_have_data() -> bool:
            _over_http(cluster, MODEL)
            client.extract(WRITER, ["a text"], ReadText(max_tokens=4))
            client.encode(MODEL, ["a text"])  # it is resident again, and workers wait for more
            queries.update({query: prometheus.query(query) for _, query in dashboards.queries()})
            for query in (COMPLETED_BATCH, KEYS_AND_VALUES):
                queries[query] = prometheus.query(query)
            return all(map(_has_numbers, queries.values()))

        with suppress(AssertionError):  # the tests say which are missing
            wait_until(all_have_data, 30.0, "every panel to have data")
        _post(cluster, f"/v1/jobs/{job}/cancel", {})
    exemplars = prometheus.exemplars("shoal_request_seconds_bucket", began, time.time())
    names = {sample["metric"]["__name__"] for sample in prometheus.query('{__name__=~"shoal_.*"}')}

    with (
        ThreadPoolExecutor(ASKED_OF_NOBODY) as threads,
        Client(cluster.address, timeout=60.0, retry=RetryPolicy(attempts=1)) as client,
    ):
        cluster.signal(cluster.workers, signal.SIGSTOP)
        asked = []
        for count in range(
            1, ASKED_OF_NOBODY + 1
        ):  # each pull that still waits takes one, and its lease runs out
            asked.append(threads.submit(_ask, client, count))
            time.sleep(0.5)
        await_alerts(OF_FROZEN_WORKERS, 45.0)
        cluster.resume(cluster.workers)
        for future in asked:
            future.result()
    cluster.kill("redis")
    await_alerts(OF_LOST_REDIS, 45.0)
    for name in (*cluster.schedulers, *cluster.routers):
        cluster.kill(name)
    await_alerts(OF_THE_END, 20.0)
    return Seen(queries, alerts, quiet, names, exemplars)


def _has_numbers(samples: list[dict[str, Any]]) -> bool:
    return any(not math.isnan(float(sample["value"][1])) for sample in samples)


def _over_http(cluster: Cluster, model: str) -> None:
    body = json.dumps({"model": model, "input": "a text"}).encode()
    with (
        suppress(urllib.error.HTTPError),
        urllib.request.urlopen(f"http://{cluster.http_addresses[0]}/v1/embeddings", body, 30),
    ):
        pass


def _start_batch(cluster: Cluster, model: str) -> None:
    """Upload a file with one request and start a batch of it."""
    edge = f"http://{cluster.http_addresses[0]}"
    body = {"model": model, "input": "a text"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    form = (
        '--a\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--a\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        f"{json.dumps(line)}\r\n--a--\r\n"
    )
    upload = urllib.request.Request(
        f"{edge}/v1/files", form.encode(), {"content-type": "multipart/form-data; boundary=a"}
    )
    with urllib.request.urlopen(upload, timeout=30) as reply:
        file = json.load(reply)["id"]
    batch = {"input_file_id": file, "endpoint": line["url"], "completion_window": "24h"}
    _post(cluster, "/v1/batches", batch)


def _submit_job(cluster: Cluster, model: str, data: Path) -> str:
    """Submit a job that is too long for this test, and return its id."""
    (data / "in.jsonl").write_bytes(b'{"text": "a text"}\n' * 1_000_000)
    recipe = {"verb": "encode", "model": model, "chunk_rows": 16}
    job = {"recipe": recipe, "input": str(data / "in.jsonl"), "output": str(data / "out")}
    found = _post(cluster, "/v1/jobs", job | {"limits": {"in_flight": 1}})
    return str(found["id"])


def _post(cluster: Cluster, path: str, body: dict[str, Any]) -> Any:
    url = f"http://{cluster.http_addresses[0]}{path}"
    with urllib.request.urlopen(url, json.dumps(body).encode(), 30) as reply:
        return json.load(reply)


def _ask(client: Client, count: int) -> None:
    with suppress(ShoalError):
        client.encode(MODEL, texts(count, 5, 10, seed=count))


def _load(cluster: Cluster, client: Client, patience: float) -> None:
    """Run some seconds of each kind of load: normal, overload, requests that are cancelled after
    `patience` seconds, models that are loaded and evicted.
    """
    once = RetryPolicy(attempts=1)
    with (
        Client(cluster.address, timeout=10.0, retry=once, tenant="eager") as eager,
        ThreadPoolExecutor(16) as threads,
    ):
        for number in range(3):
            client.score(MODEL, "a query", texts(4, 5, 10, seed=number))
            client.encode(MODEL, texts(30, 20, 40, seed=number))
            for _ in range(3):
                with suppress(ShoalError):
                    eager.encode(MODEL, texts(2000, 30, 40, seed=number))
            hasty = [
                threads.submit(_give_up, eager, texts(40, 60, 80, seed=index), patience)
                for index in range(number * 16, number * 16 + 16)
            ]
            for future in hasty:
                future.result()
            for model in (MODEL, BROKEN, BROKEN):
                _over_http(cluster, model)
            with suppress(ShoalError):
                client.models.load(BROKEN, timeout=3.0)
            for worker in client.mesh().workers:
                if MODEL in worker.resident:
                    client.models.evict(MODEL)
                    break
            time.sleep(0.5)


def _give_up(client: Client, some: list[str], seconds: float) -> None:
    with suppress(ShoalError):
        client.encode(MODEL, some, timeout=seconds)


@pytest.mark.parametrize(("where", "query"), list(dashboards.queries()), ids=str)
def test_every_panel_has_data(seen: Seen, where: str, query: str) -> None:
    values = [float(sample["value"][1]) for sample in seen.queries[query]]
    assert values, f"{where}: nothing for {query}"
    assert any(not math.isnan(value) for value in values), f"{where}: no number for {query}"


def test_completed_batch_is_counted(seen: Seen) -> None:
    assert seen.queries[COMPLETED_BATCH]


@pytest.mark.parametrize("alert", [name for name in EXPRESSIONS if name not in OF_PROMTOOL])
def test_every_alert_fires_in_its_scenario(seen: Seen, alert: str) -> None:
    assert seen.alerts.get(alert), f"{alert} was never true"


@pytest.mark.parametrize("alert", EXPRESSIONS)
def test_no_alert_is_true_of_a_quiet_mesh(seen: Seen, alert: str) -> None:
    assert not seen.quiet[alert]


def test_every_series_that_we_define_was_scraped(seen: Seen) -> None:
    defined = {
        one.name + ("_total" if one.is_counter else "")
        for one in vars(metrics).values()
        if isinstance(one, metrics.Series)
    }
    counted = {
        family.name for family in metrics.REGISTRY.collect() if family.name.startswith("shoal_")
    }
    missing = {name for name in defined if name not in seen.names}
    missing |= {name for name in counted if not any(found.startswith(name) for found in seen.names)}
    assert not missing


def test_queries_name_only_series_that_we_define(seen: Seen) -> None:
    for query in [*(query for _, query in dashboards.queries()), *EXPRESSIONS.values()]:
        assert set(re.findall(r"shoal_[a-z_]+", query)) <= seen.names, query


def test_latencies_lead_to_traces(seen: Seen) -> None:
    labels = [exemplar["labels"] for series in seen.exemplars for exemplar in series["exemplars"]]
    assert labels
    assert all(re.fullmatch("[0-9a-f]{32}", one["trace_id"]) for one in labels)


def test_dashboards_are_current_and_whole() -> None:
    assert {path.stem for path in dashboards.FOLDER.glob("*.json")} == set(dashboards.DASHBOARDS)
    for name, dashboard in dashboards.DASHBOARDS.items():
        text = (dashboards.FOLDER / f"{name}.json").read_text()
        assert text == dashboards.render(dashboard), "run make dashboards"
        assert all(panel["targets"] for panel in json.loads(text)["panels"])
    files = yaml.safe_load((dashboards.FOLDER / "kustomization.yaml").read_text())[
        "configMapGenerator"
    ][0]["files"]
    assert sorted(files) == sorted(f"{name}.json" for name in dashboards.DASHBOARDS)


def test_every_alert_has_a_runbook_and_a_severity() -> None:
    runbooks = (ROOT / "docs" / "runbooks.md").read_text()
    rules = [
        rule
        for group in yaml.safe_load(RULES.read_text())["spec"]["groups"]
        for rule in group["rules"]
    ]
    for rule in rules:
        assert f"\n## {rule['alert']}\n" in runbooks
        assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
    assert len(re.findall("^## ", runbooks, re.MULTILINE)) == len(rules)


def test_promtool_accepts_the_rules_and_their_tests_pass(tmp_path: Path) -> None:
    rules = rules_file(tmp_path)
    checked = subprocess.run(
        [program("promtool"), "check", "rules", str(rules)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (tmp_path / "tests.yaml").write_text((Path(__file__).parent / "rules_test.yaml").read_text())
    command = [program("promtool"), "test", "rules", "tests.yaml"]
    tested = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    of_tests = yaml.safe_load((tmp_path / "tests.yaml").read_text())["tests"]
    assert {one["alertname"] for test in of_tests for one in test["alert_rule_test"]} == set(
        EXPRESSIONS
    )
