"""Redis behind Sentinels: real ones over a real master and its replicas, and a fake one that names
any master.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from redis.asyncio import Redis

from libs.errors import NoCapacity
from libs.queue import LaneKey, Lanes, RedisCheck, RedisTrust, UnsuitableRedis, connect, open_all
from libs.queue import lanes as lanes_module
from libs.queue.connection import sentinel as sentinel_connections
from libs.queue.connection.acl import ROUTER
from libs.queue.keys import LAYOUT, WAKEUP_CHANNEL
from tests.queue.parts import LANE, Clock, add, ids, job, lease, make_lanes
from tests.support.acl import PASSWORD, add_user, refusals
from tests.support.certificates import Certificates
from tests.support.sentinels import SERVICE, FakeSentinel, SentinelSet, TcpServer
from tests.support.tls_proxy import TlsProxy
from tests.support.waiting import end_tasks, wait_until

PAGE = Path(__file__).parents[2] / "docs/kubernetes.md"
T = TypeVar("T")
Connect = Callable[..., Redis]


@pytest.fixture(autouse=True)
def _sentinels_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for the Sentinels of these tests, which answer or are dead."""
    monkeypatch.setattr(sentinel_connections, "SENTINEL_SECONDS", 30.0)


@pytest.fixture
async def connected() -> AsyncIterator[Connect]:
    made: list[Redis] = []

    def make(url: str, trust: RedisTrust | None = None, **more: object) -> Redis:
        made.append(connect(url, trust, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for client in made:
        await client.aclose()


@pytest.fixture
def masters() -> Iterator[tuple[TcpServer, TcpServer]]:
    servers = TcpServer(), TcpServer()
    with servers[0], servers[1]:
        yield servers


async def eventually(attempt: Callable[[], Awaitable[T]]) -> T:
    """Again and again while it is NoCapacity, as a router does; anything else fails the test."""
    async with asyncio.timeout(120):
        while True:
            with suppress(NoCapacity):
                return await attempt()
            await asyncio.sleep(0.05)


async def test_queue_goes_on_with_the_new_master_when_the_old_one_is_killed(
    connected: Connect,
) -> None:
    """The users are those of docs/kubernetes.md, the Sentinels have a separate password, and one of
    them is killed, too.
    """
    users = "".join(
        f"{line.strip()}\n".replace(">…", ">s3cret")
        for line in PAGE.read_text().splitlines()
        if " on >… " in line
    )
    assert users.count("\n") == 2
    with SentinelSet(password="s3cret", sentinel_password="another", users=users) as sentinels:
        redis = connected(sentinels.url, RedisTrust(sentinel_password_file=sentinels.password_file))
        lanes = Lanes(redis, router_id="a", dead_result=b"")
        await lanes.check()
        await open_all(redis)
        before, server = sentinels.master(), lanes.masters.addresses
        deadline_ms = await lanes.now_ms() + 600_000
        assert await add(lanes, job("a", deadline_ms=deadline_ms))
        await asyncio.to_thread(
            wait_until, lambda: sentinels.replicated() == 2, 120, "the replicas to have the job"
        )
        wakeups = lanes.wakeups()
        assert await anext(wakeups) is None
        sentinels.kill(sentinels.sentinels[0])
        sentinels.sentinels = sentinels.sentinels[1:]
        sentinels.kill(before)
        with pytest.raises(NoCapacity):
            await anext(wakeups)
        await asyncio.to_thread(sentinels.wait_for_another, before)

        # The replicated data is present; scripts are loaded again.
        assert ids(await eventually(lambda: lease(lanes))) == ["a"]
        assert lanes.masters.addresses != server
        wakeups = lanes.wakeups()
        assert await eventually(lambda: anext(wakeups)) is None
        other = Lanes(redis, router_id="b", dead_result=b"")
        await other.enqueue(
            LANE, [[job("b", deadline_ms=deadline_ms)]], max_tokens=100, notify=True
        )
        async with asyncio.timeout(60):
            assert await anext(wakeups) == LANE
        await wakeups.aclose()
        assert sentinels.refusals() == []


async def test_failover_by_order_is_nothing_but_a_short_absence(connected: Connect) -> None:
    """One call waits for answers and another one for notifications: a master that becomes a replica
    fails both.
    """
    with SentinelSet() as sentinels:
        lanes = Lanes(connected(sentinels.url), router_id="a", dead_result=b"")
        await lanes.check()

        async def take() -> None:
            while True:
                await eventually(lambda: lanes.take_replies(2))

        async def hear() -> None:
            while True:
                with suppress(NoCapacity):
                    async for _ in lanes.wakeups():
                        pass

        async def ask() -> None:
            while True:
                await eventually(lambda: add(lanes, job("a")))

        loops = [asyncio.create_task(one()) for one in (take, hear, ask)]
        before = sentinels.master()
        await asyncio.to_thread(sentinels.fail_over)
        # Until the old master is demoted, open connections to it continue.
        await asyncio.to_thread(
            wait_until,
            lambda: lanes.masters.addresses == ("127.0.0.1", sentinels.master()),
            120,
            "everybody to be there",
        )
        assert sentinels.master() != before
        await eventually(lanes.lane_gauges)
        assert not [task for task in loops if task.done()]
        await end_tasks(loops)


async def test_replica_is_not_used_even_if_sentinels_name_it(
    masters: tuple[TcpServer, TcpServer], connected: Connect
) -> None:
    master, replica = masters
    at_replica = connected(replica.url)
    await at_replica.execute_command("CONFIG", "SET", "replica-read-only", "no")
    await at_replica.execute_command("REPLICAOF", *master.address)
    with FakeSentinel(replica.address) as sentinel:
        lanes = make_lanes(connected(sentinel.url()), Clock(), "a")
        for attempt in (
            lambda: add(lanes, job("a")),
            lanes.lane_gauges,
            lambda: anext(lanes.wakeups()),
        ):
            with pytest.raises(NoCapacity):
                await attempt()
        assert await at_replica.dbsize() == 0
        sentinel.master = master.address
        assert await add(lanes, job("a"))


async def test_master_that_became_a_replica_is_left(
    masters: tuple[TcpServer, TcpServer], connected: Connect
) -> None:
    """A call that the demoted master refuses is repeated at the new master."""
    old, new = masters
    with FakeSentinel(old.address) as sentinel:
        redis = connected(sentinel.url(), max_connections=1)
        lanes = make_lanes(redis, Clock(), "a")
        await add(lanes, job("a"))
        await connected(old.url).execute_command("REPLICAOF", *new.address)
        sentinel.master = new.address
        assert await add(lanes, job("b"))
        assert ids(await lease(lanes)) == ["b"]


async def test_connections_to_old_master_close_after_failover(
    masters: tuple[TcpServer, TcpServer], connected: Connect
) -> None:
    """Connections that wait for notifications are closed too, at a master that lives on, cut off
    from its Sentinels.
    """
    old, new = masters
    with FakeSentinel(old.address) as sentinel:
        redis = connected(sentinel.url())
        lanes = make_lanes(redis, Clock(), "a")
        wakeups = lanes.wakeups()
        assert await anext(wakeups) is None
        waiting = asyncio.ensure_future(anext(wakeups))
        sentinel.master = new.address
        await open_all(redis)
        with pytest.raises(NoCapacity):
            await waiting
        wakeups = lanes.wakeups()
        assert await anext(wakeups) is None
        await connected(new.url).publish(WAKEUP_CHANNEL, LaneKey("cpu", "m").name)
        assert await anext(wakeups) == LaneKey("cpu", "m")
        await wakeups.aclose()


async def test_concurrent_connects_share_one_discovery(
    masters: tuple[TcpServer, TcpServer], connected: Connect
) -> None:
    """One of them is gone by now, and none is forgotten (redis-py's own calls lose one)."""
    with FakeSentinel(masters[0].address, delay=0.1) as sentinel:
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/{SERVICE}"
        redis = connected(url, max_connections=16)
        await open_all(redis)
        assert sentinel.asked == 1
        pool: Any = redis.connection_pool
        assert len(set(pool.sentinel_manager.sentinels)) == 2


async def test_outdated_sentinel_is_ignored(
    masters: tuple[TcpServer, TcpServer], connected: Connect
) -> None:
    """The Sentinel and that master have just restarted, as after a node's restart, and report the
    old state.
    """
    old, new = masters
    with FakeSentinel(old.address, epoch=3) as stale, FakeSentinel(new.address, epoch=4) as current:
        for first, second in ((stale, current), (current, stale)):
            url = f"redis+sentinel://127.0.0.1:{first.port},127.0.0.1:{second.port}/{SERVICE}"
            lanes = make_lanes(connected(url), Clock(), "a")
            await add(lanes, job("a"))
            assert lanes.masters.addresses == new.address
    assert await connected(old.url).dbsize() == 0


async def test_in_plain_text_nothing_goes_to_a_master_on_another_machine(
    connected: Connect,
) -> None:
    with FakeSentinel(("192.0.2.1", 6379)) as sentinel:
        with pytest.raises(NoCapacity, match=r"another machine.*SHOAL_ALLOW_INSECURE") as caught:
            await make_lanes(connected(sentinel.url(":s3cret@")), Clock(), "a").lane_gauges()
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (b"-NOAUTH Authentication required.\r\n", "refuse our user name and password"),
        (
            b"-NOPERM this user has no permissions to run the 'sentinel' command\r\n",
            "SENTINEL MASTERS",
        ),
        (b"-ERR unknown command 'SENTINEL'\r\n", "not a Sentinel"),
        (b"*0\r\n", "knows a master"),
    ],
)
async def test_sentinel_failures_have_clear_messages(
    connected: Connect, says: bytes, words: str
) -> None:
    with (
        FakeSentinel(("127.0.0.1", 1), says=says) as sentinel,
        pytest.raises(NoCapacity, match=words),
    ):
        await make_lanes(connected(sentinel.url()), Clock(), "a").lane_gauges()


async def test_sentinels_and_master_are_reached_over_mutual_tls(
    masters: tuple[TcpServer, TcpServer], connected: Connect, tmp_path: Path
) -> None:
    tls = Certificates(tmp_path)
    made, mine = tls.issue("redis"), tls.issue("client/router")
    with ExitStack() as stack:
        at_master = stack.enter_context(
            TlsProxy(masters[0].socket, made.certificate, made.key, tls.ca)
        )
        stack.enter_context(FakeSentinel(("localhost", at_master.port), path=tmp_path / "s"))
        at_sentinel = stack.enter_context(
            TlsProxy(tmp_path / "s", made.certificate, made.key, tls.ca)
        )
        url = f"rediss+sentinel://localhost:{at_sentinel.port}/{SERVICE}"
        trust = RedisTrust(ca=tls.ca, certificate=mine.certificate, key=mine.key)
        assert await add(make_lanes(connected(url, trust), Clock(), "a"), job("a"))
        assert min(at_master.connections, at_sentinel.connections) > 0
        with pytest.raises(NoCapacity, match=r"not trusted|cannot be reached"):
            await make_lanes(
                connected(url, RedisTrust(certificate=mine.certificate, key=mine.key)), Clock(), "a"
            ).lane_gauges()


async def test_user_of_our_acl_has_the_needed_rights(
    masters: tuple[TcpServer, TcpServer], connected: Connect
) -> None:
    admin = connected(masters[0].url)
    await add_user(admin, ROUTER)
    (masters[0].socket.parent / "password").write_text(PASSWORD)
    with FakeSentinel(masters[0].address) as sentinel:
        trust = RedisTrust(masters[0].socket.parent / "password")
        lanes = Lanes(
            connected(sentinel.url(f"{ROUTER.name}@"), trust), router_id="a", dead_result=b""
        )
        await lanes.check()
        assert await refusals(admin) == []


async def test_redis_that_is_a_replica_by_now_or_has_too_few_is_no_capacity(
    masters: tuple[TcpServer, TcpServer], connected: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Sentinels, as behind the one address of a managed Redis: also for what waits there,
    and for scripts.
    """
    monkeypatch.setattr(
        "libs.queue.connection.client.ANSWER_SECONDS", 120.0
    )  # longer than the call waits
    server, other = masters
    redis, admin = connected(server.url), connected(server.url)
    lanes = make_lanes(redis, Clock(), "a")
    await add(lanes, job("a"))
    await admin.execute_command("CONFIG", "SET", "min-replicas-to-write", 1)
    with pytest.raises(NoCapacity, match="accepts no writes"):
        await add(lanes, job("b"))
    await admin.execute_command("CONFIG", "SET", "min-replicas-to-write", 0)
    monkeypatch.setattr(lanes_module, "MAX_BLOCK_SECONDS", 60.0)
    waiting = asyncio.create_task(lanes.take_replies(60))
    await asyncio.to_thread(
        wait_until, lambda: server.blocked_clients() == 1, 60, "the call to wait"
    )
    await admin.execute_command("REPLICAOF", *other.address)
    with pytest.raises(NoCapacity):
        await waiting
    with pytest.raises(NoCapacity):
        await add(lanes, job("b"))


async def test_script_lost_after_load_is_no_capacity(lanes: Lanes, redis: Redis) -> None:
    """Simulate another master taking over between the two calls."""

    class FakeForgetful(Redis):
        async def script_load(self, script: str) -> str:  # type: ignore[override]
            return ""

    await redis.script_flush()
    with pytest.raises(NoCapacity):
        await add(
            make_lanes(FakeForgetful.from_pool(redis.connection_pool), Clock(), "a"), job("a")
        )


async def test_replacement_redis_is_checked_again(
    masters: tuple[TcpServer, TcpServer], connected: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty server receives the layout. One that may evict is logged and used; one with another
    layout is refused.
    """
    one, other = masters
    with FakeSentinel(one.address) as sentinel:
        redis = connected(sentinel.url())
        lanes = make_lanes(redis, Clock(), "a")
        redis_check = RedisCheck(lanes)
        await redis_check.run_if_due()
        at_other = connected(other.url)
        await at_other.config_set("maxmemory-policy", "allkeys-lru")
        sentinel.master = other.address
        await open_all(redis)
        await redis_check.run_if_due()
        assert await at_other.get(LAYOUT) is not None
        assert "redis is unsuitable" in caplog.text
        await at_other.set(LAYOUT, 99)
        await redis_check.run_if_due()
        redis_check.mark_away()
        with pytest.raises(UnsuitableRedis, match="layout 99"):
            await redis_check.run_if_due()
