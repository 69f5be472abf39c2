"""The metrics for Prometheus are the numbers that are reported to KEDA."""

from __future__ import annotations

import asyncio
import math
import urllib.request
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from libs.errors import InvalidInput, NoCapacity
from libs.fleet import LeaderRecord
from libs.telemetry.exposition import parse_address, serving_metrics
from services.scheduler.demand import Demand, DemandOptions
from services.scheduler.metrics import PoolMetrics
from services.scheduler.scaler import Scaler
from services.scheduler.view import SchedulerView
from tests.scheduler.snapshots import Mesh, holding
from tests.scheduler.test_scaler import POOLS

Numbers = dict[tuple[str, str], float]


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as decision:
        return decision.read().decode()


async def scrape(address: str) -> Numbers:
    """Values by name and pool (empty: of no pool)."""
    text = await asyncio.to_thread(_get, f"http://{address}/metrics")
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {(sample.name, sample.labels.get("pool", "")): sample.value for sample in samples}


async def test_metrics_match_keda_answers() -> None:
    mesh, view, demand = Mesh(), SchedulerView(), Demand(POOLS)
    now = [mesh.at]
    scaler = Scaler(demand, view, clock=lambda: now[0])
    async with serving_metrics(
        "127.0.0.1:0", PoolMetrics(scaler, view, scheduler_id="me").read
    ) as address:
        before = await scrape(address)
        assert before["shoal_view_age_seconds", ""] == math.inf
        assert not [pool for _, pool in before if pool]

        mesh.worker("a", holding(speed=100.0))
        mesh.worker("b", preempted_in_seconds=20.0)
        demand.update(mesh.snapshot())
        mesh.lane(12_000, 200, enqueued=0)
        snapshot = mesh.snapshot(0.5)
        snapshot = replace(
            snapshot, fleet=replace(snapshot.fleet, leader=LeaderRecord("me", 3, (3 << 32) + 7, 0))
        )
        demand.update(snapshot)
        view.update(snapshot)
        now[0] = mesh.at + 2.0
        seen = await scrape(address)
        reported = scaler.demand_for("cpu", DemandOptions())
        assert (
            reported.desired == 4
        )  # 121 s of work, 60 done before another worker arrives, in 30 s; and one for the lost one
        assert seen["shoal_desired_workers", "cpu"] == reported.desired
        assert seen["shoal_needed_workers", "cpu"] == pytest.approx(reported.need.workers)
        assert seen["shoal_backlog_seconds", "cpu"] == pytest.approx(121.0)
        assert (seen["shoal_queued_tokens", "cpu"], seen["shoal_leased_tokens", "cpu"]) == (
            12_000,
            200,
        )
        assert (seen["shoal_live_workers", "cpu"], seen["shoal_ready_workers", "cpu"]) == (2, 1)
        assert seen["shoal_preempting_workers", "cpu"] == 1
        assert (seen["shoal_pool_active", "cpu"], seen["shoal_pool_active", "gpu"]) == (1, 0)
        assert seen["shoal_desired_workers", "gpu"] == 0
        assert (seen["shoal_scheduler_leader", ""], seen["shoal_plan_number", ""]) == (
            1,
            (3 << 32) + 7,
        )
        assert seen["shoal_view_age_seconds", ""] == pytest.approx(2.0)

        now[0] += 60.0  # as for KEDA, an old answer lets nothing shrink
        assert (await scrape(address))["shoal_pool_active", "gpu"] == 1


async def test_port_is_released_and_taken_port_is_reported() -> None:
    scaler = Scaler(Demand(POOLS), SchedulerView())
    metrics = PoolMetrics(scaler, SchedulerView(), scheduler_id="me").read
    async with serving_metrics("127.0.0.1:0", metrics) as address:
        with pytest.raises(NoCapacity, match="cannot listen"):
            async with serving_metrics(address, metrics):
                pass
    async with serving_metrics(address, metrics) as again:
        assert again == address


def test_addresses() -> None:
    assert parse_address("[::1]:9090") == ("::1", 9090)
    for wrong in ("9090", ":9090", "here", "here:port", "here:65536", ""):
        with pytest.raises(InvalidInput):
            parse_address(wrong)
