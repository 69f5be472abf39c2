from shoal.v1 import inference_pb2 as _inference_pb2
from shoal.v1 import models_pb2 as _models_pb2
from shoal.v1 import multiplex_pb2 as _multiplex_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Lane(_message.Message):
    __slots__ = ("pool", "model", "adapter")
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    pool: str
    model: str
    adapter: str
    def __init__(self, pool: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("job_id", "request_id", "encode", "score", "extract", "tokenize", "detokenize", "first_item", "deadline_unix_ms", "queued_unix_ms", "traceparent", "tenant", "weight", "stream_to", "item_answer_bytes", "document_pages", "document_bytes", "max_chunks")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    EXTRACT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_ITEM_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STREAM_TO_FIELD_NUMBER: _ClassVar[int]
    ITEM_ANSWER_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_PAGES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    request_id: str
    encode: _inference_pb2.EncodeRequest
    score: _inference_pb2.ScoreRequest
    extract: _inference_pb2.ExtractRequest
    tokenize: _inference_pb2.TokenizeRequest
    detokenize: _inference_pb2.DetokenizeRequest
    first_item: int
    deadline_unix_ms: int
    queued_unix_ms: int
    traceparent: str
    tenant: str
    weight: float
    stream_to: str
    item_answer_bytes: int
    document_pages: int
    document_bytes: int
    max_chunks: int
    def __init__(self, job_id: _Optional[str] = ..., request_id: _Optional[str] = ..., encode: _Optional[_Union[_inference_pb2.EncodeRequest, _Mapping]] = ..., score: _Optional[_Union[_inference_pb2.ScoreRequest, _Mapping]] = ..., extract: _Optional[_Union[_inference_pb2.ExtractRequest, _Mapping]] = ..., tokenize: _Optional[_Union[_inference_pb2.TokenizeRequest, _Mapping]] = ..., detokenize: _Optional[_Union[_inference_pb2.DetokenizeRequest, _Mapping]] = ..., first_item: _Optional[int] = ..., deadline_unix_ms: _Optional[int] = ..., queued_unix_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., tenant: _Optional[str] = ..., weight: _Optional[float] = ..., stream_to: _Optional[str] = ..., item_answer_bytes: _Optional[int] = ..., document_pages: _Optional[int] = ..., document_bytes: _Optional[int] = ..., max_chunks: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("worker_id", "epoch", "pool", "lanes", "budget_tokens", "budget_jobs", "wait_seconds", "can_load", "wire_version", "batch_id", "asked_again", "except_tenants")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_JOBS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CAN_LOAD_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ASKED_AGAIN_FIELD_NUMBER: _ClassVar[int]
    EXCEPT_TENANTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    pool: str
    lanes: _containers.RepeatedCompositeFieldContainer[Lane]
    budget_tokens: int
    budget_jobs: int
    wait_seconds: float
    can_load: bool
    wire_version: int
    batch_id: str
    asked_again: bool
    except_tenants: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., pool: _Optional[str] = ..., lanes: _Optional[_Iterable[_Union[Lane, _Mapping]]] = ..., budget_tokens: _Optional[int] = ..., budget_jobs: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., can_load: bool = ..., wire_version: _Optional[int] = ..., batch_id: _Optional[str] = ..., asked_again: bool = ..., except_tenants: _Optional[_Iterable[str]] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("lane", "batch_id", "jobs", "lease_ms", "load_model", "load_adapter", "heartbeat_now", "now_unix_ms")
    LANE_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_NOW_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    lane: Lane
    batch_id: str
    jobs: _containers.RepeatedScalarFieldContainer[bytes]
    lease_ms: int
    load_model: str
    load_adapter: str
    heartbeat_now: bool
    now_unix_ms: int
    def __init__(self, lane: _Optional[_Union[Lane, _Mapping]] = ..., batch_id: _Optional[str] = ..., jobs: _Optional[_Iterable[bytes]] = ..., lease_ms: _Optional[int] = ..., load_model: _Optional[str] = ..., load_adapter: _Optional[str] = ..., heartbeat_now: bool = ..., now_unix_ms: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reason", "message", "field", "retry_after_seconds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    field: str
    retry_after_seconds: float
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...

class JobResult(_message.Message):
    __slots__ = ("encode", "score", "extract", "failure", "tokenize", "detokenize")
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    EXTRACT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_FIELD_NUMBER: _ClassVar[int]
    encode: _inference_pb2.EncodeResponse
    score: _inference_pb2.ScoreResponse
    extract: _inference_pb2.ExtractResponse
    failure: Failure
    tokenize: _inference_pb2.TokenizeResponse
    detokenize: _inference_pb2.DetokenizeResponse
    def __init__(self, encode: _Optional[_Union[_inference_pb2.EncodeResponse, _Mapping]] = ..., score: _Optional[_Union[_inference_pb2.ScoreResponse, _Mapping]] = ..., extract: _Optional[_Union[_inference_pb2.ExtractResponse, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., tokenize: _Optional[_Union[_inference_pb2.TokenizeResponse, _Mapping]] = ..., detokenize: _Optional[_Union[_inference_pb2.DetokenizeResponse, _Mapping]] = ...) -> None: ...

class CompletedJob(_message.Message):
    __slots__ = ("job_id", "result")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    result: bytes
    def __init__(self, job_id: _Optional[str] = ..., result: _Optional[bytes] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("worker_id", "lane", "batch_id", "jobs", "release")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    lane: Lane
    batch_id: str
    jobs: _containers.RepeatedCompositeFieldContainer[CompletedJob]
    release: bool
    def __init__(self, worker_id: _Optional[str] = ..., lane: _Optional[_Union[Lane, _Mapping]] = ..., batch_id: _Optional[str] = ..., jobs: _Optional[_Iterable[_Union[CompletedJob, _Mapping]]] = ..., release: bool = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    def __init__(self, accepted: _Optional[int] = ...) -> None: ...

class HeldBatch(_message.Message):
    __slots__ = ("lane", "batch_id")
    LANE_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    lane: Lane
    batch_id: str
    def __init__(self, lane: _Optional[_Union[Lane, _Mapping]] = ..., batch_id: _Optional[str] = ...) -> None: ...

class WorkerModel(_message.Message):
    __slots__ = ("model", "state", "bytes", "load_seconds", "tokens_per_second", "idle_seconds", "pinned", "card", "failure", "downloaded_bytes", "download_bytes", "host_bytes", "activation_bytes_per_token", "adapters", "leaving", "held_jobs", "resident_seconds", "failed_adapters", "measured_batch_tokens", "data_type", "tokens_per_byte")
    class FailedAdaptersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Failure
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DOWNLOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    HELD_JOBS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    model: str
    state: _models_pb2.ModelState
    bytes: int
    load_seconds: float
    tokens_per_second: float
    idle_seconds: float
    pinned: bool
    card: _models_pb2.ModelCard
    failure: Failure
    downloaded_bytes: int
    download_bytes: int
    host_bytes: int
    activation_bytes_per_token: float
    adapters: _containers.RepeatedScalarFieldContainer[str]
    leaving: bool
    held_jobs: int
    resident_seconds: float
    failed_adapters: _containers.MessageMap[str, Failure]
    measured_batch_tokens: int
    data_type: str
    tokens_per_byte: float
    def __init__(self, model: _Optional[str] = ..., state: _Optional[_Union[_models_pb2.ModelState, str]] = ..., bytes: _Optional[int] = ..., load_seconds: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., pinned: bool = ..., card: _Optional[_Union[_models_pb2.ModelCard, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., downloaded_bytes: _Optional[int] = ..., download_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., activation_bytes_per_token: _Optional[float] = ..., adapters: _Optional[_Iterable[str]] = ..., leaving: bool = ..., held_jobs: _Optional[int] = ..., resident_seconds: _Optional[float] = ..., failed_adapters: _Optional[_Mapping[str, Failure]] = ..., measured_batch_tokens: _Optional[int] = ..., data_type: _Optional[str] = ..., tokens_per_byte: _Optional[float] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker_id", "epoch", "pool", "device", "memory_bytes", "used_bytes", "models", "batches", "draining", "batch_tokens", "leaving", "directive_seq", "host_memory_bytes", "host_used_bytes", "preempted_in_seconds", "plan", "wire_version", "device_seconds", "wasted_seconds", "subject", "kernels", "local_models_only", "on_disk", "on_disk_tag")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_SEQ_FIELD_NUMBER: _ClassVar[int]
    HOST_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WASTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_MODELS_ONLY_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_TAG_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    pool: str
    device: str
    memory_bytes: int
    used_bytes: int
    models: _containers.RepeatedCompositeFieldContainer[WorkerModel]
    batches: _containers.RepeatedCompositeFieldContainer[HeldBatch]
    draining: bool
    batch_tokens: int
    leaving: bool
    directive_seq: int
    host_memory_bytes: int
    host_used_bytes: int
    preempted_in_seconds: float
    plan: int
    wire_version: int
    device_seconds: float
    wasted_seconds: float
    subject: str
    kernels: str
    local_models_only: bool
    on_disk: _containers.RepeatedCompositeFieldContainer[WorkerModel]
    on_disk_tag: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., pool: _Optional[str] = ..., device: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., models: _Optional[_Iterable[_Union[WorkerModel, _Mapping]]] = ..., batches: _Optional[_Iterable[_Union[HeldBatch, _Mapping]]] = ..., draining: bool = ..., batch_tokens: _Optional[int] = ..., leaving: bool = ..., directive_seq: _Optional[int] = ..., host_memory_bytes: _Optional[int] = ..., host_used_bytes: _Optional[int] = ..., preempted_in_seconds: _Optional[float] = ..., plan: _Optional[int] = ..., wire_version: _Optional[int] = ..., device_seconds: _Optional[float] = ..., wasted_seconds: _Optional[float] = ..., subject: _Optional[str] = ..., kernels: _Optional[str] = ..., local_models_only: bool = ..., on_disk: _Optional[_Iterable[_Union[WorkerModel, _Mapping]]] = ..., on_disk_tag: _Optional[str] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("seq", "load_model", "evict_model", "pin_model", "unpin_model", "drain", "plan")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LOAD_MODEL_FIELD_NUMBER: _ClassVar[int]
    EVICT_MODEL_FIELD_NUMBER: _ClassVar[int]
    PIN_MODEL_FIELD_NUMBER: _ClassVar[int]
    UNPIN_MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    seq: int
    load_model: str
    evict_model: str
    pin_model: str
    unpin_model: str
    drain: bool
    plan: int
    def __init__(self, seq: _Optional[int] = ..., load_model: _Optional[str] = ..., evict_model: _Optional[str] = ..., pin_model: _Optional[str] = ..., unpin_model: _Optional[str] = ..., drain: bool = ..., plan: _Optional[int] = ...) -> None: ...

class CancelledJobs(_message.Message):
    __slots__ = ("batch_id", "job_ids", "lost")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    job_ids: _containers.RepeatedScalarFieldContainer[str]
    lost: bool
    def __init__(self, batch_id: _Optional[str] = ..., job_ids: _Optional[_Iterable[str]] = ..., lost: bool = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("directives", "cancelled", "queued_tokens", "wire_version", "on_disk_tag")
    class QueuedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DIRECTIVES_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_TAG_FIELD_NUMBER: _ClassVar[int]
    directives: _containers.RepeatedCompositeFieldContainer[Directive]
    cancelled: _containers.RepeatedCompositeFieldContainer[CancelledJobs]
    queued_tokens: _containers.ScalarMap[str, int]
    wire_version: int
    on_disk_tag: str
    def __init__(self, directives: _Optional[_Iterable[_Union[Directive, _Mapping]]] = ..., cancelled: _Optional[_Iterable[_Union[CancelledJobs, _Mapping]]] = ..., queued_tokens: _Optional[_Mapping[str, int]] = ..., wire_version: _Optional[int] = ..., on_disk_tag: _Optional[str] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("worker_id", "epoch", "wire_version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    wire_version: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., wire_version: _Optional[int] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeltasRequest(_message.Message):
    __slots__ = ("worker_id", "deltas")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    deltas: _containers.RepeatedCompositeFieldContainer[JobDelta]
    def __init__(self, worker_id: _Optional[str] = ..., deltas: _Optional[_Iterable[_Union[JobDelta, _Mapping]]] = ...) -> None: ...

class JobDelta(_message.Message):
    __slots__ = ("job_id", "router", "batch_id", "item", "page", "offset", "text", "chunks")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    router: str
    batch_id: str
    item: int
    page: int
    offset: int
    text: str
    chunks: bytes
    def __init__(self, job_id: _Optional[str] = ..., router: _Optional[str] = ..., batch_id: _Optional[str] = ..., item: _Optional[int] = ..., page: _Optional[int] = ..., offset: _Optional[int] = ..., text: _Optional[str] = ..., chunks: _Optional[bytes] = ...) -> None: ...

class DeltasResponse(_message.Message):
    __slots__ = ("forwarded_bytes",)
    FORWARDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    forwarded_bytes: int
    def __init__(self, forwarded_bytes: _Optional[int] = ...) -> None: ...
