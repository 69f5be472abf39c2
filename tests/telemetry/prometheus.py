"""A real Prometheus (Debian's package) that scrapes a test's processes, and promtool."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "k8s" / "components" / "alerts" / "rules.yaml"
PLACES = (str(ROOT / ".cache" / "prometheus" / "usr" / "bin"), os.environ.get("PATH", ""))


def program(name: str) -> str:
    """Find a program where `make .cache/prometheus/.done` put it, or on the PATH.

    Fails instead of skipping: without it nothing is tested.
    """
    found = shutil.which(name, path=os.pathsep.join(PLACES))
    assert found, (
        f"{name} is not here: `make .cache/prometheus/.done` fetches Debian's package; elsewhere "
        "install prometheus"
    )
    return found


def rules_file(directory: Path) -> Path:
    """The rules as Prometheus reads them, out of the operator's object."""
    path = directory / "rules.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(RULES.read_text())["spec"]))
    return path


class Prometheus:
    """`query` asks it."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self._ask("query", query=expression)["result"])

    def exemplars(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        return list(
            self._ask("query_exemplars", query=expression, start=f"{start:.3f}", end=f"{end:.3f}")
        )

    def alerts(self) -> set[str]:
        """Return the names of alerts that are firing or pending."""
        return {alert["labels"]["alertname"] for alert in self._ask("alerts")["alerts"]}

    def _ask(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error


@contextmanager
def scraping(
    directory: Path, targets: Mapping[str, Sequence[str]], rules: Path
) -> Iterator[Prometheus]:
    """`targets`: addresses by job. Scrapes and evaluates every second."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(own)}]}
            for job, own in targets.items()
        ],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        program("prometheus"), f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]  # fmt: skip
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    with (
        (directory / "prometheus.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            wait_until(lambda: _answers(port), 30.0, "Prometheus to be ready")
            yield prometheus
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
