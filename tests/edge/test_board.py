"""The console's view of the mesh and its changes."""

from __future__ import annotations

from typing import Any

from shoal.v1 import mesh_pb2, models_pb2

from services.edge.console.board import Board
from services.edge.console.changes import changes
from tests.edge.fake_mesh import RESIDENT, busy, make_model, make_worker


def test_changes_are_described() -> None:
    def mesh(**more: Any) -> mesh_pb2.Mesh:
        return mesh_pb2.Mesh(**more)

    def described(before: mesh_pb2.Mesh, after: mesh_pb2.Mesh) -> list[str]:
        return [f"{change.tone}: {change.text}" for change in changes(before, after)]

    worker = make_worker("w", "p", "cpu", 1)
    draining = make_worker("w", "p", "cpu", 1, draining=True, preempted_in_seconds=30.0)
    assert described(mesh(), mesh(workers=[worker])) == ["good: worker w joined pool p"]
    assert described(mesh(workers=[worker]), mesh()) == ["bad: worker w was lost"]
    assert described(mesh(workers=[draining]), mesh()) == ["plain: worker w left after draining"]
    assert described(mesh(workers=[worker]), mesh(workers=[draining])) == [
        "warn: worker w loses its machine in 30 s",
        "warn: worker w is draining: it accepts no new work",
    ]

    def held(state: models_pb2.ModelState, **place: Any) -> mesh_pb2.Mesh:
        return mesh(workers=[worker], models=[make_model("o/m", "bert", 8, 1, state, "w", **place)])

    resident, cold = held(RESIDENT), held(models_pb2.MODEL_STATE_COLD)
    assert described(cold, held(models_pb2.MODEL_STATE_LOADING)) == ["plain: w loads o/m"]
    assert described(cold, held(RESIDENT, load_seconds=1.25)) == ["good: w loaded o/m in 1.2 s"]
    assert described(resident, cold) == ["plain: w evicted o/m: it stays on disk"]
    assert described(resident, held(models_pb2.MODEL_STATE_WARM)) == [
        "plain: w evicted o/m: it stays in host memory"
    ]
    assert described(resident, mesh(workers=[worker])) == ["plain: w evicted o/m"]
    assert described(resident, mesh()) == ["bad: worker w was lost"]
    assert described(cold, held(models_pb2.MODEL_STATE_FAILED, last_error="no config")) == [
        "bad: w could not load o/m: no config"
    ]
    assert described(resident, held(RESIDENT, pinned=True)) == ["plain: o/m is pinned on w"]
    lanes = [
        mesh_pb2.LaneStatus(pool="p", model="o/m", expired_jobs=at, dead_jobs=at)
        for at in (0, 1, 3)
    ]
    assert described(mesh(lanes=lanes[:1]), mesh(lanes=lanes[1:2])) == [
        "warn: 1 job of o/m passed its deadline in the lane",
        "bad: 1 job of o/m was given up after workers died with it",
    ]
    assert described(mesh(lanes=lanes[1:2]), mesh(lanes=lanes[2:])) == [
        "warn: 2 jobs of o/m passed their deadline in the lane",
        "bad: 2 jobs of o/m were given up after workers died with them",
    ]
    leader = mesh_pb2.SchedulerStatus(scheduler_id="s")
    assert described(mesh(), mesh(scheduler=leader)) == ["plain: scheduler s leads"]
    assert described(mesh(scheduler=leader), mesh()) == [
        "warn: no scheduler leads: workers claim models themselves"
    ]
    processes = [
        mesh_pb2.ProcessStatus(name="w-0", state="running", restarts=at, detail="killed")
        for at in (0, 1)
    ]
    assert described(mesh(processes=processes[:1]), mesh(processes=processes[1:])) == [
        "bad: process w-0 ended and was started again: killed"
    ]


def test_slow_page_receives_all_changes() -> None:
    board, fake = Board(), busy()
    assert board.since(0) is None

    def show(at: float) -> None:
        copy = mesh_pb2.Mesh()
        copy.CopyFrom(fake.mesh)
        board.show(copy, at)

    show(1.0)
    first = board.since(0)
    assert first is not None
    assert first["full"]
    assert "events" not in first
    assert board.since(1) is None
    show(2.0)
    same = board.since(1)
    assert same is not None
    assert set(same) == {"router", "scheduler"}
    del fake.mesh.workers[3]
    del fake.mesh.models[0]
    show(3.0)
    board.fail("CANNOT_CONNECT", "no router")
    behind = board.since(1)
    assert behind is not None
    assert ("workers", "l4-2") in behind["gone"]
    assert [event["at"] for event in behind["events"]] == [3.0, 3.0]
    assert behind["problem"]["reason"] == "CANNOT_CONNECT"
    # After a pause in watching, changes have no known time.
    board.pause()
    fake.mesh.workers.append(make_worker("new", "l4", "NVIDIA L4", 4))
    show(900.0)
    after = board.since(4)
    assert after is not None
    assert "new" in after["workers"]
    assert "events" not in after


def test_memory_is_bounded_when_models_appear_and_disappear() -> None:
    board = Board()
    for at in range(3000):
        board.show(
            mesh_pb2.Mesh(router_id="r", models=[make_model(f"o/m-{at}", "bert", 8, 1)]), float(at)
        )
    described = board.since(1)
    assert described is not None
    assert described["full"], "a page that is too far behind gets everything anew"
    recent = board.since(board.number - 1)
    assert recent is not None
    assert recent["gone"] == [("models", "o/m-2998")]


async def test_large_labels_and_new_words_of_a_newer_router_are_shown() -> None:
    model = make_model("o/m", "bert", 8, 1)
    model.card.labels.extend(f"label {at}" for at in range(5000))
    model.state = 99  # type: ignore[assignment]
    board = Board()
    board.show(mesh_pb2.Mesh(models=[model]), 1.0)
    described = board.since(0)
    assert described is not None
    shown = described["models"]["o/m"]
    assert (shown["state"], shown["card"]["label_count"], len(shown["card"]["labels"])) == (
        "99",
        5000,
        32,
    )
