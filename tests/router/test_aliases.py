"""Aliases in a router: the models that answer, the fields of answers, and refused names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
from redis.asyncio import Redis
from shoal.v1 import aliases_pb2, aliases_pb2_grpc, models_pb2
from shoal.v1 import inference_pb2 as pb

from libs.aliases import AliasStore
from libs.aliases import store as alias_store
from libs.errors import InvalidInput, NoCapacity
from services.router.operators.aliases import AliasService, check_alias
from services.router.state.aliases import resolve
from tests.router.parts import Client, FakeWorker, card, changed, encode_request, refused, router

OLD, NEW = "tests/embedder", "tests/other"


@pytest.fixture(autouse=True)
def _empty_redis_is_trusted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alias_store, "RESTORE_SECONDS", 0.0)


class Operator:
    """Calls of AliasService."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = cast(
            "aliases_pb2_grpc.AliasServiceAsyncStub", aliases_pb2_grpc.AliasServiceStub(channel)
        )

    async def set(
        self, model: str, expect_revision: int | None = None, next_model: str = ""
    ) -> int:
        alias = aliases_pb2.Alias(name="docs", model=model, next_model=next_model)
        request = aliases_pb2.SetAliasRequest(alias=alias, expect_revision=expect_revision)
        return (await self._stub.SetAlias(request, timeout=120)).alias.revision

    async def remove(self) -> bool:
        request = aliases_pb2.RemoveAliasRequest(name="docs")
        return (await self._stub.RemoveAlias(request, timeout=120)).removed

    async def list(self) -> dict[str, str]:
        response = await self._stub.ListAliases(aliases_pb2.ListAliasesRequest(), timeout=120)
        return {alias.name: alias.model for alias in response.aliases}


@asynccontextmanager
async def mesh(redis_url: str) -> AsyncIterator[tuple[Client, Operator]]:
    """A router with a worker that has both models."""
    async with router(redis_url) as client:
        worker = FakeWorker(client.address, models=[card(OLD), card(NEW)])
        async with worker.working():
            yield client, Operator(client.channel)


def by_alias(*texts: str) -> pb.EncodeRequest:
    return changed(encode_request(*texts), model="docs")


async def test_alias_is_resolved_in_every_call(redis_url: str) -> None:
    async with mesh(redis_url) as (client, operator):
        revision = await operator.set(OLD, next_model=NEW)
        expected = pb.ResolvedAlias(model=OLD, next_model=NEW, revision=revision)
        text = pb.Item(text="a")
        calls = client.inference
        assert (await calls.Encode(by_alias("a"), timeout=120)).alias == expected
        streamed = [part async for part in calls.EncodeStream(by_alias("a", "b"), timeout=120)]
        assert streamed
        assert [part.alias for part in streamed] == [expected] * len(streamed)
        score = pb.ScoreRequest(model="docs", query=text, documents=[text])
        assert (await calls.Score(score, timeout=120)).alias == expected
        tokenize = pb.TokenizeRequest(model="docs", texts=["a"])
        assert (await calls.Tokenize(tokenize, timeout=120)).alias == expected
        model = await client.models.GetModel(models_pb2.GetModelRequest(model="docs"), timeout=120)
        assert model.model.model == OLD


async def test_moved_alias_is_answered_by_the_new_model_at_once(redis_url: str) -> None:
    async with mesh(redis_url) as (client, operator):
        for model in (OLD, NEW, OLD):
            await operator.set(model)
            assert await operator.list() == {"docs": model}
            answer = await client.inference.Encode(by_alias("a"), timeout=120)
            assert answer.alias.model == model
        assert await operator.remove()
        assert not await operator.remove()
        refusal = await refused(client.inference.Encode(by_alias("a"), timeout=120))
        assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, "model")
        assert "alias of the mesh" in refusal.message


async def test_answer_by_a_model_has_no_alias(redis_url: str) -> None:
    async with mesh(redis_url) as (client, operator):
        await operator.set(NEW)
        answer = await client.inference.Encode(encode_request("a"), timeout=120)
        assert not answer.HasField("alias")


async def test_retry_after_a_switch_is_answered_by_the_new_model(redis_url: str) -> None:
    async with mesh(redis_url) as (client, operator):
        metadata = (("x-request-id", "the-same"),)
        for model in (OLD, NEW):
            await operator.set(model)
            answer = await client.inference.Encode(by_alias("a"), timeout=120, metadata=metadata)
            assert answer.alias.model == model


async def test_change_of_another_revision_is_refused_with_the_reason(redis_url: str) -> None:
    async with mesh(redis_url) as (_, operator):
        revision = await operator.set(OLD, 0)
        refusal = await refused(operator.set(NEW, 0))
        assert refusal.code == grpc.StatusCode.FAILED_PRECONDITION
        assert refusal.reason == "ALIAS_CHANGED"
        assert await operator.set(NEW, revision) > revision


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": ""}, "alias.name"),
        ({"name": "org/name"}, "alias.name"),
        ({"name": "a" * 129}, "alias.name"),
        ({"name": ":revision"}, "alias.name"),
        ({"model": ""}, "alias.model"),
        ({"model": "docs"}, "alias.model"),
        ({"model": "../../etc/passwd"}, "alias.model"),
        ({"next_model": "x y"}, "alias.next_model"),
        ({"previous_model": "x"}, "alias.previous_model"),
        ({"next_model": OLD}, "alias.model"),
        ({"previous_model": OLD}, "alias.model"),
        ({"output": "o" * 1025}, "alias.output"),
    ],
)
def test_invalid_aliases_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        check_alias(aliases_pb2.Alias(**{"name": "docs", "model": OLD, **fields}))
    assert raised.value.field == field
    assert raised.value.message.startswith(field)


async def test_change_is_logged_although_waiting_for_the_routers_fails(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(store: AliasStore, revision: int) -> None:
        raise NoCapacity("Redis is away")

    monkeypatch.setattr(AliasStore, "wait_until_used", fail)
    caplog.set_level(logging.INFO, "services.router.operators.aliases")
    service, context = AliasService(AliasStore(redis, "a")), cast("Any", None)
    alias = aliases_pb2.Alias(name="docs", model=OLD)
    with pytest.raises(NoCapacity):
        await service.SetAlias(aliases_pb2.SetAliasRequest(alias=alias), context)
    with pytest.raises(NoCapacity):
        await service.RemoveAlias(aliases_pb2.RemoveAliasRequest(name="docs"), context)
    assert caplog.messages == ["alias set", "alias removed"]


async def test_router_that_was_away_reads_the_aliases_before_it_answers(redis: Redis) -> None:
    before, after = AliasStore(redis, "a"), AliasStore(redis, "b")
    await before.set(aliases_pb2.Alias(name="docs", model=NEW))
    found = await resolve(after, "docs")
    assert found is not None
    assert found.model == NEW
    assert await resolve(after, "other") is None


async def test_unknown_alias_may_be_retried_while_lost_ones_are_restored(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alias_store, "RESTORE_SECONDS", 600.0)
    store = AliasStore(redis, "a")
    with pytest.raises(NoCapacity, match="repeat the request"):
        await resolve(store, "docs")
    assert await resolve(store, OLD) is None
    monkeypatch.setattr(alias_store, "RESTORE_SECONDS", 0.0)
    await store.refresh()
    assert await resolve(store, "docs") is None


class FailingStore(AliasStore):
    """A store of an unreachable Redis, and the number of reads of it."""

    reads = 0
    is_away = True

    async def refresh(self) -> None:
        self.reads += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise NoCapacity("Redis is away")
        self._read_at = time.monotonic()


async def test_requests_share_a_read_and_fail_at_once_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alias_store, "_FAILURE_SECONDS", 600.0)
    store = FailingStore(cast("Any", None), "a")
    first = asyncio.create_task(resolve(store, "docs"))
    others = [asyncio.create_task(resolve(store, "docs")) for _ in range(10)]
    await asyncio.sleep(0)
    first.cancel()
    results = await asyncio.gather(*others, return_exceptions=True)
    assert [str(result) for result in results] == ["Redis is away [NO_CAPACITY]"] * 10
    assert {type(result) for result in results} == {NoCapacity}
    with pytest.raises(NoCapacity):
        await resolve(store, "docs")
    assert store.reads == 1
    monkeypatch.setattr(alias_store, "_FAILURE_SECONDS", 0.0)
    store.is_away = False
    assert await resolve(store, "docs") is None
    assert store.reads == 2


class FakeStore(AliasStore):
    """A store that counts its reads and calls no Redis."""

    def __init__(self) -> None:
        self.reads = 0

    @property
    def is_stale(self) -> bool:
        return True

    async def refresh(self) -> None:
        self.reads += 1


@pytest.mark.parametrize("model", [OLD, f"{OLD}@v1", "", "../x"])
async def test_model_ids_are_not_looked_up(model: str) -> None:
    store = FakeStore()
    assert await resolve(store, model) is None
    assert store.reads == 0
