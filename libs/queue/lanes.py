"""The lanes of one process: every operation on waiting, leased and answered jobs.

On the request path twice: `dispatch.py` enqueues, cancels and takes replies; `pull.py` pulls,
completes and renews for workers. All state is in Redis. Every operation is one script, and so
atomic; any router may run any of them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import count
from typing import Any, TypedDict, cast

from redis.asyncio import Redis

from libs.errors import NoCapacity
from libs.queue import operations, upkeep
from libs.queue.chunks import CALL_JOBS, batched, is_large, split_jobs
from libs.queue.clock import RedisClock
from libs.queue.connection.channels import RedisChannels
from libs.queue.connection.client import translated
from libs.queue.connection.requirements import check_redis
from libs.queue.jobs import Completed, Idle, LaneGauges, Pulled, PulledJob, QueuedJob, RenewedBatch
from libs.queue.keys import (
    KEYS,
    STREAMED_CHANNEL,
    WAKEUP_CHANNEL,
    LaneKey,
    RedisKeys,
    WakeupLeft,
    WorkerWakeup,
    parse_wakeup,
)
from libs.queue.masters import Masters
from libs.queue.scripts import load_scripts

MAX_BLOCK_SECONDS = 2.0
"""A blocking read must end before the connection times out (connection.ANSWER_SECONDS)."""
REPLIES_AT_ONCE = 256
SWEPT_JOBS = 4_000
DAY_MS = 86_400_000
_OWNER, _LEASES = KEYS.index("owner"), KEYS.index("leases")
_COUNTERS = (
    "queued",
    "leased",
    "enqueued",
    "done",
    "expired",
    "dead",
    "cancelled",
    "enqueued_tokens",
)
"""Fields of a lane's `meta`, in the order of LaneGauges."""


class _Attempts(TypedDict):
    """Rules for giving up a job with expiring leases. Arguments of several scripts."""

    max_attempts: int
    dead_letter_limit: int
    """Maximum length of the dead-letter stream."""
    dead_result: bytes
    """The answer to such a job."""


class _Wakeup(TypedDict):
    """Rules for notifying of enqueued jobs. Arguments of a script."""

    channel: str
    notify: bool
    everywhere: bool


class Lanes:
    """The queue, as the router `router_id` uses it. Every method raises NoCapacity while Redis is
    away.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        router_id: str,
        dead_result: bytes,
        slots: int = 1,
        lease_ms: int = 15_000,
        max_attempts: int = 3,
        dead_letter_limit: int = 10_000,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """
        Args:
            dead_result: The answer (a serialised `JobResult`) to a job after workers died with it
                `max_attempts` times.
            slots: Must be the same in all processes.
            clock: Replaces Redis' clock in tests.
        """
        self.lease_ms = lease_ms
        self._redis = redis
        self._router_id = router_id
        self._attempts = _Attempts(
            max_attempts=max_attempts, dead_letter_limit=dead_letter_limit, dead_result=dead_result
        )
        self._keys = RedisKeys(slots)
        self.masters = Masters(redis, self._keys)
        self._clients = self.masters.clients
        inboxes: dict[Redis, list[str]] = {}
        for client, replies in zip(self._clients, self._keys.replies(router_id), strict=True):
            inboxes.setdefault(client, []).append(replies)
        # The reply lists of each client: one call can wait for them.
        self._inboxes = list(inboxes.items())
        self.clock = RedisClock(redis, clock)
        # Batch ids are never reused, even after Redis lost its data: a late answer must not end
        # another batch's lease.
        self._batch_prefix = secrets.token_hex(6)
        self._channels = RedisChannels(
            redis, lambda: [client for client, _ in self.masters.group_slots()]
        )
        # The state: the number of the next batch; the last gauges.
        self._batch_numbers = count(1)
        self._gauges: list[LaneGauges] = []

    async def check(self, *, again: bool = False) -> bool:
        """Raise UnsuitableRedis unless the server can hold the queue (`requirements.py`). Also
        measures its clock. Returns False if a master of a cluster did not answer.
        """
        is_complete = await check_redis(self._redis, slots=len(self._clients), again=again)
        # The masters of other lanes may answer: their clock is estimated by the last offset.
        with self.masters.tolerate_away(when=again):
            async with self.masters.within_timeout():
                await self.now_ms()
        return is_complete

    async def load_scripts(self) -> None:
        """Load all scripts of this version: schedulers may run but not load them. Raises
        NoCapacity.
        """
        await load_scripts(self._redis)

    async def now_ms(self) -> int:
        """Measure and return Redis' clock in Unix milliseconds."""
        return await self.clock.measure()

    def clock_ms(self) -> int:
        """Estimate Redis' clock since the last `now_ms` (which `lane_gauges` also calls), without a
        round trip.
        """
        return self.clock.now_ms()

    async def enqueue(
        self,
        lane: LaneKey,
        groups: Sequence[Sequence[QueuedJob]],
        *,
        max_tokens: int,
        notify: bool,
        everywhere: bool = False,
    ) -> list[bool]:
        """Enqueue each group (the jobs of one request) whole, or not at all if the lane would then
        hold more than `max_tokens`.

        Returns True for each group that was enqueued. A job that the lane already has is not
        enqueued twice; its answer will be sent to this router. A group above 256 jobs or 4 MiB
        takes several calls, and the first decides for the whole. After an error some jobs may be
        queued: it is safe to enqueue them again, and to cancel them.

        Args:
            notify: Notify the other routers that watch the lane, because they found it empty or
                have pulls that exclude tenants; all routers and schedulers if none does and it was
                empty.
            everywhere: Notify all routers and schedulers if the lane was empty, because its model
                may have to be loaded.
        """
        wakeup = _Wakeup(channel=WAKEUP_CHANNEL, notify=notify, everywhere=everywhere)
        admitted = [False] * len(groups)
        for call in batched(groups):
            answers = await self._enqueue(
                lane, [(groups[index], 0) for index in call], max_tokens, wakeup
            )
            for index, answer in zip(call, answers, strict=True):
                admitted[index] = answer
        for index, group in enumerate(groups):
            if is_large(group):
                admitted[index] = await self._enqueue_large(lane, group, max_tokens, wakeup)
        return admitted

    async def _enqueue_large(
        self, lane: LaneKey, group: Sequence[QueuedJob], max_tokens: int, wakeup: _Wakeup
    ) -> bool:
        first, *others = split_jobs(group)
        later_tokens = sum(job.tokens for chunk in others for job in chunk)
        if not (await self._enqueue(lane, [(first, later_tokens)], max_tokens, wakeup))[0]:
            return False
        for chunk in others:
            await self._enqueue(lane, [(chunk, 0)], -1, wakeup)
        return True

    async def _enqueue(
        self,
        lane: LaneKey,
        groups: Sequence[tuple[Sequence[QueuedJob], int]],
        max_tokens: int,
        wakeup: _Wakeup,
    ) -> list[bool]:
        arguments: list[str | bytes | int | float] = []
        for jobs, later_tokens in groups:
            arguments += (len(jobs), later_tokens)
            for job in jobs:
                arguments += (
                    job.job_id,
                    job.tenant,
                    job.weight,
                    job.tokens,
                    job.deadline_ms,
                    job.priority[0],
                    job.payload,
                )
        slot, keys = self._keys.locate(lane)
        admitted = await operations.enqueue(
            self._clients[slot],
            keys,
            lane=lane.name,
            **wakeup,
            router_id=self._router_id,
            now_ms=self.clock.argument(),
            max_tokens=max_tokens,
            groups=arguments,
        )
        return [flag == 1 for flag in admitted]

    async def pull(
        self,
        lane: LaneKey,
        *,
        budget_tokens: int,
        budget_jobs: int,
        worker_id: str,
        batch_id: str = "",
        notify: bool = False,
        exclude_tenants: Sequence[str] = (),
    ) -> Pulled | Idle:
        """Lease the next jobs by fair queueing.

        Expired leases are revoked first. A job of such a lease is leased alone from then on; after
        the last attempt it is answered with `dead_result` and added to the dead-letter stream.

        Args:
            budget_tokens: Maximum tokens; a first job may exceed it.
            budget_jobs: Maximum jobs.
            worker_id: The worker that may answer and renew, and that `cancel` notifies.
            batch_id: Names the lease; empty: a new name. If the lane has already leased a batch of
                that name to this worker, that batch is returned again.
            notify: Notify the other routers that found the lane empty if jobs are left.
            exclude_tenants: Lease only interactive jobs of other tenants, among the first 128. Idle
                does not mean then that the lane is empty.
        """
        batch_id = batch_id or f"{self._batch_prefix}-{next(self._batch_numbers)}"
        slot, keys = self._keys.locate(lane)
        while True:
            reply = await operations.pull(
                self._clients[slot],
                keys,
                lane=lane.name,
                channel=WAKEUP_CHANNEL,
                notify=notify,
                router_id=self._router_id,
                batch_id=batch_id,
                worker_id=worker_id,
                now_ms=self.clock.argument(),
                lease_ms=self.lease_ms,
                budget_tokens=budget_tokens,
                budget_jobs=max(1, budget_jobs),
                **self._attempts,
                exclude_tenants=exclude_tenants,
            )
            if (found := _pulled(batch_id, reply)) is not None:
                return found

    async def leasing(self, lanes: Sequence[LaneKey], batch_id: str) -> LaneKey | None:
        """Return the lane that has leased a batch of that name, if any. On a cluster, masters that
        do not answer are passed over.
        """

        async def find(client: Redis, own: Sequence[LaneKey]) -> list[LaneKey]:
            with self.masters.tolerate_away():  # The worker pulls from masters that answer.
                async with self.masters.within_timeout():
                    ends = await self._lease_ends(client, own, batch_id)
                return [lane for lane, end in zip(own, ends, strict=True) if end is not None]
            return []

        found = await asyncio.gather(*(find(*group) for group in self.masters.group_lanes(lanes)))
        return next((lane for leasing in found for lane in leasing), None)

    async def _lease_ends(
        self, client: Redis, lanes: Sequence[LaneKey], batch_id: str
    ) -> list[float | None]:
        """Return for each lane when the lease of that batch ends, None without one."""
        with translated():
            async with client.pipeline(transaction=False) as pipeline:
                for lane in lanes:
                    pipeline.zscore(self._keys.lane_keys(lane)[_LEASES], batch_id)
                return await pipeline.execute()

    async def complete(
        self,
        lane: LaneKey,
        worker_id: str,
        batch_id: str,
        results: Sequence[tuple[str, bytes]],
        *,
        release: bool,
    ) -> Completed:
        """Answer jobs that were leased to this worker by this lease, even if it has expired: the
        first answer to a job wins.

        Answers to other jobs are dropped, and other workers' leases are not changed. A worker
        cannot answer jobs that it released.

        Args:
            release: End the lease: unanswered jobs return to their positions in the lane, and no
                attempt is counted. Otherwise the lease stays, even when all its jobs are answered,
                so the last call for a batch must release it.
        """
        slot, keys = self._keys.locate(lane)
        accepted, *own = await operations.complete(
            self._clients[slot],
            keys,
            lane=lane.name,
            channel=WAKEUP_CHANNEL,
            router_id=self._router_id,
            worker_id=worker_id,
            batch_id=batch_id,
            release=release,
            results=[part for result in results for part in result],
        )
        return Completed(accepted, [results[position] for position in own])

    async def renew(
        self, lane: LaneKey, worker_id: str, batch_ids: Sequence[str]
    ) -> list[RenewedBatch]:
        """Extend leases of this worker to `lease_ms` from now; results in the given order. Leases
        of other workers count as lost.
        """
        slot, keys = self._keys.locate(lane)
        replies = await operations.renew(
            self._clients[slot],
            keys,
            worker_id=worker_id,
            now_ms=self.clock.argument(),
            lease_ms=self.lease_ms,
            batch_ids=batch_ids,
        )
        return [
            RenewedBatch(
                batch_id,
                lost=reply[0] == 0,
                gone=[job_id.decode() for job_id in reply[1]] if reply[0] else [],
            )
            for batch_id, reply in zip(batch_ids, replies, strict=True)
        ]

    async def cancel(self, lane: LaneKey, jobs: Sequence[QueuedJob]) -> int:
        """Cancel jobs, queued or leased, except those for which another router waits now. Returns
        the number cancelled.

        Notifies the workers that hold some of them; the replies to their next heartbeats name the
        jobs (`renew`).
        """
        cancelled = 0
        slot, keys = self._keys.locate(lane)
        for chunk in split_jobs(jobs):
            cancelled += await operations.cancel(
                self._clients[slot],
                keys,
                channel=WAKEUP_CHANNEL,
                router_id=self._router_id,
                job_ids=[job.job_id for job in chunk],
            )
        return cancelled

    async def fail_all(self, lane: LaneKey, result: bytes) -> int:
        """Answer every queued job of the lane with `result`, because its model cannot be served,
        and return their number. Leased jobs stay.
        """
        total, more = 0, True
        slot, keys = self._keys.locate(lane)
        while more:
            answered, more = await upkeep.fail(
                self._clients[slot], keys, result=result, limit=CALL_JOBS
            )
            total += answered
        return total

    async def missing(self, lane: LaneKey, job_ids: Sequence[str]) -> list[str]:
        """Return the `job_ids` that the lane does not hold. Take all replies first: answered jobs
        are not in the lane either.
        """
        slot, keys = self._keys.locate(lane)
        absent: list[str] = []
        for start in range(0, len(job_ids), CALL_JOBS):
            chunk = list(job_ids[start : start + CALL_JOBS])
            with translated():
                routers = await self._clients[slot].hmget(keys[_OWNER], chunk)
            absent += [
                job_id for job_id, router in zip(chunk, routers, strict=True) if router is None
            ]
        return absent

    @property
    def inboxes(self) -> range:
        """Return the numbers of the inboxes of this router, from each of which `take_replies` takes
        answers. An inbox is a group of reply lists that one call can wait for: of all slots, or on
        a cluster of one slot.
        """
        return range(len(self._inboxes))

    async def take_replies(self, wait_seconds: float, inbox: int = 0) -> list[tuple[str, bytes]]:
        """Take the answers (job id, result) that other routers delivered for this router to an
        inbox; wait at most 2 s for the first.

        If Redis loses its data, it loses these answers too; `missing` then reports their jobs, and
        a result may arrive twice.

        Args:
            inbox: One of `inboxes`. Without a cluster the first one has all answers.
        """
        with translated():
            taken = await _take(*self._inboxes[inbox], wait_seconds)
        return [
            (job_id.decode(), result)
            for job_id, _, result in (answer.partition(b"\0") for answer in taken)
        ]

    async def drop_replies(self, router_id: str) -> None:
        """Delete the answers to a dead router. They would otherwise expire two minutes after the
        last one. On a cluster, masters that do not answer are passed over.
        """
        names = self._keys.replies(router_id)

        async def drop(client: Redis, slots: Sequence[int]) -> None:
            with self.masters.tolerate_away(), translated():
                async with (
                    self.masters.within_timeout(),
                    client.pipeline(transaction=False) as pipeline,
                ):
                    for slot in slots:
                        pipeline.delete(names[slot])
                    await pipeline.execute()

        await asyncio.gather(*(drop(*group) for group in self.masters.group_slots()))

    async def wakeups(self) -> AsyncGenerator[LaneKey | WakeupLeft | WorkerWakeup | None, None]:
        """Yield lanes that have work for waiting pulls, and workers that have orders waiting.

        The first value is None: notifications may have been missed. Ends only by NoCapacity, when
        the connection is lost; call again.
        """
        own = f"{WAKEUP_CHANNEL}:{self._router_id}"
        async for message in self._channels.messages(WAKEUP_CHANNEL, own):
            yield None if message is None else parse_wakeup(message.decode())

    @property
    def router_id(self) -> str:
        """Return the id of the router that uses this object."""
        return self._router_id

    async def publish_streamed(self, router_id: str, parts: bytes) -> None:
        """Send generated text to another router. It is lost if that router does not listen."""
        await self._channels.publish_to_one(f"{STREAMED_CHANNEL}:{router_id}", parts)

    async def streamed_texts(self) -> AsyncGenerator[bytes, None]:
        """Yield generated text from other routers. Ends only by NoCapacity, as `wakeups` does."""
        channel = f"{STREAMED_CHANNEL}:{self._router_id}"
        async for message in self._channels.messages(channel, is_only_one=True):
            if message is not None:
                yield message

    async def lane_gauges(self) -> list[LaneGauges]:
        """Return the counters of every lane that was used in the last day.

        Of masters that do not answer, the last counters are returned. Raises NoCapacity if none
        answers.
        """
        now_ms = self.clock_ms()
        with self.masters.tolerate_away():
            async with self.masters.within_timeout():
                now_ms = await self.now_ms()
        masters = self.masters.group_slots()
        found = await asyncio.gather(
            *(self._read_gauges(*master, now_ms) for master in masters),
            return_exceptions=True,
        )
        if all(isinstance(gauges, NoCapacity) for gauges in found):
            raise cast(NoCapacity, found[0])
        known: list[LaneGauges] = []
        for (_, slots), gauges in zip(masters, found, strict=True):
            if isinstance(gauges, NoCapacity):
                away = set(slots)
                known += [one for one in self._gauges if self._keys.locate(one.lane)[0] in away]
            elif isinstance(gauges, BaseException):
                raise gauges
            else:
                known += gauges
        self._gauges = known
        return known

    async def _read_gauges(
        self, client: Redis, slots: Sequence[int], now_ms: int
    ) -> list[LaneGauges]:
        """Read the gauges of the lanes in these slots, all on the master of `client`."""
        indexes = self._keys.indexes()
        async with self.masters.within_timeout():
            with translated():
                async with client.pipeline(transaction=False) as pipeline:
                    for slot in slots:
                        pipeline.zremrangebyscore(indexes[slot], "-inf", now_ms - DAY_MS)
                        pipeline.zrange(indexes[slot], 0, -1, withscores=True)
                    used = [pair for found in (await pipeline.execute())[1::2] for pair in found]
                lanes = [LaneKey.parse(name.decode()) for name, _ in used]
                async with client.pipeline(transaction=False) as pipeline:
                    for lane in lanes:
                        keys = self._keys.lane_keys(lane)
                        pipeline.zcard(keys[0])
                        pipeline.zcard(keys[1])
                        pipeline.hmget(keys[9], *_COUNTERS)
                    replies = await pipeline.execute()
        return [
            LaneGauges(
                lane, interactive + bulk, *(int(number or 0) for number in (*counters, used_ms))
            )
            for lane, (_, used_ms), interactive, bulk, counters in zip(
                lanes, used, replies[0::3], replies[1::3], replies[2::3], strict=True
            )
        ]

    async def sweep(self, lane: LaneKey) -> None:
        """Repair a lane: drop expired jobs at any position, revoke expired leases, recount the
        gauges.

        Run for every lane once a minute, by any router. Of a lane above 4,000 jobs only the head is
        swept, because a script blocks Redis: 4,000 jobs take 5 to 10 ms.
        """
        slot, keys = self._keys.locate(lane)
        await upkeep.sweep(
            self._clients[slot],
            keys,
            lane=lane.name,
            now_ms=self.clock.argument(),
            limit=SWEPT_JOBS,
            **self._attempts,
        )

    async def end_leases(self, lane: LaneKey, worker_id: str, epoch: str) -> int:
        """End the leases of a dead worker process, as if they had expired. Wakes waiting pulls for
        the jobs that returned to the lane, and returns their number.
        """
        slot, keys = self._keys.locate(lane)
        back = await upkeep.end_leases(
            self._clients[slot],
            keys,
            lane=lane.name,
            channel=WAKEUP_CHANNEL,
            worker_id=worker_id,
            prefix=f"{epoch}-",
            **self._attempts,
        )
        return cast(int, back)


async def _take(client: Redis, lists: Sequence[str], wait_seconds: float) -> list[bytes]:
    """Take the answers in these lists, or the first one that arrives in the given time. All lists
    are of one client.
    """
    if len(lists) == 1:
        taken = cast(list[bytes], await client.lpop(lists[0], REPLIES_AT_ONCE) or [])
    else:
        async with client.pipeline(transaction=False) as pipeline:
            for name in lists:
                pipeline.lpop(name, REPLIES_AT_ONCE)
            taken = [answer for answers in await pipeline.execute() for answer in answers or []]
    if taken or wait_seconds <= 0:
        return taken
    popped = await client.blpop([*lists], timeout=min(wait_seconds, MAX_BLOCK_SECONDS))
    return [cast(bytes, popped[1])] if popped else []


def _pulled(batch_id: str, reply: Sequence[Any]) -> Pulled | Idle | None:
    """Decode the reply of the script `pull`; None if it dropped a thousand expired jobs and stopped
    early, so another call is needed.
    """
    if reply[0] == 1:
        ids, tokens, attempts, payloads = reply[3::4], reply[4::4], reply[5::4], reply[6::4]
        jobs = [
            PulledJob(job_id.decode(), payload, tries, size)
            for job_id, payload, tries, size in zip(ids, payloads, attempts, tokens, strict=True)
        ]
        return Pulled(batch_id, jobs, reply[2], reply[1] == 1)
    if reply[1] == 0:
        return Idle(reply[2] if reply[2] >= 0 else None)
    return None
