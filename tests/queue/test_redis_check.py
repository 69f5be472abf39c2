"""The check of Redis is repeated until every master of a cluster has passed it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from libs.queue import RedisCheck, redis_check


class ClusterLanes:
    """Lanes of a cluster with masters that do not answer the first two checks."""

    def __init__(self) -> None:
        self.masters = SimpleNamespace(addresses=("a", "b"))
        self.checks: list[bool] = []

    async def check(self, *, again: bool) -> bool:
        self.checks.append(again)
        return len(self.checks) > 2


async def test_check_is_repeated_until_all_masters_answer_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes: Any = ClusterLanes()
    check = RedisCheck(lanes)
    await check.run_if_due()
    await check.run_if_due()
    assert lanes.checks == [False]  # not before REPEATED_CHECK_SECONDS
    now = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(redis_check, "time", clock)
    for _ in range(4):
        now += redis_check.REPEATED_CHECK_SECONDS
        await check.run_if_due()
    assert lanes.checks == [False, True, True]
