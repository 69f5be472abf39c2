"""The gRPC service ModelService: it lists models, and orders workers to load, evict and pin
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
from shoal.v1 import models_pb2 as pb
from shoal.v1 import models_pb2_grpc, worker_pb2

from libs.aliases import AliasStore
from libs.errors import DeadlinePassed, ModelNotFound, NoCapacity
from libs.fleet import LOADING_STATES, Fleet, WorkerRecord
from libs.serving.watched import Watched
from libs.telemetry.logs import fields
from services.router.admission.routing.routes import Routes, refuse_pool
from services.router.admission.validation.requests import check_model
from services.router.lanes.codec import from_failure
from services.router.state.aliases import resolve
from services.router.state.view import RouterView, describe, is_known, known_models

log = logging.getLogger(__name__)


class ModelService(models_pb2_grpc.ModelServiceServicer):
    """Lists models and gives orders to workers. A worker receives an order in the reply to its next
    heartbeat. Calls to load or pin return when the workers have executed the order.
    """

    def __init__(
        self,
        fleet: Fleet,
        view: RouterView,
        aliases: AliasStore,
        *,
        routes: Watched[Routes],
        default_deadline_seconds: float,
    ) -> None:
        self._fleet = fleet
        self._view = view
        self._aliases = aliases
        self._routes = routes
        self._default_deadline_seconds = default_deadline_seconds

    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=known_models(self._view.snapshot, self._view.gauges))

    async def GetModel(
        self,
        request: pb.GetModelRequest,
        context: grpc.aio.ServicerContext[pb.GetModelRequest, pb.GetModelResponse],
    ) -> pb.GetModelResponse:
        alias = await resolve(self._aliases, request.model)
        model = request.model if alias is None else alias.model
        self._require_known(model)
        return pb.GetModelResponse(model=self._describe(model))

    async def LoadModel(
        self,
        request: pb.LoadModelRequest,
        context: grpc.aio.ServicerContext[pb.LoadModelRequest, pb.LoadModelResponse],
    ) -> pb.LoadModelResponse:
        check_model(request.model)  # workers will report this model, if only as failed
        snapshot, routes = self._view.snapshot, self._routes.content
        refuse_pool(request.pool, routes, snapshot)
        pool = request.pool or next(
            iter(routes.model_pools(request.model, snapshot)), routes.default
        )
        async with self._within(context.time_remaining(), f"{request.model} was loaded"):
            await self._load(request.model, pool)
        return pb.LoadModelResponse(model=self._describe(request.model))

    async def EvictModel(
        self,
        request: pb.EvictModelRequest,
        context: grpc.aio.ServicerContext[pb.EvictModelRequest, pb.EvictModelResponse],
    ) -> pb.EvictModelResponse:
        self._require_known(request.model)
        holders = self._view.snapshot.resident_on(request.model)
        for worker in holders:
            await self._order(worker, worker_pb2.Directive(evict_model=request.model))
        return pb.EvictModelResponse(worker_ids=sorted(worker.worker_id for worker in holders))

    async def PinModel(
        self,
        request: pb.PinModelRequest,
        context: grpc.aio.ServicerContext[pb.PinModelRequest, pb.PinModelResponse],
    ) -> pb.PinModelResponse:
        self._require_known(request.model)
        what = f"{request.model} was {'' if request.pinned else 'un'}pinned"
        async with self._within(context.time_remaining(), what):
            holders = self._view.snapshot.resident_on(request.model)
            for worker in holders:
                await self._order(worker, _pin(request.model, request.pinned))
            for worker in holders:
                await self._pinned(request.model, request.pinned, worker)
        return pb.PinModelResponse(model=self._describe(request.model))

    @asynccontextmanager
    async def _within(self, seconds: float | None, what: str) -> AsyncIterator[None]:
        """Bound the wait by the call's deadline. Raises DeadlinePassed naming the unfinished
        order.
        """
        try:
            async with asyncio.timeout(
                self._default_deadline_seconds if seconds is None else seconds
            ):
                yield
        except TimeoutError:
            raise DeadlinePassed(f"the deadline passed before {what}; the order stands") from None

    def _describe(self, model: str) -> pb.Model:
        return describe(model, self._view.snapshot, self._view.gauges)

    def _require_known(self, model: str) -> None:
        check_model(model)
        if not is_known(model, self._view.snapshot):
            raise ModelNotFound(f"no worker knows {model}", field="model")

    async def _load(self, model: str, pool: str) -> None:
        workers = self._view.snapshot.in_pool(pool)
        if not workers:
            raise NoCapacity(f"pool {pool} has no worker", field="pool")
        place = self._choose_worker(model, workers)
        if place is not None:
            await self._order(place, worker_pb2.Directive(load_model=model))
        # If no other worker can load a copy, wait for the copies that are being loaded.
        loading = [worker for worker in workers if worker.state(model) in LOADING_STATES]
        for worker in [place] if place is not None else loading:
            await self._resident(model, worker)

    def _choose_worker(self, model: str, workers: Sequence[WorkerRecord]) -> WorkerRecord | None:
        """Return the worker that shall load another copy, or None if every worker that is not
        shutting down holds the model or is loading it.

        Workers on which the model has not failed to load are preferred, then those with the most
        free memory.
        """
        failed = self._view.snapshot.failures.get(model, {})
        held = (*LOADING_STATES, pb.MODEL_STATE_RESIDENT)
        free = [
            worker
            for worker in workers
            if worker.state(model) not in held and worker.preempted_in_seconds is None
        ]
        return max(
            free,
            key=lambda worker: (
                worker.worker_id not in failed,
                worker.memory_bytes - worker.used_bytes,
                worker.worker_id,
            ),
            default=None,
        )

    async def _order(self, worker: WorkerRecord, directive: worker_pb2.Directive) -> None:
        number = await self._fleet.order(worker.worker_id, worker.epoch, directive)
        order = directive.WhichOneof("order") or ""
        log.info(
            "worker ordered",
            extra=fields({"worker": worker.worker_id, "order": order, "seq": number}),
        )

    async def _resident(self, model: str, worker: WorkerRecord) -> None:
        """Wait until the model is resident on the worker. Raises the error of a failed load, or
        NoCapacity if the worker is gone.
        """
        earlier = self._view.snapshot.failures.get(model, {}).get(worker.worker_id)
        while True:
            snapshot = self._view.snapshot
            now = snapshot.workers.get(worker.worker_id)
            if now is None or now.epoch != worker.epoch:
                raise NoCapacity(f"worker {worker.worker_id} left before it had loaded {model}")
            if now.state(model) == pb.MODEL_STATE_RESIDENT:
                return
            failure = snapshot.failures.get(model, {}).get(worker.worker_id)
            if (
                failure is not None
                and failure is not earlier
                and now.state(model) == pb.MODEL_STATE_FAILED
            ):
                raise from_failure(failure)
            await self._view.changed()

    async def _pinned(self, model: str, pinned: bool, worker: WorkerRecord) -> None:
        """Wait until the worker reports that it has pinned or unpinned the model, or that the model
        is no longer resident.
        """
        while True:
            now = self._view.snapshot.workers.get(worker.worker_id)
            if (
                now is None
                or now.epoch != worker.epoch
                or now.state(model) != pb.MODEL_STATE_RESIDENT
            ):
                return
            if now.models[model].pinned == pinned:
                return
            await self._view.changed()


def _pin(model: str, pinned: bool) -> worker_pb2.Directive:
    return (
        worker_pb2.Directive(pin_model=model) if pinned else worker_pb2.Directive(unpin_model=model)
    )
