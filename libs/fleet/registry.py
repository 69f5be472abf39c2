"""The registry of workers in Redis: written from heartbeats by `services/router/lanes/pull.py`,
read by every router.

It consists of hashes of heartbeats, of cards, of failed loads, of the leading scheduler and of its
plan's notes, and of models on disks (`disks.py`), a sorted set of routers, and a key for each claim
and each worker's orders. A worker is alive while its last heartbeat is younger than `ttl_ms`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import cast

from redis.asyncio import Redis
from shoal.v1 import models_pb2, worker_pb2

from libs.errors import ModelNotFound, ModelUnreachable, NoCapacity
from libs.fleet import scripts
from libs.fleet.cards import Copies, digest_of, merged, without_measures
from libs.fleet.disks import LISTS, TAGS, Disks, ModelsOnDisk, records_of, tag_of
from libs.fleet.snapshot import FleetSnapshot, LeaderRecord, WorkerModelRecord, WorkerRecord
from libs.queue.connection.client import translated
from libs.queue.keys import WAKEUP_CHANNEL, LaneKey, WorkerWakeup

FAILURE_MS = 15 * 60_000
PASSING_MS = 60_000
"""The backoff before a worker tries a model again: after a failed load, and after it could not find
or reach the model.
"""
FAILURE_DOUBLINGS = 5
"""FAILURE_MS doubles with each further failure, at most this often: up to 8 hours."""
TTL_MS = 10_000
"""A worker without a heartbeat for this time, or for the length of its leases, is dead: others may
load the models it held.
"""
LEAD_MS = 3_000
"""The leader's lease: a scheduler that does not renew it in this time has lost the leadership."""
ORDER_CLAIM_MS = 10_000
"""Duration of a load order's claim on the model, as of routers' claims: until the worker's
heartbeat reports LOADING, which then prevents further loads.
"""

_PASSING = (ModelNotFound.reason, ModelUnreachable.reason, NoCapacity.reason)

_WORKERS, _CARDS, _CARDS_REVISION, _FAILURES, _STRIKES, _ROUTERS, _LEADER, _FENCES, _NOTES = (
    f"v1:{{fleet}}:{part}"
    for part in (
        "workers",
        "cards",
        "cards_revision",
        "failures",
        "strikes",
        "routers",
        "leader",
        "fences",
        "notes",
    )
)

_Notes = dict[bytes, bytes]
_NOTHING: Mapping[str, float] = MappingProxyType({})
_NO_MODELS: ModelsOnDisk = MappingProxyType({})
_Change = Callable[[FleetSnapshot], FleetSnapshot]


class LostLeadership(Exception):
    """This scheduler no longer leads: another one does, or none. Its decisions are refused."""


class Fleet:
    """This process' view of the workers, and its updates to routers and workers. Raises NoCapacity
    while Redis is unavailable.
    """

    def __init__(self, redis: Redis, *, ttl_ms: int = TTL_MS) -> None:
        self._redis = redis
        self._ttl_ms = ttl_ms
        # The state: the last snapshot, the bytes of heartbeats and cards, so that only changed ones
        # are parsed, the cards of the last read with their revision, and the lists of disks.
        self.snapshot = FleetSnapshot({}, {}, {}, 0)
        self._heartbeats: dict[bytes, tuple[bytes, WorkerRecord, str]] = {}
        self._parsed_cards: dict[bytes, models_pb2.ModelCard] = {}
        self._cards: dict[str, models_pb2.ModelCard] = {}
        self._cards_revision: bytes | None = None
        self._disks = Disks(redis)
        # The digests of the cards that each worker reported last, by model, and in its list.
        self._reported_cards: dict[str, dict[str, int]] = {}
        self._cards_on_disk: dict[str, dict[str, int]] = {}
        self._copies = Copies()
        # Own updates since the last refresh began, because the data that it reads may be older.
        self._own_changes: list[_Change] = []

    async def report(self, heartbeat: worker_pb2.HeartbeatRequest) -> str:
        """Store a heartbeat for all routers, and apply it to `snapshot` at once.

        A model that has just failed is recorded by `record_failure`. Failures are forgotten for
        models that are resident now, and for all models of a restarted worker.

        Returns the tag of the worker's models on disk, empty if it has none. Empty too if the
        heartbeat names a tag without a list in Redis: it is not stored, and the worker must send
        another one with the list.
        """
        previous = self.snapshot.workers.get(heartbeat.worker_id)
        kept, models = _without_cards(heartbeat)
        content = worker_pb2.HeartbeatRequest(on_disk=models).SerializeToString()
        kept.on_disk_tag = tag_of(content) if content else heartbeat.on_disk_tag
        cards = self._merged_cards(heartbeat, [*kept.models, *models])
        changed = {name: card for name, card in cards.items() if card != self.snapshot.card(name)}
        # Cards of models on disk are not sent again: write those that Redis has lost.
        listed = {model.model: cards[model.model] for model in models if model.model in cards}
        now_ms, has_list = await scripts.report(
            self._redis,
            (_WORKERS, _CARDS, _CARDS_REVISION, LISTS, TAGS),
            worker_id=heartbeat.worker_id,
            heartbeat=kept.SerializeToString(),
            leaving=heartbeat.leaving,
            tag=kept.on_disk_tag,
            on_disk=content,
            changed=len(changed),
            new_cards=[
                part
                for name, card in (*changed.items(), *listed.items())
                for part in (name, card.SerializeToString())
            ],
        )
        if kept.on_disk_tag and not (has_list or heartbeat.leaving):
            return ""
        if content:
            on_disk = records_of(models)
        else:
            await self._disks.read([(kept.on_disk_tag, heartbeat.worker_id)])
            on_disk = self._disks.find(kept.on_disk_tag) or _NO_MODELS
        record = WorkerRecord.from_heartbeat(kept, now_ms, on_disk)

        def change(snapshot: FleetSnapshot) -> FleetSnapshot:
            workers = {**snapshot.workers, record.worker_id: record}
            if heartbeat.leaving:
                del workers[record.worker_id]
            return replace(
                snapshot,
                workers=workers,
                cards={**snapshot.cards, **changed} if changed else snapshot.cards,
                now_ms=max(snapshot.now_ms, now_ms),
            )

        self._apply(change)
        self._copies.replace(previous, None if heartbeat.leaving else record)
        await self._note_failures(previous, heartbeat)
        return kept.on_disk_tag

    def _merged_cards(
        self,
        heartbeat: worker_pb2.HeartbeatRequest,
        kept: Iterable[worker_pb2.WorkerModel],
    ) -> dict[str, models_pb2.ModelCard]:
        """Return the cards in this heartbeat, merged with those of other workers
        (`libs/fleet/cards.py`). Of a model that is on disk too, the other card counts.

        Args:
            kept: Its models, then those on disk, as they are stored: with their measurements.
        """
        worker_id = heartbeat.worker_id
        before = self._reported_cards.get(worker_id, {})
        before_on_disk = self._cards_on_disk.get(worker_id, {})
        reported: dict[str, int] = {}
        cards: dict[str, models_pb2.ModelCard] = {}
        for model, own in zip([*heartbeat.models, *heartbeat.on_disk], kept, strict=True):
            name = model.model
            if not model.HasField("card") or name in cards:
                continue
            known, digest = self.snapshot.card(name), digest_of(model.card)
            reported[name] = digest
            repeats = digest in (before.get(name), before_on_disk.get(name))
            plain = known if known is not None and repeats else model.card
            cards[name] = merged(
                without_measures(plain),
                known or models_pb2.ModelCard(),
                [*self._copies.elsewhere(name, worker_id), WorkerModelRecord.from_proto(own)],
            )
        if heartbeat.on_disk:
            self._cards_on_disk[worker_id] = {
                model.model: reported[model.model]
                for model in heartbeat.on_disk
                if model.model in reported
            }
        self._reported_cards[worker_id] = {
            model.model: reported[model.model]
            for model in heartbeat.models
            if model.model in reported
        }
        return cards

    def _apply(self, change: _Change) -> None:
        self._own_changes.append(change)
        self.snapshot = change(self.snapshot)

    async def _note_failures(
        self, previous: WorkerRecord | None, heartbeat: worker_pb2.HeartbeatRequest
    ) -> None:
        known = {
            model
            for model, failed in self.snapshot.failures.items()
            if heartbeat.worker_id in failed
        }
        if previous is not None and previous.epoch == heartbeat.epoch:
            resident = {
                model.model
                for model in heartbeat.models
                if model.state == models_pb2.MODEL_STATE_RESIDENT
            }
            known &= resident
        if known:
            await self._forget_failures(heartbeat.worker_id, known)
        for model in heartbeat.models:
            before = previous.state(model.model) if previous else models_pb2.MODEL_STATE_ABSENT
            if model.state == models_pb2.MODEL_STATE_FAILED != before:
                await self.record_failure(model.model, heartbeat.worker_id, model.failure)

    async def _forget_failures(self, worker_id: str, models: set[str]) -> None:
        with translated():
            for name in (_FAILURES, _STRIKES):
                await self._redis.hdel(name, *(f"{model} {worker_id}" for model in models))

        def change(snapshot: FleetSnapshot) -> FleetSnapshot:
            failures = {
                model: {
                    worker: failure
                    for worker, failure in failed.items()
                    if worker != worker_id or model not in models
                }
                for model, failed in snapshot.failures.items()
            }
            return replace(snapshot, failures=failures)

        self._apply(change)

    async def record_failure(self, model: str, worker_id: str, failure: worker_pb2.Failure) -> None:
        """Record that the worker cannot load the model: for 15 minutes, doubled with each further
        failure, or for one minute if it could not find or reach the model.
        """
        is_passing = failure.reason in _PASSING
        await scripts.record_failure(
            self._redis,
            (_FAILURES, _STRIKES),
            field=f"{model} {worker_id}",
            failure=failure.SerializeToString(),
            last_ms=PASSING_MS if is_passing else FAILURE_MS,
            doublings=0 if is_passing else FAILURE_DOUBLINGS,
        )

        shown = _until(failure, PASSING_MS)

        def change(snapshot: FleetSnapshot) -> FleetSnapshot:
            failed = {**snapshot.failures.get(model, {}), worker_id: shown}
            return replace(snapshot, failures={**snapshot.failures, model: failed})

        self._apply(change)

    async def forgive(self, models: Collection[str]) -> int:
        """Halve the backoff after failed loads of these models, because they have work: workers
        after half of it may try again.

        Returns the number of failures forgotten; `snapshot` shows it after the next `refresh`.
        """
        known = {model: self.snapshot.failures.get(model, {}) for model in models}
        fields = [
            f"{model} {worker_id}"
            for model, failed in known.items()
            for worker_id, failure in failed.items()
            if failure.reason not in _PASSING
        ]
        if not fields:
            return 0
        keys = (_FAILURES, _STRIKES)
        return cast(
            int,
            await scripts.forgive(
                self._redis, keys, last_ms=FAILURE_MS, doublings=FAILURE_DOUBLINGS, fields=fields
            ),
        )

    async def refresh(self) -> FleetSnapshot:
        """Read the registry into `snapshot`, and delete expired entries: in one round trip, unless
        cards or the models on a disk have changed. Updates made during the read are kept.
        """
        self._own_changes.clear()
        with translated():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.time()
                for name in (_WORKERS, _FAILURES):
                    pipeline.hgetall(name)
                pipeline.hmget(
                    _LEADER, "scheduler", "fence", "plan", "plan_ms", "desired", "cold_starts"
                )
                pipeline.get(_CARDS_REVISION)
                time, workers, failures, leader, revision = await pipeline.execute()
            now_ms = time[0] * 1000 + time[1] // 1000
            snapshot = FleetSnapshot(
                await self._live_workers(workers, now_ms),
                await self._read_cards(revision),
                await self._live_failures(failures, now_ms),
                now_ms,
                _leader(leader),
            )
        for change in self._own_changes:
            snapshot = change(snapshot)
        self.snapshot, self._copies = snapshot, Copies(snapshot.workers.values())
        return snapshot

    async def _live_workers(
        self, heartbeats: dict[bytes, bytes], now_ms: int
    ) -> dict[str, WorkerRecord]:
        kept: dict[bytes, tuple[bytes, WorkerRecord, str]] = {}
        new: dict[bytes, tuple[bytes, worker_pb2.HeartbeatRequest, int]] = {}
        gone = []
        for worker_id, value in heartbeats.items():
            time_ms, _, heartbeat = value.partition(b" ")
            if int(time_ms) > now_ms - self._ttl_ms:
                before = self._heartbeats.get(worker_id)
                if before is not None and before[0] == value:
                    kept[worker_id] = before
                else:
                    message = worker_pb2.HeartbeatRequest.FromString(heartbeat)
                    new[worker_id] = value, message, int(time_ms)
            elif int(time_ms) < now_ms - 6 * self._ttl_ms:
                gone.append(worker_id)
        if gone:
            for name in (_WORKERS, LISTS, TAGS):
                await self._redis.hdel(name, *gone)
        await self._disks.read(
            (message.on_disk_tag, message.worker_id) for _, message, _ in new.values()
        )
        live = {record.worker_id: record for _, record, _ in kept.values()}
        for worker_id, (value, message, arrived_ms) in new.items():
            on_disk = self._disks.find(message.on_disk_tag)
            record = WorkerRecord.from_heartbeat(message, arrived_ms, on_disk or _NO_MODELS)
            live[record.worker_id] = record
            if on_disk is not None:  # otherwise its next heartbeat has a list
                kept[worker_id] = value, record, message.on_disk_tag
        self._heartbeats = kept
        self._disks.keep({tag for _, _, tag in kept.values()})
        for digests in (self._reported_cards, self._cards_on_disk):
            for worker in digests.keys() - live.keys():
                del digests[worker]
        return live

    async def _read_cards(self, revision: bytes | None) -> dict[str, models_pb2.ModelCard]:
        """Return all cards. They are read only if their revision has changed."""
        if revision is None or revision != self._cards_revision:
            cards = cast(dict[bytes, bytes], await self._redis.hgetall(_CARDS))
            self._parsed_cards = {
                value: self._parsed_cards.get(value) or models_pb2.ModelCard.FromString(value)
                for value in cards.values()
            }
            self._cards = {
                name.decode(): self._parsed_cards[value] for name, value in cards.items()
            }
            self._cards_revision = revision
        return self._cards

    async def _live_failures(
        self, failures: dict[bytes, bytes], now_ms: int
    ) -> dict[str, dict[str, worker_pb2.Failure]]:
        live: dict[str, dict[str, worker_pb2.Failure]] = defaultdict(dict)
        gone = []
        for field, value in failures.items():
            expiry_ms, _, failure = value.partition(b" ")
            model, _, worker_id = field.decode().partition(" ")
            if int(expiry_ms) > now_ms:
                live[model][worker_id] = _until(
                    worker_pb2.Failure.FromString(failure), int(expiry_ms) - now_ms
                )
            else:
                gone.append(field)
        if gone:
            await self._redis.hdel(_FAILURES, *gone)
        return dict(live)

    async def last_heartbeat(self, worker_id: str) -> tuple[str, int] | None:
        """Return the epoch and arrival time (Unix ms by Redis' clock) of the worker's last
        heartbeat; None if it is not registered.
        """
        with translated():
            value = cast("bytes | None", await self._redis.hget(_WORKERS, worker_id))
        if value is None:
            return None
        time_ms, _, heartbeat = value.partition(b" ")
        return worker_pb2.HeartbeatRequest.FromString(heartbeat).epoch, int(time_ms)

    async def forget(self, worker_id: str, heard_ms: int) -> bool:
        """Remove a dead worker; False if it sent a heartbeat since `heard_ms`, or was removed
        already.
        """
        if not await scripts.forget(
            self._redis, (_WORKERS, LISTS, TAGS), worker_id=worker_id, heard_ms=str(heard_ms)
        ):
            return False

        def change(snapshot: FleetSnapshot) -> FleetSnapshot:
            return replace(
                snapshot,
                workers={name: one for name, one in snapshot.workers.items() if name != worker_id},
            )

        self._apply(change)
        return True

    async def claim(self, lane: LaneKey, worker_id: str, ttl_ms: int) -> bool:
        """Give this worker the exclusive right to load the lane's model, for `ttl_ms` or until it
        is released; False if another has it.
        """
        with translated():
            if await self._redis.set(_claim(lane), worker_id, nx=True, px=ttl_ms):
                return True
        # The worker may have evicted the model since, and reload it.
        return await self.renew_claim(lane, worker_id, ttl_ms)

    async def renew_claim(self, lane: LaneKey, worker_id: str, ttl_ms: int) -> bool:
        """Extend the worker's claim to `ttl_ms` from now; False if it has none."""
        return bool(
            await scripts.renew_claim(
                self._redis, (_claim(lane),), worker_id=worker_id, last_ms=ttl_ms
            )
        )

    async def release_claim(self, lane: LaneKey, worker_id: str) -> bool:
        """End the worker's claim; False if it has none."""
        return bool(await scripts.release_claim(self._redis, (_claim(lane),), worker_id=worker_id))

    async def order(
        self,
        worker_id: str,
        epoch: str,
        directive: worker_pb2.Directive,
        *,
        fence: int = 0,
        lane: LaneKey | None = None,
        known: Collection[str] = (),
    ) -> int:
        """Queue an order that the worker's heartbeats fetch, for a day, and notify the worker.

        Returns its sequence number, above all earlier ones; 0, without an order, if another worker
        has the claim and is not in `known`. Raises LostLeadership if another scheduler leads.

        Args:
            fence: The fencing number of the scheduler that gives the order; 0: an operator.
            lane: For a load by a scheduler: the lane to claim for the worker.
            known: The workers that hold the model, or will by the plan.
        """
        number = await scripts.order(
            self._redis,
            (
                f"v1:{{fleet}}:orders:{worker_id}:{epoch}",
                _LEADER,
                _claim(lane) if lane else "v1:{fleet}:claim:",
            ),
            directive=directive.SerializeToString(),
            channel=WAKEUP_CHANNEL,
            wakeup=WorkerWakeup(worker_id).message,
            worker_id=worker_id,
            fence=fence,
            claim_ms=ORDER_CLAIM_MS if lane else 0,
            known=list(known),
        )
        if number == -1:
            raise LostLeadership
        return cast(int, number)

    async def orders(
        self, worker_id: str, epoch: str, after_seq: int
    ) -> list[worker_pb2.Directive]:
        """Return the orders with numbers above `after_seq`, in order."""
        with translated():
            found = await self._redis.zrangebyscore(
                f"v1:{{fleet}}:orders:{worker_id}:{epoch}", f"({after_seq}", "+inf"
            )
        directives = []
        for number, _, directive in (cast(bytes, member).partition(b" ") for member in found):
            directives.append(worker_pb2.Directive.FromString(directive))
            directives[-1].seq = int(number)
        return directives

    async def lead(
        self, scheduler_id: str, fence: int = 0, *, last_ms: int = LEAD_MS
    ) -> int | None:
        """Make this scheduler the leader for `last_ms` if none leads, or renew its lease if it
        leads by `fence`.

        Returns its fencing number, above those of all earlier leaders; None while another leads.
        """
        found = await scripts.lead(
            self._redis, (_LEADER, _FENCES), scheduler_id=scheduler_id, fence=fence, last_ms=last_ms
        )
        return cast(int, found) or None

    async def resign(self, fence: int) -> bool:
        """Give up the leadership, so that another scheduler may take it at once; False if it was
        lost already.
        """
        return bool(await scripts.resign(self._redis, (_LEADER,), fence=fence))

    async def note_plan(
        self,
        fence: int,
        plan: int,
        changed: Mapping[str, str],
        *,
        desired: Mapping[str, float] = _NOTHING,
        cold_starts: Mapping[str, float] = _NOTHING,
        replace_all: bool = False,
    ) -> None:
        """Publish the leader's last plan. Raises LostLeadership if another leads.

        Args:
            plan: Its number.
            changed: The changed notes by model; empty: removed.
            desired: Number of workers that each pool should have.
            cold_starts: Seconds that a new worker of each pool takes to start.
            replace_all: The changed notes replace all notes.
        """
        parts = [part for note in changed.items() for part in note]
        desired_json, starts = json.dumps(dict(desired)), json.dumps(dict(cold_starts))
        keys = (_LEADER, _NOTES)
        if not await scripts.note_plan(
            self._redis,
            keys,
            fence=fence,
            plan=str(plan),
            desired=desired_json,
            cold_starts=starts,
            replace=replace_all,
            changed=parts,
        ):
            raise LostLeadership

    async def plan_notes(self, *models: str) -> dict[str, str]:
        """Return the notes of the leader's last plans on these models, or on all if none is named;
        models without a note have no entry.
        """
        with translated():
            if not models:
                return {
                    name.decode(): note.decode()
                    for name, note in cast(_Notes, await self._redis.hgetall(_NOTES)).items()
                }
            found = cast(list[bytes | None], await self._redis.hmget(_NOTES, list(models)))
        return {
            model: note.decode()
            for model, note in zip(models, found, strict=True)
            if note is not None
        }

    async def router_heartbeat(self, router_id: str) -> list[str]:
        """Record that this router is alive. Returns routers that were silent for three times
        `ttl_ms`, each to only one caller in the mesh.
        """
        silent = await scripts.router_heartbeat(
            self._redis, (_ROUTERS,), router_id=router_id, last_ms=3 * self._ttl_ms
        )
        return [name.decode() for name in silent]


def _leader(values: list[bytes | None]) -> LeaderRecord | None:
    scheduler_id, fence, plan, plan_ms, desired, cold_starts = values
    if scheduler_id is None:
        return None
    numbers = (int(fence or 0), int(plan or 0), int(plan_ms or 0))
    return LeaderRecord(
        scheduler_id.decode(),
        *numbers,
        json.loads(desired or b"{}"),
        json.loads(cold_starts or b"{}"),
    )


def _until(failure: worker_pb2.Failure, left_ms: int) -> worker_pb2.Failure:
    """Copy the failure; if memory was short, with a retry time: the worker tries again in
    `left_ms`.
    """
    copy = worker_pb2.Failure()
    copy.CopyFrom(failure)
    if failure.reason == NoCapacity.reason:
        copy.retry_after_seconds = left_ms / 1000
    return copy


def _claim(lane: LaneKey) -> str:
    return f"v1:{{fleet}}:claim:{lane.name}"


def _without_cards(
    heartbeat: worker_pb2.HeartbeatRequest,
) -> tuple[worker_pb2.HeartbeatRequest, list[worker_pb2.WorkerModel]]:
    """Return the heartbeat and its models on disk as they are stored: with the worker's
    measurements instead of cards, the heartbeat without leases, the models with their bytes only.
    """
    kept = worker_pb2.HeartbeatRequest()
    for field, value in heartbeat.ListFields():
        if field.name in ("batches", "on_disk"):
            continue
        if field.name == "models":
            kept.models.extend(value)
        else:
            setattr(kept, field.name, value)
    for model in kept.models:
        model.data_type = model.data_type or model.card.data_type
        model.tokens_per_byte = model.tokens_per_byte or model.card.tokens_per_byte
        model.ClearField("card")
    return kept, [
        worker_pb2.WorkerModel(
            model=model.model,
            state=model.state,
            bytes=model.bytes,
            data_type=model.data_type or model.card.data_type,
            tokens_per_byte=model.tokens_per_byte or model.card.tokens_per_byte,
        )
        for model in heartbeat.on_disk
    ]
