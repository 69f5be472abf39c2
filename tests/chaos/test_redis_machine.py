"""The clock and the disk of a real redis-server are wrong for as long as a run wants."""

from __future__ import annotations

import time
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from tests.chaos.redis_machine import RedisMachines
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until


def test_clock_and_disk_of_redis_are_changed_and_restored(tmp_path: Path) -> None:
    machines = RedisMachines(tmp_path)
    assert machines.can_change, "the kernels' tests need a compiler, too"
    cluster = Cluster(tmp_path, models="", routers=0, workers=0, durable=True, each={"redis": {}})
    cluster.each["redis"] = machines.variables("redis")
    with cluster, Redis(unix_socket_path=str(tmp_path / "redis.sock"), protocol=2) as redis:
        wait_until(lambda: answers(redis), 60, "Redis to answer")

        def error() -> float:
            return float(redis.time()[0]) - time.time()

        assert abs(error()) < 100
        machines.change("redis", clock_seconds=-3600.25)
        assert -3700 < error() < -3500
        machines.change("redis", clock_seconds=3600.75)
        assert 3500 < error() < 3700
        machines.change("redis")
        assert abs(error()) < 100

        machines.change("redis", disk_seconds=0.05)
        redis.config_set("appendfsync", "always")
        begin = time.monotonic()
        for number in range(20):
            redis.set("key", number)
        assert time.monotonic() - begin >= 20 * 0.05


def answers(redis: Redis) -> bool:
    try:
        return bool(redis.ping())
    except RedisError:
        return False
