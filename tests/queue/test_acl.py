"""Redis' users: each may do what its process does, and nothing else. That it suffices, all tests of
the queue and the fleet show, which run as `shoal-router`, and those of the whole mesh
(tests/mesh/test_trust.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError
from shoal.v1 import models_pb2, worker_pb2

from libs.errors import NoCapacity
from libs.fleet import Fleet
from libs.queue import LaneKey, Lanes, UnsuitableRedis, connect
from libs.queue.connection.acl import ROUTER, SCHEDULER, User, acl_file
from libs.queue.queue_position import QueuePositions
from libs.queue.rates import RateLimit, Rates
from tests.queue.parts import DEAD, LANE, Clock, add, job, lease, make_lanes
from tests.support.acl import PASSWORD, add_user, connect_as, refusals
from tests.support.redis import RedisServer

UNSEEN = {
    "@pubsub",  # only on a cluster with shard channels
    *("asking", "cluster"),  # only on a cluster (tests/queue/test_cluster.py)
    "select",  # only where the URL names a database
    "unsubscribe",
}
BROKEN = worker_pb2.Failure(reason="MODEL_LOAD_FAILED", message="broken")


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server with statistics of only this test."""
    with RedisServer() as running:
        yield running


@pytest.fixture
async def admin(own_server: RedisServer) -> AsyncIterator[Redis]:
    client = connect(own_server.url)
    for user in (ROUTER, SCHEDULER):
        await add_user(client, user)
    yield client
    await client.aclose()


As = Callable[[User], Redis]


@pytest.fixture
async def connected(own_server: RedisServer) -> AsyncIterator[As]:
    """Makes clients for users."""
    made: list[Redis] = []

    def make(user: User) -> Redis:
        made.append(connect_as(user, own_server.url))
        return made[-1]

    yield make
    for client in made:
        await client.aclose()


async def used(admin: Redis) -> set[str]:
    """Return the commands since the last CONFIG RESETSTAT, including those in scripts, without the
    test's own.
    """
    found = {
        name.removeprefix("cmdstat_").partition("|")[0] for name in await admin.info("commandstats")
    }
    return found - {"config", "acl", "auth"}


async def script_calls(admin: Redis) -> int:
    """Return how often SCRIPT was called since the last CONFIG RESETSTAT; Redis 7 counts its
    subcommands separately.
    """
    stats = await admin.info("commandstats")
    return sum(
        counts["calls"]
        for name, counts in stats.items()
        if name.partition("|")[0] == "cmdstat_script"
    )


def allowed(user: User) -> set[str]:
    return {command.partition("|")[0] for command in user.commands} - UNSEEN


async def as_a_router(redis: Redis) -> None:
    """Everything that a router does."""
    await redis.ping()  # as every client does with a connection that was idle
    clock = Clock()
    lanes, fleet = make_lanes(redis, clock, "a"), Fleet(redis)
    await Lanes(redis, router_id="a", dead_result=DEAD).check()
    wakeups = lanes.wakeups()
    await anext(wakeups)
    await lanes.enqueue(LANE, [[job(name)] for name in "abcd"], max_tokens=1000, notify=True)
    await anext(wakeups)
    await wakeups.aclose()
    await make_lanes(redis, clock, "b").complete(
        LANE, "w", (await lease(lanes, 20)).batch_id, [("a", b"x")], release=True
    )
    assert await lanes.take_replies(1.0) == [("a", b"x")]
    assert await lanes.take_replies(0.01) == []
    streamed_texts = make_lanes(redis, clock, "a").streamed_texts()
    reported = asyncio.create_task(anext(streamed_texts))
    async with asyncio.timeout(60):
        while not reported.done():  # until it listens
            await make_lanes(redis, clock, "b").publish_streamed("a", b"more")
            await asyncio.wait([reported], timeout=0.1)
    assert await reported == b"more"
    await streamed_texts.aclose()
    held = await lease(lanes, 10)
    await lanes.renew(LANE, "w", [held.batch_id])
    await lanes.missing(LANE, ["b"])
    assert await lanes.cancel(LANE, [job("b")]) == 1
    await lanes.sweep(LANE)
    for _ in range(4):  # until the job is given up as one that kills workers
        await lease(lanes, 10)
        clock.ms += 10_000
    await lanes.pull(LANE, worker_id="w", budget_tokens=10, budget_jobs=1)
    await QueuePositions(redis).read(LANE, ["t"])
    await Rates(redis).take("t", RateLimit(1.0, 1.0), 5)
    await lanes.fail_all(LANE, b"x")
    await lanes.drop_replies("a")
    await QueuePositions(redis).forget(LANE)
    await lanes.lane_gauges()
    model = worker_pb2.WorkerModel(
        model="org/model", state=models_pb2.MODEL_STATE_FAILED, failure=BROKEN
    )
    await fleet.report(
        worker_pb2.HeartbeatRequest(worker_id="w", epoch="e", pool="cpu", models=[model])
    )
    cold = worker_pb2.WorkerModel(
        model="org/cold",
        state=models_pb2.MODEL_STATE_COLD,
        card=models_pb2.ModelCard(model="org/cold"),
    )
    await fleet.report(
        worker_pb2.HeartbeatRequest(worker_id="w", epoch="f", pool="cpu", on_disk=[cold])
    )
    await fleet.refresh()
    await Fleet(redis).refresh()  # reads the models on the worker's disk
    await fleet.claim(LANE, "w", 1000)
    await fleet.renew_claim(LANE, "w", 1000)
    await fleet.release_claim(LANE, "w")
    await fleet.order("w", "f", worker_pb2.Directive())
    await fleet.orders("w", "f", 0)
    await fleet.plan_notes("org/model")
    await fleet.router_heartbeat("a")


async def as_a_scheduler(redis: Redis) -> None:
    """Everything that a scheduler does."""
    await redis.ping()
    lanes, fleet = Lanes(redis, router_id="s", dead_result=b""), Fleet(redis, ttl_ms=1)
    await lanes.check()
    wakeups = lanes.wakeups()
    await anext(wakeups)
    fence = await fleet.lead("s", last_ms=600_000)
    assert fence is not None
    await Fleet(redis).refresh()  # the worker is alive by this ttl: its models on disk are read
    await fleet.refresh()
    await lanes.lane_gauges()
    await fleet.forgive(["org/model"])
    await fleet.order("w", "e", worker_pb2.Directive(), fence=fence, lane=LANE)
    await anext(wakeups)
    await wakeups.aclose()
    await fleet.note_plan(fence, 1, {"org/model": "wanted", "org/other": ""}, replace_all=True)
    await fleet.resign(fence)


async def test_router_has_exactly_the_rights_that_it_uses(connected: As, admin: Redis) -> None:
    router = connected(ROUTER)
    await admin.config_resetstat()
    await as_a_router(router)
    assert await refusals(admin) == []
    assert await used(admin) == allowed(ROUTER), (
        "libs/queue/connection/acl.py names other commands than a router uses"
    )


async def test_scheduler_has_exactly_the_rights_that_it_uses(connected: As, admin: Redis) -> None:
    scheduler = connected(SCHEDULER)
    fleet = Fleet(admin)
    await Lanes(admin, router_id="a", dead_result=DEAD).enqueue(
        LANE, [[job("a")]], max_tokens=100, notify=False
    )
    on_disk = [worker_pb2.WorkerModel(model="org/model", state=models_pb2.MODEL_STATE_COLD)]
    await fleet.report(
        worker_pb2.HeartbeatRequest(worker_id="w", epoch="e", pool="cpu", on_disk=on_disk)
    )
    await fleet.record_failure("org/model", "w", BROKEN)
    await admin.hset("v1:{fleet}:failures", "org/old w", b"1 " + BROKEN.SerializeToString())
    await asyncio.sleep(0.01)  # the worker is silent for longer than the scheduler's ttl
    await Lanes(connected(ROUTER), router_id="a", dead_result=DEAD).load_scripts()
    await admin.config_resetstat()
    await as_a_scheduler(scheduler)
    assert await refusals(admin) == []
    assert await used(admin) == allowed(SCHEDULER), (
        "libs/queue/connection/acl.py names other commands than a scheduler uses"
    )


@pytest.mark.parametrize("user", [ROUTER, SCHEDULER], ids=lambda user: user.name)
async def test_everything_else_is_refused(connected: As, admin: Redis, user: User) -> None:
    redis = connected(user)
    keys = make_lanes(admin, Clock(), "a")._keys.lane_keys(LANE)
    outside: list[tuple[str | int, ...]] = [
        ("CONFIG", "GET", "requirepass"),
        ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("KEYS", "*"),
        ("SCAN", 0),
        ("EVAL", "return redis.call('KEYS', '*')", 0),
        ("SCRIPT", "FLUSH"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("MODULE", "LIST"),
        ("MONITOR",),
        ("SHUTDOWN", "NOSAVE"),
        ("REPLICAOF", "10.0.0.1", 6379),
        ("GET", "other:key"),
        ("SET", "other:key", "x"),
        ("PUBLISH", "other", "x"),
        ("SUBSCRIBE", "other"),
    ]
    if user is SCHEDULER:
        outside += [
            ("SCRIPT", "LOAD", "return 1"),
            ("HGETALL", "v1:{fleet}:routers"),
            ("RPUSH", keys[12] + "a", "x"),
        ]
        outside += [
            ("HGETALL", keys[2]),
            ("HGET", keys[3], "a"),
            ("DEL", keys[12] + "a"),
            ("LPOP", keys[12] + "a"),
        ]
    for command in outside:
        with pytest.raises(NoPermissionError):
            await redis.execute_command(*command)
    reported = await refusals(admin)
    assert reported
    assert all(line.startswith(user.name) for line in reported)
    assert await admin.dbsize() == 0


async def test_scripts_have_no_more_rights_than_their_user(connected: As, admin: Redis) -> None:
    redis = connected(ROUTER)
    for script in ("return redis.call('KEYS', '*')", "return redis.call('GET', 'other:key')"):
        sha = await redis.script_load(script)
        with pytest.raises(Exception, match=r"can't|NOPERM|permission"):
            await redis.evalsha(sha, 0)
    assert len(await refusals(admin)) == 2


async def test_scheduler_runs_no_lua_but_the_scripts_that_routers_loaded(
    connected: As, admin: Redis
) -> None:
    router, scheduler = connected(ROUTER), connected(SCHEDULER)
    fleet = Fleet(scheduler)
    with pytest.raises(NoCapacity, match="start a router"):
        await fleet.lead("s")
    await Fleet(router).router_heartbeat("a")  # its script is missing, so it loads all
    assert await fleet.lead("s", last_ms=600_000)
    await admin.script_flush()
    with pytest.raises(NoCapacity, match="start a router"):
        await fleet.lead("s")
    await Fleet(router).router_heartbeat("a")
    assert not await fleet.lead("t")
    # A script of routers runs with the scheduler's rights: payloads are not among its keys.
    lanes = Lanes(router, router_id="a", dead_result=DEAD)
    await add(lanes, job("a"))
    with pytest.raises(NoCapacity, match="let our user"):
        await Lanes(scheduler, router_id="s", dead_result=b"").pull(
            LANE, worker_id="w", budget_tokens=10, budget_jobs=1
        )


async def test_calls_that_find_all_scripts_lost_load_them_once(connected: As, admin: Redis) -> None:
    lanes = make_lanes(connected(ROUTER), Clock(), "a")
    await lanes.load_scripts()
    await admin.config_resetstat()
    await lanes.load_scripts()
    loads = await script_calls(admin)
    await admin.script_flush()
    await admin.config_resetstat()
    await asyncio.gather(*(add(lanes, job(name)) for name in "abcdefgh"))
    assert await script_calls(admin) == loads


async def test_acl_without_needed_rights_is_logged_and_survived(
    connected: As, admin: Redis
) -> None:
    redis = connected(ROUTER)
    lanes = make_lanes(redis, Clock(), "a")
    for revoked in ("evalsha", "zadd"):
        await admin.execute_command("ACL", "SETUSER", ROUTER.name, f"-{revoked}")
        with pytest.raises(NoCapacity, match="shoal redis-acl"):
            await add(lanes, job("a"))
        await admin.execute_command("ACL", "SETUSER", ROUTER.name, f"+{revoked}")
    await admin.execute_command("ACL", "SETUSER", ROUTER.name, "-info")
    with pytest.raises(UnsuitableRedis, match="shoal redis-acl"):
        await lanes.check()


async def test_acl_file_admits_only_users_with_a_password(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text(acl_file(router=PASSWORD, scheduler=None, admin="root's"))
    with RedisServer(arguments=["--aclfile", str(users)]) as server:
        router, nobody, scheduler = (
            connect_as(ROUTER, server.url),
            connect(server.url),
            connect_as(SCHEDULER, server.url),
        )
        assert await add(make_lanes(router, Clock(), "a"), job("a"))
        for closed in (nobody, scheduler):
            with pytest.raises(RedisConnectionError):
                await closed.ping()
            with pytest.raises(NoCapacity, match="user name and password"):
                await make_lanes(closed, Clock(), "a").lane_gauges()
        admin = connect(f"{server.url}?password=root's")
        assert await admin.dbsize() > 0
        for client in (router, nobody, scheduler, admin):
            await client.aclose()
    text = acl_file(router=PASSWORD, scheduler="other", admin="root's")
    assert PASSWORD not in text
    assert "root's" not in text


def test_lanes_of_any_name_are_within_the_keys_of_a_scheduler() -> None:
    """Its patterns end with the part of a lane; no name of a lane may end a key so that it looks
    like another part.
    """
    assert ":" not in LaneKey("a:i", "b:meta/c", "d:b").name
