"""The cost of jobs, by the workers that have the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shoal.bulk.cost import CostMeter
from shoal.bulk.engine import JobRun, create
from shoal.bulk.manifest import Manifest
from shoal.bulk.places import Folder
from shoal.bulk.progress import JobProgress
from shoal.bulk.spec import BulkLimits
from shoal.cli.bulk.arguments import JobLimitOptions
from shoal.cli.bulk.running import continued, progress_line
from shoal.errors import PermissionDenied
from shoal.status import Mesh, WorkerStatus

from tests.api.fake_router import MODEL as SERVED
from tests.bulk.fake_client import FakeClient
from tests.bulk.jobs import MODEL, read_manifest, recipe, write_parquet
from tests.bulk.test_cli import Run, files, nobody, router, run, source

__all__ = ["files", "nobody", "router", "run", "source"]  # Fixtures.


def worker(pool: str, *models: str) -> WorkerStatus:
    return WorkerStatus("w", pool, "cuda", 1, 1, models, False, 0.0)


class Metered(FakeClient):
    """Has a mesh of two workers with the model in the pool `l4`."""

    async def mesh(self) -> Mesh:
        return Mesh((worker("l4", MODEL), worker("l4", MODEL), worker("l4")), (), (), "router")


def test_time_of_workers_with_the_model_is_charged_by_pool() -> None:
    meter = CostMeter(FakeClient(), MODEL, {"l4": 0.7, "h100": 4.0}, {"l4": 1.0})  # type: ignore[arg-type]
    assert (meter.spent(100.0), meter.left(3600.0)) == ({"l4": 1.0}, 0.0)
    others = [worker("l4"), worker("cpu", MODEL)]  # without the model, and without a price
    meter.observe([worker("l4", MODEL), worker("l4", "org/other", MODEL), *others], 1000.0)
    assert meter.left(3600.0) == pytest.approx(1.4)
    meter.observe([worker("h100", MODEL)], 1000.0 + 1800.0)
    assert meter.spent(1000.0 + 1800.0 + 900.0) == pytest.approx({"l4": 1.7, "h100": 1.0})
    assert meter.left(3600.0) == pytest.approx(4.0)


def test_progress_shows_the_cost_and_an_estimate_of_all() -> None:
    progress = JobProgress(10, 40, 0, 90, 1.0, 9.0, 30.0, 1, "", {"l4": 1.0, "h100": 0.5}, 6.0)
    assert "cost 1.50 (l4 1.00, h100 0.50) of about 6.00" in progress_line(progress)
    assert progress.rates()["whole_cost"] == 6.0


async def run_metered(
    source: Path, out: Path, **prices: float
) -> tuple[Manifest, list[JobProgress]]:
    seen: list[JobProgress] = []
    manifest = create(Folder(out), str(source), recipe(), BulkLimits(prices=prices))
    job = JobRun(Folder(out), manifest, Metered(), on_progress=seen.append)  # type: ignore[arg-type]
    return await job.run(), seen


async def test_cost_is_in_the_manifest_and_continues_after_a_resume(tmp_path: Path) -> None:
    source, out = write_parquet(tmp_path / "in.parquet", 45), tmp_path / "out"
    manifest, _ = await run_metered(source, out, l4=3600.0)
    first = manifest.cost["l4"]
    # At most two workers for the whole time.
    assert 0 < first <= 2 * manifest.active_seconds + 0.001
    manifest.state = "paused"
    manifest.save(Folder(out))
    again, seen = await run_metered(source, out, l4=3600.0)
    assert first < again.cost["l4"] <= 2 * again.active_seconds + 0.001
    assert seen[0].cost["l4"] >= first
    assert read_manifest(out).cost == again.cost


async def test_job_without_prices_does_not_ask_for_workers(tmp_path: Path) -> None:
    source, out = write_parquet(tmp_path / "in.parquet", 45), tmp_path / "out"
    manifest = create(Folder(out), str(source), recipe(), BulkLimits())
    found = await JobRun(Folder(out), manifest, FakeClient()).run()  # type: ignore[arg-type]
    assert (found.state, found.cost) == ("completed", {})


async def test_mesh_that_refuses_its_workers_stops_a_job_with_prices(tmp_path: Path) -> None:
    class Refused(FakeClient):
        async def mesh(self) -> Mesh:
            self.gate.set()
            raise PermissionDenied("the role client may not call GetMesh")

    source, out = write_parquet(tmp_path / "in.parquet", 45), tmp_path / "out"
    client, limits = Refused(), BulkLimits(prices={"l4": 1.0})
    client.gate.clear()
    job = JobRun(Folder(out), create(Folder(out), str(source), recipe(), limits), client)  # type: ignore[arg-type]
    with pytest.raises(PermissionDenied) as caught:
        await job.run()
    assert "without --price" in "".join(caught.value.__notes__)
    assert read_manifest(out).state == "failed"


def test_prices_are_options_of_the_command(run: Run, files: list[Any], tmp_path: Path) -> None:
    code, _, notes = run("run", "encode", SERVED, *files, "--price", "cpu")
    assert (code, "'cpu' is not a pool and its price" in notes) == (2, True)
    code, _, _ = run("run", "encode", SERVED, *files, "--price", "cpu=3600")
    assert code == 0
    found = json.loads(run("show", tmp_path / "out", "--json")[1])
    assert found["limits"]["prices"] == {"cpu": 3600.0}
    assert found["cost"]["cpu"] > 0
    assert "cost" in run("show", tmp_path / "out")[1]


def test_repeated_command_keeps_limits_that_are_not_given(tmp_path: Path) -> None:
    source, out = str(write_parquet(tmp_path / "in.parquet", 3)), Folder(tmp_path / "out")
    first = continued(out, source, recipe(), JobLimitOptions(in_flight=3, price=["cpu=2"]))
    out.path.mkdir()
    first.save(out)
    again = continued(out, source, recipe(), JobLimitOptions(max_failed=0.5))
    assert again.job == first.job
    assert again.limits == BulkLimits(in_flight=3, failed_share=0.5, prices={"cpu": 2.0})
