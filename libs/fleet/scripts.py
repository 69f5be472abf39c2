"""The Redis scripts of the registry of workers. Times are from Redis' clock, so that differences
between the clocks of routers do not matter.
"""

from __future__ import annotations

from libs.queue.keys import FLEET_KEYS
from libs.queue.scripts import CLOCK, Reply, Rest, script

(
    WORKERS,
    CHANGES,
    GONE,
    HEARD,
    USAGE,
    DISKS,
    DISK_TAGS,
    GENERATION,
    COUNTER,
    CARDS,
    CARD_CHANGES,
    FAILURES,
    STRIKES,
    LEADER,
    FENCES,
    NOTES,
) = FLEET_KEYS
ROUTERS = "v1:{fleet}:routers"

_REGISTER = {
    "workers": WORKERS,
    "changes": CHANGES,
    "gone": GONE,
    "heard": HEARD,
    "usage": USAGE,
    "lists": DISKS,
    "tags": DISK_TAGS,
    "generation": GENERATION,
    "counter": COUNTER,
}
"""The keys that change together with the register of workers, by their names in the scripts."""
REGISTER = tuple(_REGISTER.values())


@script(*_REGISTER, "cards", "card_changes", prologues=[CLOCK, "fleet"])
async def report(
    *,
    worker_id: str,
    known: str,
    repeated: str,
    heartbeat: bytes,
    used: str,
    leaving: bool,
    tag: str,
    on_disk: bytes,
    changed: int,
    new_cards: Rest,
) -> Reply: ...


@script(*_REGISTER, prologues=[CLOCK, "fleet"])
async def forget(*, silent: Rest) -> Reply: ...


@script(
    *("workers", "changes", "gone", "heard", "generation", "counter"),
    *("cards", "card_changes", "failures", "leader"),
    prologues=[CLOCK, "fleet"],
)
async def read(*, known: str, since: int, goal: int, limit: int, silent_ms: int) -> Reply: ...


READ = (
    *(WORKERS, CHANGES, GONE, HEARD, GENERATION, COUNTER),
    *(CARDS, CARD_CHANGES, FAILURES, LEADER),
)
"""The keys of `read`."""


@script("failures", "strikes", prologues=[CLOCK, "fleet"])
async def record_failure(*, field: str, failure: bytes, last_ms: int, doublings: int) -> Reply: ...


@script("failures", "strikes", prologues=[CLOCK, "fleet"])
async def forgive(*, last_ms: int, doublings: int, fields: Rest) -> Reply: ...


@script("claim")
async def renew_claim(*, worker_id: str, last_ms: int) -> Reply: ...


@script("claim")
async def release_claim(*, worker_id: str) -> Reply: ...


@script("orders", "leader", "claim", prologues=[CLOCK, "fleet"])
async def order(
    *,
    directive: bytes,
    channel: str,
    wakeup: str,
    worker_id: str,
    fence: int,
    claim_ms: int,
    known: Rest,
) -> Reply: ...


@script("leader", "fences", prologues=[CLOCK, "fleet"])
async def lead(*, scheduler_id: str, fence: int, last_ms: int) -> Reply: ...


@script("leader")
async def resign(*, fence: int) -> Reply: ...


@script("leader", "notes", prologues=[CLOCK, "fleet"])
async def note_plan(
    *, fence: int, plan: str, desired: str, cold_starts: str, replace: bool, changed: Rest
) -> Reply: ...


@script("routers", prologues=[CLOCK, "fleet"])
async def router_heartbeat(*, router_id: str, last_ms: int) -> Reply: ...
