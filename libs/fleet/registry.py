"""The registry of workers in Redis: written from heartbeats by `services/router/lanes/pull.py`,
read by every router and scheduler.

It consists of hashes of heartbeats, of cards, of failed loads (`failures.py`), of the leading
scheduler and of its plan's notes, and of models on disks (`disks.py`), indexes of what has changed
(`reader.py`), sorted sets of routers and of workers' last heartbeats, and a key for each claim and
each worker's orders (`coordination.py`). A worker is alive while its last heartbeat is younger than
`ttl_ms`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from redis.asyncio import Redis
from shoal.v1 import models_pb2, worker_pb2

from libs.fleet import drift, scripts
from libs.fleet.cards import card_digest, merged, without_measures
from libs.fleet.coordination import TTL_MS, Coordination
from libs.fleet.disks import Disks, content_tag, models_on_disk
from libs.fleet.failures import Failures
from libs.fleet.reader import NO_MODELS, FleetReader, Known
from libs.fleet.snapshot import (
    FleetSnapshot,
    LeaderRecord,
    WorkerModelRecord,
    WorkerRecord,
)
from libs.queue.connection.client import translated

ANOTHER: Final = -1


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """Values of a worker's last heartbeat that only operators need."""

    heartbeat_ms: int
    """Arrival time, Unix time by Redis' clock."""
    device_seconds: float
    wasted_seconds: float


class Fleet(Coordination):
    """This process' view of the workers, and its updates to routers and workers. Raises NoCapacity
    while Redis is unavailable.
    """

    def __init__(self, redis: Redis, *, ttl_ms: int = TTL_MS) -> None:
        super().__init__(redis, ttl_ms=ttl_ms)
        self._disks = Disks(redis)
        self._reader = FleetReader(redis, self._disks, ttl_ms=ttl_ms)
        self._failures = Failures(redis)
        # The state: the last snapshot, and the leader of the last read; the digests of the cards
        # that each worker reported last, by model, and in its list; each model's holders and card
        # when its card was last found merged.
        self.snapshot = FleetSnapshot({}, {}, {}, 0)
        self._leader: LeaderRecord | None = None
        self._reported_cards: dict[str, dict[str, int]] = {}
        self._cards_on_disk: dict[str, dict[str, int]] = {}
        self._settled: dict[str, tuple[object, models_pb2.ModelCard]] = {}

    async def report(self, heartbeat: worker_pb2.HeartbeatRequest) -> str:
        """Store a heartbeat for all routers, if it says anything new (`drift.py`), and apply it to
        `snapshot` at once.

        A model that has just failed is recorded by `record_failure`. Failures are forgotten for
        models that are resident now, and for all models of a restarted worker.

        Returns the tag of the worker's models on disk, empty if it has none. Empty too if the
        heartbeat names a tag without a list in Redis: it is not stored, and the worker must send
        another one with the list.
        """
        worker_id = heartbeat.worker_id
        before = self._reader.known(worker_id)
        kept, listed = _without_cards(heartbeat)
        content = worker_pb2.HeartbeatRequest(on_disk=listed).SerializeToString()
        tag = kept.on_disk_tag = content_tag(content) if content else heartbeat.on_disk_tag
        on_disk = models_on_disk(listed) if content else self._disks.find(tag)
        record = WorkerRecord.from_heartbeat(kept, self._reader.now_ms(), on_disk or NO_MODELS)
        found: drift.Change = "changed"
        if before is not None and before.tag == tag and not content and on_disk is not None:
            found = drift.change(before.record, record)
        stored = None
        if before is not None and found != "changed" and not heartbeat.leaving:
            cards = self._merged_cards(heartbeat, kept.models, is_same=found == "none")
            stored = await self._store(heartbeat, kept, content, [], cards, before)
        repeats = stored is not None and stored[-1] != ANOTHER
        if stored is None or not repeats:
            cards = self._merged_cards(heartbeat, [*kept.models, *listed])
            stored = await self._store(heartbeat, kept, content, listed, cards)
        now_ms, has_list, generation, version = stored
        if tag and not (has_list or heartbeat.leaving):
            return ""
        if heartbeat.leaving:
            self._reader.note(worker_id, None, version)
        elif repeats:
            self._reader.heard(worker_id)
        else:
            if on_disk is None:
                await self._disks.read([(tag, worker_id)])
                on_disk = self._disks.find(tag)
            record = WorkerRecord.from_heartbeat(kept, now_ms, on_disk or NO_MODELS)
            self._reader.note(worker_id, Known(record, tag, version, generation), version)
        self._publish(max(self.snapshot.now_ms, now_ms))
        await self._note_failures(before.record if before is not None else None, heartbeat)
        return tag

    async def _store(
        self,
        heartbeat: worker_pb2.HeartbeatRequest,
        kept: worker_pb2.HeartbeatRequest,
        content: bytes,
        listed: Iterable[worker_pb2.WorkerModel],
        cards: Mapping[str, models_pb2.ModelCard],
        repeated: Known | None = None,
    ) -> tuple[int, bool, str, int]:
        """Store the heartbeat, or only its time if it repeats a known record, and the cards that it
        changes.

        Returns the time, whether Redis has its models on disk, and the record's generation and
        version. Version ANOTHER: the record is another one by now.
        """
        changed = {
            name: card for name, card in cards.items() if card is not self.snapshot.card(name)
        }
        # Cards of models on disk are not sent again: write those that Redis has lost.
        others = {model.model: cards[model.model] for model in listed if model.model in cards}
        now_ms, has_list, generation, version, first = await scripts.report(
            self._redis,
            (*scripts.REGISTER, scripts.CARDS, scripts.CARD_CHANGES),
            worker_id=heartbeat.worker_id,
            known=repeated.generation if repeated is not None else "",
            repeated=str(repeated.version) if repeated is not None else "",
            heartbeat=b"" if repeated is not None else kept.SerializeToString(),
            used=f"{heartbeat.device_seconds:.3f} {heartbeat.wasted_seconds:.3f}",
            leaving=heartbeat.leaving,
            tag=kept.on_disk_tag,
            on_disk=content,
            changed=len(changed),
            new_cards=[
                part
                for name, card in (*changed.items(), *others.items())
                for part in (name, card.SerializeToString())
            ],
        )
        if first:
            self._reader.note_cards(changed, first)
        return now_ms, bool(has_list), generation.decode(), version

    def _merged_cards(
        self,
        heartbeat: worker_pb2.HeartbeatRequest,
        kept: Iterable[worker_pb2.WorkerModel],
        *,
        is_same: bool = False,
    ) -> dict[str, models_pb2.ModelCard]:
        """Return the cards in this heartbeat, merged with those of other workers
        (`libs/fleet/cards.py`). Of a model that is on disk too, the other card counts.

        Args:
            kept: Its models, then those on disk, as they are stored: with their measurements.
            is_same: The heartbeat repeats the worker's record.
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
            known, digest = self.snapshot.card(name), card_digest(model.card)
            reported[name] = digest
            repeats = digest in (before.get(name), before_on_disk.get(name))
            holders = self.snapshot.index.holders(name)
            if known is not None and repeats and is_same:
                settled = self._settled.get(name)
                if settled is not None and settled[0] is holders and settled[1] is known:
                    cards[name] = known
                    continue
            plain = known if known is not None and repeats else model.card
            copies = [one.models[name] for id_, one in holders.items() if id_ != worker_id]
            card = merged(
                without_measures(plain),
                known or models_pb2.ModelCard(),
                [*copies, WorkerModelRecord.from_proto(own)],
            )
            if known is not None and card == known:
                card, self._settled[name] = known, (holders, known)
            cards[name] = card
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

    async def _note_failures(
        self, previous: WorkerRecord | None, heartbeat: worker_pb2.HeartbeatRequest
    ) -> None:
        known = self._failures.failed_models(heartbeat.worker_id)
        if previous is not None and previous.epoch == heartbeat.epoch:
            resident = {
                model.model
                for model in heartbeat.models
                if model.state == models_pb2.MODEL_STATE_RESIDENT
            }
            known &= resident
        if known:
            await self._failures.forget(heartbeat.worker_id, known)
            self._publish(self.snapshot.now_ms)
        for model in heartbeat.models:
            before = previous.state(model.model) if previous else models_pb2.MODEL_STATE_ABSENT
            if model.state == models_pb2.MODEL_STATE_FAILED != before:
                await self.record_failure(model.model, heartbeat.worker_id, model.failure)

    async def record_failure(self, model: str, worker_id: str, failure: worker_pb2.Failure) -> None:
        """See `Failures.record`."""
        await self._failures.record(model, worker_id, failure)
        self._publish(self.snapshot.now_ms)

    async def forgive(self, models: Collection[str]) -> int:
        """See `Failures.forgive`."""
        return await self._failures.forgive(models)

    async def refresh(self) -> FleetSnapshot:
        """Read what has changed in the registry into `snapshot`, and delete expired entries: in one
        round trip, unless much or the models on a disk have changed. Updates made during the read
        are kept.
        """
        self._failures.begin_read()
        read = await self._reader.read()
        await self._failures.end_read(read.failures, read.now_ms)
        if read.dead:
            silent = [part for worker in read.dead.items() for part in map(str, worker)]
            await scripts.forget(self._redis, scripts.REGISTER, silent=silent)
        workers = self._reader.workers
        for digests in (self._reported_cards, self._cards_on_disk):
            for worker_id in digests.keys() - workers.keys():
                del digests[worker_id]
        self._leader = _leader(read.leader)
        self._publish(read.now_ms)
        return self.snapshot

    def _publish(self, now_ms: int) -> None:
        reader, failures = self._reader, self._failures.by_model
        self.snapshot = FleetSnapshot(
            reader.workers, reader.cards, failures, now_ms, self._leader
        ).with_index(reader.index)

    async def last_heartbeat(self, worker_id: str) -> tuple[str, int] | None:
        """Return the epoch and arrival time (Unix ms by Redis' clock) of the worker's last
        heartbeat; None if it is not registered.
        """
        with translated():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.hget(scripts.WORKERS, worker_id)
                pipeline.zscore(scripts.HEARD, worker_id)
                value, heard_ms = await pipeline.execute()
        if value is None or heard_ms is None:
            return None
        heartbeat = value.partition(b" ")[2]
        return worker_pb2.HeartbeatRequest.FromString(heartbeat).epoch, int(heard_ms)

    async def usage(self) -> dict[str, WorkerUsage]:
        """Read these values of all workers."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.zrange(scripts.HEARD, 0, -1, withscores=True)
                pipeline.hgetall(scripts.USAGE)
                heard, used = await pipeline.execute()
        return {
            worker_id.decode(): WorkerUsage(
                int(heard_ms), *(float(seconds) for seconds in used[worker_id].split())
            )
            for worker_id, heard_ms in heard
            if worker_id in used
        }

    async def forget(self, worker_id: str, heard_ms: int) -> bool:
        """Remove a dead worker; False if it sent a heartbeat since `heard_ms`, or was removed
        already.
        """
        version = await scripts.forget(
            self._redis, scripts.REGISTER, silent=[worker_id, str(heard_ms)]
        )
        if not version:
            return False
        self._reader.note(worker_id, None, version)
        self._publish(self.snapshot.now_ms)
        return True


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
