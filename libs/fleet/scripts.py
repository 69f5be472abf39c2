"""The atomic Redis operations of the registry. Times are from Redis' clock, so routers' clocks do
not matter.
"""

from __future__ import annotations

from libs.queue.scripts import Reply, Rest, script


@script("workers", "cards", "cards_revision", "lists", "tags", prologue="fleet")
async def report(
    *,
    worker_id: str,
    heartbeat: bytes,
    leaving: bool,
    tag: str,
    on_disk: bytes,
    changed: int,
    new_cards: Rest,
) -> Reply: ...


@script("workers", "lists", "tags")
async def forget(*, worker_id: str, heard_ms: str) -> Reply: ...


@script("failures", "strikes", prologue="fleet")
async def record_failure(*, field: str, failure: bytes, last_ms: int, doublings: int) -> Reply: ...


@script("failures", "strikes", prologue="fleet")
async def forgive(*, last_ms: int, doublings: int, fields: Rest) -> Reply: ...


@script("claim")
async def renew_claim(*, worker_id: str, last_ms: int) -> Reply: ...


@script("claim")
async def release_claim(*, worker_id: str) -> Reply: ...


@script("orders", "leader", "claim", prologue="fleet")
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


@script("leader", "fences", prologue="fleet")
async def lead(*, scheduler_id: str, fence: int, last_ms: int) -> Reply: ...


@script("leader")
async def resign(*, fence: int) -> Reply: ...


@script("leader", "notes", prologue="fleet")
async def note_plan(
    *, fence: int, plan: str, desired: str, cold_starts: str, replace: bool, changed: Rest
) -> Reply: ...


@script("routers", prologue="fleet")
async def router_heartbeat(*, router_id: str, last_ms: int) -> Reply: ...
