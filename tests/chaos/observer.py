"""The invariants of the queue, read from Redis in one script call a slot: I1, I3, I4 and I6, and
I7 of a backlog.

I2 and I5 are seen at the clients: one answer for each request, and the right one (`traffic.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from libs.queue.connection.cluster import client_for_key, list_masters
from libs.queue.keys import KEYS, LaneKey, RedisKeys

EVERY_SECONDS: Final = 0.25
OVERDUE_SECONDS: Final = 5.0
"""Seconds for which an expired lease may remain on a busy machine: a pull checks leases within 2 s
(I6).
"""
_SNAPSHOT: Final = """
local function list(key, start) return redis.call('ZRANGE', key, start, -1, 'WITHSCORES') end
local found = {}
for at = 1, #KEYS, 8 do
  local batches = {}
  local packed = redis.call('HGETALL', KEYS[at + 5])
  for i = 1, #packed, 2 do
    local jobs = cmsgpack.unpack(packed[i + 1])
    local members = {}
    for j = 2, #jobs, 2 do members[#members + 1] = jobs[j] end
    batches[#batches + 1] = { packed[i], tostring(jobs[1]), members }
  end
  found[#found + 1] = {
    list(KEYS[at], 0), list(KEYS[at + 1], 0), redis.call('HKEYS', KEYS[at + 2]),
    redis.call('HGETALL', KEYS[at + 3]), list(KEYS[at + 4], 0), batches,
    redis.call('HGETALL', KEYS[at + 6]), redis.call('EXISTS', KEYS[at + 7]),
  }
end
local now = redis.call('TIME')
return { now[1] * 1000 + math.floor(now[2] / 1000), found }
"""
_READ: Final = ("interactive", "bulk", "payload", "owner", "leases", "batches", "meta", "attempts")


@dataclass(frozen=True, slots=True)
class LaneSnapshot:
    """A lane at one moment. Members are `<i|b>:<tokens>:<deadline ms>:<job id>`; `waiting` are of
    both classes, with start tags.
    """

    name: str
    now_ms: int
    waiting: dict[str, float]
    unfinished: set[str]
    members: dict[str, str]
    """Members by job id, of jobs that have an owner."""
    leases: dict[str, float]
    batches: dict[str, tuple[int, list[str]]]
    counters: dict[str, float]
    has_attempts: bool

    def problems(self) -> Iterator[str]:
        """Yield violations of the invariants that hold at every moment."""
        places = Counter(_id(member) for member in self.waiting)
        for _, members in self.batches.values():
            places.update(
                _id(member) for member in members if self.members.get(_id(member)) == member
            )
        for job_id in self.unfinished:
            if places[job_id] != 1:
                yield f"I1 {self.name}: job {job_id} is in {places[job_id]} places"
        for job_id in {_id(member) for member in self.waiting} - self.unfinished:
            yield f"I1 {self.name}: job {job_id} waits, and is finished"
        if self.leases.keys() != self.batches.keys():
            yield (
                f"I1 {self.name}: leases {sorted(self.leases)} and batches "
                f"{sorted(self.batches)} differ"
            )
        ended = sum(self._count(name) for name in ("done", "expired", "dead", "cancelled"))
        if self._count("enqueued") != ended + len(self.unfinished):
            yield (
                f"I3 {self.name}: {self._count('enqueued')} enqueued, {ended} ended, "
                f"{len(self.unfinished)} are unfinished"
            )
        for name, tokens in (
            ("queued", sum(map(_tokens, self.waiting))),
            ("leased", sum(tokens for tokens, _ in self.batches.values())),
        ):
            if self._count(name) != tokens:
                yield (
                    f"I3 {self.name}: {self._count(name)} tokens are said to be {name}, and "
                    f"{tokens} are"
                )

    def remains(self) -> Iterator[str]:
        """Yield parts that an idle lane must not have (I4)."""
        kept = {
            "waiting jobs": len(self.waiting),
            "unfinished jobs": len(self.unfinished),
            "owners": len(self.members),
            "leases": len(self.leases),
            "batches": len(self.batches),
            "queued tokens": self._count("queued"),
            "leased tokens": self._count("leased"),
            "attempts": int(self.has_attempts),
        }
        yield from (f"I4 {self.name}: {count} {what}" for what, count in kept.items() if count)

    def done(self) -> int:
        return self._count("done")

    def overdue(self) -> float:
        """Return the seconds since the oldest lease expired."""
        return max((self.now_ms - expiry for expiry in self.leases.values()), default=0.0) / 1000

    def _count(self, name: str) -> int:
        return int(self.counters.get(name, 0))


@dataclass
class Seen:
    """The observer's records."""

    snapshots: int = 0
    """Number of snapshots, of one slot each."""
    missed: int = 0
    """Number of snapshots that Redis did not answer."""
    problems: list[str] = field(default_factory=list)
    overdue: float = 0.0
    """The longest time that a lease remained after it expired, while only workers were harmed."""


class Observer:
    """`run` polls each slot of the queue every 250 ms, except while its Redis is away.

    Args:
        is_calm: Returns True if expired leases should be reclaimed in time.
        overdue_seconds: For how long an expired lease may remain.
    """

    def __init__(
        self,
        redis: Redis,
        is_calm: Callable[[], bool],
        slots: int = 1,
        *,
        overdue_seconds: float = OVERDUE_SECONDS,
    ) -> None:
        self.seen = Seen()
        self._redis = redis
        self._is_calm = is_calm
        self._overdue_seconds = overdue_seconds
        self._keys = RedisKeys(slots)
        self._slots = slots

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for slot in range(self._slots):
                group.create_task(self._watch(slot))

    async def _watch(self, slot: int) -> None:
        while True:
            try:
                self._judge(await self._slot_snapshots(slot))
            except (RedisError, OSError):
                self.seen.missed += 1
            await asyncio.sleep(EVERY_SECONDS)

    async def snapshots(self) -> list[LaneSnapshot]:
        """Return all lanes, those of a slot at one moment. Raises RedisError or OSError."""
        slots = await asyncio.gather(*map(self._slot_snapshots, range(self._slots)))
        return [lane for lanes in slots for lane in lanes]

    async def _slot_snapshots(self, slot: int) -> list[LaneSnapshot]:
        index = self._keys.indexes()[slot]
        redis = client_for_key(self._redis, index)
        names = [name.decode() for name in cast(list[bytes], await redis.zrange(index, 0, -1))]
        if not names:
            return []
        keys = [self._keys_of(name)[part] for name in names for part in _READ]
        now_ms, found = cast(tuple[int, list[Any]], await redis.eval(_SNAPSHOT, len(keys), *keys))
        return [_snapshot(name, now_ms, *parts) for name, parts in zip(names, found, strict=True)]

    async def leftovers(self) -> list[str]:
        """Return the keys and parts that remain in a mesh that should be idle."""
        lanes = await self.snapshots()
        left = [problem for lane in lanes for problem in (*lane.problems(), *lane.remains())]
        parts = {
            name: {
                key for part, key in self._keys_of(name).items() if part not in ("meta", "watchers")
            }
            for name in (lane.name for lane in lanes)
        }
        kept = {
            name.decode()
            for redis in list_masters(self._redis)
            for name in cast(list[bytes], await redis.keys("*"))
        }
        shared = {self._keys_of(name)[part] for name in parts for part in ("index", "dead")}
        left += [
            f"I4 {name}: {key} is there"
            for name, keys in parts.items()
            for key in sorted(keys & kept - shared)
        ]
        replies = tuple(self._keys.replies(""))
        return left + [
            f"I4 {key}: answers that nobody fetched"
            for key in sorted(kept)
            if key.startswith(replies)
        ]

    async def payloads(self, name: str) -> dict[str, bytes]:
        """Return the payloads of a lane's unfinished jobs, by job id."""
        key = self._keys_of(name)["payload"]
        found = cast(dict[bytes, bytes], await client_for_key(self._redis, key).hgetall(key))
        return {job_id.decode(): payload for job_id, payload in found.items()}

    def _keys_of(self, name: str) -> dict[str, str]:
        return dict(zip(KEYS, self._keys.lane_keys(LaneKey.parse(name)), strict=True))

    def _judge(self, lanes: Collection[LaneSnapshot]) -> None:
        if not lanes:
            return
        self.seen.snapshots += 1
        problems = [problem for lane in lanes for problem in lane.problems()]
        if self._is_calm():
            overdue = max((lane.overdue() for lane in lanes), default=0.0)
            self.seen.overdue = max(self.seen.overdue, overdue)
            if overdue > self._overdue_seconds:
                problems.append(
                    f"I6: a lease ran out {overdue:.1f} s ago, and nobody took its jobs back"
                )
        self.seen.problems += [
            f"{time.strftime('%H:%M:%S', time.gmtime())} {problem}" for problem in problems
        ]


def unfairness(
    lane: LaneSnapshot, tenant_of: Mapping[str, str], weights: Mapping[str, float]
) -> Iterator[str]:
    """I7, of the order in which the lane's backlog will be served: while two tenants both wait,
    what each gets by its weight differs by no more than one item of each (Goyal, Vin, Cheng 1996,
    theorem 1)."""
    order = sorted((tag, member) for member, tag in lane.waiting.items())
    by_tenant: dict[str, list[int]] = {}
    for position, (_, member) in enumerate(order):
        by_tenant.setdefault(tenant_of[_id(member)], []).append(position)
    names = sorted(by_tenant)
    for one, other in ((one, other) for one in names for other in names if one < other):
        both = (one, other)
        largest = sum(
            max(_tokens(order[position][1]) for position in by_tenant[name]) / weights[name]
            for name in both
        )
        begin, end = (
            max(by_tenant[name][0] for name in both),
            min(by_tenant[name][-1] for name in both),
        )
        got = dict.fromkeys(both, 0.0)
        for tag, member in order[begin : end + 1]:
            name = tenant_of[_id(member)]
            if name in got:
                got[name] += _tokens(member) / weights[name]
                if abs(got[one] - got[other]) > largest * (1 + 1e-6):
                    yield (
                        f"I7 {lane.name}: at tag {tag:g} {one!r} has {got[one]:g}, {other!r} "
                        f"{got[other]:g}, allowed {largest:g}"
                    )
                    break


def _snapshot(
    name: str,
    now_ms: int,
    interactive: list[bytes],
    bulk: list[bytes],
    unfinished: list[bytes],
    owners: list[bytes],
    leases: list[bytes],
    batches: list[Any],
    meta: list[bytes],
    attempts: int,
) -> LaneSnapshot:
    waiting = {member: float(tag) for member, tag in (*_pairs(interactive), *_pairs(bulk))}
    return LaneSnapshot(
        name,
        now_ms,
        waiting,
        {job_id.decode() for job_id in unfinished},
        {job_id: owner.partition("\0")[2] for job_id, owner in _pairs(owners)},
        {batch_id: float(expiry) for batch_id, expiry in _pairs(leases)},
        {
            batch_id.decode(): (int(tokens), [member.decode() for member in members])
            for batch_id, tokens, members in batches
        },
        {counter: float(count) for counter, count in _pairs(meta)},
        bool(attempts),
    )


def _pairs(flat: list[bytes]) -> list[tuple[str, str]]:
    texts = [part.decode() for part in flat]
    return list(zip(texts[0::2], texts[1::2], strict=True))


def _id(member: str) -> str:
    return member.split(":", 3)[3]


def _tokens(member: str) -> int:
    return int(member.split(":", 3)[1])
