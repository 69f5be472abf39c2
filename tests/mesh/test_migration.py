"""An alias that is moved between two models under queries, through two routers of a whole mesh."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import shoal

from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

OLD, NEW, ALIAS = "org/old", "org/new", "docs"
TEXT = "a boat in the harbour"


@dataclass
class Tally:
    """Answers by the model that they name, and reasons of wrong ones."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def ask(
    client: shoal.AsyncClient,
    expected: Mapping[str, shoal.EncodeResult],
    tally: Tally,
    stop: asyncio.Event,
) -> None:
    while not stop.is_set():
        try:
            found = await client.encode(ALIAS, TEXT, timeout=60)
        except shoal.ShoalError as error:
            tally.wrong.append(str(error))
            return
        assert found.alias is not None
        named = expected[found.alias.model]
        if found.embedding_id != named.embedding_id or not np.allclose(
            found.dense, named.dense, atol=1e-5
        ):
            tally.wrong.append(f"vectors of another model than {found.alias.model}")
        tally.answers[found.alias.model] += 1


async def check_moved(
    clients: list[shoal.AsyncClient], model: str, other: str, tally: Tally
) -> None:
    """Check that every router answers by the model at once, and wait for answers to all askers."""
    for client in clients * 3:
        found = await client.encode(ALIAS, TEXT, both_models=True, timeout=60)
        assert found.alias is not None
        assert found.alias.model == model
        assert found.alias.other_model == other
        assert found.other is not None
        assert found.other.embedding_id != found.embedding_id
    wanted = tally.answers[model] + 10
    await asyncio.to_thread(
        wait_until,
        lambda: bool(tally.wrong) or tally.answers[model] >= wanted,
        60,
        f"answers by {model}",
    )


async def test_queries_are_answered_throughout_a_change_of_the_model(tmp_path: Path) -> None:
    for seed, model in enumerate((OLD, NEW)):
        write_checkpoint("bert", tmp_path / "models" / model, seed=seed, sentence=SentenceFiles())
    with Cluster(tmp_path, models=str(tmp_path / "models"), routers=2) as cluster:
        clients = [
            shoal.AsyncClient(address, retry=shoal.RetryPolicy(attempts=1))
            for address in cluster.addresses
        ]
        expected = {
            model: await clients[0].encode(model, TEXT, timeout=120) for model in (OLD, NEW)
        }
        assert expected[OLD].embedding_id != expected[NEW].embedding_id
        first, second = (client.aliases for client in clients)
        tally, stop = Tally(), asyncio.Event()
        await first.set(ALIAS, OLD)
        async with asyncio.TaskGroup() as group:
            for client in clients * 2:
                group.create_task(ask(client, expected, tally, stop))
            try:
                await second.start(ALIAS, NEW)
                await check_moved(clients, OLD, NEW, tally)
                await first.switch(ALIAS)
                await check_moved(clients, NEW, OLD, tally)
                await second.rollback(ALIAS)
                await check_moved(clients, OLD, NEW, tally)
            finally:
                stop.set()
        assert tally.wrong == []
        assert min(tally.answers[OLD], tally.answers[NEW]) >= 10
        for client in clients:
            await client.close()
