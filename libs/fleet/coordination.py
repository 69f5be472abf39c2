"""Coordination of workers, schedulers and routers by small atomic operations in Redis, without
state in this process: claims to load a model, orders to workers, the leading scheduler with the
notes of its plan, and which routers are alive.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final, cast

from redis.asyncio import Redis
from shoal.v1 import worker_pb2

from libs.fleet import scripts
from libs.queue.connection.client import translated
from libs.queue.keys import WAKEUP_CHANNEL, LaneKey, WorkerWakeup

TTL_MS: Final = 10_000
"""A worker without a heartbeat for this time, or for the length of its leases, is dead: others may
load the models it held.
"""
LEAD_MS: Final = 3_000
"""The leader's lease: a scheduler that does not renew it in this time has lost the leadership."""
ORDER_CLAIM_MS: Final = 10_000
"""Duration of the claim on a model that is made with an order to load it. It prevents further
orders until the worker's heartbeat reports the state LOADING, which then does.
"""

_Notes = dict[bytes, bytes]
_NOTHING: Mapping[str, float] = MappingProxyType({})


class LostLeadership(Exception):
    """This scheduler no longer leads: another one does, or none. Its decisions are refused."""


class Coordination:
    """Claims, orders and leadership in Redis. Methods raise NoCapacity while Redis is
    unavailable.
    """

    def __init__(self, redis: Redis, *, ttl_ms: int = TTL_MS) -> None:
        self._redis = redis
        self._ttl_ms = ttl_ms

    async def claim(self, lane: LaneKey, worker_id: str, ttl_ms: int) -> bool:
        """Give this worker the exclusive right to load the lane's model, for `ttl_ms` milliseconds
        or until it is released. Return False if another worker has it.
        """
        with translated():
            if await self._redis.set(_claim(lane), worker_id, nx=True, px=ttl_ms):
                return True
        # The worker may have evicted the model since, and reload it.
        return await self.renew_claim(lane, worker_id, ttl_ms)

    async def renew_claim(self, lane: LaneKey, worker_id: str, ttl_ms: int) -> bool:
        """Extend the worker's claim to `ttl_ms` milliseconds from now. Return False if it has
        none.
        """
        return bool(
            await scripts.renew_claim(
                self._redis, (_claim(lane),), worker_id=worker_id, last_ms=ttl_ms
            )
        )

    async def release_claim(self, lane: LaneKey, worker_id: str) -> bool:
        """End the worker's claim. Return False if it has none."""
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
        """Queue an order for a worker, which receives it with its next heartbeat, and notify the
        worker. Orders are kept for a day.

        Returns the order's sequence number, above all earlier ones, or 0 if no order was given
        because another worker, which is not in `known`, has the claim. Raises LostLeadership if
        another scheduler leads.

        Args:
            epoch: Identifies the run of the worker: a restarted worker ignores orders of before.
            fence: The fencing number of the scheduler that gives the order; 0: an operator.
            lane: For a load by a scheduler: the lane to claim for the worker.
            known: The workers that hold the model, or will hold it by the plan.
        """
        number = await scripts.order(
            self._redis,
            (
                f"v1:{{fleet}}:orders:{worker_id}:{epoch}",
                scripts.LEADER,
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
        """Return the worker's orders with sequence numbers above `after_seq`, in order."""
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
        """Make this scheduler the leader for `last_ms` milliseconds if none leads, or renew its
        lease.

        Returns its fencing number, above those of all earlier leaders, or None while another leads.

        Args:
            fence: The fencing number of the lease to renew; 0: the scheduler has none.
        """
        found = await scripts.lead(
            self._redis,
            (scripts.LEADER, scripts.FENCES),
            scheduler_id=scheduler_id,
            fence=fence,
            last_ms=last_ms,
        )
        return cast(int, found) or None

    async def resign(self, fence: int) -> bool:
        """Give up the leadership, so that another scheduler can take it immediately. Return False
        if it was lost already.
        """
        return bool(await scripts.resign(self._redis, (scripts.LEADER,), fence=fence))

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
            plan: The number of the plan.
            changed: The changed notes by model; an empty note is removed.
            desired: Number of workers that each pool should have.
            cold_starts: Seconds that a new worker of each pool takes to start.
            replace_all: The changed notes replace all notes.
        """
        parts = [part for note in changed.items() for part in note]
        desired_json, starts = json.dumps(dict(desired)), json.dumps(dict(cold_starts))
        keys = (scripts.LEADER, scripts.NOTES)
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
                    for name, note in cast(_Notes, await self._redis.hgetall(scripts.NOTES)).items()
                }
            found = cast(list[bytes | None], await self._redis.hmget(scripts.NOTES, list(models)))
        return {
            model: note.decode()
            for model, note in zip(models, found, strict=True)
            if note is not None
        }

    async def router_heartbeat(self, router_id: str) -> list[str]:
        """Record that this router is alive. Return the routers that have sent no heartbeat for
        three times `ttl_ms`; each of them is returned to only one caller in the mesh, which cleans
        up.
        """
        silent = await scripts.router_heartbeat(
            self._redis, (scripts.ROUTERS,), router_id=router_id, last_ms=3 * self._ttl_ms
        )
        return [name.decode() for name in silent]


def _claim(lane: LaneKey) -> str:
    return f"v1:{{fleet}}:claim:{lane.name}"
