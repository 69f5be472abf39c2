"""Names: of lanes, and of every Redis key of a lane.

All keys of a lane and the reply lists of its slot carry one hash tag, so that the scripts also run on a sharded Redis. A process of
another layout (LAYOUT_VERSION) must not read these keys.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from urllib.parse import quote, unquote

LAYOUT = "v1:layout"
"""STRING: the LAYOUT_VERSION of who wrote first. `v1` in names is no version any more: it keeps our keys from those of others."""
BELL = "v1:bell"
KEYS = (
    "interactive",  # ZSET: waiting members by start tag
    "bulk",  # ZSET
    "payload",  # HASH: job id -> job; being in here is what makes a job unfinished
    "owner",  # HASH: job id -> <router that waits for the answer> NUL <member>
    "attempts",  # HASH: job id -> leases that ran out
    "tags_i",  # HASH: tenant -> finish tag of its last interactive job
    "tags_b",  # HASH
    "leases",  # ZSET: batch id by the time it runs out
    "batches",  # HASH: batch id -> packed {tokens, member, start tag, member, start tag, ...}
    "meta",  # HASH: counters (LaneGauges), virtual times vi and vb, bulk's credit
    "index",  # ZSET: lane names by last use
    "dead",  # STREAM: dead letters
    "replies",  # prefix of the reply lists
    "holders",  # HASH: job id -> {worker TAB lease LF} of whom it was leased to and who did not give it back, newest first; padded
    "whose",  # HASH: job id -> tenant, of interactive jobs; a hint by which a pull finds those of some tenants
)
"""Of one lane, by the names that its scripts have for them (`lua/`), with their types."""
_MOST_LANES = 8192
"""Whose names and keys are kept, about 12 MB: clients can make up any number of models."""


@dataclass(frozen=True)
class LaneKey:
    """The lane of one pool, model and adapter (`""`: none)."""

    pool: str
    model: str
    adapter: str = ""

    @cached_property
    def name(self) -> str:
        """One string, safe as part of a key: no colon, brace or bar that is not ours. `parse` undoes it."""
        return "|".join(quote(part, safe="/@") for part in (self.pool, self.model, self.adapter))

    @staticmethod
    @lru_cache(maxsize=_MOST_LANES)
    def parse(name: str) -> LaneKey:
        """The lane of that name. ValueError if it is not one."""
        pool, model, adapter = name.split("|")
        return LaneKey(unquote(pool), unquote(model), unquote(adapter))


@dataclass(frozen=True, slots=True)
class WorkerBell:
    """A ring for one worker: orders wait for it, so it should send a heartbeat now."""

    worker_id: str

    @property
    def message(self) -> str:
        """What is published on BELL; no lane's name begins so. `parse_bell` undoes it."""
        return f"!{self.worker_id}"


def parse_bell(message: str) -> LaneKey | WorkerBell:
    """What a message on BELL is for. ValueError if it is neither."""
    return WorkerBell(message[1:]) if message.startswith("!") else LaneKey.parse(message)


class Keys:
    """The names of all keys, given the number of slots; a lane's are made once and kept."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._lanes: dict[LaneKey, tuple[str, ...]] = {}

    def of(self, lane: LaneKey) -> tuple[str, ...]:
        """A lane's keys in the order of `library.KEYS`."""
        keys = self._lanes.get(lane)
        if keys is None:
            if len(self._lanes) == _MOST_LANES:
                self._lanes.clear()
            keys = self._lanes[lane] = self._make(lane)
        return keys

    def _make(self, lane: LaneKey) -> tuple[str, ...]:
        slot = crc_hqx(lane.model.encode(), 0) % self._slots
        own = ("i", "b", "pay", "own", "att", "fi", "fb", "lease", "batch", "meta")
        shared = ("lanes", "dead", "replies:")
        prefix = f"v1:{{{slot}}}:lane:{lane.name}:"
        return (*(prefix + part for part in own), *(f"v1:{{{slot}}}:{part}" for part in shared), f"{prefix}hold", f"{prefix}whose")

    def indexes(self) -> Iterator[str]:
        """One ZSET a slot: lane names by the time of last use."""
        return (f"v1:{{{slot}}}:lanes" for slot in range(self._slots))

    def replies(self, router_id: str) -> list[str]:
        """One LIST a slot: answers on their way to that router."""
        return [f"v1:{{{slot}}}:replies:{router_id}" for slot in range(self._slots)]
