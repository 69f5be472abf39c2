"""The names of lanes and of every Redis key of a lane.

All keys of a lane and the reply lists of its slot share one hash tag, so that the scripts also run
on a Redis Cluster, where one master holds all keys of a tag. A process with another layout
(LAYOUT_VERSION) or another number of slots must not read these keys.
"""

from __future__ import annotations

from binascii import crc_hqx
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from libs import setting
from libs.versions import LAYOUT_VERSION

LAYOUT = "v1:layout"
"""STRING: the layout of the process that wrote first (`layout_value`). `v1` in names is no longer a
version; it only separates Shoal's keys from others.
"""
MAX_SLOTS: Final = 1024
"""Bounded because each router reads one index per slot every second and, on a cluster, waits for
answers on one connection per slot.
"""
WAKEUP_CHANNEL = "v1:wakeup"
"""The channel of all routers and schedulers; with `:<router>`, that of one router."""
STREAMED_CHANNEL = "v1:streamed"
"""Prefix of the channels, one for each router, that carry generated text for its streaming
clients.
"""
KEYS = (
    "interactive",  # ZSET: waiting members by start tag
    "bulk",  # ZSET
    "payload",  # HASH: job id -> job; a job is unfinished while it has an entry here
    "owner",  # HASH: job id -> <router that waits for the answer> NUL <member>
    "attempts",  # HASH: job id -> expired leases
    "tags_i",  # HASH: tenant -> finish tag of its last interactive job
    "tags_b",  # HASH
    "leases",  # ZSET: batch id by the expiry of its lease
    "batches",  # HASH: batch id -> packed {tokens, member, start tag, member, start tag, ...}
    "meta",  # HASH: counters (LaneGauges), virtual times (vi, vb), credit of bulk jobs
    "index",  # ZSET: lane names by last use
    "dead",  # STREAM: dead letters
    "replies",  # prefix of the reply lists
    # HASH: job id -> {worker TAB lease LF} of each of its leases that was not released, newest
    # first; padded
    "holders",
    # HASH: job id -> tenant, of interactive jobs; a hint that lets a pull pick jobs by tenant
    "tenant_of",
    # ZSET: routers that must learn of the lane's next jobs, by time: those that found it empty;
    # with "+" before their ids, those with pulls that exclude tenants
    "watchers",
)
"""The keys of one lane, by their names in its scripts (`lua/`), with their types."""
FLEET_KEYS: Final = (
    "v1:{fleet}:workers",
    "v1:{fleet}:changes",
    "v1:{fleet}:gone",
    "v1:{fleet}:heard",
    "v1:{fleet}:usage",
    "v1:{fleet}:disks",
    "v1:{fleet}:disk_tags",
    "v1:{fleet}:generation",
    "v1:{fleet}:counter",
    "v1:{fleet}:cards",
    "v1:{fleet}:card_changes",
    "v1:{fleet}:failures",
    "v1:{fleet}:strikes",
    "v1:{fleet}:leader",
    "v1:{fleet}:fences",
    "v1:{fleet}:notes",
)
"""The keys of the registry of workers (`libs/fleet`) that schedulers also use."""
_MAX_LANES = 8192
"""Number of lanes with cached names and keys, about 12 MB: bounded because clients can name any
number of models that do not exist.
"""


class LaneKey(NamedTuple):
    """The lane of one pool, model and adapter (`""`: none). It is a tuple, which hashes fast: it is
    looked up about forty times per request.
    """

    pool: str
    model: str
    adapter: str = ""

    @property
    def name(self) -> str:
        """Return one string that is safe as part of a Redis key: colons, braces and vertical bars
        within the parts are escaped. `parse` is the inverse.
        """
        return _name(self)

    @staticmethod
    @lru_cache(maxsize=_MAX_LANES)
    def parse(name: str) -> LaneKey:
        """Return the lane of that name. Raises ValueError for an invalid name."""
        pool, model, adapter = name.split("|")
        return LaneKey(unquote(pool), unquote(model), unquote(adapter))


@lru_cache(maxsize=_MAX_LANES)
def _name(lane: LaneKey) -> str:
    return "|".join(quote(part, safe="/@") for part in lane)


@dataclass(frozen=True, slots=True)
class WorkerWakeup:
    """A notification that orders (to load or evict models) wait for a worker, so it should send a
    heartbeat now.
    """

    worker_id: str

    @property
    def message(self) -> str:
        """Return the message published on WAKEUP_CHANNEL. It begins with `!`, as no lane's name
        does. `parse_wakeup` is the inverse.
        """
        return f"!{self.worker_id}"


@dataclass(frozen=True, slots=True)
class WakeupLeft:
    """A notification that a pull has left jobs in a lane. None of these jobs is new: each caused a
    notification when it arrived.
    """

    lane: LaneKey


_LEFT: Final = "!\t"
"""Prefix of such a message (pull.lua). No worker's id begins with a tab."""


def parse_wakeup(message: str) -> LaneKey | WakeupLeft | WorkerWakeup:
    """Parse a message on WAKEUP_CHANNEL into its lane or worker. Raises ValueError if it is
    neither.
    """
    if message.startswith(_LEFT):
        return WakeupLeft(LaneKey.parse(message.removeprefix(_LEFT)))
    return WorkerWakeup(message[1:]) if message.startswith("!") else LaneKey.parse(message)


def slot_number(name: str, slots: int) -> int:
    """Return the slot of a model or tenant, 0 to `slots` - 1: its CRC-16, modulo `slots`."""
    return crc_hqx(name.encode(), 0) % slots


def layout_value(slots: int) -> str:
    """Return the value of LAYOUT that processes with this number of slots write and accept."""
    return str(LAYOUT_VERSION) if slots == 1 else f"{LAYOUT_VERSION} with {slots} slots"


def queue_slots_setting() -> int:
    """Declare the setting for the number of slots."""
    return setting.integer(
        "SHOAL_QUEUE_SLOTS",
        1,
        "slots",
        setting.in_range(1, MAX_SLOTS),
        "The parts of the queue that can lie on different masters of a Redis Cluster: models are "
        "spread over them. The same for all routers and schedulers of a mesh.",
    )


class RedisKeys:
    """The names of all keys, given the number of slots; those of a lane are cached."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._lanes: dict[LaneKey, tuple[int, tuple[str, ...]]] = {}

    def lane_keys(self, lane: LaneKey) -> tuple[str, ...]:
        """Return a lane's keys in the order of `KEYS`."""
        return self.locate(lane)[1]

    def locate(self, lane: LaneKey) -> tuple[int, tuple[str, ...]]:
        """Return a lane's slot, and its keys in the order of `KEYS`."""
        located = self._lanes.get(lane)
        if located is None:
            if len(self._lanes) == _MAX_LANES:
                self._lanes.clear()
            slot = slot_number(lane.model, self._slots)
            located = self._lanes[lane] = (slot, self._make(lane, slot))
        return located

    def _make(self, lane: LaneKey, slot: int) -> tuple[str, ...]:
        own = ("i", "b", "pay", "own", "att", "fi", "fb", "lease", "batch", "meta")
        shared = ("lanes", "dead", "replies:")
        prefix = f"v1:{{{slot}}}:lane:{lane.name}:"
        return (
            *(prefix + part for part in own),
            *(f"v1:{{{slot}}}:{part}" for part in shared),
            f"{prefix}hold",
            f"{prefix}tenant_of",
            f"{prefix}watch",
        )

    def indexes(self) -> list[str]:
        """Return one ZSET per slot: lane names by the time of last use."""
        return [f"v1:{{{slot}}}:lanes" for slot in range(self._slots)]

    def replies(self, router_id: str) -> list[str]:
        """Return one LIST per slot: answers to be delivered to that router."""
        return [f"v1:{{{slot}}}:replies:{router_id}" for slot in range(self._slots)]
