"""Which waiting sequences go into the next forward pass: decisions only, no clock, no device.

On the way of a request between `intake.py`, which prepares sequences, and `runner.py`, which runs the batch chosen here.

Device time is shared by start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), as lanes share out tokens: between models,
and within a model between flows (`Flow`). Whoever has had the fewest device seconds for its weight is next. The virtual time is
where the one in service stands; who comes anew begins BURST_SECONDS behind it, and is owed no more for the time it was away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from math import exp
from typing import Final, Generic, TypeVar

BULK_SHARE: Final = 1 / 9
"""Weight of bulk work beside interactive work of the same tenant: a tenth of what both get, as in the lanes."""

COMPANY_SECONDS: Final = 0.005
"""How much further than the flow whose turn it is others may be and still join its batch. Flows that keep pace stay together in
large batches; a light one is not held up by the work of one that has just had a batch."""

BURST_SECONDS: Final = 0.25
"""Of the device, for weight 1: what somebody who has had less than its share gets at once, before those who have had theirs.
Requests come in bunches, also of a client that needs little; sharing evenly with a backlog would double what a bunch takes."""

REMEMBERED_SECONDS: Final = 5.0
"""How long it counts what somebody had who has nothing waiting. That is long against the time in which a busy lane is filled up
again, and bounds what is kept."""

LEAST_SECONDS: Final = 1e-4
"""What a batch costs at least."""

CANDIDATES: Final = 1024
"""Of so many sequences those are chosen that fit best."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Group:
    """What a batch has in common: one model and one head."""

    model: str
    head: str


@dataclass(frozen=True, slots=True)
class Flow:
    """Whose work it is, of those who share a model."""

    adapter: str = ""
    tenant: str = ""
    is_bulk: bool = False


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


class Turns(Generic[Key]):
    """Who is next of several that share something. A tag is what one has had for its weight; those with equal tags take turns in
    the order in which they came."""

    def __init__(self) -> None:
        self._virtual = 0.0
        # The state: tags of those who wait, in order of arrival; tags of those who do not, and when they were served or left last,
        # in order of that.
        self._tags: dict[Key, float] = {}
        self._away: dict[Key, tuple[float, float]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tags or key in self._away

    def __len__(self) -> int:
        """How many wait, or did so lately."""
        return len(self._tags) + len(self._away)

    @property
    def anybody(self) -> bool:
        return bool(self._tags)

    def tag(self, key: Key) -> float:
        """Of one who is not known: where it would begin."""
        if key in self._tags:
            return self._tags[key]
        begin = self._virtual - BURST_SECONDS
        return max(begin, self._away[key][0]) if key in self._away else begin

    def come(self, key: Key, *, has_credit: bool = True) -> None:
        """It has something waiting. Without credit it begins where the one in service stands."""
        if key not in self._tags:
            self._tags[key] = self.tag(key) if has_credit else max(self.tag(key), self._virtual)
            self._away.pop(key, None)

    def leave(self, key: Key, now: float) -> None:
        """It has nothing waiting any more."""
        self._away[key] = (self._tags.pop(key), now)

    def next(self) -> Key:
        """Of those who wait; its turn begins."""
        key = min(self._tags, key=self._tags.__getitem__)
        self._virtual = max(self._virtual, self._tags[key])
        return key

    def company(self, key: Key) -> list[Key]:
        """Those who wait and are hardly further than the one whose turn it is, by tag; that one first."""
        most = self._tags[key] + COMPANY_SECONDS
        others = sorted((tag, number, one) for number, (one, tag) in enumerate(self._tags.items()) if tag <= most and one != key)
        return [key, *(one for _, _, one in others)]

    def charge(self, key: Key, cost: float, now: float) -> None:
        """It was served: `cost` is what it got, for its weight."""
        if key in self._tags:
            self._tags[key] += cost
        else:
            self._away[key] = (self._away.pop(key, (self._virtual,))[0] + cost, now)

    def forget(self, now: float) -> None:
        """Those who left long ago."""
        while self._away:
            oldest = next(iter(self._away))
            if self._away[oldest][1] >= now - REMEMBERED_SECONDS:
                return
            del self._away[oldest]


class Lately:
    """Device seconds of each tenant, over all models; each second counts for less the longer it is ago (REMEMBERED_SECONDS)."""

    def __init__(self) -> None:
        # The state: seconds of each tenant and when they were reckoned, in the order of that; the same of all.
        self._seconds: dict[str, tuple[float, float]] = {}
        self._total = (0.0, 0.0)

    def add(self, tenant: str, seconds: float, now: float) -> None:
        self._seconds[tenant] = (self._of(tenant, now) + seconds, now)
        self._total = (_faded(self._total, now) + seconds, now)
        while self._seconds:
            oldest = next(iter(self._seconds))
            if self._seconds[oldest][1] >= now - 4 * REMEMBERED_SECONDS:
                return
            del self._seconds[oldest]

    def has_more_than_its_share(self, tenant: str, now: float) -> bool:
        """Than the mean of those who had the device lately."""
        mean = _faded(self._total, now) / max(1, len(self._seconds))
        own = self._seconds.get(tenant, (0.0, now))
        return _faded(own, now) > mean * (1 + 1e-6)

    def _of(self, tenant: str, now: float) -> float:
        return _faded(self._seconds.pop(tenant, (0.0, now)), now)


def _faded(reckoned: tuple[float, float], now: float) -> float:
    seconds, at = reckoned
    return seconds * exp((at - now) / REMEMBERED_SECONDS)


_LineKey = tuple[str, Flow]
"""Head and flow: what waits in one line of a model."""


@dataclass(slots=True, eq=False)
class _Line:
    """What waits of one flow for one head of a model, by job and index, in order of arrival."""

    model: str
    key: _LineKey
    weight: float
    waiting: dict[tuple[int, int], Waiting] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Share:
    """One model's lines that are not empty, and whose turn it is."""

    turns: Turns[_LineKey] = field(default_factory=Turns)
    lines: dict[_LineKey, _Line] = field(default_factory=dict)


class WaitingRoom:
    """Prepared sequences that wait for a forward pass. Not thread-safe: `runner.py` guards it.

    No flow starves. One that is not remembered waits for at most one batch of each other model that waits, and then for at most
    one of each other flow of its own. Between two batches of a flow, others get at most what its last one cost, by weight, and one
    batch each; those who come anew, BURST_SECONDS more. Flows that always have work waiting get device time by weight, but for one
    batch each.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.lanes: dict[tuple[str, str], dict[Flow, int]] = {}
        """Tokens that wait, by model and adapter, of each flow, where any do."""
        # The whole state beside that. Every waiting sequence is in one line, and its line is found by its job and index.
        self._models: Turns[str] = Turns()
        self._shares: dict[str, _Share] = {}
        self._jobs: dict[int, dict[int, _Line]] = {}
        self._lately = Lately()
        self._now = 0.0

    def add(self, group: Group, sequences: Collection[Waiting], flow: Flow = NOBODY, weight: float = 1.0) -> None:
        """Sequences must not be older than those that wait already. `weight` is the flow's from now on."""
        if not sequences:
            return
        share = self._shares.setdefault(group.model, _Share())
        key = (group.head, flow)
        # A bunch of requests has credit, but not one more model for a tenant who has had more than its share of the others.
        self._models.come(group.model, has_credit=not self._lately.has_more_than_its_share(flow.tenant, self._now))
        share.turns.come(key)
        line = share.lines.setdefault(key, _Line(group.model, key, weight))
        line.weight = weight * (BULK_SHARE if flow.is_bulk else 1.0)
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
        return len(self._models) > 1 or (model in self._shares and len(self._shares[model].turns) > 1)

    def turn(self, model: str) -> float:
        """The model's tag: the lower, the sooner it is next."""
        return self._models.tag(model)

    def take(self, limits: Limits, now: float, cap: Callable[[Group], int] | None = None) -> Batch | None:
        """Choose the next batch and take it out. None if nothing waits.

        The oldest sequence of the flow whose turn it is is always in it, alone if it exceeds the budget. Its company joins: what
        waits for the same head in flows that are hardly further. Of these, sequences older than `max_age` follow strictly in order
        (of flow, then of age); if one does not fit, the batch ends. The room that is left goes to those whose length is nearest to
        the first one's, which keeps runs of equal length together. `cap`: the token budget of a group, where below that of
        `limits`. `ran` must follow.
        """
        self._now = now
        self._forget()
        if not self._models.anybody:
            return None
        model = self._models.next()
        share = self._shares[model]
        first = share.turns.next()
        group = Group(model, first[0])
        lines = [share.lines[key] for key in share.turns.company(first) if key[0] == group.head]
        tokens = limits.tokens if cap is None else min(limits.tokens, cap(group))
        weighed: dict[Flow, float] = {}
        chosen = tuple(_pick(lines, tokens, limits, now))
        for one in chosen:
            line = self._jobs[one.job][one.index]
            flow = line.key[1]
            weighed[flow] = weighed.get(flow, 0.0) + one.tokens / line.weight
            self._take_out(line, one)
        return Batch(group, chosen, sum(one.tokens for one in chosen), weighed)

    def ran(self, batch: Batch, seconds: float, now: float) -> None:
        """The batch has taken so long: who was in it is charged for it."""
        self._now = now
        rate = max(seconds, LEAST_SECONDS) / max(batch.tokens, 1)
        share = self._shares.setdefault(batch.group.model, _Share())
        for flow, tokens in batch.weighed.items():
            share.turns.charge((batch.group.head, flow), tokens * rate, now)
            self._lately.add(flow.tenant, tokens * rate, now)
        self._models.charge(batch.group.model, sum(batch.weighed.values()) * rate, now)
        self._forget()

    def _take_out(self, line: _Line, one: Waiting) -> None:
        del line.waiting[one.job, one.index]
        of_job = self._jobs[one.job]
        del of_job[one.index]
        if not of_job:
            del self._jobs[one.job]
        self._count(line, -one.tokens)
        if line.waiting:
            return
        share = self._shares[line.model]
        del share.lines[line.key]
        share.turns.leave(line.key, self._now)
        if not share.lines:
            self._models.leave(line.model, self._now)

    def _count(self, line: _Line, tokens: int) -> None:
        flow = line.key[1]
        lane = (line.model, flow.adapter)
        self.tokens += tokens
        flows = self.lanes.setdefault(lane, {})
        flows[flow] = flows.get(flow, 0) + tokens
        if not flows[flow]:
            del flows[flow]
        if not flows:
            del self.lanes[lane]

    def _forget(self) -> None:
        self._models.forget(self._now)
        for model in [model for model in self._shares if model not in self._models]:
            del self._shares[model]
        for share in self._shares.values():
            share.turns.forget(self._now)


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
