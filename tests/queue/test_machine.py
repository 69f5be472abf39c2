"""Any order of operations by two routers keeps the invariants I1 to I5 of the queue, and the
holders of leased jobs right.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from collections.abc import Set as AbstractSet
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from libs.queue import LaneKey, Priority, Pulled, QueuedJob, connect
from libs.queue.keys import RedisKeys
from tests.queue.parts import (
    DEAD,
    LANE,
    LEASE_MS,
    NOTHING,
    Clock,
    gauges,
    job,
    look_inside,
    make_lanes,
)
from tests.support.redis import RedisServer

T = TypeVar("T")
ROUTERS = st.sampled_from(["a", "b"])
UNPACK = "return cmsgpack.unpack(redis.call('HGET', KEYS[1], ARGV[1]))"


class LaneMachine(RuleBasedStateMachine):
    """The model: which jobs are unfinished and who waits for them; how often each was queued, and
    how each of these lives ended.
    """

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.redis = connect(self.url)
        self.clock = Clock()
        self.lanes = {name: make_lanes(self.redis, self.clock, name) for name in "ab"}
        self.alive: dict[str, QueuedJob] = {}
        self.owner: dict[str, str] = {}
        self.batches: list[Pulled] = []
        self.leased: dict[str, dict[str, QueuedJob]] = {}
        self.givers: dict[str, list[str]] = {}
        self.worker: dict[str, str] = {}
        self.lives: Counter[str] = Counter()
        self.replies: Counter[str] = Counter()
        self.accepted = self.cancelled = self.expired = self.dead = self.enqueued_tokens = 0

    def run(self, action: Awaitable[T]) -> T:
        return self.loop.run_until_complete(action)

    @initialize()
    def empty(self) -> None:
        self.run(self.redis.flushall())

    @rule(
        router=ROUTERS,
        names=st.lists(st.integers(0, 15), min_size=1, max_size=5),
        tokens=st.integers(1, 40),
        tenant=st.sampled_from("xyz"),
        priority=st.sampled_from(["interactive", "bulk"]),
        patience_ms=st.sampled_from([1, 500, 5000, 10**9]),
        max_tokens=st.sampled_from([60, 10**9]),
    )
    def enqueue(
        self,
        router: str,
        names: list[int],
        tokens: int,
        tenant: str,
        priority: Priority,
        patience_ms: int,
        max_tokens: int,
    ) -> None:
        deadline_ms = self.clock.ms + patience_ms
        group = [
            job(f"{name}", tokens, tenant=tenant, priority=priority, deadline_ms=deadline_ms)
            for name in names
        ]
        new = {one.job_id: one for one in group if one.job_id not in self.alive}
        queued = self.run(look_inside(self.redis)).queued_tokens
        (admitted,) = self.run(
            self.lanes[router].enqueue(LANE, [group], max_tokens=max_tokens, notify=False)
        )
        assert admitted == (not new or queued + tokens * len(new) <= max_tokens)
        if admitted:
            self.alive |= new
            for job_id in new:
                self.givers.pop(job_id, None)
            self.lives.update(new.keys())
            self.enqueued_tokens += tokens * len(new)
            self.owner |= {one.job_id: router for one in group}

    @rule(
        router=ROUTERS,
        worker=st.sampled_from(["v", "w"]),
        budget_tokens=st.integers(1, 100),
        budget_jobs=st.integers(1, 8),
        exclude_tenants=st.one_of(st.just(set()), st.sets(st.sampled_from("xyz"))),
    )
    def pull(
        self,
        router: str,
        worker: str,
        budget_tokens: int,
        budget_jobs: int,
        exclude_tenants: AbstractSet[str] = frozenset(),
    ) -> None:
        pulled = self.run(
            self.lanes[router].pull(
                LANE,
                worker_id=worker,
                budget_tokens=budget_tokens,
                budget_jobs=budget_jobs,
                exclude_tenants=sorted(exclude_tenants),
            )
        )
        self.collect()
        if isinstance(pulled, Pulled):
            jobs = [self.alive[one.job_id] for one in pulled.jobs]
            assert not exclude_tenants or all(
                one.priority == "interactive" and one.tenant not in exclude_tenants for one in jobs
            )
            assert all(self.alive[one.job_id].payload == one.payload for one in pulled.jobs)
            assert pulled.tokens == sum(one.tokens for one in pulled.jobs)
            assert len(pulled.jobs) == 1 or (
                pulled.tokens <= budget_tokens and not any(one.attempts for one in pulled.jobs)
            )
            self.batches.append(pulled)
            self.leased[pulled.batch_id] = {
                one.job_id: self.alive[one.job_id] for one in pulled.jobs
            }
            self.worker[pulled.batch_id] = worker
            for one in pulled.jobs:
                before = self.givers.get(one.job_id, []) if one.attempts else []
                self.givers[one.job_id] = [f"{worker}\t{pulled.batch_id}", *before]

    @rule(
        router=ROUTERS,
        which=st.integers(0, 5),
        answered=st.integers(0, 8),
        release=st.booleans(),
        is_own=st.booleans(),
    )
    def complete(
        self, router: str, which: int, answered: int, release: bool, is_own: bool = True
    ) -> None:
        """Answer jobs of one of the last batches, with or without a valid lease, by its worker or
        another one.
        """
        if which >= len(self.batches):
            return
        batch = self.batches[-1 - which]
        worker = self.worker[batch.batch_id] if is_own else "thief"
        results = [(one.job_id, b"result") for one in batch.jobs[:answered]]
        held = batch.batch_id in self.run(look_inside(self.redis)).leases
        given = [
            job_id for job_id, _ in results if self.was_given(job_id, worker, batch.batch_id, held)
        ]
        ends = release and held and (bool(given) or self.is_held_by(worker, batch.batch_id))
        unfinished = [job_id for job_id in given if job_id in self.alive]
        completed = self.run(
            self.lanes[router].complete(LANE, worker, batch.batch_id, results, release=release)
        )
        assert completed.accepted == len(unfinished)
        assert completed.own == [
            (job_id, b"result") for job_id in unfinished if self.owner[job_id] == router
        ]
        self.accepted += len(unfinished)
        self.replies.update(job_id for job_id, _ in completed.own)
        for job_id in unfinished:
            del self.alive[job_id]
        for job_id, one in self.leased[batch.batch_id].items() if ends else ():
            if job_id not in given and self.is_unfinished(one):
                self.givers.pop(job_id, None)
        self.collect()

    def was_given(self, job_id: str, worker: str, batch_id: str, held: bool) -> bool:
        """A job that was queued again has no recorded holder: its old lease counts while it
        lasts.
        """
        noted = self.givers.get(job_id) if job_id in self.alive else None
        return (
            f"{worker}\t{batch_id}" in noted if noted else held and job_id in self.leased[batch_id]
        )

    def is_held_by(self, worker: str, batch_id: str) -> bool:
        left = [job_id for job_id, one in self.leased[batch_id].items() if self.is_unfinished(one)]
        return not left or self.was_given(left[0], worker, batch_id, True)

    @rule(router=ROUTERS, names=st.sets(st.integers(0, 15), max_size=5))
    def cancel(self, router: str, names: set[int]) -> None:
        jobs = [self.alive.get(f"{name}", job(f"{name}")) for name in names]
        ended = [
            one.job_id
            for one in jobs
            if one.job_id in self.alive and self.owner[one.job_id] == router
        ]
        assert self.run(self.lanes[router].cancel(LANE, jobs)) == len(ended)
        self.cancelled += len(ended)
        for job_id in ended:
            del self.alive[job_id]
            self.lives[job_id] -= 1

    @rule(elapsed_ms=st.sampled_from([1, 400, LEASE_MS]))
    def wait(self, elapsed_ms: int) -> None:
        self.clock.ms += elapsed_ms

    @rule(router=ROUTERS, which=st.integers(0, 5), is_own=st.booleans())
    def renew(self, router: str, which: int, is_own: bool) -> None:
        if which >= len(self.batches):
            return
        batch = self.batches[-1 - which]
        worker = self.worker[batch.batch_id] if is_own else "thief"
        held = batch.batch_id in self.run(look_inside(self.redis)).leases
        (renewed,) = self.run(self.lanes[router].renew(LANE, worker, [batch.batch_id]))
        assert renewed.lost == (not held or not self.is_held_by(worker, batch.batch_id))
        over = [
            job_id
            for job_id, one in self.leased[batch.batch_id].items()
            if not self.is_unfinished(one)
        ]
        assert renewed.lost or renewed.gone == over

    def is_unfinished(self, leased: QueuedJob) -> bool:
        """Return whether the job has not ended since; it may have been queued again with another
        deadline.
        """
        now = self.alive.get(leased.job_id)
        return now is not None and (now.priority, now.tokens, now.deadline_ms) == (
            leased.priority,
            leased.tokens,
            leased.deadline_ms,
        )

    @rule(router=ROUTERS)
    def sweep(self, router: str) -> None:
        self.run(self.lanes[router].sweep(LANE))
        self.collect()

    @rule()
    def forget_scripts(self) -> None:
        self.run(self.redis.script_flush())

    def collect(self) -> None:
        """Take replies, and find the jobs that have expired or lost their workers."""
        payloads = self.run(look_inside(self.redis)).payloads
        ended = {job_id: one for job_id, one in self.alive.items() if job_id not in payloads}
        for router, lanes in self.lanes.items():
            for job_id, result in self.run(lanes.take_replies(0)):
                assert self.owner[job_id] == router
                self.replies[job_id] += 1
                if result == DEAD:
                    del ended[job_id], self.alive[job_id]
                    self.dead += 1
        for job_id, one in ended.items():
            assert one.deadline_ms <= self.clock.ms
            del self.alive[job_id]
            self.lives[job_id] -= 1
            self.expired += 1

    @invariant()
    def every_job_is_in_one_place(self) -> None:
        inside = self.run(look_inside(self.redis))
        assert inside.payloads == set(inside.owners) == set(self.alive)
        assert inside.owners == {job_id: self.owner[job_id] for job_id in self.alive}
        assert set(inside.attempts) <= inside.payloads
        assert inside.leases == inside.batches
        # Who may answer a job: whom it was leased to, the last one first, which is rung for when
        # the job is cancelled.
        assert inside.holders == {
            job_id: "\n".join(self.givers[job_id])
            for job_id in self.alive
            if self.givers.get(job_id)
        }
        assert set(self.alive) - set(inside.waiting) <= set(inside.holders)
        assert inside.tenant_of == {
            one.job_id: one.tenant for one in self.alive.values() if one.priority == "interactive"
        }
        batches = [
            self.run(self.redis.eval(UNPACK, 1, RedisKeys(1).lane_keys(LANE)[8], batch))
            for batch in inside.batches
        ]
        leased = [member.decode().split(":", 3)[3] for batch in batches for member in batch[1::2]]
        places = Counter(job_id for job_id in [*inside.waiting, *leased] if job_id in self.alive)
        # A job that was queued again after it had ended may still be named by an earlier lease; it
        # then has a second position.
        assert set(places) == set(self.alive)
        assert set(inside.waiting) <= set(self.alive)
        assert len(set(inside.waiting)) == len(inside.waiting)
        if self.alive or inside.waiting or inside.leases:
            now = self.run(gauges(self.lanes["a"]))
            assert now.queued_tokens == inside.queued_tokens
            assert now.leased_tokens == sum(batch[0] for batch in batches)

    @invariant()
    def every_job_is_counted_once(self) -> None:
        for now in self.run(self.lanes["a"].lane_gauges()):
            assert (now.done, now.cancelled, now.expired, now.dead) == (
                self.accepted,
                self.cancelled,
                self.expired,
                self.dead,
            )
            assert now.enqueued == now.done + now.cancelled + now.expired + now.dead + len(
                self.alive
            )
            assert now.enqueued_tokens == self.enqueued_tokens

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            self.run(self.redis.aclose())
            self.loop.close()

    def finish(self) -> None:
        """Everything is answered in the end: once for each life that was not cut short."""
        for _ in range(200):
            self.clock.ms += LEASE_MS
            self.pull("a", "w", 100, 8)
            if not self.alive and self.run(look_inside(self.redis)) == NOTHING:
                break
            if self.batches:
                self.complete("b", 0, 8, True)
        assert self.run(look_inside(self.redis)) == NOTHING
        assert +self.replies == +self.lives


def test_any_order_of_operations_keeps_the_invariants(server: RedisServer) -> None:
    LaneMachine.url = server.url
    run_state_machine_as_test(
        LaneMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(
    "lane", [LANE, LaneKey("l4-spot", "org/name@main", "a|b"), LaneKey("p", "ü:{}%|", "")]
)
def test_lane_names_can_be_read_back(lane: LaneKey) -> None:
    assert LaneKey.parse(lane.name) == lane
    assert not set(lane.name) & set(":{}* ")


def test_all_keys_of_a_lane_are_on_one_slot() -> None:
    for number in range(100):
        tags = {
            key.split("}")[0] for key in RedisKeys(16).lane_keys(LaneKey("cpu", f"org/{number}"))
        }
        assert len(tags) == 1
