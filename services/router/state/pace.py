"""Estimates a lane's throughput, and how long a request waits in it. Pure: counts, snapshots and
the clock are arguments.

Used by `control.py` for every request that may miss its deadline. Two estimates are made, and the
longer one counts:

- by speed: the lane's tokens / tokens a second that its workers measured in forward passes, and the
  time they give other lanes;
- by drain: the lane's tokens / tokens that left it a second while it was backlogged, which includes
  everything that takes time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from libs.fleet import FleetSnapshot, WorkerRecord
from libs.queue import LaneGauges, LaneKey, Priority
from libs.queue.standing import QueuePosition

BULK_SHARE: Final = 0.1
"""Share of a lane with interactive work that bulk gets (libs/queue/operations.py)."""
LASTING_SECONDS: Final = 0.5
"""More interactive work than this is taken for sustained load, beside which bulk gets its share and
nothing else.
"""
DRAIN_DECAY_SECONDS: Final = 5.0
DRAIN_LEAST_SECONDS: Final = 2.0
"""How long a lane must have been backlogged before its drain is an estimate of its speed: batches
are large steps.
"""
FULL_SHARE: Final = 0.25
"""Share of a worker's token budget: smaller batches say little of its speed under backlog, when
batches are full.
"""
LEASED_BATCHES: Final = 3
"""Batches that a worker holds of a lane with jobs smaller than a batch: one and a half, and what
one more pull brings.
"""
SLOWEST: Final = 0.25
"""Share of the measured speed: a drain below it is taken for transient, such as after a worker's
death.
"""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another model's work beside the lane. `seconds`: for each worker with that model; `share`: of
    the lane's workers.
    """

    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """A lane's throughput. rate: tokens/s of all its workers; 0: not measured. drain: tokens/s that
    left it lately; 0: not known. batch_seconds: of one full batch on one worker. neighbours: other
    models with work there. batch_tokens: of one on each."""

    rate: float = 0.0
    drain: float = 0.0
    batch_seconds: float = 0.0
    neighbours: tuple[Neighbour, ...] = ()
    batch_tokens: int = 0

    @property
    def is_known(self) -> bool:
        return self.rate > 0

    def seconds(self, tokens: float) -> float:
        """Seconds until so many tokens of the lane are computed, if its workers divide their time
        evenly among lanes with work.
        """
        alone = tokens / self.rate
        shared = alone + sum(min(alone, one.seconds) * one.share for one in self.neighbours)
        return max(shared, min(tokens / self.drain, alone / SLOWEST)) if self.drain > 0 else shared


def wait_seconds(
    pace: Throughput, standing: QueuePosition, priority: Priority, since: int = 0, own: int = 0
) -> float:
    """Estimated queueing time of a request. `since`: tokens admitted after the standing was read;
    `own`: tokens of its tenant in the lane.

    An interactive job waits for leased work and the interactive work ahead of it, while bulk may
    get its tenth. A bulk job gets its tenth, or waits for all interactive ones if that is sooner
    and their load is not sustained. Leased and interactive work of other tenants counts for a few
    batches at most: workers switch tenants between batches, so that another tenant's job causes no
    head-of-line blocking however large it is.
    """
    leased = _overtaken(standing.leased, LEASED_BATCHES, pace, own)
    if priority == "interactive":
        tokens = (
            _overtaken(standing.interactive_ahead, standing.interactive_jobs, pace, own) + since
        )
        return pace.seconds(leased + tokens / (1 - BULK_SHARE if standing.bulk else 1))
    ahead = standing.bulk_ahead + since
    by_share = ahead / BULK_SHARE if standing.interactive else ahead
    goes_on = pace.seconds(standing.interactive) > LASTING_SECONDS
    return pace.seconds(
        leased + (by_share if goes_on else min(by_share, standing.interactive + ahead))
    )


def _overtaken(tokens: int, batches: int, pace: Throughput, own: int) -> int:
    """At most so many batches for each worker, or the tenant's own tokens if those are more."""
    return min(tokens, max(own, batches * pace.batch_tokens)) if pace.batch_tokens else tokens


def pace_of(
    lane: LaneKey,
    snapshot: FleetSnapshot,
    backlog: Mapping[tuple[str, str], int],
    drain: float = 0.0,
) -> Throughput:
    """The pace of a lane. `backlog`: tokens that wait or are leased, by pool and model."""
    workers = holders(lane, snapshot)
    rate = lane_rate(lane, workers)
    if rate <= 0:
        return (
            Throughput()
        )  # its drain may be that of workers that are gone, or 0 because there were none
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
    """Tokens/s of the lane's model on all these workers, those that have not measured it taken for
    average; 0 if none has.
    """
    rates = [full_speed(worker, lane.model) for worker in workers]
    measured = [rate for rate in rates if rate > 0]
    return sum(measured) / len(measured) * len(rates) if measured else 0.0


def full_speed(worker: WorkerRecord, model: str) -> float:
    """Tokens/s of full batches; 0: not measured. If only small ones were, the optimistic estimate:
    a pass over few tokens takes about as long as one over some more. Better to admit too much for a
    moment than to refuse what could be done."""
    record = worker.models[model]
    small = record.measured_batch_tokens or worker.batch_tokens
    return record.tokens_per_second * max(1.0, FULL_SHARE * worker.batch_tokens / max(small, 1))


def holders(lane: LaneKey, snapshot: FleetSnapshot) -> list[WorkerRecord]:
    """Workers of the pool that serve the model; only those with the lane's adapter, once one has
    it.
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
    beside: dict[str, int] = {}
    for worker in workers:
        for record in worker.held:
            if (
                record.model != lane.model
                and backlog.get((lane.pool, record.model), 0)
                and record.tokens_per_second > 0
            ):
                beside[record.model] = beside.get(record.model, 0) + 1
    for model, count in beside.items():
        other = LaneKey(lane.pool, model)
        seconds = backlog[lane.pool, model] / (lane_rate(other, holders(other, snapshot)) or 1.0)
        yield Neighbour(seconds, count / len(workers))


@dataclass(slots=True)
class _Drained:
    tokens: float
    seconds: float


class Drains:
    """The drain of each lane: tokens that leave it a second while it is backlogged, between two
    readings of the gauges.
    """

    def __init__(self) -> None:
        # The state: the last look, and decaying sums of lanes that were backlogged lately.
        self._last: Mapping[LaneKey, LaneGauges] = {}
        self._at = 0.0
        self._sums: dict[LaneKey, _Drained] = {}

    def of(self, lane: LaneKey) -> float:
        """Tokens a second; 0 if it was not backlogged for long enough to tell."""
        drained = self._sums.get(lane)
        return (
            drained.tokens / drained.seconds
            if drained is not None and drained.seconds >= DRAIN_LEAST_SECONDS
            else 0.0
        )

    def look(self, gauges: Mapping[LaneKey, LaneGauges], now: float) -> None:
        """`now`: seconds of any clock that only rises."""
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
    """Tokens that left a lane between two looks; None if it may have run dry meanwhile, or its
    counters were reset.
    """
    held, holds = (
        before.queued_tokens + before.leased_tokens,
        after.queued_tokens + after.leased_tokens,
    )
    left = held + after.enqueued_tokens - before.enqueued_tokens - holds
    return left if left >= 0 and min(held, holds) >= max(1.0, left / 2) else None
