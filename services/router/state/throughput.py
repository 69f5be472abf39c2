"""Estimate a lane's throughput, and a request's waiting time in it. Pure: counts, snapshots and the
clock are arguments.

Used by `admission/rules.py` for every request that may miss its deadline. The longer of two
estimates counts:

- by speed: the lane's tokens / tokens per second that its workers measured in forward passes, plus
  the time they give other lanes;
- by drain: the lane's tokens / tokens per second that left it while it was backlogged, which
  includes every cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from libs.fleet import FleetSnapshot, WorkerRecord
from libs.queue import LaneGauges, LaneKey, Priority
from libs.queue.queue_position import QueuePosition
from libs.work_estimate import average_speed, work_seconds

BULK_SHARE: Final = 0.1
"""Share of a lane with interactive work that bulk gets (libs/queue/operations.py)."""
SUSTAINED_SECONDS: Final = 0.5
"""More interactive work than this is taken for sustained load, next to which bulk gets only its
share.
"""
DRAIN_DECAY_SECONDS: Final = 5.0
MIN_DRAIN_SECONDS: Final = 2.0
"""Minimum time that a lane must have been backlogged before its drain estimates its speed: batches
are large steps.
"""
FULL_BATCH_SHARE: Final = 0.25
"""Share of a worker's token budget. Smaller batches say little about its speed under backlog, when
batches are full.
"""
LEASED_BATCHES: Final = 3
"""Batches that a worker holds of a lane with jobs smaller than a batch: one and a half, and one
more pull.
"""
MIN_DRAIN_SHARE: Final = 0.25
"""Share of the measured speed. A drain below it is taken for transient, such as after a worker's
death.
"""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another model's work on the lane's workers."""

    seconds: float
    """Work for each worker with that model."""
    share: float
    """Share of the lane's workers that have the model."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """A lane's throughput."""

    rate: float = 0.0
    """Tokens per second of all its workers; 0: not measured."""
    drain: float = 0.0
    """Tokens per second that left it recently; 0: not known."""
    batch_seconds: float = 0.0
    """Duration of one full batch on one worker."""
    neighbours: tuple[Neighbour, ...] = ()
    """Other models with work on its workers."""
    batch_tokens: int = 0
    """Tokens of one full batch on each worker."""

    @property
    def is_known(self) -> bool:
        return self.rate > 0

    def seconds(self, tokens: float) -> float:
        """Return the seconds until `tokens` of the lane are computed, if its workers divide their
        time evenly among lanes with work.
        """
        alone = work_seconds(tokens, self.rate)
        shared = alone + sum(min(alone, one.seconds) * one.share for one in self.neighbours)
        return (
            max(shared, min(tokens / self.drain, alone / MIN_DRAIN_SHARE))
            if self.drain > 0
            else shared
        )


def wait_seconds(
    throughput: Throughput,
    position: QueuePosition,
    priority: Priority,
    since: int = 0,
    own: int = 0,
) -> float:
    """Estimate the queueing time of a request.

    1. An interactive job waits for leased work and the interactive work ahead of it, while bulk may
      get its tenth.
    2. A bulk job gets its tenth, or waits for all interactive jobs if that is sooner and their load
      is not sustained.
    3. Leased and interactive work of other tenants counts for a few batches at most: workers switch
      tenants between batches, so another tenant's large job causes no head-of-line blocking.

    Args:
        since: Tokens admitted after the position was read.
        own: Tokens of its tenant in the lane.
    """
    leased = _limited(position.leased, LEASED_BATCHES, throughput, own)
    if priority == "interactive":
        tokens = (
            _limited(position.interactive_ahead, position.interactive_jobs, throughput, own) + since
        )
        return throughput.seconds(leased + tokens / (1 - BULK_SHARE if position.bulk else 1))
    ahead = position.bulk_ahead + since
    by_share = ahead / BULK_SHARE if position.interactive else ahead
    is_sustained = throughput.seconds(position.interactive) > SUSTAINED_SECONDS
    return throughput.seconds(
        leased + (by_share if is_sustained else min(by_share, position.interactive + ahead))
    )


def _limited(tokens: int, batches: int, throughput: Throughput, own: int) -> int:
    """Limit tokens to `batches` for each worker, or to the tenant's own tokens if those are
    more.
    """
    return (
        min(tokens, max(own, batches * throughput.batch_tokens))
        if throughput.batch_tokens
        else tokens
    )


def lane_throughput(
    lane: LaneKey,
    snapshot: FleetSnapshot,
    backlog: Mapping[tuple[str, str], int],
    drain: float = 0.0,
) -> Throughput:
    """Estimate a lane's throughput. `backlog`: waiting and leased tokens, by pool and model."""
    workers = holders(lane, snapshot)
    rate = lane_rate(lane, workers)
    if rate <= 0:
        return Throughput()  # a drain may be that of workers that are gone
    batch = max(worker.batch_tokens for worker in workers)
    seconds = batch / (rate / len(workers))
    return Throughput(
        rate,
        drain,
        seconds,
        tuple(_neighbours(lane, workers, snapshot, backlog)),
        batch * len(workers),
    )


def lane_rate(lane: LaneKey, workers: Iterable[WorkerRecord]) -> float:
    """Return the tokens/s of the lane's model on all these workers; 0 if none has measured it.
    Workers without a measurement count as average.
    """
    rates = [full_speed(worker, lane.model) for worker in workers]
    return average_speed(rates) * len(rates)


def full_speed(worker: WorkerRecord, model: str) -> float:
    """Return the tokens/s of full batches; 0: not measured. Generative models report the speed of a
    full pool of sequences, and no size of batches.

    If only small batches were measured, the estimate is optimistic: a pass over few tokens takes
    about as long as one over some more. Admitting too much for a moment is better than refusing
    work that could be done.
    """
    record = worker.models[model]
    small = record.measured_batch_tokens or worker.batch_tokens
    return record.tokens_per_second * max(
        1.0, FULL_BATCH_SHARE * worker.batch_tokens / max(small, 1)
    )


def holders(lane: LaneKey, snapshot: FleetSnapshot) -> list[WorkerRecord]:
    """Return the pool's workers that serve the model; only those with the lane's adapter, once one
    has it.
    """
    found = [
        worker
        for worker in snapshot.resident_on(lane.model)
        if worker.pool == lane.pool and not worker.draining
    ]
    able = (
        [worker for worker in found if lane.adapter in worker.models[lane.model].adapters]
        if lane.adapter
        else found
    )
    return able or found


def _neighbours(
    lane: LaneKey,
    workers: list[WorkerRecord],
    snapshot: FleetSnapshot,
    backlog: Mapping[tuple[str, str], int],
) -> Iterable[Neighbour]:
    others: dict[str, int] = {}
    for worker in workers:
        for record in worker.held:
            if (
                record.model != lane.model
                and backlog.get((lane.pool, record.model), 0)
                and record.tokens_per_second > 0
            ):
                others[record.model] = others.get(record.model, 0) + 1
    for model, count in others.items():
        other = LaneKey(lane.pool, model)
        seconds = work_seconds(
            backlog[lane.pool, model], lane_rate(other, holders(other, snapshot)) or 1.0
        )
        yield Neighbour(seconds, count / len(workers))


@dataclass(slots=True)
class _Drained:
    tokens: float
    seconds: float


class Drains:
    """The drain of each lane: tokens that leave it per second while it is backlogged, between two
    readings of the gauges.
    """

    def __init__(self) -> None:
        # The state: the last reading, and decaying sums of recently backlogged lanes.
        self._last: Mapping[LaneKey, LaneGauges] = {}
        self._at = 0.0
        self._sums: dict[LaneKey, _Drained] = {}

    def rate(self, lane: LaneKey) -> float:
        """Return tokens per second; 0 if the lane was not backlogged for long enough."""
        drained = self._sums.get(lane)
        return (
            drained.tokens / drained.seconds
            if drained is not None and drained.seconds >= MIN_DRAIN_SECONDS
            else 0.0
        )

    def record(self, gauges: Mapping[LaneKey, LaneGauges], now: float) -> None:
        """Record a reading. `now`: seconds of a monotonic clock."""
        seconds, self._at = now - self._at, now
        before, self._last = self._last, gauges
        sums, kept = self._sums, max(0.0, 1 - seconds / DRAIN_DECAY_SECONDS)
        self._sums = {}
        for lane, gauge in gauges.items():
            past, last = sums.get(lane), before.get(lane)
            tokens = _left(last, gauge) if last is not None else None
            if tokens is not None:
                old = past or _Drained(0.0, 0.0)
                self._sums[lane] = _Drained(
                    old.tokens * kept + tokens, old.seconds * kept + seconds
                )


def _left(before: LaneGauges, after: LaneGauges) -> int | None:
    """Return the tokens that left a lane between two readings; None if it may have run dry in
    between, or its counters were reset.
    """
    held, holds = (
        before.queued_tokens + before.leased_tokens,
        after.queued_tokens + after.leased_tokens,
    )
    left = held + after.enqueued_tokens - before.enqueued_tokens - holds
    return left if left >= 0 and min(held, holds) >= max(1.0, left / 2) else None
