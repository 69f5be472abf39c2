"""Simulate a fleet's loads, evictions and waits for one trace under one policy, event by event.
Pure and deterministic.

It shares its decisions with the mesh: the policies and hard rules of `libs/eviction`. The rest is a
model:

1. A worker serves one batch of one model at a time, the least recently served first, in a fixed
  time plus tokens ÷ rate.
2. Loads run concurrently, at most `max_loads`, and do not slow it down.
3. A model's requests wait in one lane for the whole fleet, together with those of its adapters.
4. Every file is on every worker's disk.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from libs.errors import InvalidInput
from libs.eviction import POLICIES, Candidate, Challenger, Policy, choose_victims
from services.scheduler.simulate.trace import ModelCost, Trace

CLAIRVOYANT: Final = "clairvoyant"
"""A policy that knows the trace: load seconds ÷ bytes ÷ requests until the next use. It shows how
much could still be gained, greedily: it is not proven to be the minimum.
"""

LOAD_RETRY_SECONDS: Final = 0.1
"""Interval for retrying a load that no model would yield to: the work that waits for it has grown
older.
"""
PROGRESS_REQUESTS: Final = 2000

_WARM_AFFINITY: Final = 0.6
_COLD_AFFINITY: Final = 0.3

EventKind = Literal["load", "warm load", "loaded", "evict", "freed", "kept", "dropped"]


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Identical workers."""

    memory_bytes: int
    """Bytes for models on each device."""
    workers: int = 1
    host_bytes: int = 0
    """Bytes for models in each host's memory; 0: evicted models return to disk."""
    max_loads: int = 2
    batch_tokens: int = 16_384
    batch_seconds: float = 0.002
    """Fixed time of a forward pass, in addition to its tokens."""
    host_bytes_per_second: float = 12e9
    clients: int = 0
    """Maximum requests in flight; a due request waits for a free client. 0: an open loop."""
    count_seconds: float = 0.0
    """Interval at which routers count the waiting work for workers; 0: always current."""

    def __post_init__(self) -> None:
        for name, least in (
            ("memory_bytes", 1),
            ("workers", 1),
            ("host_bytes", 0),
            ("max_loads", 1),
            ("batch_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise InvalidInput(f"{name} must be at least {least}", field=name)
        if (
            self.clients < 0
            or self.batch_seconds < 0
            or self.count_seconds < 0
            or self.host_bytes_per_second <= 0
        ):
            raise InvalidInput(
                "clients, batch_seconds and count_seconds must be at least 0,"
                " host_bytes_per_second above 0"
            )


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a model's bytes on a worker.

    From "load" to "freed" they are taken from the device's budget, from "kept" to "dropped" or
    "warm load" from the host's.
    """

    at: float
    worker: int
    what: EventKind
    model: str
    bytes: int


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """The result of a simulation.

    Waits are from a request's arrival to the start of its forward pass, in seconds.
    """

    policy: str
    requests: int
    refused: int
    """Requests for models that fit on no worker."""
    misses: int
    """Requests that arrived while their model was resident on no worker."""
    cold_loads: int
    warm_loads: int
    evictions: int
    stall_seconds: float
    """Duration of loads for which requests had to wait, each load once, however many waited. Loads
    of a further copy do not count, nor does time spent waiting for memory.
    """
    bytes_loaded: int
    wait_mean: float
    wait_p50: float
    wait_p99: float
    seconds: float
    """Time from the first request's arrival to the last one's answer."""
    peak_bytes: int
    """The maximum that one device held."""


def simulate(
    trace: Trace,
    fleet: SimulatedFleet,
    policy: str,
    *,
    watch: Callable[[Event], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SimulationOutcome:
    """Replay `trace` on `fleet` under the named policy. Raises InvalidInput for an unknown
    policy.
    """
    if policy != CLAIRVOYANT and policy not in POLICIES:
        raise InvalidInput(
            f"policy must be one of {', '.join((*POLICIES, CLAIRVOYANT))}, not {policy!r}",
            field="policy",
        )
    return _Simulation(trace, fleet, policy, watch).run(on_progress or _ignore_progress)


class _Clairvoyant:
    """A policy that knows later requests; `position` is the number of the latest arrival."""

    def __init__(self, trace: Trace) -> None:
        self.position = 0
        self._uses: dict[str, list[int]] = {model: [] for model in trace.models}
        for number, request in enumerate(trace.requests):
            self._uses[request.model].append(number)

    def __call__(self, candidate: Candidate) -> float:
        uses = self._uses[candidate.name]
        following = bisect_right(uses, self.position)
        if following == len(uses):
            return 0.0
        return candidate.load_seconds / candidate.bytes / (uses[following] - self.position)


@dataclass(slots=True, eq=False)
class _Lane:
    cost: ModelCost
    warm_seconds: float
    back_seconds: float
    """Load time from the tier to which an eviction moves the model."""
    queue: deque[int]
    tokens: int
    """Tokens in the queue."""
    counted: int
    """Tokens that were in the queue when it was last counted."""
    holders: list[_Worker]
    """Workers that have it resident and not leaving."""
    loading: int
    """Number of workers that load it, or want to."""

    @property
    def waiting_seconds(self) -> float:
        return self.tokens / self.cost.tokens_per_second


@dataclass(slots=True, eq=False)
class _Held:
    """A model on a worker, resident or warm."""

    lane: _Lane
    since: float
    last_used: float
    floor: float
    uses: int = 0
    leaving: bool = False
    flight_seconds: float = 0.0
    """Duration of the batch in the forward pass; 0: none."""


class _Worker:
    def __init__(self, number: int) -> None:
        self.number = number
        self.residents: dict[str, _Held] = {}
        self.warm: dict[str, _Held] = {}
        self.ready: dict[str, _Held] = {}  # residents with requests in their lane
        self.loading: set[str] = set()
        self.wanted: dict[str, float] = {}  # since when, in order
        self.running: _Held | None = None
        self.used = 0
        self.warm_used = 0
        self.leaving_bytes = 0
        self.floor = 0.0
        self.will_retry = False


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        fleet: SimulatedFleet,
        policy: str,
        watch: Callable[[Event], None] | None,
    ) -> None:
        self._trace = trace
        self._fleet = fleet
        self._name = policy
        self._foresight = _Clairvoyant(trace) if policy == CLAIRVOYANT else None
        self._policy: Policy = self._foresight or POLICIES[policy]
        self._watch = watch
        self._lanes = _lanes(trace.models, fleet)
        self._workers = [_Worker(number) for number in range(fleet.workers)]
        self._came: list[float] = []  # arrival time by number of request
        self._waits: list[float] = []
        # Future events: (time, rising number, function, its arguments).
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = 0
        self._now = 0.0
        self._answered = 0
        self._refused = 0
        self._misses = 0
        self._cold_loads = 0
        self._warm_loads = 0
        self._evictions = 0
        self._stall_seconds = 0.0
        self._bytes_loaded = 0
        self._peak_bytes = 0

    def run(self, on_progress: Callable[[int, int], None]) -> SimulationOutcome:
        requests, agenda, clients = self._trace.requests, self._agenda, self._fleet.clients
        total, record_workers = len(requests), 0
        if self._fleet.count_seconds:
            self._count()
        while self._answered < total:
            if record_workers < total and (
                not clients or record_workers - self._answered < clients
            ):
                at = max(requests[record_workers].at, self._now)
                if not agenda or at <= agenda[0][0]:
                    self._now = at
                    self._arrive(record_workers)
                    record_workers += 1
                    if record_workers % PROGRESS_REQUESTS == 0:
                        on_progress(record_workers, total)
                    continue
            self._now, _, act, arguments = heapq.heappop(agenda)
            act(*arguments)
        on_progress(total, total)
        return self._outcome()

    def _outcome(self) -> SimulationOutcome:
        waits = sorted(self._waits)
        return SimulationOutcome(
            policy=self._name,
            requests=self._answered,
            refused=self._refused,
            misses=self._misses,
            cold_loads=self._cold_loads,
            warm_loads=self._warm_loads,
            evictions=self._evictions,
            stall_seconds=self._stall_seconds,
            bytes_loaded=self._bytes_loaded,
            wait_mean=sum(waits) / len(waits) if waits else 0.0,
            wait_p50=_quantile(waits, 0.5),
            wait_p99=_quantile(waits, 0.99),
            seconds=self._now - self._came[0] if self._came else 0.0,
            peak_bytes=self._peak_bytes,
        )

    def _at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (when, self._number, act, arguments))

    # Requests

    def _arrive(self, number: int) -> None:
        request = self._trace.requests[number]
        lane = self._lanes[request.model]
        self._came.append(self._now)
        if self._foresight is not None:
            self._foresight.position = number
        if lane.cost.bytes > self._fleet.memory_bytes:
            self._refused += 1
            self._answered += 1
            return
        lane.queue.append(number)
        lane.tokens += request.tokens
        if lane.holders:
            for worker in lane.holders:
                worker.ready[request.model] = worker.residents[request.model]
            self._serve_first_idle(lane)
            self._consider_copy(lane)
        else:
            self._misses += 1
            if not lane.loading:
                self._want(lane, self._best(lane, self._workers))

    def _serve_first_idle(self, lane: _Lane) -> None:
        for worker in lane.holders:
            if worker.running is None:
                self._serve(worker)
                return

    def _serve(self, worker: _Worker) -> None:
        """Begin a batch of the least recently served model with work, if any."""
        if not worker.ready:
            return
        held = min(worker.ready.values(), key=lambda one: (one.last_used, one.lane.cost.model))
        lane, requests = held.lane, self._trace.requests
        budget, count, tokens = self._fleet.batch_tokens, 0, 0
        while lane.queue and (not count or tokens + requests[lane.queue[0]].tokens <= budget):
            number = lane.queue.popleft()
            tokens += requests[number].tokens
            self._waits.append(self._now - self._came[number])
            count += 1
        lane.tokens -= tokens
        if not lane.queue:
            for holder in lane.holders:
                holder.ready.pop(lane.cost.model, None)
        self._use(worker, held, count)
        held.flight_seconds = self._fleet.batch_seconds + tokens / lane.cost.tokens_per_second
        worker.running = held
        self._at(self._now + held.flight_seconds, self._served, worker, count)

    def _served(self, worker: _Worker, count: int) -> None:
        held = worker.running
        assert held is not None  # noqa: S101 — only `_serve` puts this on the agenda
        worker.running = None
        held.flight_seconds = 0.0
        self._use(worker, held, 0)
        self._answered += count
        if held.leaving:
            worker.leaving_bytes -= held.lane.cost.bytes
            self._free(worker, held)
        self._serve(worker)
        if worker.wanted:
            self._try_loads(worker)

    def _use(self, worker: _Worker, held: _Held, count: int) -> None:
        held.last_used = self._now
        held.uses += count
        held.floor = worker.floor

    def _count(self) -> None:
        for lane in self._lanes.values():
            lane.counted = lane.tokens
        self._at(self._now + self._fleet.count_seconds, self._count)

    # Placement

    def _best(self, lane: _Lane, workers: list[_Worker]) -> _Worker:
        """Choose the worker where the model is nearest to the device, less the busy share of the
        worker's slots; then the one with the most free memory.
        """
        hands = self._fleet.max_loads + 1

        def score(worker: _Worker) -> tuple[float, int, int]:
            affinity = _WARM_AFFINITY if lane.cost.model in worker.warm else _COLD_AFFINITY
            busy = (len(worker.loading) + len(worker.wanted) + (worker.running is not None)) / hands
            return affinity - min(1.0, busy), -worker.used, -worker.number

        return max(workers, key=score)

    def _consider_copy(self, lane: _Lane) -> None:
        """Load one more copy if its load and the work before it take less than the wait for the
        present ones.
        """
        if len(self._workers) == 1 or lane.loading or not lane.queue:
            return
        wait = lane.waiting_seconds / len(lane.holders)
        others = [one for one in self._workers if lane.cost.model not in one.residents]
        if wait <= lane.cost.load_seconds or not others:
            return
        worker = self._best(lane, others)
        before = sum(held.lane.waiting_seconds for held in worker.ready.values())
        if wait > lane.cost.load_seconds + before:
            self._want(lane, worker)

    # Loads and evictions

    def _want(self, lane: _Lane, worker: _Worker) -> None:
        lane.loading += 1
        worker.wanted[lane.cost.model] = self._now
        self._try_loads(worker)

    def _try_loads(self, worker: _Worker) -> None:
        """Begin the wanted loads that have memory, or free memory for them."""
        has_no_room = False
        for model, asked in list(worker.wanted.items()):
            if len(worker.loading) >= self._fleet.max_loads:
                break
            if model in worker.residents:
                continue  # it is still leaving
            lane = self._lanes[model]
            missing = lane.cost.bytes - (self._fleet.memory_bytes - worker.used)
            if missing > worker.leaving_bytes:
                waiting = max(lane.waiting_seconds, self._now - asked)
                if not self._make_room(
                    worker,
                    missing - worker.leaving_bytes,
                    Challenger(model, lane.cost.bytes, waiting),
                ):
                    has_no_room = True
                    continue
                missing = lane.cost.bytes - (self._fleet.memory_bytes - worker.used)
            if missing > 0:
                break  # until the leaving models are gone: the memory is for this one
            del worker.wanted[model]
            self._load(worker, lane)
        if has_no_room and not worker.will_retry:
            worker.will_retry = True
            self._at(self._now + LOAD_RETRY_SECONDS, self._retry, worker)

    def _retry(self, worker: _Worker) -> None:
        worker.will_retry = False
        self._try_loads(worker)

    def _load(self, worker: _Worker, lane: _Lane) -> None:
        cost = lane.cost
        warm = worker.warm.pop(cost.model, None)
        if warm is not None:
            worker.warm_used -= cost.bytes
            self._warm_loads += 1
        else:
            self._cold_loads += 1
        seconds = cost.load_seconds if warm is None else lane.warm_seconds
        if not lane.holders:
            self._stall_seconds += seconds
        self._bytes_loaded += cost.bytes
        worker.used += cost.bytes
        worker.loading.add(cost.model)
        self._peak_bytes = max(self._peak_bytes, worker.used)
        self._emit(worker, "load" if warm is None else "warm load", lane)
        self._at(self._now + seconds, self._loaded, worker, lane)

    def _loaded(self, worker: _Worker, lane: _Lane) -> None:
        model = lane.cost.model
        worker.loading.remove(model)
        held = _Held(lane, since=self._now, last_used=self._now, floor=worker.floor)
        worker.residents[model] = held
        lane.holders.append(worker)
        lane.loading -= 1
        self._emit(worker, "loaded", lane)
        if lane.queue:
            worker.ready[model] = held
            if worker.running is None:
                self._serve(worker)
            self._consider_copy(lane)
        if worker.wanted:
            self._try_loads(worker)

    def _make_room(self, worker: _Worker, needed: int, challenger: Challenger) -> bool:
        """Evict models that together take `needed` bytes; False if the rules do not allow enough
        now.
        """
        candidates = [self._candidate(worker, held) for held in worker.residents.values()]
        victims = choose_victims(candidates, needed, self._policy, challenger)
        if victims is None:
            return False
        for victim in victims:
            worker.floor = max(worker.floor, self._policy(victim))
            self._leave(worker, worker.residents[victim.name])
        return True

    def _candidate(self, worker: _Worker, held: _Held) -> Candidate:
        lane = held.lane
        tokens = lane.counted if self._fleet.count_seconds else lane.tokens
        return Candidate(
            lane.cost.model,
            lane.cost.bytes,
            lane.back_seconds,
            self._now - held.last_used,
            held.uses,
            held.floor,
            False,
            held.leaving,
            worker.running is held,
            tokens / lane.cost.tokens_per_second / max(len(lane.holders), 1) + held.flight_seconds,
            self._now - held.since,
            len(lane.holders) <= 1,
        )

    def _leave(self, worker: _Worker, held: _Held) -> None:
        """First phase of an eviction: no new work. Waiting requests wait for another copy or for
        its next load.
        """
        lane = held.lane
        self._evictions += 1
        self._emit(worker, "evict", lane)
        lane.holders.remove(worker)
        worker.ready.pop(lane.cost.model, None)
        held.leaving = True
        if worker.running is held:
            worker.leaving_bytes += lane.cost.bytes
        else:
            self._free(worker, held)
        if lane.queue and not lane.holders and not lane.loading:
            lane.loading += 1
            best = self._best(lane, self._workers)
            best.wanted[lane.cost.model] = self._now
            self._at(self._now, self._try_loads, best)

    def _free(self, worker: _Worker, held: _Held) -> None:
        """Second phase: off the device, into the host's memory if that can make room without
        evicting wanted models.
        """
        cost = held.lane.cost
        del worker.residents[cost.model]
        worker.used -= cost.bytes
        self._emit(worker, "freed", held.lane)
        missing = cost.bytes - (self._fleet.host_bytes - worker.warm_used)
        candidates = [
            self._warm_candidate(one)
            for name, one in worker.warm.items()
            if name not in worker.wanted
        ]
        victims = choose_victims(
            candidates, missing, self._policy, Challenger(cost.model, cost.bytes)
        )
        if victims is None:
            return
        for victim in victims:
            worker.warm_used -= victim.bytes
            self._emit(worker, "dropped", worker.warm.pop(victim.name).lane)
        worker.warm[cost.model] = held
        worker.warm_used += cost.bytes
        self._emit(worker, "kept", held.lane)

    def _warm_candidate(self, held: _Held) -> Candidate:
        lane = held.lane
        saved = lane.cost.load_seconds - lane.warm_seconds
        return Candidate(
            lane.cost.model,
            lane.cost.bytes,
            saved,
            self._now - held.last_used,
            held.uses,
            held.floor,
        )

    def _emit(self, worker: _Worker, what: EventKind, lane: _Lane) -> None:
        if self._watch is not None:
            self._watch(Event(self._now, worker.number, what, lane.cost.model, lane.cost.bytes))


def _lanes(models: Mapping[str, ModelCost], fleet: SimulatedFleet) -> dict[str, _Lane]:
    lanes = {}
    for model, cost in models.items():
        warm = (
            cost.bytes / fleet.host_bytes_per_second
            if cost.warm_seconds is None
            else cost.warm_seconds
        )
        warm = min(warm, cost.load_seconds)
        back = warm if cost.bytes <= fleet.host_bytes else cost.load_seconds
        lanes[model] = _Lane(cost, warm, back, deque(), 0, 0, [], 0)
    return lanes


def _quantile(ordered: list[float], share: float) -> float:
    """Return the nearest-rank quantile; 0 without values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _ignore_progress(done: int, total: int) -> None:
    pass
