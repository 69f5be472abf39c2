"""`FakeWorkers`: a Deployment of workers that exist only as numbers, for hours of load in seconds.

Stands for machines, pods and their start, which take minutes; test_keda.py has real worker
processes too, for less time. Requests arrive at random (Poisson, seeded), wait in one lane in
order, and are done by pods at a known speed. The scheduler's view is a `MeshSnapshot`, as Redis
would have it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
from shoal.v1 import models_pb2

from libs.fleet import FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.queue import LaneGauges, LaneKey
from services.scheduler.view import MeshSnapshot

MODEL: Final = "org/model"
BYTES: Final = 100_000_000
MEMORY: Final = 1_000_000_000
LEASE_SECONDS: Final = 15.0
TTL_SECONDS: Final = 10.0
GRACE_SECONDS: Final = 25.0
_START_MS: Final = 1_700_000_000_000
_CARD: Final = models_pb2.ModelCard(bytes=BYTES)


@dataclass(frozen=True, slots=True)
class Request:
    """A request: its arrival time and tokens."""

    at: float
    tokens: int


@dataclass(slots=True)
class Pod:
    """One worker."""

    name: str
    joins: float
    """Time of its first heartbeat."""
    loading_since: float | None = None
    resident_since: float | None = None
    last_used: float = 0.0
    noticed: float | None = None
    stopped: float | None = None
    """Time at which it was ordered to end."""
    lost: float | None = None
    """Time at which its machine was lost."""
    held: deque[Request] = field(default_factory=deque)
    spare: float = 0.0
    """Tokens it could have done already of the request it is at."""


class FakeWorkers:
    """Workers of a simulated pool. Times are seconds of the clock by which `advance` is called.

    Args:
        load: Requested tokens per second at each moment.
        pod_seconds: Time from the request for a worker to its first heartbeat.
    """

    def __init__(
        self,
        load: Callable[[float], float],
        *,
        pool: str = "cpu",
        tokens_per_second: float = 5_000.0,
        request_tokens: int = 500,
        pod_seconds: float = 45.0,
        load_seconds: float = 5.0,
        seed: int = 1,
    ) -> None:
        self.load = load
        self.pool = pool
        self.tokens_per_second = tokens_per_second
        self._lane = LaneKey(pool, MODEL)
        self._request_tokens = request_tokens
        self._pod_seconds = pod_seconds
        self._load_seconds = load_seconds
        self._random = np.random.default_rng(seed)
        # The state.
        self._now = 0.0
        self._replicas = 0
        self._made = 0
        self.pods: list[Pod] = []
        self._waiting: deque[Request] = deque()
        self._orphans: list[tuple[float, Request]] = []
        """Leased to pods that were lost, until their leases run out."""
        self.asked = self.answered = self.cancelled = self.asked_tokens = 0
        self.longest_wait = 0.0
        self.pod_seconds = 0.0
        """Return the pod seconds used so far, the cost of a way of scaling."""

    # As a Deployment.

    @property
    def replicas(self) -> int:
        return self._replicas

    def scale(self, replicas: int) -> None:
        self._replicas = replicas
        self._reconcile()

    def _reconcile(self) -> None:
        kept = [pod for pod in self.pods if pod.stopped is None and pod.lost is None]
        while len(kept) < self._replicas:
            self._made += 1
            kept.append(Pod(f"pod-{self._made}", self._now + self._pod_seconds))
            self.pods.append(kept[-1])
        while len(kept) > self._replicas:
            kept.pop(int(self._random.integers(len(kept)))).stopped = self._now

    def warn(self, name: str) -> None:
        """A spot notice: the pod's machine goes away in half a minute."""
        self._named(name).noticed = self._now

    def lose(self, name: str) -> None:
        """Remove the pod's machine now, with the requests that the pod held. A new pod takes its
        place.
        """
        pod = self._named(name)
        pod.lost = self._now
        self._orphans += [(self._now + LEASE_SECONDS, request) for request in pod.held]
        pod.held.clear()
        self._reconcile()

    def leave(self) -> None:
        """Drop all waiting requests."""
        self.cancelled += len(self._waiting)
        self._waiting.clear()

    def running(self) -> list[Pod]:
        """Pods that serve, in the order in which they were made."""
        return [
            pod
            for pod in self.pods
            if pod.resident_since is not None and pod.stopped is None and pod.lost is None
        ]

    def _named(self, name: str) -> Pod:
        return next(pod for pod in self.pods if pod.name == name)

    # Time.

    def advance(self, seconds: float) -> None:
        """Advance by `seconds`; best a second or less."""
        self._now += seconds
        self._arrive(seconds)
        self._take_back()
        for pod in self.pods:
            if pod.joins <= self._now and pod.lost is None:
                self._work(pod, seconds)
            self.pod_seconds += seconds
        self.pods = [pod for pod in self.pods if not self._is_gone(pod)]

    def _arrive(self, seconds: float) -> None:
        arrived = self._random.poisson(self.load(self._now) * seconds / self._request_tokens)
        for tokens in self._random.integers(
            self._request_tokens // 2, 3 * self._request_tokens // 2, arrived
        ).tolist():
            self._waiting.append(Request(self._now, tokens))
            self.asked += 1
            self.asked_tokens += tokens

    def _take_back(self) -> None:
        back = [request for expiry, request in self._orphans if expiry <= self._now]
        self._orphans = [
            (expiry, request) for expiry, request in self._orphans if expiry > self._now
        ]
        self._waiting.extendleft(reversed(back))

    def _work(self, pod: Pod, seconds: float) -> None:
        """Loads the model when work waits for it; leases up to two seconds' work and does it in
        order.
        """
        if pod.loading_since is None and self._waiting and pod.stopped is None:
            pod.loading_since = self._now
        if pod.resident_since is None:
            if (
                pod.loading_since is not None
                and self._now >= pod.loading_since + self._load_seconds
            ):
                pod.resident_since = self._now
            return
        held = sum(request.tokens for request in pod.held)
        takes = pod.stopped is None and pod.noticed is None
        while takes and self._waiting and held < 2 * self.tokens_per_second:
            pod.held.append(self._waiting.popleft())
            held += pod.held[-1].tokens
        pod.spare = pod.spare + seconds * self.tokens_per_second if pod.held else 0.0
        while pod.held and pod.held[0].tokens <= pod.spare:
            request = pod.held.popleft()
            pod.spare -= request.tokens
            pod.last_used = self._now
            self.answered += 1
            self.longest_wait = max(self.longest_wait, self._now - request.at)

    def _is_gone(self, pod: Pod) -> bool:
        if pod.lost is not None:
            return self._now > pod.lost + TTL_SECONDS
        if pod.stopped is None:
            return False
        if pod.held and self._now > pod.stopped + GRACE_SECONDS:
            self._waiting.extendleft(reversed(pod.held))
            pod.held.clear()
        return not pod.held

    # The scheduler's view.

    @property
    def waiting_tokens(self) -> int:
        return sum(request.tokens for request in self._waiting)

    @property
    def leased_tokens(self) -> int:
        held = sum(request.tokens for pod in self.pods for request in pod.held)
        return held + sum(request.tokens for _, request in self._orphans)

    @property
    def is_loading(self) -> bool:
        return any(
            pod.loading_since is not None and pod.resident_since is None and pod.lost is None
            for pod in self.pods
        )

    def snapshot(self) -> MeshSnapshot:
        """The mesh now, by the clock that `advance` is called by."""
        now_ms = _START_MS + round(self._now * 1000)
        workers = {
            pod.name: self._record(pod, now_ms) for pod in self.pods if pod.joins <= self._now
        }
        gauges: dict[LaneKey, LaneGauges] = {}
        if self.asked:
            jobs = (self.asked, self.answered, 0, 0, self.cancelled)
            tokens = (self.waiting_tokens, self.leased_tokens)
            gauges[self._lane] = LaneGauges(
                self._lane, len(self._waiting), *tokens, *jobs, enqueued_tokens=self.asked_tokens
            )
        return MeshSnapshot(
            FleetSnapshot(workers, {MODEL: _CARD}, {}, now_ms), MappingProxyType(gauges), self._now
        )

    def _record(self, pod: Pod, now_ms: int) -> WorkerRecord:
        silent = self._now - pod.lost if pod.lost is not None else 0.0
        return WorkerRecord(
            worker_id=pod.name,
            epoch=pod.name,
            pool=self.pool,
            device="cpu",
            memory_bytes=MEMORY,
            used_bytes=BYTES if pod.resident_since is not None else 0,
            batch_tokens=2048,
            draining=pod.stopped is not None or pod.noticed is not None,
            heartbeat_ms=now_ms - round(silent * 1000),
            silent_since_ms=now_ms - round(silent * 1000) if silent else None,
            models={MODEL: self._model(pod)},
            preempted_in_seconds=max(0.0, pod.noticed + 30 - self._now)
            if pod.noticed is not None
            else None,
        )

    def _model(self, pod: Pod) -> WorkerModelRecord:
        state = models_pb2.MODEL_STATE_COLD
        if pod.resident_since is not None:
            state = models_pb2.MODEL_STATE_RESIDENT
        elif pod.loading_since is not None:
            state = models_pb2.MODEL_STATE_LOADING
        is_resident = pod.resident_since is not None
        # A worker's measurements vary, and are lower while its batches are small.
        measured = (
            self.tokens_per_second
            * float(self._random.normal(1.0, 0.05))
            * (1.0 if self._waiting else 0.8)
        )
        return WorkerModelRecord(
            model=MODEL,
            state=state,
            bytes=BYTES if is_resident else 0,
            load_seconds=self._load_seconds if is_resident else 0.0,
            tokens_per_second=measured if is_resident and pod.last_used else 0.0,
            idle_seconds=self._now - pod.last_used,
            pinned=False,
            held_jobs=len(pod.held),
            resident_seconds=self._now - pod.resident_since
            if pod.resident_since is not None
            else 0.0,
        )
