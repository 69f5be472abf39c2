"""A mesh is recorded through its WatchMesh, and the recording can be replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from shoal.v1 import mesh_pb2 as pb
from shoal.v1 import mesh_pb2_grpc, models_pb2
from typer.testing import CliRunner

from services.scheduler.simulate import record
from services.scheduler.simulate.command import app
from services.scheduler.simulate.record import Recorder
from services.scheduler.simulate.trace import ModelCost, TraceRequest, read_trace


def lane(model: str, jobs: int, tokens: int, adapter: str = "") -> pb.LaneStatus:
    return pb.LaneStatus(
        pool="cpu", model=model, adapter=adapter, enqueued_jobs=jobs, enqueued_tokens=tokens
    )


def held(model: str, *places: tuple[int, float, float]) -> models_pb2.Model:
    """(bytes, load seconds, tokens a second) of each place."""
    return models_pb2.Model(
        model=model,
        places=[
            models_pb2.ModelPlace(bytes=size, load_seconds=seconds, tokens_per_second=rate)
            for size, seconds, rate in places
        ],
    )


def mesh(*lanes: pb.LaneStatus, models: tuple[models_pb2.Model, ...] = ()) -> pb.Mesh:
    return pb.Mesh(lanes=lanes, models=models)


def test_growth_of_a_lanes_counters_becomes_requests_spread_over_the_time() -> None:
    recorder = Recorder()
    known = (held("org/a", (100, 2.0, 500.0)),)
    recorder.see(mesh(lane("org/a", 5, 50), models=known), 10.0)
    recorder.see(mesh(lane("org/a", 5, 50), models=known), 11.0)
    recorder.see(mesh(lane("org/a", 7, 57), models=known), 12.0)
    requests, costs, left_out = recorder.trace()
    assert requests == [TraceRequest(1.25, "org/a", 4), TraceRequest(1.75, "org/a", 3)]
    assert costs == [ModelCost("org/a", 100, 2.0, None, 500.0)]
    assert not left_out


def test_new_or_reset_lanes_count_from_zero() -> None:
    recorder = Recorder()
    known = (held("org/a", (100, 2.0, 500.0)),)
    recorder.see(mesh(models=known), 0.0)
    recorder.see(mesh(lane("org/a", 1, 9), lane("org/a", 1, 3, "org/lora"), models=known), 1.0)
    recorder.see(mesh(lane("org/a", 4, 12), lane("org/a", 1, 3, "org/lora"), models=known), 2.0)
    recorder.see(mesh(lane("org/a", 2, 2), models=known), 3.0)  # forgotten after a day, and new
    requests, _, _ = recorder.trace()
    assert Counter((one.adapter, one.tokens) for one in requests) == {
        ("", 9): 1,
        ("org/lora", 3): 1,
        ("", 1): 5,
    }


def test_costs_are_those_of_loaded_copies_and_requests_without_are_left_out() -> None:
    recorder = Recorder()
    recorder.see(mesh(), 0.0)
    known = (
        held("org/a", (100, 2.0, 0.0), (110, 4.0, 700.0), (0, 0.0, 0.0)),
        held("org/b", (0, 0.0, 0.0)),
    )
    recorder.see(mesh(lane("org/a", 1, 1), lane("org/b", 3, 3), models=known), 1.0)
    requests, costs, left_out = recorder.trace()
    assert [one.model for one in requests] == ["org/a"]
    assert costs == [ModelCost("org/a", 110, 3.0, None, 700.0)]
    assert left_out == {"org/b": 3}


class FakeMesh(mesh_pb2_grpc.MeshServiceServicer):
    """Every look finds three more jobs of one model and one of another; after `snapshots` of them
    the router is gone.
    """

    snapshots = 4

    def __init__(self) -> None:
        self.seen = 0
        self.goes_for_good_after = self.snapshots

    def WatchMesh(
        self, request: pb.WatchMeshRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.WatchMeshResponse]:
        assert request.interval_seconds == pytest.approx(0.2)
        models = (held("org/a", (100, 0.5, 900.0)), held("org/b", (200, 0.25, 0.0)))
        for number in range(self.seen, min(self.seen + self.snapshots, self.goes_for_good_after)):
            self.seen = number + 1
            yield pb.WatchMeshResponse(
                mesh=mesh(
                    lane("org/a", 3 * number, 30 * number),
                    lane("org/b", number, number),
                    models=models,
                )
            )
        context.abort(grpc.StatusCode.UNAVAILABLE, "going away")

    def GetMesh(
        self, request: pb.GetMeshRequest, context: grpc.ServicerContext
    ) -> pb.GetMeshResponse:
        raise NotImplementedError

    def ExplainPlacement(
        self, request: pb.ExplainPlacementRequest, context: grpc.ServicerContext
    ) -> pb.ExplainPlacementResponse:
        raise NotImplementedError


@pytest.fixture
def fake() -> FakeMesh:
    return FakeMesh()


@pytest.fixture
def router(fake: FakeMesh) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    mesh_pb2_grpc.add_MeshServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_recording_survives_router_stop_and_can_be_replayed(router: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    ran = CliRunner().invoke(app, ["record", router, "-o", str(path)])
    assert ran.exit_code == 1
    assert "going away" in ran.stderr
    trace = read_trace(path, tmp_path / "trace.models.csv")
    assert Counter((one.model, one.tokens) for one in trace.requests) == {
        ("org/a", 10): 9,
        ("org/b", 1): 3,
    }
    assert trace.models["org/a"] == ModelCost("org/a", 100, 0.5, None, 900.0)
    assert CliRunner().invoke(app, [str(path)]).exit_code == 0


def test_watch_that_an_old_connection_took_with_it_goes_on(
    router: str, fake: FakeMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RENEWED_SECONDS", 0.0)
    fake.goes_for_good_after = 10
    path = tmp_path / "trace.csv"
    assert CliRunner().invoke(app, ["record", router, "-o", str(path)]).exit_code == 1
    trace = read_trace(path, tmp_path / "trace.models.csv")
    assert Counter(one.model for one in trace.requests) == {"org/a": 27, "org/b": 9}


def test_recording_ends_after_its_time(router: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    ran = CliRunner().invoke(app, ["record", router, "-o", str(path), "--seconds", "0"])
    assert ran.exit_code == 0
    assert "no requests arrived" in ran.stderr
    assert not path.exists()
