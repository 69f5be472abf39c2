"""Aliases in the client: the steps of a change, and calls by an alias."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import shoal
from shoal import errors
from shoal.results import ResolvedAlias
from shoal.status import Alias
from shoal.v1 import aliases_pb2, inference_pb2

from tests.api.conftest import Connect
from tests.api.fake_router import BROKEN, MODEL, FakeRouter

OLD, NEW = "org/old", "org/new"
STEADY = Alias("docs", OLD)
STARTED = Alias("docs", OLD, next_model=NEW, output="vectors")
SWITCHED = Alias("docs", NEW, previous_model=OLD, output="vectors")


def test_steps_of_a_change() -> None:
    assert STEADY.started(NEW, "vectors") == STARTED
    assert STARTED.started(NEW) == STARTED
    assert STARTED.switched() == SWITCHED
    assert SWITCHED.rolled_back() == STARTED
    assert SWITCHED.switched() == SWITCHED
    assert STARTED.rolled_back() == STARTED
    assert SWITCHED.finished() == Alias("docs", NEW)
    assert STARTED.finished() == STEADY
    assert [one.other_model for one in (STEADY, STARTED, SWITCHED)] == ["", NEW, OLD]


@pytest.mark.parametrize(
    ("alias", "step", "reason"),
    [
        (STEADY, "switched", "shoal migrate start docs --to MODEL"),
        (STEADY, "rolled_back", "no previous model"),
        (STEADY, "finished", "no change is in progress"),
    ],
)
def test_steps_out_of_order_name_the_step_to_take(alias: Alias, step: str, reason: str) -> None:
    with pytest.raises(errors.InvalidInput, match=reason):
        getattr(alias, step)()


@pytest.mark.parametrize(
    ("alias", "model", "reason"),
    [
        (STEADY, OLD, "names org/old already"),
        (STARTED, "org/third", "changed to org/new already: `shoal migrate finish docs`"),
        (SWITCHED, "org/third", "not finished: `shoal migrate finish docs`"),
    ],
)
def test_change_that_cannot_start_names_the_step_to_take(
    alias: Alias, model: str, reason: str
) -> None:
    with pytest.raises(errors.InvalidInput, match=reason):
        alias.started(model)


async def test_change_through_the_mesh(router: FakeRouter, connect: Connect) -> None:
    client = connect(router.address)
    await client.do("aliases.set", "docs", OLD)
    started = await client.do("aliases.start", "docs", MODEL, output="vectors")
    assert (started.model, started.next_model, started.output) == (OLD, MODEL, "vectors")
    switched = await client.do("aliases.switch", "docs")
    assert (switched.model, switched.previous_model) == (MODEL, OLD)
    assert (await client.do("aliases.rollback", "docs")).model == OLD
    assert await client.do("aliases.list") == [await client.do("aliases.get", "docs")]
    finished = await client.do("aliases.finish", "docs")
    assert (finished.model, finished.next_model, finished.revision) == (OLD, "", 5)
    assert await client.do("aliases.remove", "docs")
    assert not await client.do("aliases.remove", "docs")


async def test_next_model_is_loaded_before_the_switch(router: FakeRouter, connect: Connect) -> None:
    client = connect(router.address)
    router.aliases["docs"] = aliases_pb2.Alias(name="docs", model=MODEL, next_model=NEW)
    await client.do("aliases.switch", "docs")
    calls = [call.method for call in router.calls]
    assert calls == ["ListAliases", "GetModel", "LoadModel", "SetAlias"]
    await client.do("aliases.rollback", "docs")  # MODEL is resident.
    assert [call.method for call in router.calls][4:] == ["ListAliases", "GetModel", "SetAlias"]


async def test_repeated_step_waits_until_all_routers_use_it(
    router: FakeRouter, connect: Connect
) -> None:
    client = connect(router.address)
    router.aliases["docs"] = aliases_pb2.Alias(
        name="docs", model=MODEL, previous_model=OLD, revision=3
    )
    switched = await client.do("aliases.switch", "docs")
    assert (switched.model, switched.previous_model, switched.next_model) == (MODEL, OLD, "")
    assert [call.method for call in router.calls] == ["ListAliases", "GetModel", "SetAlias"]
    request: Any = router.calls[-1].request
    assert request.expect_revision == 3


async def test_alias_is_not_moved_if_the_model_cannot_be_loaded(
    router: FakeRouter, connect: Connect
) -> None:
    client = connect(router.address)
    router.aliases["docs"] = aliases_pb2.Alias(name="docs", model=MODEL, next_model=BROKEN)
    with pytest.raises(errors.ModelBroken):
        await client.do("aliases.switch", "docs")
    assert router.aliases["docs"].model == MODEL


async def test_unknown_alias_names_those_of_the_mesh(router: FakeRouter, connect: Connect) -> None:
    client = connect(router.address)
    router.aliases["docs"] = aliases_pb2.Alias(name="docs", model=MODEL)
    with pytest.raises(errors.InvalidInput, match=r"no alias doc \(it has: docs\)"):
        await client.do("aliases.switch", "doc")


class OutdatedList(dict[str, aliases_pb2.Alias]):
    """Lists aliases as they were before another caller changed them."""

    def values(self) -> Any:
        return [
            aliases_pb2.Alias(name=one.name, model=one.model, next_model=one.next_model)
            for one in super().values()
        ]


async def test_change_by_another_caller_is_not_overwritten(
    router: FakeRouter, connect: Connect
) -> None:
    client = connect(router.address)
    router.aliases = OutdatedList(
        docs=aliases_pb2.Alias(name="docs", model=MODEL, next_model=NEW, revision=3)
    )
    with pytest.raises(errors.AliasChanged):
        await client.do("aliases.switch", "docs")
    assert router.aliases["docs"].model == MODEL


async def test_result_names_the_model_of_the_alias(router: FakeRouter, connect: Connect) -> None:
    client = connect(router.address, request_items=2)
    router.aliases["docs"] = aliases_pb2.Alias(name="docs", model=OLD, next_model=NEW, revision=7)
    result = await client.do("encode", "docs", ["a", "b", "c"])
    assert result.alias == ResolvedAlias(OLD, NEW, "", 7)
    assert result.other is None
    assert (await client.do("encode", MODEL, ["a"])).alias is None


async def test_call_answered_by_two_models_is_an_error(
    router: FakeRouter, connect: Connect
) -> None:
    client = connect(router.address, request_items=1, concurrency=1)
    router.aliases["docs"] = aliases_pb2.Alias(name="docs", model=OLD)

    def moved(number: int) -> str:
        router.aliases["docs"] = aliases_pb2.Alias(name="docs", model=f"org/m{number}")
        return ""

    router.embedding_id = moved
    with pytest.raises(errors.ModelChanged, match="the alias was moved"):
        await client.do("encode", "docs", ["a", "b"])


@pytest.mark.parametrize("other", ["next_model", "previous_model"])
async def test_both_models_of_a_change_are_returned(
    router: FakeRouter, connect: Connect, other: str
) -> None:
    client = connect(router.address)
    router.aliases["docs"] = aliases_pb2.Alias(name="docs", model=OLD)
    setattr(router.aliases["docs"], other, NEW)
    router.embedding_id = lambda number: f"{number:016}"
    result = await client.do(
        "encode",
        "docs",
        iter(["a", "b"]),
        both_models=True,
        role="query",
        expect_embedding_id=f"{1:016}",
    )
    assert result.embedding_id == f"{1:016}"
    assert result.other.embedding_id == f"{2:016}"
    assert np.array_equal(result.dense, result.other.dense)
    requests: list[Any] = [call.request for call in router.calls]
    assert [request.model for request in requests] == ["docs", NEW]
    assert [request.role for request in requests] == [inference_pb2.ROLE_QUERY] * 2


async def test_without_a_change_one_model_answers(router: FakeRouter, connect: Connect) -> None:
    client = connect(router.address)
    router.aliases["docs"] = aliases_pb2.Alias(name="docs", model=OLD)
    for model in ("docs", MODEL):
        assert (await client.do("encode", model, ["a"], both_models=True)).other is None
    assert len(router.calls) == 2


def test_classes_of_aliases_are_public() -> None:
    with shoal.Client("127.0.0.1:1") as client:
        assert repr(client.aliases) == "Client('127.0.0.1:1').aliases"
