"""This process' copy of the workers and cards in Redis, into which only changes are read.

Each record and card has a version, and a reader asks for those above the last that it has read, one
page at a time, up to the last one when the read began. Workers that were removed are listed for a
minute, and silent ones at every read. Everything is read again after a gap: if Redis restarted,
failed over or lost data (then another generation of versions begins), if the last read was too long
ago, or if the number of workers differs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from redis.asyncio import Redis
from shoal.v1 import models_pb2, worker_pb2

from libs.fleet import scripts
from libs.fleet.disks import Disks, ModelsOnDisk
from libs.fleet.snapshot import NO_WORKERS, SILENT_MS, Index, WorkerRecord

PAGE_FIELDS: Final = 10
"""The parts of each page of a read; the last page has more."""
PAGE: Final = 250
"""Records of a page: Redis and this process need some 50 ms for one."""
GAP_SECONDS: Final = 30.0
"""Time without a read after which everything is read again: Redis lists removed workers for a
minute.
"""

SLOWER_MS: Final = 100
"""Each read may show that Redis' clock is this much slower than it seemed."""

NO_MODELS: Final[ModelsOnDisk] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Known:
    """A record that Redis holds."""

    record: WorkerRecord
    tag: str
    """The tag of its models on disk."""
    version: int
    generation: str


@dataclass(frozen=True, slots=True)
class Rest:
    """The parts that each read returns whole."""

    now_ms: int
    failures: Iterable[tuple[bytes, bytes]]
    leader: list[bytes | None]
    dead: dict[str, int]
    """Workers to be removed, with the times of their last heartbeats."""


class FleetReader:
    """The records and cards of the last read, with this process' own changes since."""

    def __init__(self, redis: Redis, disks: Disks, *, ttl_ms: int) -> None:
        self._redis = redis
        self._disks = disks
        self._ttl_ms = ttl_ms
        self._lock = asyncio.Lock()
        # The state: live workers with their index, and cards by model. They are replaced, not
        # changed, because snapshots hold them.
        self.workers = NO_WORKERS
        self.index = Index()
        self.cards: dict[str, models_pb2.ModelCard] = {}
        # All records, with the silent workers' last heartbeats, and workers of which the list of
        # models on disk was not found; how far they were read, when, and how far Redis' clock is
        # ahead of the monotonic one; whether all is to be read again, and the workers and cards
        # found since that began; whether lists may be unused now; versions of own changes since the
        # last read began, which it may not show yet, and whether these change the number of
        # workers.
        self._known: dict[str, Known] = {}
        self._silent: dict[str, int] = {}
        self._listless: set[str] = set()
        self._generation, self._since, self._read_at, self._ahead_ms = "", 0, 0.0, 0.0
        self._has_gap = True
        self._found: tuple[set[str], set[str]] | None = None
        self._has_changed = False
        self._own: dict[str, int] = {}
        self._own_cards: dict[str, int] = {}
        self._has_own_count = False

    def known(self, worker_id: str) -> Known | None:
        """Return the worker's record as Redis has it, also that of a silent worker."""
        return self._known.get(worker_id)

    def now_ms(self) -> int:
        """Estimate Redis' clock."""
        return round(time.monotonic() * 1000 + self._ahead_ms)

    # Own changes

    def heard(self, worker_id: str) -> None:
        """Note a heartbeat that changes nothing."""
        self._own.setdefault(worker_id, 0)
        if self._silent.pop(worker_id, None) is not None:
            self._show([worker_id])

    def note(self, worker_id: str, known: Known | None, version: int) -> None:
        """Note a record that this process has stored, or removed (None), unless a later one has
        been read, or that the worker was removed. `version`: 0 if Redis did not have the removed
        one.
        """
        before = self._known.get(worker_id)
        # A version that was read, but is not known any more, was removed or replaced.
        is_later = 0 < version < before.version if before is not None else version <= self._since
        if is_later and (known is None or known.generation == self._generation):
            return
        self._own[worker_id] = version
        self._has_own_count = self._has_own_count or (before is None) != (known is None)
        if known is None:
            self._known.pop(worker_id, None)
            self._listless.discard(worker_id)
        else:
            self._known[worker_id] = known
            self._has_gap = self._has_gap or known.generation != self._generation
        self._silent.pop(worker_id, None)
        self._show([worker_id])

    def note_cards(self, cards: dict[str, models_pb2.ModelCard], version: int) -> None:
        """Note cards that this process has stored, unless these or later ones have been read."""
        if version <= self._since:
            return
        self._own_cards.update(dict.fromkeys(cards, version))
        self.cards = {**self.cards, **cards}

    # Reading

    async def read(self) -> Rest:
        """Read all changes. Raises NoCapacity while Redis is unavailable: pages read until then
        are kept.
        """
        async with self._lock:
            self._own.clear()
            self._own_cards.clear()
            self._has_own_count, goal = False, 0
            if self._has_gap or time.monotonic() - self._read_at > GAP_SECONDS:
                self._since, self._has_gap, self._read_at = 0, False, time.monotonic()
            while True:
                page = await scripts.read(
                    self._redis,
                    scripts.READ,
                    known=self._generation,
                    since=self._since,
                    goal=goal,
                    limit=PAGE,
                    silent_ms=min(SILENT_MS, self._ttl_ms),
                )
                # Late replies make Redis' clock appear slow: the fastest of the last ones counts.
                ahead_ms = page[4] - time.monotonic() * 1000
                self._ahead_ms = max(ahead_ms, self._ahead_ms - SLOWER_MS)
                self._apply(page, await self._parse(page))
                if len(page) > PAGE_FIELDS:
                    return await self._finish(page)
                if not goal or int(page[1]) == 0:
                    goal = int(page[3])  # so that it ends: the next read has later changes

    async def _parse(self, page: list[Any]) -> dict[str, Known]:
        generation, found = page[0].decode(), {}
        for (worker_id, version), value in zip(_pairs(page[5]), page[6], strict=True):
            if value is None:  # lost: the worker sends it again with its next heartbeat
                continue
            time_ms, _, content = value.partition(b" ")
            heartbeat = worker_pb2.HeartbeatRequest.FromString(content)
            found[worker_id.decode()] = heartbeat, int(time_ms), int(version)
        await self._disks.read(
            (heartbeat.on_disk_tag, worker_id) for worker_id, (heartbeat, *_) in found.items()
        )
        known = {}
        for worker_id, (heartbeat, time_ms, version) in found.items():
            on_disk = self._disks.find(heartbeat.on_disk_tag)
            if on_disk is None:
                self._listless.add(worker_id)
            else:
                self._listless.discard(worker_id)
            record = WorkerRecord.from_heartbeat(heartbeat, time_ms, on_disk or NO_MODELS)
            known[worker_id] = Known(record, heartbeat.on_disk_tag, version, generation)
        return known

    def _apply(self, page: list[Any], found: dict[str, Known]) -> None:
        generation, since, upto = page[0].decode(), int(page[1]), int(page[2])
        if since == 0:
            self._found = set(), set()
        self._generation, self._since = generation, upto
        changed = [
            worker_id
            for worker_id, known in found.items()
            if known.version > self._own.get(worker_id, 0)
        ]
        removed = [
            worker_id.decode()
            for worker_id, version in _pairs(page[7])
            if int(version) > self._own.get(worker_id.decode(), 0)
        ]
        for worker_id in changed:
            self._known[worker_id] = found[worker_id]
        for worker_id in removed:
            self._known.pop(worker_id, None)
        self._has_changed = self._has_changed or bool(changed or removed)
        cards = {
            model.decode(): models_pb2.ModelCard.FromString(value)
            for (model, version), value in zip(_pairs(page[8]), page[9], strict=True)
            if value is not None and int(version) > self._own_cards.get(model.decode(), 0)
        }
        if cards:
            self.cards = {**self.cards, **cards}
        if self._found is not None:
            self._found[0].update(found)
            self._found[1].update(cards)
        self._show([*changed, *removed])

    async def _finish(self, page: list[Any]) -> Rest:
        now_ms, count, late = page[4], page[10], page[11]
        is_whole = page[2] == page[3]
        touched = set[str]()
        if self._found is not None:  # the rest is gone
            workers, cards = self._found
            workers |= {worker_id.decode() for worker_id in page[14]} | self._own.keys()
            gone = self._known.keys() - workers
            self._has_changed = True
            for worker_id in gone:
                del self._known[worker_id]
            cards |= {model.decode() for model in page[15]} | self._own_cards.keys()
            if not self.cards.keys() <= cards:
                self.cards = {name: card for name, card in self.cards.items() if name in cards}
            self._found = None
            touched |= gone
        elif is_whole and count != len(self._known) and not self._has_own_count:
            self._has_gap = True
        silent = {
            worker_id.decode(): int(heard_ms)
            for worker_id, heard_ms in _pairs(late)
            if worker_id.decode() not in self._own
        }
        touched |= silent.keys() | self._silent.keys()
        self._silent = silent
        self._show(touched, now_ms)  # first: reading lists may fail
        self._show(await self._read_missing_lists(), now_ms)
        self._read_at = time.monotonic()
        if self._has_changed:
            self._disks.keep({known.tag for known in self._known.values()})
            self._has_changed = False
        dead = {id_: ms for id_, ms in silent.items() if ms < now_ms - 6 * self._ttl_ms}
        return Rest(now_ms, _pairs(page[12]), page[13], dead)

    async def _read_missing_lists(self) -> set[str]:
        """Read lists that were not there when their workers' records were read. Workers with other
        ones send these with their next heartbeats.
        """
        self._listless &= self._known.keys()
        await self._disks.read((self._known[one].tag, one) for one in self._listless)
        found = {
            one for one in self._listless if self._disks.find(self._known[one].tag) is not None
        }
        for worker_id in found:
            known = self._known[worker_id]
            listed = self._disks.find(known.tag) or NO_MODELS
            record = replace(known.record, models={**listed, **known.record.models}, listed=listed)
            self._known[worker_id] = replace(known, record=record)
        self._listless -= found
        return found

    # The live workers

    def _show(self, worker_ids: Iterable[str], now_ms: int | None = None) -> None:
        """Update `workers` and `index`."""
        now_ms = self.now_ms() if now_ms is None else now_ms
        changes = []
        for worker_id in worker_ids:
            before, now = self.workers.get(worker_id), self._live(worker_id, now_ms)
            if before is not now:
                changes.append((worker_id, before, now))
        if not changes:
            return
        self.workers = self.workers.changed({worker_id: now for worker_id, _, now in changes})
        self.index = self.index.changed((before, now) for _, before, now in changes)

    def _live(self, worker_id: str, now_ms: int) -> WorkerRecord | None:
        known, heard_ms = self._known.get(worker_id), self._silent.get(worker_id)
        if known is None or heard_ms is None:
            return None if known is None else known.record
        if heard_ms <= now_ms - self._ttl_ms:
            return None
        shown = self.workers.get(worker_id)
        if (
            shown is not None
            and shown.silent_since_ms == heard_ms
            and shown.models is known.record.models
        ):
            return shown
        return replace(known.record, silent_since_ms=heard_ms)


def _pairs(values: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(values[::2], values[1::2], strict=True)
