"""Aliases in a real Redis, as several routers see and change them."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from shoal.v1 import aliases_pb2

from libs.aliases import AliasStore
from libs.aliases import store as alias_store
from libs.errors import AliasChanged, InvalidInput

OLD, NEW = "org/old", "org/new"


@pytest.fixture(autouse=True)
def _empty_redis_is_trusted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alias_store, "RESTORE_SECONDS", 0.0)


@pytest.fixture
def store(as_router: Redis) -> AliasStore:
    return AliasStore(as_router, "router-a")


@pytest.fixture
def other(as_router: Redis) -> AliasStore:
    """Another router's store."""
    return AliasStore(as_router, "router-b")


def docs(model: str = OLD, next_model: str = "", output: str = "") -> aliases_pb2.Alias:
    return aliases_pb2.Alias(name="docs", model=model, next_model=next_model, output=output)


def models(store: AliasStore) -> dict[str, str]:
    return {name: alias.model for name, alias in store.table.aliases.items()}


async def test_change_is_seen_whole_by_other_routers(store: AliasStore, other: AliasStore) -> None:
    await other.refresh()
    assert other.table.aliases == {}
    revision = await store.set(docs(next_model=NEW, output="s3://bucket/new"))
    assert store.table.revision == revision
    await other.refresh()
    found = other.table.aliases["docs"]
    assert (found.model, found.next_model, found.output) == (OLD, NEW, "s3://bucket/new")
    assert found.revision == other.table.revision == revision
    assert await store.set(docs(NEW)) > revision
    await other.refresh()
    assert models(other) == {"docs": NEW}
    assert await other.remove("docs")
    await store.refresh()
    assert models(store) == {}
    assert await store.remove("docs") == 0


async def test_change_of_another_revision_is_refused(store: AliasStore, other: AliasStore) -> None:
    first = await store.set(docs(), expect_revision=0)
    with pytest.raises(AliasChanged, match="does not have revision 0"):
        await other.set(docs(NEW), expect_revision=0)
    second = await other.set(docs(NEW), expect_revision=first)
    with pytest.raises(AliasChanged):
        await store.remove("docs", expect_revision=first)
    assert models(store) == {"docs": NEW}
    assert await store.remove("docs", expect_revision=second) > second


async def test_repeated_change_after_a_lost_answer_succeeds(store: AliasStore) -> None:
    first = await store.set(docs(), expect_revision=0)
    moved = await store.set(docs(NEW), expect_revision=first)
    assert await store.set(docs(NEW), expect_revision=first) == moved
    assert await store.remove("docs", expect_revision=moved) > moved
    assert await store.remove("docs", expect_revision=moved) == 0


async def test_concurrent_changes_of_one_revision_succeed_once(
    store: AliasStore, other: AliasStore
) -> None:
    first = await store.set(docs())
    changes = [
        (store if number % 2 else other).set(docs(f"org/m{number}"), expect_revision=first)
        for number in range(20)
    ]
    results = await asyncio.gather(*changes, return_exceptions=True)
    refused = [result for result in results if isinstance(result, AliasChanged)]
    assert len(refused) == 19
    assert len([result for result in results if isinstance(result, int)]) == 1


async def test_number_of_aliases_is_limited(
    store: AliasStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alias_store, "MAX_ALIASES", 2)
    for name in ("a", "b"):
        await store.set(aliases_pb2.Alias(name=name, model=OLD))
    with pytest.raises(InvalidInput, match="has 2 aliases, its maximum"):
        await store.set(docs())
    await store.set(aliases_pb2.Alias(name="b", model=NEW))
    await store.remove("a")
    await store.set(docs())
    assert set(models(store)) == {"b", "docs"}


async def test_aliases_that_redis_lost_are_written_back(
    store: AliasStore, other: AliasStore, redis: Redis
) -> None:
    revision = await store.set(docs(next_model=NEW))
    await redis.flushall()
    await other.refresh()
    assert models(other) == {}
    await store.refresh()
    await other.refresh()
    assert other.table.revision == revision
    assert other.table.aliases["docs"] == store.table.aliases["docs"]


async def test_router_without_aliases_lets_others_restore_them_before_it_writes(
    store: AliasStore, other: AliasStore, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.set(docs())
    await redis.flushall()
    monkeypatch.setattr(alias_store, "RESTORE_SECONDS", 600.0)
    writing = asyncio.create_task(other.set(aliases_pb2.Alias(name="mine", model=NEW)))
    async with asyncio.timeout(60):
        while not other.is_settling:  # until it has read an empty Redis  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    done, _ = await asyncio.wait([writing], timeout=0.2)
    assert not done
    settling = [other.is_settling]
    await store.refresh()
    await asyncio.wait_for(writing, 120)
    settling.append(other.is_settling)
    assert settling == [True, False]
    await store.refresh()
    assert models(other) == models(store) == {"docs": OLD, "mine": NEW}


async def test_empty_redis_is_trusted_after_a_while(
    store: AliasStore, other: AliasStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alias_store, "RESTORE_SECONDS", 3.0)
    await store.refresh()
    assert store.is_settling
    await asyncio.wait_for(other.set(docs()), 120)
    await store.refresh()
    assert models(store) == {"docs": OLD}


async def test_latest_aliases_win_after_a_loss(
    store: AliasStore, other: AliasStore, redis: Redis
) -> None:
    await store.set(docs())
    await other.refresh()
    await store.set(docs(NEW))
    await redis.flushall()
    await other.refresh()
    await store.refresh()
    await other.refresh()
    assert models(other) == models(store) == {"docs": NEW}


async def test_change_waits_for_routers_with_an_older_revision(
    store: AliasStore, other: AliasStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alias_store, "MAX_ALIASES_AGE_SECONDS", 600.0)
    await store.set(docs())
    await other.refresh()
    revision = await store.set(docs(NEW))
    waiting = asyncio.create_task(store.wait_until_used(revision))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    await other.refresh()
    await asyncio.wait_for(waiting, 120)


async def test_change_does_not_wait_for_routers_that_must_read_first(
    store: AliasStore, other: AliasStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alias_store, "MAX_ALIASES_AGE_SECONDS", 600.0)
    staleness = [other.is_stale]
    await other.refresh()
    staleness.append(other.is_stale)
    monkeypatch.setattr(alias_store, "MAX_ALIASES_AGE_SECONDS", -1.0)
    staleness.append(other.is_stale)
    assert staleness == [True, False, True]
    await asyncio.wait_for(store.wait_until_used(await store.set(docs())), 120)


async def test_change_does_not_wait_for_removed_routers(
    store: AliasStore, other: AliasStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alias_store, "MAX_ALIASES_AGE_SECONDS", 600.0)
    await other.refresh()
    revision = await store.set(docs())
    await store.forget_router("router-b")
    await asyncio.wait_for(store.wait_until_used(revision), 120)
