from shoal.v1 import models_pb2 as _models_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "pool", "device", "memory_bytes", "used_bytes", "resident", "draining", "heartbeat_age_seconds", "host_memory_bytes", "host_used_bytes", "preempted_in_seconds", "device_seconds", "wasted_seconds", "kernels")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOST_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WASTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pool: str
    device: str
    memory_bytes: int
    used_bytes: int
    resident: _containers.RepeatedScalarFieldContainer[str]
    draining: bool
    heartbeat_age_seconds: float
    host_memory_bytes: int
    host_used_bytes: int
    preempted_in_seconds: float
    device_seconds: float
    wasted_seconds: float
    kernels: str
    def __init__(self, worker_id: _Optional[str] = ..., pool: _Optional[str] = ..., device: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., resident: _Optional[_Iterable[str]] = ..., draining: bool = ..., heartbeat_age_seconds: _Optional[float] = ..., host_memory_bytes: _Optional[int] = ..., host_used_bytes: _Optional[int] = ..., preempted_in_seconds: _Optional[float] = ..., device_seconds: _Optional[float] = ..., wasted_seconds: _Optional[float] = ..., kernels: _Optional[str] = ...) -> None: ...

class LaneStatus(_message.Message):
    __slots__ = ("pool", "model", "adapter", "queued_jobs", "queued_tokens", "leased_tokens", "enqueued_jobs", "done_jobs", "expired_jobs", "dead_jobs", "cancelled_jobs", "enqueued_tokens", "oldest_seconds")
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    QUEUED_JOBS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENQUEUED_JOBS_FIELD_NUMBER: _ClassVar[int]
    DONE_JOBS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_JOBS_FIELD_NUMBER: _ClassVar[int]
    DEAD_JOBS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_JOBS_FIELD_NUMBER: _ClassVar[int]
    ENQUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    model: str
    adapter: str
    queued_jobs: int
    queued_tokens: int
    leased_tokens: int
    enqueued_jobs: int
    done_jobs: int
    expired_jobs: int
    dead_jobs: int
    cancelled_jobs: int
    enqueued_tokens: int
    oldest_seconds: float
    def __init__(self, pool: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., queued_jobs: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., leased_tokens: _Optional[int] = ..., enqueued_jobs: _Optional[int] = ..., done_jobs: _Optional[int] = ..., expired_jobs: _Optional[int] = ..., dead_jobs: _Optional[int] = ..., cancelled_jobs: _Optional[int] = ..., enqueued_tokens: _Optional[int] = ..., oldest_seconds: _Optional[float] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("pool", "desired_workers")
    POOL_FIELD_NUMBER: _ClassVar[int]
    DESIRED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    desired_workers: int
    def __init__(self, pool: _Optional[str] = ..., desired_workers: _Optional[int] = ...) -> None: ...

class SchedulerStatus(_message.Message):
    __slots__ = ("scheduler_id", "plan", "age_seconds")
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    scheduler_id: str
    plan: int
    age_seconds: float
    def __init__(self, scheduler_id: _Optional[str] = ..., plan: _Optional[int] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class ProcessStatus(_message.Message):
    __slots__ = ("name", "state", "restarts", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    restarts: int
    detail: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., restarts: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class Mesh(_message.Message):
    __slots__ = ("workers", "models", "lanes", "router_id", "scheduler", "pools", "processes")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    models: _containers.RepeatedCompositeFieldContainer[_models_pb2.Model]
    lanes: _containers.RepeatedCompositeFieldContainer[LaneStatus]
    router_id: str
    scheduler: SchedulerStatus
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    processes: _containers.RepeatedCompositeFieldContainer[ProcessStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[_models_pb2.Model, _Mapping]]] = ..., lanes: _Optional[_Iterable[_Union[LaneStatus, _Mapping]]] = ..., router_id: _Optional[str] = ..., scheduler: _Optional[_Union[SchedulerStatus, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., processes: _Optional[_Iterable[_Union[ProcessStatus, _Mapping]]] = ...) -> None: ...

class GetMeshRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMeshResponse(_message.Message):
    __slots__ = ("mesh",)
    MESH_FIELD_NUMBER: _ClassVar[int]
    mesh: Mesh
    def __init__(self, mesh: _Optional[_Union[Mesh, _Mapping]] = ...) -> None: ...

class WatchMeshRequest(_message.Message):
    __slots__ = ("interval_seconds",)
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    def __init__(self, interval_seconds: _Optional[float] = ...) -> None: ...

class WatchMeshResponse(_message.Message):
    __slots__ = ("mesh",)
    MESH_FIELD_NUMBER: _ClassVar[int]
    mesh: Mesh
    def __init__(self, mesh: _Optional[_Union[Mesh, _Mapping]] = ...) -> None: ...

class ExplainPlacementRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class PlacementReason(_message.Message):
    __slots__ = ("worker_id", "eligible", "reason", "score", "pool")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    eligible: bool
    reason: str
    score: float
    pool: str
    def __init__(self, worker_id: _Optional[str] = ..., eligible: bool = ..., reason: _Optional[str] = ..., score: _Optional[float] = ..., pool: _Optional[str] = ...) -> None: ...

class ExplainPlacementResponse(_message.Message):
    __slots__ = ("workers", "summary", "scheduler", "plan")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[PlacementReason]
    summary: str
    scheduler: SchedulerStatus
    plan: str
    def __init__(self, workers: _Optional[_Iterable[_Union[PlacementReason, _Mapping]]] = ..., summary: _Optional[str] = ..., scheduler: _Optional[_Union[SchedulerStatus, _Mapping]] = ..., plan: _Optional[str] = ...) -> None: ...
