"""The scripts that are not on the path of a job: answering a whole lane, ending a dead worker's
leases, and repairing a lane.
"""

from __future__ import annotations

from libs.queue.operations import lane_script
from libs.queue.scripts import Reply


@lane_script
async def fail(*, result: bytes, limit: int) -> Reply: ...


@lane_script
async def end_leases(
    *,
    lane: str,
    channel: str,
    worker_id: str,
    prefix: str,
    max_attempts: int,
    dead_letter_limit: int,
    dead_result: bytes,
) -> Reply: ...


@lane_script
async def sweep(
    *,
    lane: str,
    now_ms: int,
    limit: int,
    max_attempts: int,
    dead_letter_limit: int,
    dead_result: bytes,
) -> Reply: ...
