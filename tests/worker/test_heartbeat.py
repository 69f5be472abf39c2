"""The worker's reports about its models, and the orders that it executes."""

from __future__ import annotations

from pathlib import Path

from shoal.v1 import models_pb2, worker_pb2

from tests.worker.fakes import SLOW, FakeLanes, encode_job, routers, until
from tests.worker.running import MODEL, RunningWorker, worker

RESIDENT, COLD = models_pb2.MODEL_STATE_RESIDENT, models_pb2.MODEL_STATE_COLD
FIRST, SECOND = (1 << 32) + 7, (2 << 32) + 1
"""Plans of one leader and of the next."""


def order(
    seq: int, plan: int = 0, *, load: str = "", evict: str = "", pin: str = ""
) -> worker_pb2.Directive:
    directive = worker_pb2.Directive(seq=seq, plan=plan)
    if load:
        directive.load_model = load
    elif evict:
        directive.evict_model = evict
    else:
        directive.pin_model = pin
    return directive


async def send_orders(lanes: FakeLanes, *orders: worker_pb2.Directive, **queued: int) -> None:
    """Send orders with the next heartbeat's reply. Return when the worker has them."""
    seq = max(one.seq for one in orders)
    lanes.next_response = worker_pb2.HeartbeatResponse(
        directives=orders, queued_tokens={f"org/{name}": n for name, n in queued.items()}
    )
    await until(lambda: lanes.heartbeats[-1].directive_seq == seq)


def line(lanes: FakeLanes, model: str = MODEL) -> worker_pb2.WorkerModel:
    """Return the model's entry in the last heartbeat, empty if it is not there yet."""
    return next(
        (one for one in lanes.heartbeats[-1].models if one.model == model),
        worker_pb2.WorkerModel(),
    )


async def test_orders_of_an_older_plan_are_ignored(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with (
        routers(lanes) as running,
        worker(tmp_path, running, "org/a", "org/b", "org/c", "org/d") as bay,
    ):
        await until(lambda: bool(lanes.heartbeats))
        assert lanes.heartbeats[-1].plan == 0
        await send_orders(
            lanes,
            order(1, SECOND, load="org/a"),
            order(2, FIRST, load="org/b"),
            order(3, SECOND, load="org/c"),
        )
        await until(lambda: {"org/a", "org/c"} <= bay.models.keys())
        assert lanes.heartbeats[-1].plan == SECOND
        await send_orders(lanes, order(4, FIRST, evict="org/a"), order(5, load="org/d"))
        await until(lambda: "org/d" in bay.models, "an operator's order, which is of no plan")
        await until(lambda: lanes.states()["org/a"] == RESIDENT)
        assert "org/b" not in bay.models
        assert lanes.heartbeats[-1].plan == SECOND


async def test_plan_does_not_evict_pinned_or_busy_models(tmp_path: Path) -> None:
    lanes = FakeLanes()
    names = ("org/pinned", "org/busy", "org/queued", "org/idle")
    async with routers(lanes) as running, worker(tmp_path, running, *names) as bay:
        await until(lambda: bool(lanes.heartbeats))
        await send_orders(
            lanes, *(order(seq, load=name) for seq, name in enumerate(names, start=1))
        )
        await until(lambda: all(lanes.states()[name] == RESIDENT for name in names))
        lanes.put("org/busy", encode_job("slow", SLOW))
        await until(lambda: bay.models["org/busy"].started.is_set())
        evictions = [order(seq, FIRST, evict=name) for seq, name in enumerate(names, start=11)]
        await send_orders(lanes, order(10, pin="org/pinned"), *evictions, queued=1)
        await until(lambda: lanes.states()["org/idle"] == COLD)
        assert [lanes.states()[name] for name in names[:3]] == [RESIDENT] * 3
        assert line(lanes, "org/pinned").pinned
        await send_orders(
            lanes, *(order(seq, evict=name) for seq, name in enumerate(names, start=21))
        )
        await until(lambda: line(lanes, "org/busy").leaving, "it to take no new work")
        assert (line(lanes, "org/busy").state, line(lanes, "org/busy").held_jobs) == (RESIDENT, 1)
        await _let_go(bay, lanes)
        assert all(lanes.states()[name] == COLD for name in names)


async def _let_go(bay: RunningWorker, lanes: FakeLanes) -> None:
    bay.models["org/busy"].gate.set()
    await until(lambda: "slow" in lanes.answers)
    await until(lambda: lanes.states()["org/busy"] == COLD)


async def test_memory_and_residence_are_reported(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running):
        lanes.put(MODEL, encode_job("j1", "hello"))
        await until(lambda: "j1" in lanes.answers)
        await until(lambda: line(lanes).resident_seconds > 0.2)
        reported = lanes.heartbeats[-1]
        assert (
            reported.memory_bytes,
            reported.used_bytes,
            reported.host_memory_bytes,
            reported.host_used_bytes,
        ) == (1000, 100, 0, 0)
        assert (line(lanes).leaving, line(lanes).held_jobs, line(lanes).host_bytes) == (False, 0, 0)
        assert not reported.HasField("preempted_in_seconds")


async def test_models_on_disk_are_listed_once_and_when_a_router_asks(tmp_path: Path) -> None:
    lanes, listed = FakeLanes(), ["org/a", "org/b", MODEL]

    def lists() -> list[list[str]]:
        return [[one.model for one in beat.on_disk] for beat in lanes.heartbeats]

    async with routers(lanes) as running, worker(tmp_path, running, "org/a", "org/b"):
        await until(lambda: len(lanes.heartbeats) >= 3)
        assert lists()[0] == listed
        assert not any(lists()[1:])
        assert {beat.on_disk_tag for beat in lanes.heartbeats[1:]} == {"its disk"}
        asked = len(lanes.heartbeats)
        lanes.is_disk_known = False
        await until(lambda: any(lists()[asked:]))
        assert listed in lists()[asked : asked + 3]
        await until(lambda: lanes.heartbeats[-1].on_disk_tag == "its disk")
