"""The queue on a real Redis Cluster of three masters with a replica each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import suppress
from inspect import iscoroutinefunction, signature
from types import ModuleType
from typing import Any, TypeVar

import pytest
from redis.asyncio import Redis
from shoal.v1 import worker_pb2

from libs.errors import NoCapacity
from libs.fleet import Fleet
from libs.queue import LaneKey, Lanes, Pulled, RedisCheck, UnsuitableRedis, connect, open_all
from libs.queue.connection.acl import ROUTER, SCHEDULER
from libs.queue.connection.cluster import ClusterRedis, client_for_key, list_masters
from libs.queue.keys import LAYOUT, STREAMED_CHANNEL, RedisKeys
from libs.queue.queue_position import QueuePositions
from libs.queue.rates import RateLimit, Rates, rates_key
from libs.versions import LAYOUT_VERSION
from tests.fleet import test_cards, test_lead, test_reader, test_registry
from tests.queue import test_lanes, test_leases, test_order, test_queue_position, test_upkeep
from tests.queue.parts import DEAD, LANE, LEASE_MS, Clock, add, ids, job, lease, make_lanes
from tests.support.redis_cluster import RedisCluster
from tests.support.sentinels import FakeSentinel, TcpServer
from tests.support.waiting import end_tasks, wait_until

SLOTS = 16
T = TypeVar("T")
Connect = Callable[..., Redis]
MODELS = [LaneKey("cpu", f"org/model-{number}") for number in range(24)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster(node_timeout_ms=4000) as running:
        yield running
        assert running.refusals() == []


@pytest.fixture
async def connected(cluster: RedisCluster) -> AsyncIterator[Connect]:
    """Makes clients, by default of the emptied cluster as a router. Nodes that the test killed are
    started again, even if it fails.
    """
    made: list[Redis] = []
    await asyncio.to_thread(cluster.empty)

    def make(url: str = cluster.url_as(ROUTER), **more: Any) -> Redis:
        made.append(connect(url, slots=SLOTS, **more))
        return made[-1]

    yield make
    for client in made:
        await client.aclose()
    await asyncio.to_thread(cluster.restore)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def as_router(connected: Connect) -> Redis:
    """A client that knows the topology, as a router's does once it has checked Redis."""
    return await with_topology(connected())


@pytest.fixture
async def redis(connected: Connect, cluster: RedisCluster) -> Redis:
    """A client for the keys of the only slot of `lanes` and `other`, with all rights. Commands
    without keys are run by the master of that slot.
    """
    return client_for_key(await with_topology(connected(cluster.url)), "{0}")


async def with_topology(redis: Redis) -> Redis:
    assert isinstance(redis, ClusterRedis)
    await redis.topology.refresh()
    return redis


def sharded(redis: Redis, clock: Clock | None, router_id: str) -> Lanes:
    return Lanes(
        redis, router_id=router_id, dead_result=DEAD, lease_ms=LEASE_MS, slots=SLOTS, clock=clock
    )


def tag_of(lane: LaneKey) -> str:
    return f"{{{RedisKeys(SLOTS).locate(lane)[0]}}}"


def lanes_at(cluster: RedisCluster, port: int) -> list[LaneKey]:
    return [lane for lane in MODELS if cluster.master_port(tag_of(lane)) == port]


async def put(lanes: Lanes, lane: LaneKey, *names: str) -> None:
    await lanes.enqueue(lane, [[job(name)] for name in names], max_tokens=10**9, notify=True)


async def pull(lanes: Lanes, lane: LaneKey) -> Pulled:
    pulled = await lanes.pull(lane, worker_id="w", budget_tokens=10**6, budget_jobs=256)
    assert isinstance(pulled, Pulled)
    return pulled


async def eventually(attempt: Callable[[], Awaitable[T]]) -> T:
    """Again and again while it is NoCapacity, as a router does; anything else fails the test."""
    async with asyncio.timeout(120):
        while True:
            with suppress(NoCapacity):
                return await attempt()
            await asyncio.sleep(0.05)


def shared_tests(
    fixtures: Collection[str], *modules: ModuleType
) -> list[Callable[..., Awaitable[None]]]:
    """Return the tests of these modules that need nothing but these fixtures."""
    return [
        test
        for module in modules
        for name, test in vars(module).items()
        if name.startswith("test_")
        and iscoroutinefunction(test)
        and signature(test).parameters.keys() <= set(fixtures)
        and "slots" not in name  # this module tests several slots itself
        and "ten_thousand" not in name  # slow, and the same
    ]


QUEUE_TESTS = shared_tests(
    ("lanes", "other", "redis", "clock"),
    *(test_lanes, test_leases, test_order, test_queue_position, test_upkeep),
)
FLEET_TESTS = shared_tests(
    ("fleet", "other", "redis"), test_cards, test_lead, test_reader, test_registry
)


@pytest.mark.parametrize("test", QUEUE_TESTS, ids=lambda test: test.__name__)
async def test_queue_behaves_as_on_one_redis(
    test: Callable[..., Awaitable[None]], as_router: Redis, redis: Redis, clock: Clock
) -> None:
    lanes = {"lanes": make_lanes(as_router, clock, "a"), "other": make_lanes(as_router, clock, "b")}
    given: dict[str, object] = {**lanes, "redis": redis, "clock": clock}
    await test(**{name: given[name] for name in signature(test).parameters})


@pytest.mark.parametrize("test", FLEET_TESTS, ids=lambda test: test.__name__)
async def test_registry_behaves_as_on_one_redis(
    test: Callable[..., Awaitable[None]], as_router: Redis, redis: Redis
) -> None:
    given: dict[str, object] = {
        "fleet": Fleet(as_router),
        "other": Fleet(as_router),
        "redis": client_for_key(redis, "{fleet}"),
    }
    await test(**{name: given[name] for name in signature(test).parameters})


def test_shared_tests_are_found() -> None:
    assert len(QUEUE_TESTS) > 40
    assert len(FLEET_TESTS) > 30


async def test_lanes_of_all_masters_are_served_together(
    as_router: Redis, clock: Clock, cluster: RedisCluster
) -> None:
    a, b = sharded(as_router, clock, "a"), sharded(as_router, clock, "b")
    await a.check()
    await a.load_scripts()
    await open_all(as_router)
    assert len({cluster.master_port(tag_of(lane)) for lane in MODELS}) == 3
    for lane in MODELS:
        await put(a, lane, lane.model, f"{lane.model} left")
        pulled = await b.pull(
            lane, worker_id="w", batch_id=lane.model, budget_tokens=10, budget_jobs=1
        )
        assert isinstance(pulled, Pulled)
        assert await b.leasing(MODELS, lane.model) == lane
        assert not (await b.renew(lane, "w", [lane.model]))[0].lost
        await b.complete(lane, "w", lane.model, [(lane.model, b"x")], release=True)
        assert await a.missing(lane, [lane.model, f"{lane.model} left"]) == [lane.model]
        await a.sweep(lane)
    gauges = {one.lane: one for one in await a.lane_gauges()}
    assert gauges.keys() == set(MODELS)
    assert {one.queued_jobs for one in gauges.values()} == {1}
    positions = QueuePositions(as_router, slots=SLOTS)
    assert (await positions.read(MODELS[0], ["t"]))[0].interactive == 10
    assert [await a.cancel(lane, [job(f"{lane.model} left")]) for lane in MODELS] == [1] * 24
    assert await positions.forget(MODELS[0])
    taken = [answer for inbox in a.inboxes for answer in await a.take_replies(0, inbox)]
    assert len(a.inboxes) == SLOTS
    assert sorted(taken) == sorted((lane.model, b"x") for lane in MODELS)


async def test_answers_to_a_dead_router_are_dropped_at_every_master(
    as_router: Redis, clock: Clock
) -> None:
    a, b = sharded(as_router, clock, "a"), sharded(as_router, clock, "b")
    for lane in MODELS:
        await put(a, lane, lane.model)
        batch = await pull(b, lane)
        await b.complete(lane, "w", batch.batch_id, [(lane.model, b"x")], release=True)
    await b.drop_replies("a")
    assert [await a.take_replies(0, inbox) for inbox in a.inboxes] == [[]] * SLOTS


async def test_answer_is_awaited_in_its_own_slot(as_router: Redis, clock: Clock) -> None:
    a, b = sharded(as_router, clock, "a"), sharded(as_router, clock, "b")

    async def answers(inbox: int) -> list[tuple[str, bytes]]:
        while not (found := await a.take_replies(2, inbox)):
            pass
        return found

    waiting = [asyncio.create_task(answers(inbox)) for inbox in a.inboxes]
    await asyncio.sleep(0.05)
    await put(a, LANE, "a")
    batch = await pull(b, LANE)
    await b.complete(LANE, "w", batch.batch_id, [("a", b"x")], release=True)
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [[("a", b"x")]]
    await end_tasks(others)


async def test_notifications_and_streamed_text_reach_routers_from_every_master(
    as_router: Redis, connected: Connect, clock: Clock
) -> None:
    a, b = sharded(as_router, clock, "a"), sharded(connected(), clock, "b")
    wakeups, streamed = a.wakeups(), a.streamed_texts()
    assert await anext(wakeups) is None
    for lane in MODELS:
        await put(b, lane, "a")
        assert await anext(wakeups) == lane
    reported = asyncio.ensure_future(anext(streamed))
    async with asyncio.timeout(120):
        while not reported.done():  # until it listens
            await b.publish_streamed("a", b"more")
            await asyncio.wait([reported], timeout=0.1)
    assert await reported == b"more"
    await wakeups.aclose()
    await streamed.aclose()


async def test_streamed_text_is_passed_on_by_one_shard_where_servers_can(
    as_router: Redis, connected: Connect, clock: Clock, cluster: RedisCluster
) -> None:
    """A message for one router is not copied to all nodes, and follows the slot to another master.
    Servers older than Redis 7 have no shard channels.
    """
    a, b = sharded(as_router, clock, "a"), sharded(connected(), clock, "b")
    channel = f"{STREAMED_CHANNEL}:a"

    def is_subscribed() -> bool:
        with cluster.client(cluster.master_port(channel)) as node:
            has_shards = int(node.info("server")["redis_version"].split(".")[0]) >= 7
            if has_shards:
                return bool(node.execute_command("PUBSUB", "SHARDNUMSUB", channel)[1] == 1)
        counts = []
        for port in cluster.masters():
            with cluster.client(port) as node:
                counts.append(node.execute_command("PUBSUB", "NUMSUB", channel)[1])
        return sum(counts) == 1

    taken: asyncio.Queue[bytes] = asyncio.Queue()

    async def take() -> None:
        while True:
            with suppress(NoCapacity):
                async for text in a.streamed_texts():
                    taken.put_nowait(text)

    taking = asyncio.create_task(take())
    for text in (b"first", b"at another master"):
        await asyncio.to_thread(wait_until, is_subscribed, 60, "the subscription")
        await b.publish_streamed("a", text)
        assert await asyncio.wait_for(taken.get(), 60) == text
        others = [port for port in cluster.masters() if port != cluster.master_port(channel)]
        await asyncio.to_thread(cluster.move_slot, channel, others[0])
    await end_tasks([taking])


async def test_fleet_and_rates_are_kept_for_all_routers(
    as_router: Redis, connected: Connect, cluster: RedisCluster
) -> None:
    scheduler, router = Fleet(connected(cluster.url_as(SCHEDULER))), Fleet(as_router)
    await router.report(worker_pb2.HeartbeatRequest(worker_id="w", epoch="e", pool="cpu"))
    assert await router.claim(LANE, "w", 1000)
    fence = await scheduler.lead("s", last_ms=600_000)
    assert fence is not None
    assert (await scheduler.refresh()).workers.keys() == {"w"}
    assert await scheduler.order("w", "e", worker_pb2.Directive(load_model="m"), fence=fence)
    assert [one.load_model for one in await router.orders("w", "e", 0)] == ["m"]
    await scheduler.note_plan(fence, 1, {"m": "wanted"})
    assert await router.plan_notes("m") == {"m": "wanted"}
    rate = RateLimit(requests_per_second=0.001, burst_seconds=1000)
    for tenant in map(str, range(8)):
        first, second = (Rates(client, slots=SLOTS) for client in (as_router, connected()))
        assert await first.take(tenant, rate, 1) == 0.0
        assert await second.take(tenant, rate, 1) > 0.0


async def test_every_master_must_suit_and_all_processes_have_the_same_slots(
    as_router: Redis, connected: Connect, cluster: RedisCluster
) -> None:
    lanes = sharded(as_router, None, "a")
    await lanes.check()
    for port in cluster.masters():
        with cluster.client(port) as node:
            node.config_set("maxmemory-policy", "allkeys-lru")
            with pytest.raises(UnsuitableRedis, match="maxmemory-policy"):
                await lanes.check()
            node.config_set("maxmemory-policy", "noeviction")
    await lanes.check()
    with pytest.raises(
        UnsuitableRedis,
        match=rf"layout {LAYOUT_VERSION} with 16 slots .* reads layout {LAYOUT_VERSION}: .*SLOTS",
    ):
        await make_lanes(connected(), Clock(), "a").check()
    assert await client_for_key(as_router, LAYOUT).get(LAYOUT) is not None


async def test_planned_failover_loses_and_refuses_nothing(
    as_router: Redis, clock: Clock, cluster: RedisCluster
) -> None:
    """Calls in flight, calls that wait for answers and subscriptions continue at the new master."""
    lanes = sharded(as_router, clock, "a")
    redis_check = RedisCheck(lanes)
    await redis_check.run_if_due()
    old = cluster.master_port(tag_of(LANE))
    before, sent = lanes.masters.addresses, 0
    is_over = False

    async def send() -> None:
        nonlocal sent
        while not is_over:
            await put(lanes, LANE, f"{sent}")
            sent += 1
            await asyncio.sleep(0.01)

    async def hear() -> None:
        while not is_over:
            with suppress(NoCapacity):
                async for _ in lanes.wakeups():
                    pass

    async def take() -> None:
        while not is_over:
            await asyncio.gather(*(lanes.take_replies(0.5, inbox) for inbox in lanes.inboxes))

    sending, hearing, taking = (asyncio.create_task(one()) for one in (send, hear, take))
    await asyncio.to_thread(cluster.fail_over, old)
    middle = sent
    await asyncio.to_thread(wait_until, lambda: sent > middle + 20 or sending.done(), 120, "calls")
    is_over = True
    await asyncio.gather(sending, taking)
    await end_tasks([hearing])
    assert cluster.master_port(tag_of(LANE)) != old
    assert lanes.masters.addresses != before
    await redis_check.run_if_due()
    found: list[str] = []
    while len(found) < sent:
        found += ids(await pull(lanes, LANE))
    assert sorted(found, key=int) == [f"{number}" for number in range(sent)]


async def test_lanes_of_other_masters_are_served_while_one_is_dead(
    as_router: Redis, clock: Clock, cluster: RedisCluster
) -> None:
    lanes = sharded(as_router, clock, "a")
    await lanes.check()
    for lane in MODELS:
        await put(lanes, lane, "before")
    victim = cluster.master_port(tag_of(LANE))
    dead = lanes_at(cluster, victim)
    healthy = [lane for lane in MODELS if lane not in dead]
    assert dead
    assert healthy
    await lanes.lane_gauges()
    await asyncio.to_thread(cluster.wait_replicated, victim)

    async def listen() -> None:
        wakeups = lanes.wakeups()
        assert await anext(wakeups) is None
        await wakeups.aclose()

    with cluster.without_failover():
        cluster.kill(victim)
        with pytest.raises(NoCapacity, match=r"cannot be reached|no master"):
            await put(lanes, dead[0], "refused")
        for lane in healthy:
            await put(lanes, lane, "during")
        gauges = {one.lane: one.queued_jobs for one in await lanes.lane_gauges()}
        assert gauges == dict.fromkeys(dead, 1) | dict.fromkeys(healthy, 2)
        await eventually(listen)
    for lane in dead:
        await eventually(lambda lane=lane: put(lanes, lane, "after"))  # type: ignore[misc]
        assert "before" in ids(await pull(lanes, lane))
    assert cluster.master_port(tag_of(LANE)) != victim
    assert await lanes.check(again=True)


async def test_master_that_does_not_answer_delays_no_work_for_the_others(
    as_router: Redis, clock: Clock, cluster: RedisCluster
) -> None:
    """Nor does it make a router unready if it holds the fleet and the layout."""
    lanes = sharded(as_router, clock, "a")
    await lanes.check()
    for lane in MODELS:
        await put(lanes, lane, "a")
    victim = cluster.master_port("{fleet}")
    assert cluster.master_port(LAYOUT) == victim
    silent = lanes_at(cluster, victim)
    healthy = [lane for lane in MODELS if lane not in silent]
    batch = await pull(lanes, healthy[0])
    await lanes.lane_gauges()
    renewed: list[LaneKey] = []

    async def renew(lane: LaneKey) -> None:
        await lanes.renew(lane, "w", [batch.batch_id])
        renewed.append(lane)

    with cluster.without_failover(), cluster.suspended(victim):
        with pytest.raises(NoCapacity):
            await lanes.masters.for_each_lane([*silent, *healthy], renew)
        assert set(renewed) == set(healthy)
        assert await lanes.leasing([*silent, *healthy], batch.batch_id) == healthy[0]
        assert {one.lane for one in await lanes.lane_gauges()} == set(MODELS)
        assert not await lanes.check(again=True)
        await lanes.drop_replies("b")
    await eventually(lambda: put(lanes, silent[0], "b"))


async def test_slot_that_migrates_key_by_key_is_no_capacity_until_it_has_moved(
    as_router: Redis, clock: Clock, cluster: RedisCluster
) -> None:
    lanes = sharded(as_router, clock, "a")
    await lanes.check()
    lane = MODELS[0]
    await put(lanes, lane, "a")
    with cluster.migrating(tag_of(lane)) as finish:
        with pytest.raises(NoCapacity, match="atomic slot migration"):
            await put(lanes, lane, "b")
        finish()
    await put(lanes, lane, "c")
    assert ids(await pull(lanes, lane)) == ["a", "c"]


async def test_keys_of_a_migrating_slot_are_found_at_either_master(
    as_router: Redis, clock: Clock, cluster: RedisCluster
) -> None:
    """A command or script of one key is served throughout, whether its key has moved, has not, or
    does not exist.
    """
    lanes = sharded(as_router, clock, "a")
    await lanes.check()
    lane = MODELS[0]
    await put(lanes, lane, "a")
    inbox = lanes.inboxes[RedisKeys(SLOTS).locate(lane)[0]]
    with cluster.migrating(tag_of(lane)) as finish:
        assert await lanes.missing(lane, ["a", "b"]) == ["b"]
        assert await lanes.take_replies(0.1, inbox) == []
        assert [one.queued_jobs for one in await lanes.lane_gauges()] == [1]
        await lanes.drop_replies("b")
        finish()
    rate, rates = (
        RateLimit(requests_per_second=0.001, burst_seconds=1000),
        Rates(as_router, slots=SLOTS),
    )
    for tenant in map(str, range(4)):
        assert await rates.take(tenant, rate, 1) == 0.0
        with cluster.migrating(rates_key(tenant, SLOTS)) as finish:
            assert await rates.take(tenant, rate, 1) > 0.0
            finish()
        assert await rates.take(tenant, rate, 1) > 0.0


async def test_connections_that_break_are_opened_again(
    as_router: Redis, clock: Clock, cluster: RedisCluster
) -> None:
    lanes = sharded(as_router, clock, "a")
    for round_number in range(3):
        for lane in MODELS:
            await put(lanes, lane, f"{round_number}")
        assert len(await lanes.lane_gauges()) == len(MODELS)
        cluster.commands("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert {len(ids(await pull(lanes, lane))) for lane in MODELS} == {3}


async def test_clients_of_a_master_share_one_line(as_router: Redis, clock: Clock) -> None:
    lanes = sharded(as_router, clock, "a")
    await lanes.check()
    for lane in MODELS:
        await put(lanes, lane, "a")
    assert isinstance(as_router, ClusterRedis)
    assert [server.held_connections for server in as_router.topology.servers] == [1, 1, 1]
    assert len(list_masters(as_router)) == 3


async def test_node_without_cluster_url_and_url_without_cluster_are_refused_by_name(
    connected: Connect, cluster: RedisCluster
) -> None:
    clock = Clock()
    port = next(port for port in cluster.masters() if port != cluster.master_port("{0}"))
    with pytest.raises(NoCapacity, match=r"redis\+cluster://"):
        await add(make_lanes(connected(f"redis://127.0.0.1:{port}"), clock, "a"), job("a"))
    single = TcpServer()
    with single:
        url = f"redis+cluster://127.0.0.1:{single.address[1]}"
        with pytest.raises(NoCapacity, match="not a node of a cluster"):
            await sharded(connected(url), clock, "a").check()


async def test_dead_seeds_are_passed_over(connected: Connect, cluster: RedisCluster) -> None:
    port = cluster.ports[0]
    lanes = make_lanes(connected(f"redis+cluster://127.0.0.1:1,127.0.0.1:{port}"), Clock(), "a")
    assert await add(lanes, job("a"))
    assert ids(await lease(lanes)) == ["a"]
    with pytest.raises(NoCapacity, match="no node of the cluster answers"):
        await make_lanes(connected("redis+cluster://127.0.0.1:1"), Clock(), "a").lane_gauges()


def slots_reply(host: bytes, port: int) -> bytes:
    return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n" % (len(host), host, port)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (slots_reply(b"192.0.2.1", 6379), r"another machine.*SHOAL_ALLOW_INSECURE"),
        (b"*0\r\n", "no node of the cluster"),
        (b"*1\r\n:1\r\n", "no node of the cluster"),
        (b"-NOAUTH Authentication required.\r\n", "user name and password"),
        (b"-NOPERM this user has no permissions to run 'cluster|slots'\r\n", "shoal redis-acl"),
        (b"-ERR This instance has cluster support disabled\r\n", "not a node of a cluster"),
    ],
)
async def test_unusable_topologies_are_refused_in_words(
    connected: Connect, says: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.queue.connection.cluster.TOPOLOGY_SECONDS", 30.0)
    with FakeSentinel(("127.0.0.1", 1), says=says) as node:
        url = f"redis+cluster://:s3cret@127.0.0.1:{node.port}"
        if b"NOAUTH" not in says:
            url = url.replace(":s3cret@", "")
        with pytest.raises(NoCapacity, match=words) as caught:
            await sharded(connected(url), Clock(), "a").check()
        assert "s3cret" not in str(caught.value)
