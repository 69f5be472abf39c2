"""A light tenant next to one that requests the largest products it can, at their limits and beyond
(`hostile_kinds.py`).

The test checks the order: once an attack is in the lanes, or was refused, the light tenant is
answered before the attack's deadline. `make bench-hostile` measures durations and memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import shoal
from numpy.typing import NDArray

from benchmarks.stress.hostile_client import TENANT
from benchmarks.stress.hostile_kinds import Attack, texts
from services.local.settings import MINILM
from tests.fuzz.tiny_kinds import LABELS, PAIRS, write_kinds
from tests.support.cluster import Cluster

ATTACKS = {
    f"{attack.name}, {'at its limit' if attack.legal else 'too large'}": attack
    for attack in texts()
}
ATTACK_SECONDS = 60.0
REFUSAL_SECONDS = 5.0
LIGHT_REQUESTS = 3
"""Light requests during each attack."""
REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> Iterator[Cluster]:
    models = tmp_path_factory.mktemp("models")
    write_kinds(models)
    with Cluster(
        tmp_path_factory.mktemp("hostile"), models=f"{MINILM}={minilm}:{models}"
    ) as running:
        yield running


class Clients:
    """Both tenants, over separate connections."""

    def __init__(
        self, operator: shoal.AsyncClient, light: shoal.AsyncClient, hostile: grpc.aio.Channel
    ) -> None:
        # They repeat requests for as long as the router asks for it, as while large ones arrive.
        self._operator = operator
        self._light = light
        self._hostile = hostile

    async def load(self) -> None:
        """Load all models, so that no request waits for one."""
        await self._operator.score(PAIRS, "a text", ["a text"])
        await self._operator.entities(LABELS, ["a text"], ["a"])

    async def light(self) -> NDArray[np.number]:
        return np.asarray((await self._light.encode(MINILM, ["many small boats"])).dense)

    def attack(self, attack: Attack) -> grpc.aio.UnaryUnaryCall[Any, bytes]:
        """Start an attack. It is on its way on return."""
        method = self._hostile.unary_unary(
            f"/shoal.v1.InferenceService/{attack.method}", bytes, bytes
        )
        return method(attack.body, timeout=ATTACK_SECONDS, metadata=(("x-shoal-tenant", TENANT),))

    async def enqueued(self) -> int:
        """Return the number of jobs ever enqueued, in all lanes."""
        return sum(lane.enqueued_jobs for lane in (await self._operator.mesh()).lanes)

    async def let_in(self, call: grpc.aio.UnaryUnaryCall[Any, bytes], before: int) -> None:
        """Wait until more jobs than `before` have been in the lanes, or the call is over."""
        while True:
            if call.done() or await self.enqueued() > before:
                return
            await asyncio.sleep(0.02)


@pytest.fixture
async def clients(cluster: Cluster) -> AsyncIterator[Clients]:
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        shoal.AsyncClient(cluster.address, timeout=120) as operator,
        shoal.AsyncClient(cluster.address, timeout=120, tenant="light") as light,
        grpc.aio.insecure_channel(cluster.address, options=own) as hostile,
    ):
        yield Clients(operator, light, hostile)


@pytest.mark.parametrize("name", ATTACKS)
async def test_light_tenant_is_answered_before_the_attacks_deadline(
    name: str, clients: Clients, cluster: Cluster
) -> None:
    await clients.load()
    expected = await clients.light()
    before = await clients.enqueued()
    call = clients.attack(ATTACKS[name])
    await clients.let_in(call, before)
    for _ in range(LIGHT_REQUESTS):
        np.testing.assert_allclose(await clients.light(), expected, atol=1e-5)
    if call.done():
        assert await call.code() != grpc.StatusCode.DEADLINE_EXCEEDED, (
            "the light tenant has waited until the attack was over"
        )
    if ATTACKS[name].legal:
        # A request that the model cannot read is refused soon, and would attack nothing.
        ended = asyncio.ensure_future(call.code())
        await asyncio.wait([ended], timeout=REFUSAL_SECONDS)
        assert not ended.done() or ended.result() not in REFUSED
        call.cancel()
    else:
        assert await call.code() in REFUSED
    assert all(process.poll() is None for process in cluster.processes.values())
