"""A soak's judgement: a line's slope and an interval that samples a second apart do not make too
narrow.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common.trend import trend
from benchmarks.stress.soak import Sample, grown

MIB = 2**20


def wandering(seed: int, slope: float = 0.0, count: int = 540, keeps: float = 0.9) -> list[float]:
    """Noise of which each sample keeps most of the one before, as a process' memory does."""
    generator = np.random.default_rng(seed)
    values = np.zeros(count)
    for index in range(1, count):
        values[index] = keeps * values[index - 1] + generator.normal()
    return [*map(float, values + slope * np.arange(count))]


def test_straight_line() -> None:
    found = trend(range(100), [3.0 + 0.5 * second for second in range(100)])
    assert (found.slope, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    assert not found.contains_zero


def test_wandering_without_trend_is_found_flat_as_often_as_the_interval_says() -> None:
    """95 %, less what stays correlated between the batches."""
    flat = [trend(range(540), wandering(seed)).contains_zero for seed in range(300)]
    assert sum(flat) / len(flat) > 0.9


def test_growth_in_wandering_is_found() -> None:
    """0.02 a second is ten over nine minutes, where the wandering has a deviation of 2.3."""
    found = [trend(range(540), wandering(seed, slope=0.02)) for seed in range(100)]
    assert sum(one.low > 0 for one in found) > 95
    assert np.mean([one.slope for one in found]) == pytest.approx(0.02, rel=0.05)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="19 times and 19 values are too few for 10 batches"):
        trend(range(19), range(19))


def samples(
    bytes_a_second: float, files_at_last: int = 20, since: int = 500, until: int = 540
) -> list[Sample]:
    """`files_at_last`: between those seconds, where 20 are open else."""
    noise = wandering(1)
    return [
        Sample(
            float(at),
            int(100 * MIB + bytes_a_second * at + 1000 * noise[at]),
            8,
            files_at_last if since <= at < until else 20,
        )
        for at in range(540)
    ]


def test_leaking_process_is_distinguished_from_a_stable_one() -> None:
    """Half a per cent of 100 MiB in ten minutes is 874 bytes a second."""
    assert grown("steady", samples(0)).is_flat
    assert grown("hardly", samples(500)).is_flat
    assert not grown("leaking", samples(1500)).is_flat


def test_file_that_stays_open_is_seen() -> None:
    assert grown("steady", samples(0)).opens_no_more
    assert not grown("one more", samples(0, files_at_last=21)).opens_no_more


def test_briefly_open_file_is_not_growth() -> None:
    """Renewed gRPC connections are the case."""
    assert grown("renewed", samples(0, files_at_last=21, since=510, until=514)).opens_no_more
