"""MeshService: the mesh as an operator sees it, and why a model is where it is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import grpc
from shoal.v1 import mesh_pb2 as pb
from shoal.v1 import mesh_pb2_grpc, models_pb2

from libs.errors import InvalidInput
from libs.fleet import FleetSnapshot, WorkerRecord, may_claim
from libs.queue import LaneGauges, Lanes
from services.router.admission import choose_lane
from services.router.view import View, known_models


class MeshService(mesh_pb2_grpc.MeshServiceServicer):
    """Reads what this router knows; costs Redis nothing."""

    def __init__(self, lanes: Lanes, view: View, *, router_id: str, default_pool: str) -> None:
        self._lanes = lanes
        self._view = view
        self._router_id = router_id
        self._default_pool = default_pool

    async def GetMesh(
        self, request: pb.GetMeshRequest, context: grpc.aio.ServicerContext[pb.GetMeshRequest, pb.GetMeshResponse]
    ) -> pb.GetMeshResponse:
        return pb.GetMeshResponse(mesh=self._mesh())

    async def WatchMesh(
        self, request: pb.WatchMeshRequest, context: grpc.aio.ServicerContext[pb.WatchMeshRequest, pb.WatchMeshResponse]
    ) -> AsyncIterator[pb.WatchMeshResponse]:
        interval = request.interval_seconds or 1.0
        if math.isnan(interval) or not 0.2 <= interval <= 60:
            raise InvalidInput("interval_seconds must be in 0.2..60", field="interval_seconds")
        while True:
            yield pb.WatchMeshResponse(mesh=self._mesh())
            await asyncio.sleep(interval)  # the interval is what was asked for

    async def ExplainPlacement(
        self,
        request: pb.ExplainPlacementRequest,
        context: grpc.aio.ServicerContext[pb.ExplainPlacementRequest, pb.ExplainPlacementResponse],
    ) -> pb.ExplainPlacementResponse:
        if not request.model:
            raise InvalidInput("model is required", field="model")
        snapshot = self._view.snapshot
        lane = choose_lane(request.model, snapshot, self._default_pool)
        gauges = self._view.gauges_of(lane)
        reasons = [_explain(worker, gauges, snapshot) for _, worker in sorted(snapshot.workers.items())]
        return pb.ExplainPlacementResponse(workers=reasons, summary=_summary(gauges, snapshot))

    def _mesh(self) -> pb.Mesh:
        snapshot, gauges, now_ms = self._view.snapshot, self._view.gauges, self._lanes.clock_ms()
        return pb.Mesh(
            workers=[_worker(worker, now_ms) for _, worker in sorted(snapshot.workers.items())],
            models=known_models(snapshot, gauges),
            lanes=[_lane(gauge) for _, gauge in sorted(gauges.items(), key=lambda entry: entry[0].name)],
            router_id=self._router_id,
        )


def _worker(worker: WorkerRecord, now_ms: int) -> pb.WorkerStatus:
    resident = [name for name, record in worker.models.items() if record.state == models_pb2.MODEL_STATE_RESIDENT]
    return pb.WorkerStatus(
        worker_id=worker.worker_id,
        pool=worker.pool,
        device=worker.device,
        memory_bytes=worker.memory_bytes,
        used_bytes=worker.used_bytes,
        resident=sorted(resident),
        draining=worker.draining,
        heartbeat_age_seconds=max(0, now_ms - worker.heartbeat_ms) / 1000,
    )


def _lane(gauges: LaneGauges) -> pb.LaneStatus:
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
    )


def _explain(worker: WorkerRecord, gauges: LaneGauges, snapshot: FleetSnapshot) -> pb.PlacementReason:
    model = gauges.lane.model
    eligible, reason = True, "it may claim the model when there is work that its present copies cannot do sooner"
    failure = snapshot.failures.get(model, {}).get(worker.worker_id)
    state = worker.state(model)
    if worker.pool != gauges.lane.pool:
        eligible, reason = False, f"it is in pool {worker.pool}; the model is queued for pool {gauges.lane.pool}"
    elif state == models_pb2.MODEL_STATE_RESIDENT:
        record = worker.models[model]
        reason = f"it holds the model: {record.bytes:,} bytes, {record.tokens_per_second:,.0f} tokens/s"
    elif state == models_pb2.MODEL_STATE_LOADING:
        reason = "it is loading the model"
    elif state == models_pb2.MODEL_STATE_DOWNLOADING:
        record = worker.models[model]
        reason = f"it is fetching the model: {record.downloaded_bytes:,} of {record.download_bytes:,} bytes"
    elif worker.draining:
        eligible, reason = False, "it is draining"
    elif failure is not None:
        eligible, reason = False, f"it failed to load the model: {failure.message}"
    elif may_claim(gauges, snapshot, worker.worker_id):
        reason = f"it may claim the model now: {gauges.queued_tokens:,} tokens wait"
    return pb.PlacementReason(worker_id=worker.worker_id, eligible=eligible, reason=reason)


def _summary(gauges: LaneGauges, snapshot: FleetSnapshot) -> str:
    lane = gauges.lane
    verdict = snapshot.verdict(lane.model, lane.pool)
    holders = len([worker for worker in snapshot.resident_on(lane.model) if worker.pool == lane.pool])
    if verdict is not None:
        return f"No worker of pool {lane.pool} can serve {lane.model}: {verdict.message}"
    if not snapshot.in_pool(lane.pool):
        return f"Pool {lane.pool} has no worker: requests for {lane.model} wait until one comes or their deadline passes."
    if holders:
        return f"{holders} of pool {lane.pool} hold {lane.model}; {gauges.queued_tokens:,} tokens wait."
    if gauges.queued_tokens:
        return f"{gauges.queued_tokens:,} tokens wait for {lane.model}: the next eligible worker that asks for work loads it."
    return f"Nothing waits for {lane.model}; its first request makes an eligible worker load it."
