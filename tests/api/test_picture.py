"""The rates and tables that `shoal top` computes from snapshots of the mesh. Pure."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text
from shoal.cli.top.drawing import drawn, fitted
from shoal.cli.top.history import RATE_WINDOW_SECONDS, MeshHistory, Snapshot
from shoal.status import LaneStatus, Mesh, Model, ModelPlace, PoolStatus, Scheduler, WorkerStatus

LONG = "sentence-transformers/all-MiniLM-L6-v2"


def worker(
    name: str = "w",
    pool: str = "cpu",
    *,
    computed: float = 0.0,
    age: float = 0.0,
    draining: bool = False,
) -> WorkerStatus:
    return WorkerStatus(
        name, pool, "cpu", 8 << 30, 128 << 20, (LONG,), draining, age, device_seconds=computed
    )


def lane(
    model: str = LONG,
    pool: str = "cpu",
    *,
    entered: int = 0,
    queued: int = 0,
    leased: int = 0,
    oldest: float = 0.0,
) -> LaneStatus:
    return LaneStatus(pool, model, "", queued // 10, queued, leased, 0, 0, 0, 0, 0, entered, oldest)


def model(name: str = LONG, state: str = "resident", on: str = "w", error: str = "") -> Model:
    return Model(
        name,
        state,
        None,
        (ModelPlace(on, state, 90 << 20, 0.5, 12_000.0, error, False, 0, 0),),
        0,
        error,
    )


def mesh(
    *,
    workers: tuple[WorkerStatus, ...] = (),
    lanes: tuple[LaneStatus, ...] = (),
    models: tuple[Model, ...] = (),
) -> Mesh:
    return Mesh(
        workers, models, lanes, "router-1", Scheduler("s1", 1, 0.5), (PoolStatus("cpu", 3),)
    )


def text(picture: Snapshot, width: int = 80, height: int | None = None) -> list[str]:
    """The drawn lines."""
    out = io.StringIO()
    Console(file=out, width=width, markup=False).print(drawn(picture, Text("head"), width, height))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_tokens_a_second_are_those_that_left_the_lane() -> None:
    history = MeshHistory()
    first = history.add(mesh(lanes=(lane(entered=1000, queued=500, leased=100),)), 10.0)
    assert first.lanes[0].tokens_per_second is None
    second = history.add(mesh(lanes=(lane(entered=5000, queued=300, leased=300),)), 14.0)
    assert second.lanes[0].tokens_per_second == pytest.approx((4400 - 400) / 4)
    assert second.pools[0].tokens_per_second == second.lanes[0].tokens_per_second


def test_rates_are_over_the_last_seconds_only() -> None:
    history = MeshHistory()
    for second in range(30):
        picture = history.add(
            mesh(lanes=(lane(entered=100 * second if second < 15 else 1500),)), float(second)
        )
    assert RATE_WINDOW_SECONDS < 14
    assert picture.lanes[0].tokens_per_second == 0


def test_counter_reset_gives_no_rate() -> None:
    history = MeshHistory()
    history.add(mesh(lanes=(lane(entered=9000),), workers=(worker(computed=50.0),)), 0.0)
    picture = history.add(
        mesh(lanes=(lane(entered=10), lane("org/new", entered=7)), workers=(worker(computed=1.0),)),
        2.0,
    )
    assert [one.tokens_per_second for one in picture.lanes] == [None, None]
    assert picture.workers[0].busy is None


def test_busy_fraction_is_computed_between_heartbeats() -> None:
    history = MeshHistory()
    history.add(mesh(workers=(worker(computed=10.0, age=1.5),)), 10.0)
    history.add(mesh(workers=(worker(computed=10.0, age=2.5),)), 11.0)
    picture = history.add(mesh(workers=(worker(computed=11.0, age=0.5),)), 11.0)
    assert picture.workers[0].busy == pytest.approx(0.5)
    assert picture.pools[0].busy == pytest.approx(0.5)


def test_pools_are_sums_and_those_without_workers_are_there() -> None:
    lanes = (
        lane(queued=70, oldest=1.0),
        lane("org/b", queued=30, oldest=4.0),
        lane(pool="l4-spot", queued=5),
    )
    picture = MeshHistory().add(
        mesh(workers=(worker("a"), worker("b", draining=True)), lanes=lanes), 0.0
    )
    cpu, spot = picture.pools
    assert (
        cpu.pool,
        cpu.workers,
        cpu.draining,
        cpu.desired_workers,
        cpu.queued_tokens,
        cpu.oldest_seconds,
    ) == (
        "cpu",
        2,
        1,
        3,
        100,
        4,
    )
    assert (spot.pool, spot.workers, spot.desired_workers, spot.queued_tokens) == (
        "l4-spot",
        0,
        None,
        5,
    )
    assert (cpu.used_bytes, cpu.memory_bytes) == (256 << 20, 16 << 30)


def test_one_pool_of_several() -> None:
    models = (model(), model("org/far", on="b"), model("org/cold", "cold"))
    whole = MeshHistory().add(
        mesh(
            workers=(worker("w"), worker("b", "gpu")),
            lanes=(lane(), lane(pool="gpu")),
            models=models,
        ),
        0.0,
    )
    assert [one.model for one in whole.models] == [LONG, "org/far"]
    part = whole.for_pool("gpu")
    assert [one.pool for one in part.pools] == ["gpu"]
    assert [one.worker_id for one in part.workers] == ["b"]
    assert [one.pool for one in part.lanes] == ["gpu"]
    assert [one.model for one in part.models] == ["org/far"]


def test_eighty_columns_are_enough() -> None:
    workers = (worker("shoal-worker-cpu-7d9f8c6b5-x2x9z"), worker("w2", "l4-spot", draining=True))
    lanes = (
        lane(queued=1_234_567, leased=99_999, oldest=75.0),
        lane("BAAI/bge-m3", "l4-spot", queued=10, oldest=0.25),
    )
    failed = model("org/broken", "failed", error="no tensor")
    picture = MeshHistory().add(mesh(workers=workers, lanes=lanes, models=(model(), failed)), 0.0)
    lines = text(picture)
    assert max(map(len, lines)) <= 80
    drawn_text = "\n".join(lines)
    for wanted in (
        "…/all-MiniLM-L6-v2",
        "1.2 M",
        "99,999",
        "75 s",
        "0.2 s",
        "128.0 MiB of 8.0 GiB",
        "12,000 tokens/s",
        "failed",
        "desired",
    ):
        assert wanted in drawn_text
    assert LONG in "\n".join(text(picture, width=160))
    names = [line.split()[0] for line in lines if line.startswith(("…/", "BAAI"))]
    assert names[:2] == ["…/all-MiniLM-L6-v2", "BAAI/bge-m3"]  # the longest lane first


def test_omitted_rows_are_counted() -> None:
    workers = tuple(worker(f"w{number:02}") for number in range(40))
    lines = text(MeshHistory().add(mesh(workers=workers, models=(model(),)), 0.0), height=24)
    assert len(lines) <= 24
    assert any("more" in line for line in lines)
    assert any("…/all-MiniLM-L6-v2" in line for line in lines)


def test_longest_tables_are_cut_first() -> None:
    assert fitted([1, 20, 3], 10) == [1, 6, 3]
    assert fitted([1, 2], 10) == [1, 2]
    assert fitted([5, 5], 0) == [1, 1]


def test_empty_mesh_says_so() -> None:
    picture = replace(MeshHistory().add(mesh(), 0.0), pools=())
    assert "no workers" in "\n".join(text(picture))
