"""KEDA scales workers by what our scaler answers it: a step, a spike, a sine and lost machines, and
schedulers that go away.

The scaler, its gRPC and the arithmetic are ours and real; KEDA and the HPA are `FakeKeda`, which
does what theirs do. With real worker processes, routers and Redis the scenarios are in
test_keda_processes.py.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial

from tests.scheduler.keda_stage import COOLDOWN, POOL, SCALED, SPEC, Stage, staged, turns
from tests.scheduler.plant import FakeWorkers

SPEED = 5_000.0
MINUTE, HOUR = 60.0, 3_600.0


def step(start: float, end: float, workers: float) -> FakeWorkers:
    """Return a load for this number of workers from `start` to `end`."""
    return FakeWorkers(
        lambda at: SPEED * workers if start <= at < end else 0.0, tokens_per_second=SPEED
    )


def sine(at: float, mean: float, height: float) -> float:
    """Least at 0, with a period of an hour."""
    return SPEED * (mean - height * math.cos(2 * math.pi * at / HOUR))


async def test_step_from_nothing_to_three_workers_and_back_to_none() -> None:
    end = 62 + 12 * MINUTE
    async with staged(step(62, end, 2.1)) as stage:
        await stage.run(61)
        assert stage.keda.changes == []
        await stage.run_until(
            lambda: stage.workers.replicas == 1, 3, "a push, before the next poll"
        )
        assert stage.keda.pushes
        await stage.run_until(
            lambda: stage.workers.replicas >= 3, 30, "one sync of the HPA, or two"
        )
        await stage.run(end - stage.clock.now())
        # 2.1 workers' load at 75 % are three; measured speeds waver.
        assert 3 <= stage.workers.replicas <= 4
        assert stage.most <= 10
        assert turns(stage.keda.changes) == 1
        await stage.run_until(
            lambda: stage.workers.replicas == 0,
            60 + COOLDOWN + 10,
            "zero after keep-warm and cooldown",
        )
        last = stage.keda.changes[-1]
        assert (last.after, last.by) == (0, "keda")
        assert stage.keda.last_active is not None
        assert COOLDOWN < last.at - stage.keda.last_active <= COOLDOWN + 5
        assert last.at - end > COOLDOWN + 50
        await stage.run(10 * MINUTE)
        assert stage.keda.changes[-1] == last
    assert stage.workers.answered == stage.workers.asked > 1_000
    # The first worker's start, and the drain of what waited for it.
    assert stage.workers.longest_wait < 50 + SPEC.drain_seconds


async def test_spike_brings_many_workers_in_two_syncs_and_none_stays() -> None:
    async with staged(step(62, 92, 8)) as stage:
        await stage.run(61)
        await stage.run_until(
            lambda: stage.workers.replicas >= 8, 32, "from zero to as many as the spike needs"
        )
        await stage.run(92 - stage.clock.now())
        await stage.run_until(
            lambda: stage.workers.answered == stage.workers.asked, 90, "all to be answered"
        )
        # The scheduler has just been started, but does not keep workers that it requested itself as
        # if it had found them.
        await stage.run_until(lambda: stage.workers.replicas == 0, 60 + COOLDOWN + 10, "zero again")
        assert turns(stage.keda.changes) == 1
    assert stage.workers.longest_wait < 50 + SPEC.drain_seconds


async def test_sine_is_followed_without_flapping() -> None:
    """SHOAL_KEDA_HOURS between load for 1 and for 5 workers. A flap is a turn of the replicas that
    the load does not make.
    """
    hours = int(os.environ.get("SHOAL_KEDA_HOURS", "2"))
    load = partial(sine, mean=3, height=2)
    workers = FakeWorkers(load, tokens_per_second=SPEED, request_tokens=8_000)
    # Polls and looks are rarer than they would be, because each takes the test its time; between 1
    # and N workers neither matters.
    async with staged(workers, replace(SCALED, polling_interval=15), snapshot_seconds=2) as stage:
        await stage.run(15 * MINUTE)  # until the workers of the first minute's backlog are gone
        settled = stage.clock.now()
        await stage.run(hours * HOUR)
        # The load turns twice an hour.
        flaps = turns(stage.changes_since(settled)) - 2 * hours
        assert flaps <= hours, stage.story()
        # 5 workers' load at 75 % are 7; one more for speeds that waver. Never near zero at the
        # trough.
        assert {change.after for change in stage.changes_since(settled)} <= set(range(2, 9))
        # A backoff of 2 s each, because every stream ended in order.
        assert len(stage.keda.backoffs) >= hours * 6
        assert set(stage.keda.backoffs) == {2.0}
        assert stage.keda.failed_polls == stage.keda.failed_syncs == 0
    # Mean load 3 at 75 % are 4 workers; what hysteresis costs over that is at most a half.
    assert workers.pod_seconds / stage.clock.now() < 1.5 * 3 / SPEC.target_utilization
    assert workers.longest_wait < 50 + SPEC.drain_seconds


def steady(workers: float, *, until: float = math.inf, load_seconds: float = 5.0) -> FakeWorkers:
    return FakeWorkers(
        lambda at: SPEED * workers if at < until else 0.0,
        tokens_per_second=SPEED,
        load_seconds=load_seconds,
    )


async def settled(stage: Stage) -> int:
    """Lets ten minutes pass, in which the first minute's backlog is done and its workers go; how
    many are left.
    """
    await stage.run(10 * MINUTE)
    return stage.workers.replicas


async def test_lost_spot_machine_is_replaced_from_its_notice_on_and_nothing_is_lost() -> None:
    spec = replace(SPEC, spot=True)
    async with staged(steady(2.1), spec=spec, snapshot_seconds=2) as stage:
        before = await settled(stage)
        noticed = stage.clock.now()
        victim = stage.workers.running()[0].name
        stage.workers.warn(victim)
        await stage.run_until(
            lambda: stage.workers.replicas == before + 1, 17, "one more at the HPA's next sync"
        )
        await stage.run(30 - (stage.clock.now() - noticed))
        stage.workers.lose(victim)
        await stage.run(15 * MINUTE)
        assert stage.workers.replicas == before
        # Up for the replacement, down when it is there: no more than that.
        assert turns(stage.changes_since(noticed)) <= 1, stage.story()
        asked = stage.workers.asked
        stage.workers.lose(
            stage.workers.running()[0].name
        )  # without a notice, with the requests it held
        await stage.run(5 * MINUTE)
    assert stage.workers.answered >= asked
    assert stage.workers.longest_wait < 50 + SPEC.drain_seconds


async def test_long_load_keeps_its_worker_without_waiting_requests() -> None:
    workers = steady(0.2, until=70, load_seconds=1_000)
    async with staged(workers) as stage:
        await stage.run_until(lambda: workers.is_loading, 120, "the load to begin")
        await stage.run(70 - stage.clock.now())
        workers.leave()
        await stage.run_until(lambda: not workers.is_loading, 1_010, "the load to end")
        assert stage.workers.replicas == 1
        loaded = stage.clock.now()
        await stage.run_until(
            lambda: stage.workers.replicas == 0, COOLDOWN + 10, "zero, a cooldown after the load"
        )
        assert stage.clock.now() - loaded > COOLDOWN - 10


async def test_while_the_scaler_is_down_the_replicas_stay() -> None:
    """Idle ones too, however long; afterwards they go, and the stream is back."""
    async with staged(steady(1.4, until=11 * MINUTE)) as stage:
        before = await settled(stage)
        await stage.run(2 * MINUTE)
        assert stage.keda.failed_polls == 0
        await stage.stop(in_order=False)
        down = stage.clock.now()
        await stage.run(12 * MINUTE)
        assert stage.changes_since(down) == []
        assert stage.workers.replicas == before
        assert stage.keda.failed_polls == 12 * 12
        assert max(stage.keda.backoffs) == 60
        await stage.serve()
        await stage.keda.connected()
        # A scheduler that has just started keeps the workers it finds for five minutes.
        await stage.run_until(lambda: stage.workers.replicas == 0, 300 + COOLDOWN + 20, "zero")


async def test_new_scheduler_keeps_requested_workers() -> None:
    """It is started between bursts, four minutes apart, and knows nothing of them."""
    bursts = FakeWorkers(lambda at: SPEED * 12 if at % 240 < 30 else 0.0, tokens_per_second=SPEED)
    async with staged(bursts, snapshot_seconds=2) as stage:
        await stage.run(4 * 240 + 60)
        before, restarted = stage.workers.replicas, stage.clock.now()
        await stage.restart()
        await stage.run(20)
        await stage.restart(in_order=False)
        await stage.run(10 * MINUTE)
        assert (
            min([before, *(change.after for change in stage.changes_since(restarted))])
            == before
            > 3
        ), stage.story()
        assert stage.keda.failed_polls == 0


async def test_while_the_scheduler_is_blind_nothing_shrinks() -> None:
    """Redis is lost when the load has ended and the pool is idle: for 15 minutes the state is
    unknown, so every worker stays.
    """
    end = 11 * MINUTE
    async with staged(steady(2.1, until=end)) as stage:
        before = await settled(stage)
        await stage.run(end + 90 - stage.clock.now())
        assert not stage.scheduler.demand.demands[POOL].active
        stage.blind = True
        blind = stage.clock.now()
        await stage.run(15 * MINUTE)
        assert stage.changes_since(blind) == []
        assert stage.workers.replicas == before
        assert stage.keda.failed_polls == 0
        stage.blind = False
        await stage.run_until(lambda: stage.workers.replicas == 0, COOLDOWN + 20, "zero")
