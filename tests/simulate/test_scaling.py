"""A pool that KEDA takes to zero and back, for days of rare visits in seconds."""

from __future__ import annotations

import pytest

from libs.catalog.pools import PoolSpec
from libs.errors import InvalidInput
from services.scheduler.simulate.keda import Executor
from services.scheduler.simulate.scaling import Cluster, ScalingOutcome, Visit, simulate, visits


def pool(start_seconds: float, cooldown_seconds: float = 600.0, **keys: float) -> Cluster:
    """A pool that is configured as it is in truth."""
    made = PoolSpec("pool", max_workers=20, cold_start_seconds=start_seconds, **keys)  # type: ignore[arg-type]
    return Cluster(made, start_seconds, cooldown_seconds=cooldown_seconds)


def rare(start_seconds: float, burst_share: float = 0.0) -> ScalingOutcome:
    return simulate(pool(start_seconds), visits(40, 1500.0, burst_share, seed=1))


@pytest.mark.parametrize("start_seconds", [180.0, 360.0])
def test_start_time_is_learnt_though_keda_scales_to_zero(
    start_seconds: float,
) -> None:
    outcome = rare(start_seconds)
    assert outcome.answered == 40
    assert outcome.cold_start_seconds == (start_seconds,) * 4
    assert outcome.longest_cold_start_seconds == start_seconds
    assert outcome.held_share < 0.5


def test_short_text_does_not_restore_burst_size() -> None:
    outcome = rare(180.0, burst_share=0.3)
    assert outcome.most_for_short == 1
    # The HPA's syncs are part of a start: 15 s each.
    assert outcome.longest_cold_start_seconds <= 180.0 + 2 * 15.0


def test_one_visit_holds_a_machine_for_its_start_keep_warm_and_cooldown() -> None:
    outcome = simulate(pool(100.0, 400.0), [Visit(1000.0, (200,))])
    assert (outcome.answered, outcome.starts) == (1, 1)
    # Keep-warm counts from the last arrival; polls are 5 s apart.
    held = outcome.held_share * (1000.0 + 3600.0)
    assert 100.0 + 400.0 <= held <= 100.0 + 400.0 + 10.0
    assert outcome.wait_p50 == pytest.approx(100.0 + 5.0 + 200 / 5_000)
    kept = simulate(pool(100.0, 400.0, keep_warm_seconds=900.0), [Visit(1000.0, (200,))])
    assert kept.held_share * 4600.0 == pytest.approx(900.0 + 400.0, abs=10.0)


def test_visit_within_the_cooldown_finds_a_worker() -> None:
    outcome = simulate(pool(100.0), [Visit(at, (200,)) for at in (0.0, 600.0, 700.0)])
    assert outcome.starts == 1
    assert outcome.wait_p50 == pytest.approx(200 / 5_000)


def test_same_seed_is_the_same_days() -> None:
    assert rare(180.0, 0.2) == rare(180.0, 0.2)
    assert visits(5, 10.0, 0.5, 1) != visits(5, 10.0, 0.5, 2)


def test_invalid_cluster_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at least 0 s"):
        Cluster(start_seconds=-1.0)


def test_keda_takes_a_pool_to_zero_in_one_step_after_the_cooldown() -> None:
    keda = Executor(0.0, cooldown_seconds=600.0, initial_cooldown_seconds=120.0)
    assert keda.decide(120.0, 1, active=False) == 1
    assert keda.decide(120.1, 1, active=False) == 0, "never active: the initial cooldown"
    assert keda.decide(200.0, 0, active=True) == 1
    assert keda.decide(300.0, 7, active=True) == 7, "the HPA does the rest"
    assert keda.decide(900.0, 7, active=False) == 7
    assert keda.decide(900.1, 7, active=False) == 0
    assert Executor(0.0, least=2).decide(10_000.0, 0, active=False) == 2
