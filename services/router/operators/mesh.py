"""MeshService: the mesh as an operator sees it, and the reasons for each model's placement."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Final

import grpc
from shoal.v1 import mesh_pb2 as pb
from shoal.v1 import mesh_pb2_grpc, models_pb2

from libs.errors import InvalidInput, NoCapacity, QueueFull
from libs.fleet import Fleet, FleetSnapshot, WorkerModelRecord, WorkerRecord, WorkerUsage, may_claim
from libs.fleet.affinity import busy_shares, score
from libs.processes import Process
from libs.queue import LaneGauges, LaneKey, Lanes
from libs.serving.watched import Watched
from services.router.admission.routing.routes import Routes, Target, choose_lane
from services.router.admission.validation.requests import check_model
from services.router.lanes.offers import is_led
from services.router.state.view import RouterView, known_models

MAX_WATCHERS: Final = 64
EXPLAINED_SECONDS: Final = 60.0
"""Placement is explained for a request with this deadline."""


class MeshService(mesh_pb2_grpc.MeshServiceServicer):
    """Answers from this router's view; only the plan's notes and the use of workers are read from
    Redis.
    """

    def __init__(
        self,
        lanes: Lanes,
        fleet: Fleet,
        view: RouterView,
        *,
        routes: Watched[Routes],
        processes: Watched[tuple[Process, ...]],
        oldest: Callable[[], Mapping[LaneKey, float]],
        router_id: str,
    ) -> None:
        """Args:
        oldest: Returns the age in seconds of the oldest of this router's jobs in each lane.
        """
        self._lanes = lanes
        self._fleet = fleet
        self._view = view
        self._routes = routes
        self._processes = processes
        self._oldest = oldest
        self._router_id = router_id
        # The state: the number of open WatchMesh streams, and how workers were last used.
        self._watchers = 0
        self._usage: Mapping[str, WorkerUsage] = {}

    async def GetMesh(
        self,
        request: pb.GetMeshRequest,
        context: grpc.aio.ServicerContext[pb.GetMeshRequest, pb.GetMeshResponse],
    ) -> pb.GetMeshResponse:
        return pb.GetMeshResponse(mesh=await self._mesh())

    async def WatchMesh(
        self,
        request: pb.WatchMeshRequest,
        context: grpc.aio.ServicerContext[pb.WatchMeshRequest, pb.WatchMeshResponse],
    ) -> AsyncIterator[pb.WatchMeshResponse]:
        interval = request.interval_seconds or 1.0
        if math.isnan(interval) or not 0.2 <= interval <= 60:
            raise InvalidInput("interval_seconds must be in 0.2..60", field="interval_seconds")
        if self._watchers >= MAX_WATCHERS:
            raise QueueFull(
                f"{MAX_WATCHERS} clients watch the mesh at this router already", retry_after=10.0
            )
        self._watchers += 1
        try:
            while True:
                yield pb.WatchMeshResponse(mesh=await self._mesh())
                await asyncio.sleep(interval)
        finally:
            self._watchers -= 1

    async def ExplainPlacement(
        self,
        request: pb.ExplainPlacementRequest,
        context: grpc.aio.ServicerContext[pb.ExplainPlacementRequest, pb.ExplainPlacementResponse],
    ) -> pb.ExplainPlacementResponse:
        check_model(request.model)
        snapshot, gauges = self._view.snapshot, self._view.gauges
        chosen = choose_lane(
            Target(request.model),
            self._routes.content,
            snapshot,
            self._view.backlog,
            EXPLAINED_SECONDS,
        )
        pools = self._routes.content.model_pools(request.model, snapshot) or (chosen.pool,)
        busy = busy_shares(snapshot, gauges.values())
        reasons = []
        for worker_id, worker in sorted(snapshot.workers.items()):
            eligible, reason = _explain(
                worker, pools, self._gauges_of_model(worker.pool, request.model), snapshot
            )
            value = score(worker, request.model, busy[worker_id])
            reasons.append(
                pb.PlacementReason(
                    worker_id=worker_id,
                    eligible=eligible,
                    reason=reason,
                    score=round(value, 3),
                    pool=worker.pool,
                )
            )
        return pb.ExplainPlacementResponse(
            workers=reasons,
            summary=_summary(self._gauges_of_model(chosen.pool, request.model), pools, snapshot),
            scheduler=self._scheduler(),
            plan=await self._plan_note(request.model),
        )

    async def _plan_note(self, model: str) -> str:
        if self._view.snapshot.leader is None:
            return ""
        try:
            return (await self._fleet.plan_notes(model)).get(model, "")
        except NoCapacity:
            return ""  # the rest of the explanation needs no Redis

    def _gauges_of_model(self, pool: str, model: str) -> LaneGauges:
        """Return the gauges of the model's lane in the pool, plus the tokens of its adapters'
        lanes.
        """
        key, own = (pool, model), self._view.lane_gauges(LaneKey(pool, model))
        queued = self._view.queued.get(key, 0)
        return replace(
            own, queued_tokens=queued, leased_tokens=self._view.backlog.get(key, 0) - queued
        )

    def _scheduler(self) -> pb.SchedulerStatus:
        leader = self._view.snapshot.leader
        if leader is None:
            return pb.SchedulerStatus()
        age = max(0, self._lanes.clock_ms() - leader.plan_ms) / 1000
        return pb.SchedulerStatus(
            scheduler_id=leader.scheduler_id, plan=leader.plan, age_seconds=age
        )

    async def _mesh(self) -> pb.Mesh:
        with suppress(NoCapacity):  # the rest of the mesh is known without Redis
            self._usage = await self._fleet.usage()
        snapshot, gauges, now_ms = self._view.snapshot, self._view.gauges, self._lanes.clock_ms()
        oldest, desired = (
            self._oldest(),
            snapshot.leader.desired if snapshot.leader is not None else {},
        )
        return pb.Mesh(
            workers=[
                _worker(worker, self._usage.get(worker_id), now_ms)
                for worker_id, worker in sorted(snapshot.workers.items())
            ],
            models=known_models(snapshot, gauges),
            lanes=[_lane(gauge, oldest.get(gauge.lane, 0.0)) for gauge in self._view.shown_lanes()],
            router_id=self._router_id,
            scheduler=self._scheduler(),
            pools=[
                pb.PoolStatus(pool=pool, desired_workers=workers)
                for pool, workers in sorted(desired.items())
            ],
            processes=[pb.ProcessStatus(**asdict(process)) for process in self._processes.content],
        )


def _worker(worker: WorkerRecord, usage: WorkerUsage | None, now_ms: int) -> pb.WorkerStatus:
    usage = usage or WorkerUsage(worker.heartbeat_ms, 0.0, 0.0)
    left, reported = worker.preempted_in_seconds, (now_ms - worker.heartbeat_ms) / 1000
    resident = [
        name
        for name, record in worker.models.items()
        if record.state == models_pb2.MODEL_STATE_RESIDENT
    ]
    return pb.WorkerStatus(
        worker_id=worker.worker_id,
        pool=worker.pool,
        device=worker.device,
        memory_bytes=worker.memory_bytes,
        used_bytes=worker.used_bytes,
        resident=sorted(resident),
        draining=worker.draining,
        heartbeat_age_seconds=max(0, now_ms - usage.heartbeat_ms) / 1000,
        host_memory_bytes=worker.host_memory_bytes,
        host_used_bytes=worker.host_used_bytes,
        preempted_in_seconds=None if left is None else max(0.0, left - reported),
        device_seconds=usage.device_seconds,
        wasted_seconds=usage.wasted_seconds,
        kernels=worker.kernels,
    )


def _lane(gauges: LaneGauges, oldest_seconds: float) -> pb.LaneStatus:
    return pb.LaneStatus(
        pool=gauges.lane.pool,
        model=gauges.lane.model,
        adapter=gauges.lane.adapter,
        queued_jobs=gauges.queued_jobs,
        queued_tokens=gauges.queued_tokens,
        leased_tokens=gauges.leased_tokens,
        enqueued_jobs=gauges.enqueued,
        done_jobs=gauges.done,
        expired_jobs=gauges.expired,
        dead_jobs=gauges.dead,
        cancelled_jobs=gauges.cancelled,
        enqueued_tokens=gauges.enqueued_tokens,
        oldest_seconds=oldest_seconds,
    )


def _explain(
    worker: WorkerRecord, pools: Sequence[str], gauges: LaneGauges, snapshot: FleetSnapshot
) -> tuple[bool, str]:
    """Return whether the worker may hold the model, and why."""
    model = gauges.lane.model
    failure = snapshot.failures.get(model, {}).get(worker.worker_id)
    record = worker.models.get(model)
    state = worker.state(model)
    if worker.pool not in pools:
        return False, f"it is in pool {worker.pool}; the model is for pool {', then '.join(pools)}"
    if record is not None and state == models_pb2.MODEL_STATE_RESIDENT:
        return not record.leaving, _resident(record)
    if state == models_pb2.MODEL_STATE_LOADING:
        return True, "it is loading the model"
    if record is not None and state == models_pb2.MODEL_STATE_DOWNLOADING:
        return (
            True,
            f"it is fetching the model: {record.downloaded_bytes:,} of {record.download_bytes:,}"
            " bytes",
        )
    if worker.preempted_in_seconds is not None:
        return False, f"its machine is taken away in {worker.preempted_in_seconds:.0f} s"
    if worker.draining:
        return False, "it is draining"
    if failure is not None:
        return False, f"it failed to load the model: {failure.message}"
    if (
        worker.local_models_only
        and record is None
        and any(model in other.models for other in snapshot.in_pool(worker.pool))
    ):
        return (
            False,
            "it has neither the model on disk nor a store to fetch it from (SHOAL_STORES)",
        )
    where = " from host memory" if state == models_pb2.MODEL_STATE_WARM else ""
    if may_claim(gauges, snapshot, worker.worker_id) and not is_led(snapshot):
        return True, f"it may claim the model now{where}: {gauges.queued_tokens:,} tokens wait"
    who = (
        "the scheduler may have it load the model" if is_led(snapshot) else "it may claim the model"
    )
    return True, f"{who}{where} when the resident copies would take longer for the waiting work"


def _resident(record: WorkerModelRecord) -> str:
    words = [
        f"it holds the model: {record.bytes:,} bytes, {record.tokens_per_second:,.0f} tokens/s"
    ]
    if record.adapters:
        words.append(f"adapters {', '.join(record.adapters)}")
    if record.pinned:
        words.append("pinned")
    if record.leaving:
        words.append("unloaded once its jobs are done")
    return "; ".join(words)


def _summary(gauges: LaneGauges, pools: Sequence[str], snapshot: FleetSnapshot) -> str:
    lane = gauges.lane
    verdict = snapshot.verdict(lane.model, lane.pool)
    holders = len(
        [worker for worker in snapshot.resident_on(lane.model) if worker.pool == lane.pool]
    )
    order = (
        ""
        if len(pools) < 2
        else f" Its pools are {', then '.join(pools)}; requests go to {lane.pool} now."
    )
    if verdict is not None:
        return f"No worker of pool {lane.pool} can serve {lane.model}: {verdict.message}{order}"
    if not snapshot.in_pool(lane.pool):
        return (
            f"Pool {lane.pool} has no worker: requests for {lane.model} wait until one joins or"
            f" their deadline passes.{order}"
        )
    if holders:
        workers = "1 worker" if holders == 1 else f"{holders:,} workers"
        return (
            f"{lane.model} is resident on {workers} of pool {lane.pool};"
            f" {gauges.queued_tokens:,} tokens wait.{order}"
        )
    loads = (
        "the scheduler has an eligible worker load it"
        if is_led(snapshot)
        else "the next eligible worker that asks for work loads it"
    )
    if gauges.queued_tokens:
        return f"{gauges.queued_tokens:,} tokens wait for {lane.model}: {loads}.{order}"
    return f"Nothing waits for {lane.model}; on its first request {loads}.{order}"
