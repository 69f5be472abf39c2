"""`shoal up --metrics-address`: one page with the metrics of every process, whatever this shell's
own variable says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from libs.errors import InvalidInput
from libs.telemetry.gathering import gather
from services.local.mesh import running
from services.local.settings import Settings
from tests.support.waiting import wait_until


def page(address: str) -> dict[str, set[str]]:
    """Return the names of the processes that each series has samples of."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.name != "up" or sample.value:
                found.setdefault(family.name, set()).add(sample.labels["process"])
    return found


async def test_one_page_has_the_metrics_of_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "SHOAL_METRICS_ADDRESS", "127.0.0.1:1"
    )  # of this shell: no child may take it
    settings = Settings(
        port=0, http_port=0, workers=2, has_scheduler=True, metrics_address="127.0.0.1:0"
    )
    async with running(settings) as mesh:
        everyone = {"router", "scheduler", "worker-0", "worker-1", "edge"}
        # A process that has no core for some seconds counts as down for them.
        for name in ("up", "process_resident_memory_bytes"):
            await asyncio.to_thread(
                wait_until,
                lambda name=name: page(mesh.metrics_address)[name] == everyone,  # type: ignore[misc]
                120,
                f"{name} of every process",
            )
        before = mesh.supervisor.pids["worker-1"]
        # The supervisor restarts no worker while this coroutine does not wait.
        os.kill(before, signal.SIGKILL)
        wait_until(
            lambda: page(mesh.metrics_address)["up"] != everyone,
            120,
            "the page to say that a worker is down",
        )


async def test_no_process_serves_metrics_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_METRICS_ADDRESS", "127.0.0.1:1")
    async with running(Settings(port=0)) as mesh:
        assert mesh.metrics_address == ""


def test_process_that_does_not_answer_is_down() -> None:
    (up,) = gather({"worker-0": "127.0.0.1:1"})
    assert [(sample.name, sample.labels, sample.value) for sample in up.samples] == [
        ("up", {"process": "worker-0"}, 0.0)
    ]


def test_address_without_a_port_is_refused() -> None:
    with pytest.raises(InvalidInput, match="host:port"):
        Settings(metrics_address="9464")
