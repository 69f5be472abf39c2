"""The observer and the faults of nodes on a real Redis Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from redis.exceptions import RedisError

from libs.queue import LaneKey, Lanes, QueuedJob, connect
from libs.queue.connection.cluster import client_for_key
from libs.queue.keys import KEYS, RedisKeys, slot_number
from tests.chaos.observer import Observer
from tests.chaos.stage import QUEUE_SLOTS
from tests.support.redis_cluster import RedisCluster

LANES = [LaneKey("cpu", f"org/model-{number}") for number in range(6)]
HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def nodes() -> Iterator[RedisCluster]:
    with RedisCluster(is_durable=True) as running:
        yield running


def tag_of(lane: LaneKey) -> str:
    return f"{{{slot_number(lane.model, QUEUE_SLOTS)}}}"


async def test_observer_reads_the_lanes_of_all_masters_also_after_a_slot_moved(
    nodes: RedisCluster,
) -> None:
    # A failover by itself, of a master that had no core, may lose what its replica lacks.
    with nodes.without_failover():
        await check_lanes(nodes)


async def check_lanes(nodes: RedisCluster) -> None:
    assert len({nodes.master_port(tag_of(lane)) for lane in LANES}) == 3
    redis = connect(nodes.url, slots=QUEUE_SLOTS)
    observer = Observer(redis, lambda: True, QUEUE_SLOTS)
    lanes = Lanes(redis, router_id="router", dead_result=b"", slots=QUEUE_SLOTS)
    deadline_ms = await lanes.now_ms() + HOUR_MS
    for lane in LANES:
        job = QueuedJob("job", "acme", 1.0, 10, deadline_ms, "interactive", b"payload")
        await lanes.enqueue(lane, [[job]], max_tokens=1000, notify=False)

    source = nodes.master_port(tag_of(LANES[0]))
    target = next(port for port in nodes.masters() if port != source)
    assert await asyncio.to_thread(nodes.move_slot, tag_of(LANES[0]), target) > 0
    await asyncio.to_thread(nodes.wait_whole)
    assert nodes.master_port(tag_of(LANES[0])) == target

    seen = {one.name: one for one in await observer.snapshots()}
    assert seen.keys() == {lane.name for lane in LANES}
    assert {problem for one in seen.values() for problem in one.problems()} == set()
    assert {len(one.unfinished) for one in seen.values()} == {1}
    assert await observer.payloads(LANES[0].name) == {"job": b"payload"}
    left = "; ".join(await observer.leftovers())
    assert all(f"I4 {lane.name}: 1 waiting jobs" in left for lane in LANES)

    counters = RedisKeys(QUEUE_SLOTS).lane_keys(LANES[1])[KEYS.index("meta")]
    await client_for_key(redis, counters).hincrby(counters, "enqueued", 1)
    problems = [problem for one in await observer.snapshots() for problem in one.problems()]
    assert [problem.split(":")[0] for problem in problems] == [f"I3 {LANES[1].name}"]
    await redis.aclose()


def test_killed_durable_node_returns_with_its_data_as_a_replica(nodes: RedisCluster) -> None:
    nodes.wait_whole()
    master = nodes.masters()[0]
    replica = nodes.replica_port(master)
    nodes.kill(master)
    nodes.wait_takeover(replica)
    with nodes.without_failover():
        nodes.restore()
        assert nodes.replica_port(replica) == master
    with nodes.client(master) as node, pytest.raises(RedisError):
        node.set("key", "a replica takes no writes")
