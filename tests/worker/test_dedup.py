"""Each sequence of a batch is computed once, and cached outputs are not computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from libs.models import InputSequence
from services.worker.jobs.execution.dedup import cache_outputs, deduplicate
from tests.worker.residing import loaded, residency
from tests.worker.test_image_cache import ENTRY, VECTOR, events, key, outputs, seeing


def sequence(tokens: int, key: bytes = b"") -> InputSequence:
    return InputSequence(np.zeros(tokens, np.int32), key=key)


async def test_batch_computes_each_image_once(tmp_path: Path) -> None:
    async with residency(
        seeing(tmp_path, "org/a"), memory_bytes=10 * ENTRY, image_cache_bytes=4 * ENTRY
    ) as models:
        await loaded(models, "org/a")
        kept = outputs(models, "org/a")
        before = {event: events(event) for event in ("hit", "shared", "miss")}
        batch = [
            sequence(3),
            sequence(5, key(1)),
            sequence(3),
            sequence(5, key(2)),
            sequence(5, key(1)),
        ]
        first = deduplicate(batch, kept)
        assert first.needed == [batch[0], batch[1], batch[2], batch[3]]
        assert first.tokens == 16
        computed = [np.full(2, number, np.float32) for number in range(4)]
        assert [float(one[0]) for one in first.outcomes(computed)] == [0, 1, 2, 3, 1]  # type: ignore[index, arg-type]
        cache_outputs(kept, first.needed, computed)
        again = deduplicate([batch[4], batch[0], batch[3], sequence(4, key(9))], kept)
        assert again.needed[0] is batch[0]
        assert again.tokens == 7
        assert [float(one[0]) for one in again.outcomes([VECTOR, VECTOR])] == [1, 0, 3, 0]  # type: ignore[index, arg-type]
        assert {event: events(event) - count for event, count in before.items()} == {
            "hit": 2,
            "shared": 1,
            "miss": 3,
        }


async def test_outputs_that_are_not_finite_are_not_cached(tmp_path: Path) -> None:
    async with residency(
        seeing(tmp_path, "org/a"), memory_bytes=10 * ENTRY, image_cache_bytes=4 * ENTRY
    ) as models:
        await loaded(models, "org/a")
        kept = outputs(models, "org/a")
        cache_outputs(kept, [sequence(5, key(1))], [np.array([1.0, np.inf], np.float32)])
        assert kept.find(key(1)) is None


@pytest.mark.parametrize("kept", [None])
def test_lookups_are_skipped_without_a_cache(kept: None) -> None:
    batch = [sequence(3, key(1)), sequence(3, key(1))]
    assert deduplicate(batch, kept).needed == batch
