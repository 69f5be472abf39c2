"""The Redis scripts on the path of every job: enqueue, lease to a worker, complete. `Lanes` calls
them and decodes their replies.

Waiting jobs are ordered by start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), separately
for each priority. A job's start tag is the larger of the lane's virtual time and its tenant's last
finish tag; its finish tag is tokens / weight after that; virtual time is the start tag of the last
leased job. Backlogged tenants thus get tokens by weight, whatever their backlog.
"""

from __future__ import annotations

from libs.queue.keys import KEYS
from libs.queue.scripts import Reply, Rest, script

lane_script = script(*KEYS, prologues=["lane"])


@lane_script
async def enqueue(
    *,
    lane: str,
    channel: str,
    notify: bool,
    everywhere: bool,
    router_id: str,
    now_ms: int,
    max_tokens: int,
    groups: Rest,
) -> Reply: ...


@lane_script
async def pull(
    *,
    lane: str,
    channel: str,
    notify: bool,
    router_id: str,
    batch_id: str,
    worker_id: str,
    now_ms: int,
    lease_ms: int,
    budget_tokens: int,
    budget_jobs: int,
    max_attempts: int,
    dead_letter_limit: int,
    dead_result: bytes,
    exclude_tenants: Rest,
) -> Reply: ...


@lane_script
async def complete(
    *,
    lane: str,
    channel: str,
    router_id: str,
    worker_id: str,
    batch_id: str,
    release: bool,
    results: Rest,
) -> Reply: ...


@lane_script
async def renew(*, worker_id: str, now_ms: int, lease_ms: int, batch_ids: Rest) -> Reply: ...


@lane_script
async def cancel(*, channel: str, router_id: str, job_ids: Rest) -> Reply: ...
