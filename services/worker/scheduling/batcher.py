"""Which waiting sequences go into the next forward pass: decisions only, no clock, no device.

On the way of a request between `intake.py`, which prepares sequences, and `runner.py`, which runs the batch chosen here.

Device time is shared by fair queueing (`turns.py`), as lanes share out tokens: between callers (`Caller`), then between the models
that one asks for, then between its adapters and heads of that model. Callers come first: else one who asks for many models would
have as many turns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter
from typing import Final

from services.worker.scheduling.turns import Turns

BULK_SHARE: Final = 1 / 9
"""Weight of bulk work beside interactive work of the same tenant: a tenth of what both get, as in the lanes."""

COMPANY_SECONDS: Final = 0.005
"""How much further than the one whose turn it is others may be and still join its batch. Those who keep pace stay together in
large batches; a light one is not held up by the work of one that has just had a batch."""

LEAST_SECONDS: Final = 1e-4
"""What a batch costs at least."""

CANDIDATES: Final = 1024
"""Of so many sequences those are chosen that fit best."""


@dataclass(frozen=True, slots=True)
class Group:
    """What a batch has in common: one model and one head."""

    model: str
    head: str


Caller = tuple[str, bool]
"""A tenant's interactive work, or all of its bulk work: who takes turns with others for the device."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Whose work it is, of those who share a model."""

    adapter: str = ""
    tenant: str = ""
    is_bulk: bool = False

    @property
    def caller(self) -> Caller:
        return self.tenant, self.is_bulk


NOBODY: Final = Flow()
"""In particular."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Sequence `index` of the held job number `job`, waiting since `since` (seconds, any clock that only rises)."""

    job: int
    index: int
    tokens: int
    since: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one batch: token budget, number of sequences, and the age from which order counts more than fit (seconds).

    `seconds`: how long a batch may be expected to take while the device is shared.
    """

    tokens: int
    items: int
    max_age: float
    seconds: float = 0.05


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one group for one forward pass, the longest-waiting of the flow whose turn it is first.

    `weighed`: tokens / weight of each flow in it.
    """

    group: Group
    chosen: tuple[Waiting, ...]
    tokens: int
    weighed: dict[Flow, float]


_LineKey = tuple[str, Flow]
"""Head and flow: what waits in one line of a model."""


@dataclass(slots=True, eq=False)
class _Line:
    """What waits of one flow for one head of a model, by job and index, in order of arrival."""

    group: Group
    flow: Flow
    weight: float
    waiting: dict[tuple[int, int], Waiting] = field(default_factory=dict)

    @property
    def key(self) -> _LineKey:
        return self.group.head, self.flow


class _Share:
    """Of one caller: whose turn it is of the models that it asks for, and of the lines of each."""

    def __init__(self) -> None:
        self.models: Turns[str] = Turns()
        self.lines: dict[str, Turns[_LineKey]] = {}

    def come(self, line: _Line) -> None:
        self.models.come(line.group.model)
        self.lines.setdefault(line.group.model, Turns()).come(line.key)

    def leave(self, line: _Line, now: float) -> None:
        turns = self.lines[line.group.model]
        turns.leave(line.key, now)
        if not turns.anybody:
            self.models.leave(line.group.model, now)

    def first(self) -> tuple[Group, Flow]:
        """Whose turn it is."""
        model = self.models.first()
        head, flow = self.lines[model].first()
        return Group(model, head), flow

    def next(self) -> tuple[Group, Flow]:
        """Whose turn it is; it begins."""
        model = self.models.next()
        head, flow = self.lines[model].next()
        return Group(model, head), flow

    def is_near(self, line: _Line) -> bool:
        """Whether the line is hardly further than the one whose turn it is of its model."""
        turns = self.lines[line.group.model]
        return turns.tag(line.key) <= turns.tag(turns.first()) + COMPANY_SECONDS

    def charge(self, line: _LineKey, model: str, cost: float, now: float) -> None:
        self.models.charge(model, cost, now)
        self.lines.setdefault(model, Turns()).charge(line, cost, now)

    def forget(self, now: float) -> None:
        self.models.forget(now)
        for model in [model for model in self.lines if model not in self.models]:
            del self.lines[model]
        for turns in self.lines.values():
            turns.forget(now)

    @property
    def is_one(self) -> bool:
        """Whether it asks for one line only."""
        return sum(len(turns) for turns in self.lines.values()) <= 1


class WaitingRoom:
    """Prepared sequences that wait for a forward pass. Not thread-safe: `runner.py` guards it.

    Nobody starves. A caller that is not remembered waits for at most one batch of each other that waits; of what one caller asks
    for, a model then waits for one batch of each other model, and a line for one of each other line of its model. Between two
    batches of a caller, others get at most what its last one cost, by weight, and one batch each; those who come anew,
    BURST_SECONDS more. Callers that always have work waiting get device time by weight, but for one batch each.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.lanes: dict[tuple[str, str], dict[Flow, int]] = {}
        """Tokens that wait, by model and adapter, of each flow, where any do."""
        # The whole state beside that. Every waiting sequence is in one line, and its line is found by its job and index.
        self._callers: Turns[Caller] = Turns()
        self._shares: dict[Caller, _Share] = {}
        self._models: Turns[str] = Turns()  # what each has had, for whomever: nobody's turn depends on it
        self._lines: dict[Group, dict[Flow, _Line]] = {}
        self._jobs: dict[int, dict[int, _Line]] = {}
        self._now = 0.0

    def add(self, group: Group, sequences: Collection[Waiting], flow: Flow = NOBODY, weight: float = 1.0) -> None:
        """Sequences must not be older than those that wait already. `weight` is the flow's from now on."""
        if not sequences:
            return
        line = self._lines.setdefault(group, {}).setdefault(flow, _Line(group, flow, weight))
        line.weight = weight * (BULK_SHARE if flow.is_bulk else 1.0)
        self._models.come(group.model)
        self._callers.come(flow.caller)
        self._shares.setdefault(flow.caller, _Share()).come(line)
        for one in sequences:
            line.waiting[one.job, one.index] = one
            self._jobs.setdefault(one.job, {})[one.index] = line
            self._count(line, one.tokens)

    def jobs(self) -> set[int]:
        """Numbers of the jobs that have sequences here."""
        return set(self._jobs)

    def remove(self, jobs: Collection[int]) -> None:
        """Forget the sequences of these jobs."""
        for job in jobs:
            for index, line in list(self._jobs.get(job, {}).items()):
                self._take_out(line, line.waiting[job, index])

    def is_shared(self, model: str) -> bool:
        """Whether others had work lately: other models, or several flows of this one."""
        if len(self._models) > 1:
            return True
        return model in self._models and (len(self._callers) > 1 or not all(share.is_one for share in self._shares.values()))

    def turn(self, model: str) -> float:
        """The lower, the less of the device the model has had."""
        return self._models.tag(model)

    def take(self, limits: Limits, now: float, cap: Callable[[Group], int] | None = None) -> Batch | None:
        """Choose the next batch and take it out. None if nothing waits.

        The oldest sequence of the line whose turn it is is always in it, alone if it exceeds the budget. Its company joins: what
        waits for the same head in lines of callers that are hardly further. Of these, sequences older than `max_age` follow
        strictly in order (of callers, then of age); if one does not fit, the batch ends. The room that is left goes to those whose
        length is nearest to the first one's, which keeps runs of equal length together. `cap`: the token budget of a group, where
        below that of `limits`. `ran` must follow.
        """
        self._now = now
        self._forget()
        if not self._callers.anybody:
            return None
        self._models.next()
        group, flow = self._shares[self._callers.next()].next()
        lines = self._company(self._lines[group][flow])
        tokens = limits.tokens if cap is None else min(limits.tokens, cap(group))
        weighed: dict[Flow, float] = {}
        chosen = tuple(_pick(lines, tokens, limits, now))
        for one in chosen:
            line = self._jobs[one.job][one.index]
            weighed[line.flow] = weighed.get(line.flow, 0.0) + one.tokens / line.weight
            self._take_out(line, one)
        return Batch(group, chosen, sum(one.tokens for one in chosen), weighed)

    def overtakes(self, running: Batch, limits: Limits) -> bool:
        """Whether the next batch should run between two layers of the one that runs.

        It should for an interactive caller that has had less than each of those in the running one, by more than `limits.seconds`:
        by what a batch takes, so that callers that keep pace do not interrupt each other. Both together must keep within
        `limits.tokens`, since the activations of both are in memory.
        """
        if not self._callers.anybody:
            return False
        caller = self._callers.first()
        _, is_bulk = caller
        tag = self._callers.tag(caller) + limits.seconds
        if is_bulk or not all(tag < self._callers.tag(flow.caller) for flow in running.weighed):
            return False
        group, flow = self._shares[caller].first()
        first = next(iter(self._lines[group][flow].waiting.values()))
        return running.tokens + first.tokens <= limits.tokens

    def ran(self, batch: Batch, seconds: float, now: float) -> None:
        """The batch has taken so long: who was in it is charged for it."""
        self._now = now
        rate = max(seconds, LEAST_SECONDS) / max(batch.tokens, 1)
        for flow, tokens in batch.weighed.items():
            self._callers.charge(flow.caller, tokens * rate, now)
            share = self._shares.setdefault(flow.caller, _Share())
            share.charge((batch.group.head, flow), batch.group.model, tokens * rate, now)
            share.forget(now)
        self._models.charge(batch.group.model, sum(batch.weighed.values()) * rate, now)
        self._forget()

    def _company(self, first: _Line) -> list[_Line]:
        """The line whose turn it is, and those of its group that may join, by what their callers have had."""
        most = self._callers.tag(first.flow.caller) + COMPANY_SECONDS
        found = [(self._callers.tag(line.flow.caller), line) for line in self._lines[first.group].values() if line is not first]
        near = [(tag, line) for tag, line in found if tag <= most and self._shares[line.flow.caller].is_near(line)]
        return [first, *(line for _, line in sorted(near, key=itemgetter(0)))]

    def _take_out(self, line: _Line, one: Waiting) -> None:
        del line.waiting[one.job, one.index]
        of_job = self._jobs[one.job]
        del of_job[one.index]
        if not of_job:
            del self._jobs[one.job]
        self._count(line, -one.tokens)
        if not line.waiting:
            self._close(line)

    def _close(self, line: _Line) -> None:
        """Nothing waits in it any more."""
        lines, share = self._lines[line.group], self._shares[line.flow.caller]
        del lines[line.flow]
        if not lines:
            del self._lines[line.group]
        if not any(group.model == line.group.model for group in self._lines):
            self._models.leave(line.group.model, self._now)
        share.leave(line, self._now)
        if not share.models.anybody:
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


def _pick(lines: Collection[_Line], tokens: int, limits: Limits, now: float) -> Iterator[Waiting]:
    """Of the lines, in their order; the first's first sequence in any case."""
    candidates = list(islice(chain.from_iterable(line.waiting.values() for line in lines), CANDIDATES))
    first, before = candidates[0], now - limits.max_age
    yield first
    room, places = tokens - first.tokens, limits.items - 1
    rest = []
    for one in candidates[1:]:
        if one.since >= before:
            rest.append(one)
        elif one.tokens > room or places == 0:
            return
        else:
            yield one
            room, places = room - one.tokens, places - 1
    if sum(one.tokens for one in rest) > room or len(rest) > places:
        rest.sort(key=lambda one: abs(one.tokens - first.tokens))
    for one in rest:
        if places == 0:
            return
        if one.tokens <= room:
            yield one
            room, places = room - one.tokens, places - 1
