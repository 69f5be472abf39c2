"""The registry of workers in Redis: written from heartbeats by `services/router/pull.py`, read by every router.

Everything is small and in five places: a hash of heartbeats, one of cards, one of failed loads, a sorted set of routers, and a key
for each claim and each worker's orders. A worker is alive while its last heartbeat is younger than `ttl_ms`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import cast

from redis.asyncio import Redis
from shoal.v1 import models_pb2, worker_pb2

from libs.errors import ModelNotFound, NoCapacity
from libs.fleet import scripts
from libs.fleet.snapshot import FleetSnapshot, WorkerRecord
from libs.queue.connection import translated
from libs.queue.keys import LaneKey

FAILURE_MS = 15 * 60_000
PASSING_MS = 60_000
"""For how long a worker does not try a model again that it could not load, and one that it could not find or reach."""

_PASSING = (ModelNotFound.reason, NoCapacity.reason)

_WORKERS, _CARDS, _FAILURES, _ROUTERS = (f"v1:{{fleet}}:{part}" for part in ("workers", "cards", "failures", "routers"))


class Fleet:
    """What this router knows of the workers, and what it tells the other routers. NoCapacity while Redis is away."""

    def __init__(self, redis: Redis, *, ttl_ms: int = 10_000) -> None:
        self._redis = redis
        self._ttl_ms = ttl_ms
        # The state: what was known last, and the cards' bytes, so that only changed ones are parsed.
        self.snapshot = FleetSnapshot({}, {}, {}, 0)
        self._cards: dict[bytes, models_pb2.ModelCard] = {}

    async def report(self, heartbeat: worker_pb2.HeartbeatRequest) -> None:
        """Tells all routers, and `snapshot` at once. A model that has just failed is noted as `record_failure` does; one that has
        become resident, and all of a worker that has been started again, are given another chance.
        """
        previous = self.snapshot.workers.get(heartbeat.worker_id)
        cards = {model.model: model.card for model in heartbeat.models if model.HasField("card")}
        changed = {name: card for name, card in cards.items() if self.snapshot.card(name) != card}
        now_ms = await scripts.report(
            self._redis,
            (_WORKERS, _CARDS),
            worker_id=heartbeat.worker_id,
            heartbeat=_without_cards(heartbeat).SerializeToString(),
            leaving=heartbeat.leaving,
            new_cards=[part for name, card in changed.items() for part in (name, card.SerializeToString())],
        )
        workers = dict(self.snapshot.workers)
        workers.pop(heartbeat.worker_id, None)
        if not heartbeat.leaving:
            workers[heartbeat.worker_id] = WorkerRecord.of(heartbeat, now_ms)
        self.snapshot = replace(self.snapshot, workers=workers, cards={**self.snapshot.cards, **changed}, now_ms=now_ms)
        await self._note_failures(previous, heartbeat)

    async def _note_failures(self, previous: WorkerRecord | None, heartbeat: worker_pb2.HeartbeatRequest) -> None:
        known = {model for model, failed in self.snapshot.failures.items() if heartbeat.worker_id in failed}
        if previous is not None and previous.epoch == heartbeat.epoch:
            resident = {model.model for model in heartbeat.models if model.state == models_pb2.MODEL_STATE_RESIDENT}
            known &= resident
        if known:
            await self._forget_failures(heartbeat.worker_id, known)
        for model in heartbeat.models:
            before = previous.state(model.model) if previous else models_pb2.MODEL_STATE_ABSENT
            if model.state == models_pb2.MODEL_STATE_FAILED != before:
                await self.record_failure(model.model, heartbeat.worker_id, model.failure)

    async def _forget_failures(self, worker_id: str, models: set[str]) -> None:
        with translated():
            await self._redis.hdel(_FAILURES, *(f"{model} {worker_id}" for model in models))
        failures = {
            model: {worker: failure for worker, failure in failed.items() if worker != worker_id or model not in models}
            for model, failed in self.snapshot.failures.items()
        }
        self.snapshot = replace(self.snapshot, failures=failures)

    async def record_failure(self, model: str, worker_id: str, failure: worker_pb2.Failure) -> None:
        """Notes that the worker cannot load the model: for 15 minutes, or for one if it did not find or not reach it."""
        last_ms = PASSING_MS if failure.reason in _PASSING else FAILURE_MS
        field = f"{model} {worker_id}"
        await scripts.record_failure(self._redis, (_FAILURES,), field=field, failure=failure.SerializeToString(), last_ms=last_ms)
        failed = {**self.snapshot.failures.get(model, {}), worker_id: failure}
        self.snapshot = replace(self.snapshot, failures={**self.snapshot.failures, model: failed})

    async def refresh(self) -> FleetSnapshot:
        """Reads everything in one round trip into `snapshot`, and removes what is out of date."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.time()
                for name in (_WORKERS, _CARDS, _FAILURES):
                    pipeline.hgetall(name)
                (seconds, microseconds), workers, cards, failures = await pipeline.execute()
            now_ms = seconds * 1000 + microseconds // 1000
            self.snapshot = FleetSnapshot(
                await self._live_workers(workers, now_ms),
                self._parse_cards(cards),
                await self._live_failures(failures, now_ms),
                now_ms,
            )
        return self.snapshot

    async def _live_workers(self, heartbeats: dict[bytes, bytes], now_ms: int) -> dict[str, WorkerRecord]:
        live: dict[str, WorkerRecord] = {}
        gone = []
        for worker_id, value in heartbeats.items():
            time_ms, _, heartbeat = value.partition(b" ")
            if int(time_ms) > now_ms - self._ttl_ms:
                live[worker_id.decode()] = WorkerRecord.of(worker_pb2.HeartbeatRequest.FromString(heartbeat), int(time_ms))
            elif int(time_ms) < now_ms - 6 * self._ttl_ms:
                gone.append(worker_id)
        if gone:
            await self._redis.hdel(_WORKERS, *gone)
        return live

    def _parse_cards(self, cards: dict[bytes, bytes]) -> dict[str, models_pb2.ModelCard]:
        self._cards = {value: self._cards.get(value) or models_pb2.ModelCard.FromString(value) for value in cards.values()}
        return {name.decode(): self._cards[value] for name, value in cards.items()}

    async def _live_failures(self, failures: dict[bytes, bytes], now_ms: int) -> dict[str, dict[str, worker_pb2.Failure]]:
        live: dict[str, dict[str, worker_pb2.Failure]] = defaultdict(dict)
        gone = []
        for field, value in failures.items():
            expiry_ms, _, failure = value.partition(b" ")
            model, _, worker_id = field.decode().partition(" ")
            if int(expiry_ms) > now_ms:
                live[model][worker_id] = worker_pb2.Failure.FromString(failure)
            else:
                gone.append(field)
        if gone:
            await self._redis.hdel(_FAILURES, *gone)
        return dict(live)

    async def claim(self, lane: LaneKey, worker_id: str, ttl_ms: int) -> bool:
        """True if no worker but this one may now load the lane's model, until `ttl_ms` are over or the claim is released."""
        with translated():
            return bool(await self._redis.set(_claim(lane), worker_id, nx=True, px=ttl_ms))

    async def renew_claim(self, lane: LaneKey, worker_id: str, ttl_ms: int) -> bool:
        """Makes the worker's claim last `ttl_ms` from now; False if it has none."""
        return bool(await scripts.renew_claim(self._redis, (_claim(lane),), worker_id=worker_id, last_ms=ttl_ms))

    async def release_claim(self, lane: LaneKey, worker_id: str) -> bool:
        """Ends the worker's claim; False if it has none."""
        return bool(await scripts.release_claim(self._redis, (_claim(lane),), worker_id=worker_id))

    async def order(self, worker_id: str, epoch: str, directive: worker_pb2.Directive) -> int:
        """Leaves an order for the worker's heartbeats, for a day; answers its number, which is above all earlier ones."""
        key = f"v1:{{fleet}}:orders:{worker_id}:{epoch}"
        return cast(int, await scripts.order(self._redis, (key,), directive=directive.SerializeToString()))

    async def orders(self, worker_id: str, epoch: str, after_seq: int) -> list[worker_pb2.Directive]:
        """The orders with numbers above `after_seq`, in order."""
        with translated():
            found = await self._redis.zrangebyscore(f"v1:{{fleet}}:orders:{worker_id}:{epoch}", f"({after_seq}", "+inf")
        directives = []
        for number, _, directive in (cast(bytes, member).partition(b" ") for member in found):
            directives.append(worker_pb2.Directive.FromString(directive))
            directives[-1].seq = int(number)
        return directives

    async def beat(self, router_id: str) -> list[str]:
        """Tells that this router lives. Answers routers that were not heard of for three times `ttl_ms`, each once in the mesh."""
        silent = await scripts.beat(self._redis, (_ROUTERS,), router_id=router_id, last_ms=3 * self._ttl_ms)
        return [name.decode() for name in silent]


def _claim(lane: LaneKey) -> str:
    return f"v1:{{fleet}}:claim:{lane.name}"


def _without_cards(heartbeat: worker_pb2.HeartbeatRequest) -> worker_pb2.HeartbeatRequest:
    kept = worker_pb2.HeartbeatRequest()
    kept.CopyFrom(heartbeat)
    kept.ClearField("batches")
    for model in kept.models:
        model.ClearField("card")
    return kept
