"""Merging the cards of a model: workers' measurements are merged, and a repeated card changes
nothing.
"""

from __future__ import annotations

from typing import cast

from redis.asyncio import Redis
from shoal.v1 import models_pb2, worker_pb2

from libs.fleet import Fleet
from tests.fleet.test_registry import RESIDENT, heartbeat, holds

COLD, WARM = models_pb2.MODEL_STATE_COLD, models_pb2.MODEL_STATE_WARM
MODEL = "org/model"


def card(**measured: float | str) -> models_pb2.ModelCard:
    return models_pb2.ModelCard(model=MODEL, dimensions=384, **measured)  # type: ignore[arg-type]


def resident(size: int, data_type: str, rate: float) -> worker_pb2.WorkerModel:
    return holds(
        RESIDENT, bytes=size, card=card(bytes=size, data_type=data_type, tokens_per_byte=rate)
    )


async def streamed_texts(redis: Redis) -> bytes | None:
    return cast("bytes | None", await redis.hget("v1:{fleet}:cards", MODEL))


async def test_cold_worker_keeps_holders_measurements(
    fleet: Fleet, other: Fleet, redis: Redis
) -> None:
    await fleet.report(heartbeat("holder", resident(90, "bfloat16", 0.25)))
    before = await streamed_texts(redis)
    for _ in range(2):
        await fleet.report(heartbeat("cold", holds(COLD, bytes=180, card=card())))
        await fleet.report(heartbeat("warm", holds(WARM, card=card(tokens_per_byte=0.25))))
        await fleet.report(heartbeat("holder", resident(90, "bfloat16", 0.25)))
    assert await streamed_texts(redis) == before
    expected = card(bytes=90, data_type="bfloat16", tokens_per_byte=0.25)
    assert fleet.snapshot.card(MODEL) == (await other.refresh()).card(MODEL) == expected


async def test_holders_that_differ_agree_on_one_card_whoever_speaks_last(
    fleet: Fleet, other: Fleet, redis: Redis
) -> None:
    beats = [
        heartbeat("gpu", resident(90, "bfloat16", 0.2)),
        heartbeat("cpu", resident(180, "float32", 0.3)),
        heartbeat("third", resident(90, "bfloat16", 0.21)),
    ]
    for beat in beats:
        await fleet.report(beat)
    expected = card(bytes=180, data_type="float32", tokens_per_byte=0.21)
    for router in (fleet, other):
        await router.refresh()
        for beat in beats:
            await router.report(beat)
            assert router.snapshot.card(MODEL) == expected
    assert router.snapshot.workers["gpu"].models[MODEL].data_type == "bfloat16"


async def test_measurements_stay_without_holders(fleet: Fleet) -> None:
    await fleet.report(heartbeat("w", resident(90, "bfloat16", 0.25)))
    await fleet.report(heartbeat("w", holds(COLD, bytes=90, card=card())))
    assert fleet.snapshot.card(MODEL) == card(bytes=90, data_type="bfloat16", tokens_per_byte=0.25)


async def test_small_changes_of_estimate_are_not_written(fleet: Fleet, redis: Redis) -> None:
    await fleet.report(heartbeat("w", resident(90, "bfloat16", 0.25)))
    before = await streamed_texts(redis)
    await fleet.report(heartbeat("w", resident(90, "bfloat16", 0.26)))
    assert await streamed_texts(redis) == before
    await fleet.report(heartbeat("w", resident(90, "bfloat16", 0.3)))
    assert await streamed_texts(redis) != before


async def test_last_new_card_wins_among_differing_files(
    fleet: Fleet,
) -> None:
    old, new = (
        holds(RESIDENT, card=card()),
        holds(RESIDENT, card=models_pb2.ModelCard(model=MODEL, dimensions=768)),
    )
    for beat in (
        heartbeat("a", old),
        heartbeat("b", new),
        heartbeat("a", old),
        heartbeat("b", new),
        heartbeat("a", old),
    ):
        await fleet.report(beat)
    assert fleet.snapshot.card(MODEL) == new.card
    await fleet.report(heartbeat("a", new, epoch="2"))
    await fleet.report(heartbeat("b", old, epoch="2"))
    assert fleet.snapshot.card(MODEL) == old.card
