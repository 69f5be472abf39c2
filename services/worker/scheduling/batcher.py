"""Chooses the waiting sequences for the next forward pass: decisions only, no clock, no device.

On the request path, between `intake.py`, which prepares sequences, and `runner.py`, which runs the
batch chosen here.

Fair queueing (`turns.py`) shares device time in three levels: between callers (`Caller`), then
between the models that one caller uses, then between the adapters and heads of one model. Callers
are first, so that a caller of many models gets no more turns than a caller of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, filterfalse, islice, takewhile
from operator import attrgetter, itemgetter
from typing import Final

from libs.models import GENERATE
from services.worker.scheduling.turns import BURST_SECONDS, Turns

BULK_WEIGHT: Final = 1 / 9
"""Weight of bulk work against interactive work of the same tenant: a tenth of the total, as in
lanes.
"""

GENERATION_SHARE: Final = 1 / 2
"""Weight of generative models against other models of the same caller. Their answers take seconds
anyway, those of others milliseconds.
"""

COBATCH_WINDOW_SECONDS: Final = 0.005
"""Callers join the batch of the least-served one if their virtual times exceed its by at most this.
Callers at the same pace are thus batched together, and a light caller does not wait for the work of
a caller that has just had a batch.
"""

MIN_CHARGE_SECONDS: Final = 1e-4
"""Minimum charge of a batch."""

CANDIDATES: Final = 1024
"""Maximum sequences that are considered for one batch."""


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """The model and head that the sequences of a batch share."""

    model: str
    head: str

    @property
    def is_continuous(self) -> bool:
        """True if the same sequences run in pass after pass. A further sequence in a batch then
        costs little, so those of every caller join it.
        """
        return self.head == GENERATE


Caller = tuple[str, bool]
"""A tenant's interactive work, or all of its bulk work. The first level of fair queueing is between
callers.
"""


@dataclass(frozen=True, slots=True)
class Flow:
    """The caller and adapter of work on a model. With the head, the unit of fair queueing in a
    model.
    """

    adapter: str = ""
    tenant: str = ""
    is_bulk: bool = False

    @property
    def caller(self) -> Caller:
        return self.tenant, self.is_bulk


NO_CALLER: Final = Flow()
"""The flow of work without a caller."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sequence of a held job, waiting since `since` (seconds of any monotonic clock)."""

    job: int
    index: int
    tokens: int
    """Tokens that the next forward computes of it, at least."""
    since: float
    answer: int = 0
    """Tokens that its generated answer may have."""
    counted: int | None = None
    """Tokens of its answer that were computed; None: it has not begun."""

    @property
    def has_begun(self) -> bool:
        return self.counted is not None

    @property
    def queued_tokens(self) -> int:
        """Tokens that it counts as waiting work: all of it until it begins."""
        return self.tokens if self.has_begun else self.tokens + self.answer


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one batch."""

    tokens: int
    """Token budget."""
    items: int
    """Maximum number of sequences."""
    max_age: float
    """Age in seconds from which order takes precedence over fit."""
    seconds: float = 0.05
    """Maximum expected duration of a batch while the device is shared."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one group for one forward pass. The oldest of the least-served flow is first."""

    group: BatchGroup
    chosen: tuple[Waiting, ...]
    tokens: int
    weighed: dict[Flow, float]
    """Tokens divided by weight of each flow in the batch."""


_LineKey = tuple[str, Flow]
"""The head and flow that identify one line of a model."""


@dataclass(slots=True, eq=False)
class _Line:
    """The queue of one flow for one head of a model, by job and index, in order of arrival."""

    group: BatchGroup
    flow: Flow
    weight: float
    waiting: dict[tuple[int, int], Waiting] = field(default_factory=dict)

    @property
    def key(self) -> _LineKey:
        return self.group.head, self.flow


class _Share:
    """Fair queueing within one caller: between its models, and between the lines of each model."""

    def __init__(self) -> None:
        self.models: Turns[str] = Turns()
        self.lines: dict[str, Turns[_LineKey]] = {}

    def join(self, line: _Line) -> None:
        # A generative model has work for seconds, so it gets no burst credit, which would delay its
        # caller's other models.
        credit = 0.0 if line.group.is_continuous else BURST_SECONDS
        self.models.join(line.group.model, credit)
        self.lines.setdefault(line.group.model, Turns()).join(line.key, credit)

    def leave(self, line: _Line, now: float) -> None:
        turns = self.lines[line.group.model]
        turns.leave(line.key, now)
        if not turns.has_waiting:
            self.models.leave(line.group.model, now)

    def first(self) -> tuple[BatchGroup, Flow]:
        """Return the least-served line of the least-served model."""
        model = self.models.first()
        head, flow = self.lines[model].first()
        return BatchGroup(model, head), flow

    def next(self) -> tuple[BatchGroup, Flow]:
        """Return `first`, and advance the virtual times to it: its service begins."""
        model = self.models.next()
        head, flow = self.lines[model].next()
        return BatchGroup(model, head), flow

    def is_near(self, line: _Line) -> bool:
        """Return whether the line may join a batch of its model's least-served line."""
        turns = self.lines[line.group.model]
        return turns.tag(line.key) <= turns.tag(turns.first()) + COBATCH_WINDOW_SECONDS

    def charge(self, line: _LineKey, group: BatchGroup, cost: float, now: float) -> None:
        cost /= GENERATION_SHARE if group.is_continuous else 1.0
        self.models.charge(group.model, cost, now)
        self.lines.setdefault(group.model, Turns()).charge(line, cost, now)

    def forget(self, now: float) -> None:
        self.models.forget(now)
        for model in [model for model in self.lines if model not in self.models]:
            del self.lines[model]
        for turns in self.lines.values():
            turns.forget(now)

    @property
    def is_one(self) -> bool:
        """True if the caller uses at most one line."""
        return sum(len(turns) for turns in self.lines.values()) <= 1


class WaitingRoom:
    """Prepared sequences that wait for a forward pass. Not thread-safe: `runner.py` guards it.

    No caller starves:

    1. A new caller waits for at most one batch of each other waiting caller.
    2. Within a caller, a model waits for at most one batch of each other model, and a line for one
       of each other line of its model.
    3. Between two batches of a caller, each other caller gets at most the cost of the last one, by
       weight, and one batch; a new caller gets BURST_SECONDS more.
    4. Callers that always have work get device time in proportion to their weights, within one
       batch each.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.lanes: dict[tuple[str, str], dict[Flow, int]] = {}
        """Waiting tokens of each flow, by model and adapter. Empty lanes are not listed."""
        # Further mutable state. Every waiting sequence is in one line, found by its job and index.
        self._callers: Turns[Caller] = Turns()
        self._shares: dict[Caller, _Share] = {}
        self._models: Turns[str] = Turns()  # device time by model, not used to choose batches
        self._lines: dict[BatchGroup, dict[Flow, _Line]] = {}
        self._jobs: dict[int, dict[int, _Line]] = {}
        self._now = 0.0

    def add(
        self,
        group: BatchGroup,
        sequences: Collection[Waiting],
        flow: Flow = NO_CALLER,
        weight: float = 1.0,
    ) -> None:
        """Queue sequences: new ones, or those of a batch that need another one. `weight` replaces
        the flow's.

        In a line, sequences that have begun are first, and each of the two kinds is in order of
        arrival.
        """
        if not sequences:
            return
        line = self._lines.setdefault(group, {}).setdefault(flow, _Line(group, flow, weight))
        line.weight = weight * (BULK_WEIGHT if flow.is_bulk else 1.0)
        self._models.join(group.model)
        self._callers.join(flow.caller)
        self._shares.setdefault(flow.caller, _Share()).join(line)
        for one in sequences:
            line.waiting[one.job, one.index] = one
            self._jobs.setdefault(one.job, {})[one.index] = line
            self._count(line, one.queued_tokens)
        if group.is_continuous:
            line.waiting = dict(sorted(line.waiting.items(), key=_place))

    def jobs(self) -> set[int]:
        """Return the numbers of the jobs that have sequences here."""
        return set(self._jobs)

    def holds(self, job: int) -> bool:
        """Return whether the job has sequences here."""
        return job in self._jobs

    def remove(self, jobs: Collection[int]) -> None:
        """Remove the sequences of these jobs."""
        for job in jobs:
            for index, line in list(self._jobs.get(job, {}).items()):
                self._take_out(line, line.waiting[job, index])

    def is_shared(self, model: str) -> bool:
        """Return whether the device is contended: other models, lines or callers have or recently
        had work.
        """
        if len(self._models) > 1:
            return True
        return model in self._models and (
            len(self._callers) > 1 or not all(share.is_one for share in self._shares.values())
        )

    def turn(self, model: str) -> float:
        """Return the model's virtual time: the lower, the less device time it has had."""
        return self._models.tag(model)

    def take(
        self, limits: BatchLimits, now: float, cap: Callable[[BatchGroup], int] | None = None
    ) -> Batch | None:
        """Choose the next batch and remove it from the queues. Return None if nothing waits.

        1. The oldest sequence of the least-served line is always in it, alone if it exceeds the
           budget. If it waits for memory, those that have begun are in it too: they free memory
           when they end.
        2. Lines for the same head join if their callers' virtual times are close
           (COBATCH_WINDOW_SECONDS).
        3. Of these, sequences older than `max_age` follow strictly in order (of callers, then of
           age). If one does not fit, the batch ends.
        4. The remaining budget goes to the sequences with lengths nearest to the first one's, which
           keeps runs of equal length together.

        Call `ran` after the batch. `cap` returns a group's token budget, if lower than that of
        `limits`.
        """
        self._now = now
        self._forget()
        if not self._callers.has_waiting:
            return None
        self._models.next()
        group, flow = self._shares[self._callers.next()].next()
        lines = self._cobatch_lines(self._lines[group][flow])
        tokens = limits.tokens if cap is None else min(limits.tokens, cap(group))
        weighed: dict[Flow, float] = {}
        chosen = tuple(_pick(lines, tokens, limits, now))
        for one in chosen:
            line = self._jobs[one.job][one.index]
            weighed[line.flow] = weighed.get(line.flow, 0.0) + one.tokens / line.weight
            self._take_out(line, one)
        return Batch(group, chosen, sum(one.tokens for one in chosen), weighed)

    def preempts(self, running: Batch, limits: BatchLimits) -> bool:
        """Return whether the next batch should run between two layers of the running one
        (preemption).

        It should for an interactive caller that has had less than each caller in the running batch
        by more than `limits.seconds`. That is the length of a batch, so callers at the same pace do
        not preempt each other. The two batches together must keep within `limits.tokens`, since the
        activations of both are in memory.
        """
        if not self._callers.has_waiting:
            return False
        caller = self._callers.first()
        _, is_bulk = caller
        tag = self._callers.tag(caller) + limits.seconds
        if is_bulk or not all(tag < self._callers.tag(flow.caller) for flow in running.weighed):
            return False
        group, flow = self._shares[caller].first()
        waiting = self._lines[group][flow].waiting.values()
        first = next(filterfalse(_HAS_BEGUN, waiting), None) or next(iter(waiting))
        return running.tokens + first.tokens <= limits.tokens

    def ran(self, batch: Batch, seconds: float, now: float, charged: float = 0.0) -> None:
        """Charge the flows in the batch for its duration. `charged` is the estimate, in seconds,
        that they were charged at launch. The difference may be negative.
        """
        self._now = now
        rate = (max(seconds, MIN_CHARGE_SECONDS) - charged) / max(batch.tokens, 1)
        for flow, tokens in batch.weighed.items():
            self._callers.charge(flow.caller, tokens * rate, now)
            share = self._shares.setdefault(flow.caller, _Share())
            share.charge((batch.group.head, flow), batch.group, tokens * rate, now)
            share.forget(now)
        self._models.charge(batch.group.model, sum(batch.weighed.values()) * rate, now)
        self._forget()

    def _cobatch_lines(self, first: _Line) -> list[_Line]:
        """Return `first` and the lines of its group that may join its batch, least-served first."""
        limit = (
            math.inf
            if first.group.is_continuous
            else self._callers.tag(first.flow.caller) + COBATCH_WINDOW_SECONDS
        )
        found = [
            (self._callers.tag(line.flow.caller), line)
            for line in self._lines[first.group].values()
            if line is not first
        ]
        near = [(tag, line) for tag, line in found if tag <= limit and self._joins(line)]
        return [first, *(line for _, line in sorted(near, key=itemgetter(0)))]

    def _joins(self, line: _Line) -> bool:
        return line.group.is_continuous or self._shares[line.flow.caller].is_near(line)

    def _take_out(self, line: _Line, one: Waiting) -> None:
        del line.waiting[one.job, one.index]
        of_job = self._jobs[one.job]
        del of_job[one.index]
        if not of_job:
            del self._jobs[one.job]
        self._count(line, -one.queued_tokens)
        if not line.waiting:
            self._close(line)

    def _close(self, line: _Line) -> None:
        """Remove an empty line."""
        lines, share = self._lines[line.group], self._shares[line.flow.caller]
        del lines[line.flow]
        if not lines:
            del self._lines[line.group]
        if not any(group.model == line.group.model for group in self._lines):
            self._models.leave(line.group.model, self._now)
        share.leave(line, self._now)
        if not share.models.has_waiting:
            self._callers.leave(line.flow.caller, self._now)

    def _count(self, line: _Line, tokens: int) -> None:
        lane = (line.group.model, line.flow.adapter)
        self.tokens += tokens
        flows = self.lanes.setdefault(lane, {})
        flows[line.flow] = flows.get(line.flow, 0) + tokens
        if not flows[line.flow]:
            del flows[line.flow]
        if not flows:
            del self.lanes[lane]

    def _forget(self) -> None:
        self._models.forget(self._now)
        self._callers.forget(self._now)
        for caller in [caller for caller in self._shares if caller not in self._callers]:
            del self._shares[caller]


_HAS_BEGUN: Final = attrgetter("has_begun")


def _place(item: tuple[tuple[int, int], Waiting]) -> tuple[bool, float, tuple[int, int]]:
    """Return the key by which a line of sequences that take several forwards is sorted."""
    name, one = item
    return not one.has_begun, one.since, name


def _pick(
    lines: Collection[_Line], tokens: int, limits: BatchLimits, now: float
) -> Iterator[Waiting]:
    """Choose sequences in the lines' order: those that have begun, then others. The first of the
    others is always chosen.
    """
    begun = list(
        chain.from_iterable(takewhile(_HAS_BEGUN, line.waiting.values()) for line in lines)
    )
    waiting = chain.from_iterable(line.waiting.values() for line in lines)
    candidates = list(islice(filterfalse(_HAS_BEGUN, waiting) if begun else waiting, CANDIDATES))
    if begun:
        begun = begun[: max(1, min(limits.items - bool(candidates), tokens))]
        yield from begun
        if not candidates or len(begun) >= limits.items:
            return
    first, before = candidates[0], now - limits.max_age
    yield first
    budget = tokens - len(begun) - first.tokens
    remaining_items = limits.items - len(begun) - 1
    newer = []
    for one in candidates[1:]:
        if one.since >= before:
            newer.append(one)
        elif one.tokens > budget or remaining_items == 0:
            return
        else:
            yield one
            budget, remaining_items = budget - one.tokens, remaining_items - 1
    if sum(one.tokens for one in newer) > budget or len(newer) > remaining_items:
        newer.sort(key=lambda one: abs(one.tokens - first.tokens))
    for one in newer:
        if remaining_items == 0:
            return
        if one.tokens <= budget:
            yield one
            budget, remaining_items = budget - one.tokens, remaining_items - 1
