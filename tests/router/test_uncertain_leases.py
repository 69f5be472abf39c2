"""Batches that were leased on a master that did not answer return to their lanes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from shoal.v1 import worker_pb2

from libs.errors import NoCapacity
from libs.queue import Idle, LaneGauges, LaneKey, Pulled, PulledJob, connect
from libs.queue.connection import cluster
from libs.queue.keys import RedisKeys
from libs.queue.masters import Masters
from libs.serving.calls.call import Call, enter_call
from libs.versions import WIRE_VERSION
from services.router.lanes import uncertain_leases
from services.router.lanes.pending_pulls import PendingPulls
from services.router.lanes.pull import WorkerService
from services.router.lanes.uncertain_leases import UncertainLeases
from services.router.lanes.wakeups import Wakeups
from services.router.state.background import Background
from tests.router.parts import until
from tests.support.waiting import end_tasks

LANE, OTHER = LaneKey("cpu", "org/a"), LaneKey("cpu", "org/b")


class SilentAtFirst:
    """Lanes with a master that answers from the third call on."""

    lease_ms = 60_000

    def __init__(self) -> None:
        self.calls = 0
        self.released: list[tuple[LaneKey, str, str]] = []

    async def complete(
        self, lane: LaneKey, worker_id: str, batch_id: str, results: list[Any], *, release: bool
    ) -> None:
        assert (results, release) == ([], True)
        self.calls += 1
        if self.calls < 3:
            raise NoCapacity("away")
        self.released.append((lane, worker_id, batch_id))


async def test_batches_are_released_when_the_master_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uncertain_leases, "RELEASE_SECONDS", 0.0)
    lanes: Any = SilentAtFirst()
    leases = UncertainLeases(lanes, Background())
    leases.add(LANE, "w", "1")
    leases.add(LANE, "v", "2")
    leases.add(OTHER, "w", "3")
    await until(lambda: len(lanes.released) == 3)
    assert sorted(lanes.released) == [(LANE, "v", "2"), (LANE, "w", "1"), (OTHER, "w", "3")]


async def test_batches_are_left_to_expire_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncertain_leases, "RELEASE_SECONDS", 0.0)
    lanes: Any = SilentAtFirst()
    lanes.lease_ms = 0
    background = Background()
    leases = UncertainLeases(lanes, background)
    leases.add(LANE, "w", "1")
    await asyncio.sleep(0.01)
    assert lanes.calls == 0
    lanes.lease_ms = 60_000
    leases.add(LANE, "w", "2")
    await until(lambda: bool(lanes.released))
    assert lanes.released == [(LANE, "w", "2")]


async def test_each_batch_of_a_lane_has_a_separate_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncertain_leases, "RELEASE_SECONDS", 0.01)
    lanes: Any = SilentAtFirst()
    leases = UncertainLeases(lanes, Background())
    lanes.lease_ms = 0
    leases.add(LANE, "w", "1")
    lanes.lease_ms = 60_000
    leases.add(LANE, "w", "2")
    await until(lambda: bool(lanes.released))
    assert lanes.released == [(LANE, "w", "2")]


async def test_batch_that_is_given_after_all_is_not_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uncertain_leases, "RELEASE_SECONDS", 0.0)
    lanes: Any = SilentAtFirst()
    background = Background()
    leases = UncertainLeases(lanes, background)
    leases.add(LANE, "w", "1")
    leases.add(LANE, "w", "2")
    leases.forget(LANE, "w", "1")
    await background.finished()
    assert lanes.released == [(LANE, "w", "2")]


class OneSilentMaster:
    """Lanes of a cluster. The master of LANE answers no pull until it is `back`, and then leases a
    batch; with `hangs` it answers late, as a suspended one.
    """

    lease_ms = 60_000
    router_id = "r"

    def __init__(self, *, hangs: bool) -> None:
        self.masters = Masters(connect("redis+cluster://127.0.0.1:1"), RedisKeys(1))
        self.hangs = hangs
        self.back = asyncio.Event()
        self.pulled: list[LaneKey] = []
        self.released: list[tuple[LaneKey, str, str]] = []

    def clock_ms(self) -> int:
        return 0

    async def pull(self, lane: LaneKey, *, batch_id: str, **_: Any) -> Pulled | Idle:
        self.pulled.append(lane)
        if lane == OTHER and self.pulled.count(OTHER) == 1:
            return Idle(None)
        if lane == LANE and not self.back.is_set():
            if not self.hangs:
                raise NoCapacity("away")
            await self.back.wait()
        return Pulled(batch_id, [PulledJob("a", b"", 0, 1)], 1, more=False)

    async def leasing(self, lanes: list[LaneKey], batch_id: str) -> LaneKey | None:
        return LANE

    async def complete(
        self, lane: LaneKey, worker_id: str, batch_id: str, results: list[Any], *, release: bool
    ) -> None:
        if not self.back.is_set():
            raise NoCapacity("away")
        self.released.append((lane, worker_id, batch_id))


@pytest.mark.parametrize("hangs", [False, True])
async def test_pull_leaves_a_silent_master_for_other_lanes_and_does_not_return_to_it(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch there is released once, and the batch of the other lane is given and kept."""
    monkeypatch.setattr(cluster, "MASTER_SECONDS", 0.05)
    monkeypatch.setattr(uncertain_leases, "RELEASE_SECONDS", 0.01)
    lanes: Any = OneSilentMaster(hangs=hangs)
    service, wakeups, background = make_service(lanes)
    context: Any = None
    enter_call(Call("Pull", "id", "", b""))
    waiting = asyncio.create_task(service.pull(pull_request(), context))
    await until(lambda: lanes.pulled == [LANE, OTHER])
    assert wakeups.needs_others(LANE, 1)
    lanes.back.set()
    wakeups.remind([gauges(LANE)], 0)
    await until(lambda: len(lanes.released) == 1)
    wakeups.remind([gauges(LANE)], 0)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    wakeups.notify(OTHER)
    assert (await waiting).lane.model == OTHER.model
    await background.finished()
    assert lanes.pulled == [LANE, OTHER, OTHER]
    assert lanes.released == [(LANE, "w", "1")]


async def test_batch_of_a_cancelled_pull_is_kept_if_it_is_pulled_again() -> None:
    lanes: Any = OneSilentMaster(hangs=True)
    service, _, background = make_service(lanes)
    context: Any = None
    enter_call(Call("Pull", "id", "", b""))
    cancelled = asyncio.create_task(service.pull(pull_request(), context))
    await until(lambda: lanes.pulled == [LANE])
    await end_tasks([cancelled])
    lanes.back.set()  # The answer to the first pull arrives after the second one was sent.
    given = await service.pull(pull_request(asked_again=True), context)
    assert given.lane.model == LANE.model
    await background.finished()
    assert lanes.pulled == [LANE, LANE]
    assert lanes.released == []


def make_service(lanes: Any) -> tuple[WorkerService, Wakeups, Background]:
    view: Any = SimpleNamespace(snapshot=SimpleNamespace(workers={}, leader=None), gauges_of=gauges)
    background = Background()
    unused: Any = None
    wakeups = Wakeups(PendingPulls(), unused, view, background, 0.0)
    service = WorkerService(lanes, unused, view, wakeups, unused, background, unused, unused)
    return service, wakeups, background


def pull_request(*, asked_again: bool = False) -> worker_pb2.PullRequest:
    return worker_pb2.PullRequest(
        worker_id="w",
        batch_id="1",
        pool="cpu",
        lanes=[worker_pb2.Lane(pool="cpu", model=lane.model) for lane in (LANE, OTHER)],
        budget_tokens=10,
        budget_jobs=10,
        wait_seconds=10,
        wire_version=WIRE_VERSION,
        asked_again=asked_again,
    )


def gauges(lane: LaneKey) -> LaneGauges:
    return LaneGauges(lane, 1, 1, *[0] * 6)
