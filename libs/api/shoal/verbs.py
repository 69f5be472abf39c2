"""What a client can do. Each verb is written once, as a coroutine function whose first argument is the client; `shoal.client` binds
it to `AsyncClient` as it is and to `Client` through `blocking`.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence

from shoal import codec, plans, results
from shoal.addresses import DEFAULT_ADDRESS, Addresses, parse
from shoal.call import Caller, Limits, Progress
from shoal.plans import (
    Aggregation,
    Classify,
    Entities,
    Given,
    Item,
    Items,
    OnInvalid,
    Priority,
    Relations,
    Role,
    Scale,
    Task,
    Truncation,
)
from shoal.results import DataType, EncodeResult, ExtractResult, Form, ScoreResult
from shoal.retry import RetryPolicy
from shoal.status import Mesh, Model, Placement
from shoal.transport import (
    EVICT_MODEL,
    EXPLAIN,
    GET_MESH,
    GET_MODEL,
    HEALTH,
    LIST_MODELS,
    LOAD_MODEL,
    PIN_MODEL,
    Metadata,
    Transport,
)
from shoal.trust import Tls, Trust, flag, tls_from, token_from
from shoal.v1 import mesh_pb2, models_pb2

_HEADER = re.compile(r"[ -~]*")


class ClientBase:
    """What both clients are made of.

    `address`: `host:port`, or several with commas between them: one is used until it fails, then the next. Default: the environment
    variable SHOAL_ADDRESS, else 127.0.0.1:50051. `tenant`: who is asking, for fair queueing. `token`: a bearer token, or a function
    that gives the current one, such as `TokenFile(path)`; default: SHOAL_TOKEN, else what the file SHOAL_TOKEN_FILE has. It is sent
    only over TLS or to this machine, unless `token_without_tls` (SHOAL_TOKEN_WITHOUT_TLS=1). `tls`: True for the system's
    certificates, `Tls(...)`, or False; default: as SHOAL_TLS=1, SHOAL_TLS_CA, SHOAL_TLS_CERT, SHOAL_TLS_KEY and SHOAL_TLS_NAME say.
    Files of certificates and tokens may change at any time. `timeout`: seconds for one request, retries included. A call of more
    than `request_items` items or about `request_characters` characters is split; `concurrency` of its requests are in flight at a
    time. Nothing is connected before the first call. Raises ValueError for arguments that cannot work.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        tenant: str = "",
        token: str | Callable[[], str] | None = None,
        token_without_tls: bool | None = None,
        tls: Tls | bool | None = None,
        timeout: float = 60.0,
        concurrency: int = 4,
        request_items: int = 512,
        request_characters: int = 1 << 20,
        retry: RetryPolicy | None = None,
    ) -> None:
        addresses = parse(address or os.environ.get("SHOAL_ADDRESS") or DEFAULT_ADDRESS)
        trust = Trust(
            tls_from() if tls is None else Tls() if tls is True else tls or None,
            token_from() if token is None else token,
            flag(os.environ, "SHOAL_TOKEN_WITHOUT_TLS") if token_without_tls is None else token_without_tls,
        )
        trust.check(addresses)
        self.address = ",".join(addresses)
        self._caller = Caller(
            self._open_transport(trust.tls),
            # Many clients with one list use all of it.
            Addresses(addresses, start=random.randrange(len(addresses))),  # noqa: S311
            metadata=_metadata(tenant, trust),
            limits=Limits(timeout, concurrency, request_items, request_characters),
            policy=retry or RetryPolicy(),
        )

    def _open_transport(self, tls: Tls | None) -> Transport:
        raise NotImplementedError


class ModelsBase:
    """Shows and steers models; reached as `client.models`."""

    def __init__(self, client: ClientBase) -> None:
        self._client = client


def _metadata(tenant: str, trust: Trust) -> Callable[[], Metadata]:
    if not _HEADER.fullmatch(tenant):  # gRPC would refuse it with an error that shows all headers, the token's too.
        raise ValueError(f"a tenant's name must be visible ASCII characters, not {tenant!r}")
    fixed: Metadata = (("x-shoal-tenant", tenant),) if tenant else ()
    return lambda: (*fixed, *trust.metadata())


async def encode(
    client: ClientBase,
    model: str,
    items: Items,
    *,
    role: Role | None = None,
    representations: Form | Sequence[Form] = (),
    data_type: DataType | None = None,
    dimensions: int = 0,
    normalize: bool | None = None,
    instruction: str = "",
    truncation: Truncation | None = None,
    adapter: str = "",
    pool: str = "",
    priority: Priority | None = None,
    on_invalid: OnInvalid = "raise",
    timeout: float | None = None,
    on_progress: Progress | None = None,
    writable: bool = False,
) -> EncodeResult:
    """Turns texts into vectors; row i of the answer is for item i, and a single text is a list of one.

    `role` chooses the model's prompt, `instruction` replaces it. `representations`: default the model's main one. `data_type`:
    default float32. `dimensions`: keep the first so many numbers (Matryoshka; 0: all); `normalize` comes after that, default as the
    model says. `truncation` "none" refuses items that are too long, "end" (default) and "start" cut there. `adapter`: a LoRA
    adapter of the model, `org/name`. `pool`: the workers to serve it, default as the mesh's catalog says. `priority`: "interactive"
    (default) or "bulk". `on_invalid` "skip": an item that is empty, too long or no text does not fail the call; its row is NaN, and
    `result.skipped` says why. `on_progress(done, total)` is called after each part of a long list. `writable`: arrays may be
    changed. An empty list needs no router: its answer has no rows. Raises ShoalError.
    """
    plan = plans.encode(
        model,
        items,
        role=role,
        representations=representations,
        data_type=data_type,
        dimensions=dimensions,
        normalize=normalize,
        instruction=instruction,
        truncation=truncation,
        adapter=adapter,
        pool=pool,
        priority=priority,
        on_invalid=on_invalid,
    )
    result = await client._caller.run(plan, timeout=timeout, on_progress=on_progress)
    return results.writable(result) if writable else result


async def score(
    client: ClientBase,
    model: str,
    query: Item,
    documents: Items,
    *,
    instruction: str = "",
    scale: Scale | None = None,
    top_n: int = 0,
    truncation: Truncation | None = None,
    adapter: str = "",
    pool: str = "",
    priority: Priority | None = None,
    on_invalid: OnInvalid = "raise",
    timeout: float | None = None,
    on_progress: Progress | None = None,
    writable: bool = False,
) -> ScoreResult:
    """Says how well each document answers the query: scores in document order, and the `top_n` best (0: all) as `ranking`.

    `scale`: "logit" or "probability", default the model's own. The rest as for `encode`. Raises ShoalError.
    """
    plan = plans.score(
        model,
        query,
        documents,
        instruction=instruction,
        scale=scale,
        top_n=top_n,
        truncation=truncation,
        adapter=adapter,
        pool=pool,
        priority=priority,
        on_invalid=on_invalid,
    )
    result = await client._caller.run(plan, timeout=timeout, on_progress=on_progress)
    return results.writable(result) if writable else result


async def extract(
    client: ClientBase,
    model: str,
    items: Items,
    task: Task,
    *,
    truncation: Truncation | None = None,
    adapter: str = "",
    pool: str = "",
    priority: Priority | None = None,
    on_invalid: OnInvalid = "raise",
    timeout: float | None = None,
    on_progress: Progress | None = None,
) -> ExtractResult:
    """Finds in each item what `task` (`Entities`, `Classify`, `Relations`, `Regions` or `ReadText`) asks for. Raises ShoalError."""
    plan = plans.extract(
        model, items, task, truncation=truncation, adapter=adapter, pool=pool, priority=priority, on_invalid=on_invalid
    )
    return await client._caller.run(plan, timeout=timeout, on_progress=on_progress)


async def entities(
    client: ClientBase,
    model: str,
    items: Items,
    labels: Sequence[str] = (),
    *,
    threshold: float | None = None,
    flat: bool | None = None,
    aggregation: Aggregation | None = None,
    truncation: Truncation | None = None,
    adapter: str = "",
    pool: str = "",
    priority: Priority | None = None,
    on_invalid: OnInvalid = "raise",
    timeout: float | None = None,
    on_progress: Progress | None = None,
) -> ExtractResult:
    """Finds named things: `result[i].entities`, in order of their start. `extract` with `Entities(...)`. Raises ShoalError."""
    task = Entities(labels=labels, threshold=threshold, flat=flat, aggregation=aggregation)
    plan = plans.extract(
        model, items, task, truncation=truncation, adapter=adapter, pool=pool, priority=priority, on_invalid=on_invalid
    )
    return await client._caller.run(plan, timeout=timeout, on_progress=on_progress)


async def classify(
    client: ClientBase,
    model: str,
    items: Items,
    labels: Sequence[str] = (),
    *,
    multi_label: bool | None = None,
    threshold: float | None = None,
    hypothesis: str = "",
    among_labels: bool = False,
    truncation: Truncation | None = None,
    adapter: str = "",
    pool: str = "",
    priority: Priority | None = None,
    on_invalid: OnInvalid = "raise",
    timeout: float | None = None,
    on_progress: Progress | None = None,
) -> ExtractResult:
    """Says which labels fit: `result[i].labels`, best first. `extract` with `Classify(...)`. Raises ShoalError."""
    task = Classify(labels=labels, multi_label=multi_label, threshold=threshold, hypothesis=hypothesis, among_labels=among_labels)
    plan = plans.extract(
        model, items, task, truncation=truncation, adapter=adapter, pool=pool, priority=priority, on_invalid=on_invalid
    )
    return await client._caller.run(plan, timeout=timeout, on_progress=on_progress)


async def relations(
    client: ClientBase,
    model: str,
    items: Items,
    labels: Sequence[str],
    *,
    entity_labels: Sequence[str] = (),
    entities: Sequence[Sequence[Given]] = (),
    threshold: float | None = None,
    truncation: Truncation | None = None,
    adapter: str = "",
    pool: str = "",
    priority: Priority | None = None,
    on_invalid: OnInvalid = "raise",
    timeout: float | None = None,
    on_progress: Progress | None = None,
) -> ExtractResult:
    """Finds how things relate: `result[i].relations`, best first. `extract` with `Relations(...)`. Raises ShoalError.

    A model either finds the things by `entity_labels`, or is given them: `entities` has a list for each item, of `(start, end)`,
    `(start, end, label)` or the `Entity` objects of another model's answer.
    """
    task = Relations(labels=labels, entity_labels=entity_labels, threshold=threshold, entities=entities)
    plan = plans.extract(
        model, items, task, truncation=truncation, adapter=adapter, pool=pool, priority=priority, on_invalid=on_invalid
    )
    return await client._caller.run(plan, timeout=timeout, on_progress=on_progress)


async def mesh(client: ClientBase, *, timeout: float | None = None) -> Mesh:
    """Workers, models and lanes as they are now. Raises ShoalError."""
    response = await client._caller.ask(GET_MESH, mesh_pb2.GetMeshRequest(), timeout=timeout)
    return codec.mesh(response.mesh)


async def explain(client: ClientBase, model: str, *, timeout: float | None = None) -> Placement:
    """Why a model is where it is, worker by worker, and what will happen next. Raises ShoalError."""
    response = await client._caller.ask(EXPLAIN, mesh_pb2.ExplainPlacementRequest(model=model), timeout=timeout)
    return codec.placement(model, response)


async def healthy(client: ClientBase, service: str = "", *, timeout: float | None = None) -> bool:
    """Whether the router says that it (or one of its services, such as `shoal.v1.InferenceService`) serves. Raises ShoalError."""
    return await client._caller.ask(HEALTH, service, timeout=timeout)


async def list_models(models: ModelsBase, *, timeout: float | None = None) -> list[Model]:
    """Models that a worker has on disk, holds, or failed to load, by id. Raises ShoalError."""
    response = await models._client._caller.ask(LIST_MODELS, models_pb2.ListModelsRequest(), timeout=timeout)
    return [codec.model(entry) for entry in response.models]


async def get_model(models: ModelsBase, model: str, *, timeout: float | None = None) -> Model:
    """One model. Raises ModelNotFound if no worker knows it."""
    response = await models._client._caller.ask(GET_MODEL, models_pb2.GetModelRequest(model=model), timeout=timeout)
    return codec.model(response.model)


async def load_model(models: ModelsBase, model: str, *, pool: str = "", timeout: float | None = None) -> Model:
    """Makes a model resident on one more worker of the pool (default: its first) and waits until it is. Raises ShoalError."""
    response = await models._client._caller.ask(LOAD_MODEL, models_pb2.LoadModelRequest(model=model, pool=pool), timeout=timeout)
    return codec.model(response.model)


async def evict_model(models: ModelsBase, model: str, *, timeout: float | None = None) -> list[str]:
    """Unloads a model everywhere, after the batches in flight; the ids of the workers that were told so. Raises ShoalError."""
    response = await models._client._caller.ask(EVICT_MODEL, models_pb2.EvictModelRequest(model=model), timeout=timeout)
    return list(response.worker_ids)


async def pin_model(models: ModelsBase, model: str, pinned: bool = True, *, timeout: float | None = None) -> Model:
    """Keeps a model resident where it is; `pinned=False` ends that. The model as it is then. Raises ShoalError."""
    response = await models._client._caller.ask(PIN_MODEL, models_pb2.PinModelRequest(model=model, pinned=pinned), timeout=timeout)
    return codec.model(response.model)
