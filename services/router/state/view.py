"""This router's view of the mesh: workers from `libs/fleet` and lanes from `libs/queue`, at most
about a second old.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from shoal.v1 import models_pb2

from libs.errors import ModelNotFound
from libs.fleet import Fleet, FleetSnapshot
from libs.queue import LaneGauges, LaneKey, Lanes
from services.router.state.throughput import Drains, Throughput, lane_throughput

# A model's state in the mesh is its nearest state on any worker: one copy is enough.
_NEARNESS: Final = (
    models_pb2.MODEL_STATE_RESIDENT,
    models_pb2.MODEL_STATE_LOADING,
    models_pb2.MODEL_STATE_WARM,
    models_pb2.MODEL_STATE_COLD,
    models_pb2.MODEL_STATE_DOWNLOADING,
    models_pb2.MODEL_STATE_FAILED,
)


class RouterView:
    """The latest snapshot and gauges, and an event for their next change."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        # The state: gauges of all lanes in use; their sums by pool and model, over adapters; how
        # fast lanes drain; throughputs, cached until the next change; the event that the next
        # change sets.
        self._gauges: dict[LaneKey, LaneGauges] = {}
        self._queued: Counter[tuple[str, str]] = Counter()
        self._backlog: Counter[tuple[str, str]] = Counter()
        self._drains = Drains()
        self._throughputs: dict[LaneKey, Throughput] = {}
        self._changed = asyncio.Event()

    @property
    def snapshot(self) -> FleetSnapshot:
        return self._fleet.snapshot

    @property
    def gauges(self) -> Mapping[LaneKey, LaneGauges]:
        return self._gauges

    def lane_gauges(self, lane: LaneKey) -> LaneGauges:
        """Return the lane's gauges, all zero for an unused lane."""
        return self._gauges.get(lane) or LaneGauges(lane, *[0] * 8)

    @property
    def queued(self) -> Mapping[tuple[str, str], int]:
        """Return waiting tokens by pool and model, all adapters together, without entries of 0."""
        return self._queued

    @property
    def backlog(self) -> Mapping[tuple[str, str], int]:
        """Return waiting and leased tokens in the same way."""
        return self._backlog

    def throughput(self, lane: LaneKey) -> Throughput:
        """Return the lane's throughput."""
        throughput = self._throughputs.get(lane)
        if throughput is None:
            throughput = lane_throughput(
                lane, self.snapshot, self._backlog, self._drains.rate(lane)
            )
            if throughput.is_known:  # clients can invent any number of models that no worker serves
                self._throughputs[lane] = throughput
        return throughput

    def idle_unknown(self) -> list[LaneKey]:
        """Return lanes without work, of models that no worker has or adapters that no worker has
        loaded.

        Clients can invent any number of such names, and their counters are never read.
        """
        names, loaded = known_names(self.snapshot), _loaded_adapters(self.snapshot)
        return [
            lane
            for lane, gauge in self._gauges.items()
            if not (gauge.queued_jobs or gauge.leased_tokens)
            and (
                lane.model not in names
                or (lane.adapter and (lane.model, lane.adapter) not in loaded)
            )
        ]

    def shown_lanes(self) -> list[LaneGauges]:
        """Return the gauges of all lanes, by name, without idle ones of models that no worker has.

        A misspelt name is shown only while it has work or its failure is remembered. Without
        workers no name is known, so all lanes are shown.
        """
        failed = {model for model, failures in self.snapshot.failures.items() if failures}
        known = known_names(self.snapshot) | failed
        hidden = (
            {lane for lane in self.idle_unknown() if lane.model not in known}
            if self.snapshot.workers
            else set()
        )
        return [
            gauges
            for lane, gauges in sorted(self._gauges.items(), key=lambda entry: entry[0].name)
            if lane not in hidden
        ]

    async def refresh(self, lanes: Lanes) -> None:
        """Read snapshot and gauges from Redis. Raises NoCapacity while it is away.

        While only the master of a known snapshot is unavailable, on a cluster, the snapshot is
        kept: lanes of other masters are still served.
        """
        with lanes.masters.tolerate_away(when=bool(self.snapshot.now_ms)):
            async with lanes.masters.within_timeout():
                await self._fleet.refresh()
        self.update(await lanes.lane_gauges(), asyncio.get_running_loop().time())

    def update(self, gauges: Iterable[LaneGauges], now: float) -> None:
        """Replace the gauges. `now`: seconds of a monotonic clock."""
        self._gauges = {gauge.lane: gauge for gauge in gauges}
        self._drains.record(self._gauges, now)
        self._queued, self._backlog = Counter(), Counter()
        for lane, gauge in self._gauges.items():
            if gauge.queued_tokens or gauge.leased_tokens:
                self._queued[lane.pool, lane.model] += gauge.queued_tokens
                self._backlog[lane.pool, lane.model] += gauge.queued_tokens + gauge.leased_tokens
        self.notify()

    def notify(self) -> None:
        """Signal that the snapshot or the gauges have changed."""
        self._throughputs.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Return at the next change."""
        await self._changed.wait()


def known_models(
    snapshot: FleetSnapshot, gauges: Mapping[LaneKey, LaneGauges]
) -> list[models_pb2.Model]:
    """Return every model that a worker names or failed to load, by id; without requested names that
    no worker could find.
    """
    names = {name for worker in snapshot.workers.values() for name in worker.models} | set(
        snapshot.failures
    )
    return [
        describe(name, snapshot, gauges)
        for name in sorted(names)
        if not _is_nowhere(name, snapshot)
    ]


def _is_nowhere(model: str, snapshot: FleetSnapshot) -> bool:
    reasons = {failure.reason for failure in snapshot.failures.get(model, {}).values()}
    return reasons == {ModelNotFound.reason} and is_new(model, snapshot)


def known_names(snapshot: FleetSnapshot) -> set[str]:
    """Return models that a worker has, at least on its disk, or that a card describes."""
    failed = models_pb2.MODEL_STATE_FAILED
    listed = {
        name
        for models in snapshot.lists()
        for name, record in models.items()
        if record.state != failed
    }
    return listed | snapshot.index.models() | set(snapshot.cards)


def _loaded_adapters(snapshot: FleetSnapshot) -> set[tuple[str, str]]:
    """Return (model, adapter) of all adapters that some worker has loaded."""
    return {
        (record.model, adapter)
        for worker in snapshot.workers.values()
        for record in worker.held
        for adapter in record.adapters
    }


def is_new(model: str, snapshot: FleetSnapshot) -> bool:
    """Return True if no worker has the model, and no card describes it."""
    return (
        model not in snapshot.cards
        and not snapshot.holders(model)
        and not any(
            worker.state(model) == models_pb2.MODEL_STATE_COLD
            for worker in snapshot.workers.values()
        )
    )


def is_known(model: str, snapshot: FleetSnapshot) -> bool:
    return model in snapshot.failures or any(
        model in worker.models for worker in snapshot.workers.values()
    )


def describe(
    model: str, snapshot: FleetSnapshot, gauges: Mapping[LaneKey, LaneGauges]
) -> models_pb2.Model:
    """Describe one model as clients see it."""
    places = _places(model, snapshot)
    states = {place.state for place in places}
    errors = [place.last_error for place in places if place.last_error]
    return models_pb2.Model(
        model=model,
        state=next(
            (state for state in _NEARNESS if state in states), models_pb2.MODEL_STATE_ABSENT
        ),
        card=snapshot.card(model),
        places=places,
        queued_tokens=sum(
            gauge.queued_tokens for lane, gauge in gauges.items() if lane.model == model
        ),
        last_error=errors[-1] if errors else "",
    )


def _places(model: str, snapshot: FleetSnapshot) -> list[models_pb2.ModelPlace]:
    """Return the workers that have the model or failed to load it, each with its state there. A
    worker that has it again may still have the error of an earlier load.
    """
    failures = snapshot.failures.get(model, {})
    places = []
    for worker_id, worker in sorted(snapshot.workers.items()):
        record = worker.models.get(model)
        failure = failures.get(worker_id)
        if record is None and failure is None:
            continue
        place = models_pb2.ModelPlace(worker_id=worker_id, state=models_pb2.MODEL_STATE_FAILED)
        if record is not None:
            place.state = record.state
            place.bytes = record.bytes
            place.load_seconds = record.load_seconds
            place.tokens_per_second = record.tokens_per_second
            place.pinned = record.pinned
            place.downloaded_bytes = record.downloaded_bytes
            place.download_bytes = record.download_bytes
            place.host_bytes = record.host_bytes
            place.adapters.extend(record.adapters)
            place.leaving = record.leaving
        place.last_error = failure.message if failure is not None else ""
        places.append(place)
    return places
