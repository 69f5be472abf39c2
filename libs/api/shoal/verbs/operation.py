"""The verbs of operators: the state of the mesh and of its models. See `shoal.verbs` for how
clients get them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from shoal.requests import codec
from shoal.status import Mesh, Model, Placement
from shoal.transport.methods import (
    EVICT_MODEL,
    EXPLAIN,
    GET_MESH,
    GET_MODEL,
    HEALTH,
    LIST_MODELS,
    LOAD_MODEL,
    PIN_MODEL,
    WATCH_MESH,
)
from shoal.v1 import mesh_pb2, models_pb2
from shoal.verbs.base import ClientBase, ModelsBase


async def mesh(client: ClientBase, *, timeout: float | None = None) -> Mesh:
    """Return the current state of workers, models and lanes. Raises ShoalError."""
    response = await client._caller.unary(GET_MESH, mesh_pb2.GetMeshRequest(), timeout=timeout)
    return codec.mesh(response.mesh)


async def explain(client: ClientBase, model: str, *, timeout: float | None = None) -> Placement:
    """Explain the placement of a model: the reasons for each worker, and the scheduler's plan.
    Raises ShoalError.
    """
    response = await client._caller.unary(
        EXPLAIN, mesh_pb2.ExplainPlacementRequest(model=model), timeout=timeout
    )
    return codec.placement(model, response)


async def healthy(client: ClientBase, service: str = "", *, timeout: float | None = None) -> bool:
    """Return True if the router (or one of its services, such as `shoal.v1.InferenceService`)
    reports SERVING. Raises ShoalError.
    """
    return await client._caller.unary(HEALTH, service, timeout=timeout)


def watch(client: ClientBase, interval_seconds: float = 1.0) -> AsyncGenerator[Mesh]:
    """Yield the state of the mesh now and after each interval, 0.2 to 60 seconds, as one router
    sees it. Raises ShoalError when that router is lost; calling `watch` again then asks the next
    router, if there is one.
    """
    request = mesh_pb2.WatchMeshRequest(interval_seconds=interval_seconds)
    return client._caller.stream(WATCH_MESH, request, lambda reply: [codec.mesh(reply.mesh)])


async def list_models(models: ModelsBase, *, timeout: float | None = None) -> list[Model]:
    """Return the models that a worker has on disk or in memory, or failed to load, ordered by id.
    Raises ShoalError.
    """
    response = await models._client._caller.unary(
        LIST_MODELS, models_pb2.ListModelsRequest(), timeout=timeout
    )
    return [codec.model(entry) for entry in response.models]


async def get_model(models: ModelsBase, model: str, *, timeout: float | None = None) -> Model:
    """Return the state of one model. Raises ModelNotFound if no worker can find it."""
    response = await models._client._caller.unary(
        GET_MODEL, models_pb2.GetModelRequest(model=model), timeout=timeout
    )
    return codec.model(response.model)


async def load_model(
    models: ModelsBase, model: str, *, pool: str = "", timeout: float | None = None
) -> Model:
    """Load a model on one more worker of the pool (default: its first), and wait until it is
    resident. Raises ShoalError.
    """
    response = await models._client._caller.unary(
        LOAD_MODEL, models_pb2.LoadModelRequest(model=model, pool=pool), timeout=timeout
    )
    return codec.model(response.model)


async def evict_model(models: ModelsBase, model: str, *, timeout: float | None = None) -> list[str]:
    """Unload a model everywhere, after the batches in flight; return the ids of these workers.
    Raises ShoalError.
    """
    response = await models._client._caller.unary(
        EVICT_MODEL, models_pb2.EvictModelRequest(model=model), timeout=timeout
    )
    return list(response.worker_ids)


async def pin_model(
    models: ModelsBase, model: str, pinned: bool = True, *, timeout: float | None = None
) -> Model:
    """Pin a model where it is resident, or with `pinned=False` unpins it; return its new state.
    Raises ShoalError.
    """
    response = await models._client._caller.unary(
        PIN_MODEL, models_pb2.PinModelRequest(model=model, pinned=pinned), timeout=timeout
    )
    return codec.model(response.model)
