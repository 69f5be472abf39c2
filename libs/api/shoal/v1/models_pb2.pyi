from shoal.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_ABSENT: _ClassVar[ModelState]
    MODEL_STATE_COLD: _ClassVar[ModelState]
    MODEL_STATE_LOADING: _ClassVar[ModelState]
    MODEL_STATE_WARM: _ClassVar[ModelState]
    MODEL_STATE_RESIDENT: _ClassVar[ModelState]
    MODEL_STATE_FAILED: _ClassVar[ModelState]
    MODEL_STATE_DOWNLOADING: _ClassVar[ModelState]

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_ENCODE: _ClassVar[Task]
    TASK_SCORE: _ClassVar[Task]
    TASK_ENTITIES: _ClassVar[Task]
    TASK_CLASSIFY: _ClassVar[Task]
    TASK_RELATIONS: _ClassVar[Task]
    TASK_REGIONS: _ClassVar[Task]
    TASK_TEXT: _ClassVar[Task]
    TASK_STRUCTURE: _ClassVar[Task]

class InputKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INPUT_KIND_UNSPECIFIED: _ClassVar[InputKind]
    INPUT_KIND_TEXT: _ClassVar[InputKind]
    INPUT_KIND_IMAGE: _ClassVar[InputKind]
    INPUT_KIND_DOCUMENT: _ClassVar[InputKind]
    INPUT_KIND_DOCUMENT_TEXT: _ClassVar[InputKind]
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_ABSENT: ModelState
MODEL_STATE_COLD: ModelState
MODEL_STATE_LOADING: ModelState
MODEL_STATE_WARM: ModelState
MODEL_STATE_RESIDENT: ModelState
MODEL_STATE_FAILED: ModelState
MODEL_STATE_DOWNLOADING: ModelState
TASK_UNSPECIFIED: Task
TASK_ENCODE: Task
TASK_SCORE: Task
TASK_ENTITIES: Task
TASK_CLASSIFY: Task
TASK_RELATIONS: Task
TASK_REGIONS: Task
TASK_TEXT: Task
TASK_STRUCTURE: Task
INPUT_KIND_UNSPECIFIED: InputKind
INPUT_KIND_TEXT: InputKind
INPUT_KIND_IMAGE: InputKind
INPUT_KIND_DOCUMENT: InputKind
INPUT_KIND_DOCUMENT_TEXT: InputKind

class ImageInput(_message.Message):
    __slots__ = ("height", "width", "short_side", "patch", "extra_tokens", "max_tokens", "long_side", "maps", "text_tokens")
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    SHORT_SIDE_FIELD_NUMBER: _ClassVar[int]
    PATCH_FIELD_NUMBER: _ClassVar[int]
    EXTRA_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LONG_SIDE_FIELD_NUMBER: _ClassVar[int]
    MAPS_FIELD_NUMBER: _ClassVar[int]
    TEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    short_side: int
    patch: int
    extra_tokens: int
    max_tokens: int
    long_side: int
    maps: int
    text_tokens: int
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ..., short_side: _Optional[int] = ..., patch: _Optional[int] = ..., extra_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., long_side: _Optional[int] = ..., maps: _Optional[int] = ..., text_tokens: _Optional[int] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("model", "revision", "family", "tasks", "representations", "dimensions", "multi_vector_dimensions", "max_tokens", "bytes", "labels", "data_type", "prompts", "tokens_per_byte", "pools", "open_labels", "given_entities", "inputs", "images", "created_unix_seconds")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    REPRESENTATIONS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    MULTI_VECTOR_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    OPEN_LABELS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_ENTITIES_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    family: str
    tasks: _containers.RepeatedScalarFieldContainer[Task]
    representations: _containers.RepeatedScalarFieldContainer[_inference_pb2.Representation]
    dimensions: int
    multi_vector_dimensions: int
    max_tokens: int
    bytes: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    data_type: str
    prompts: _containers.RepeatedScalarFieldContainer[str]
    tokens_per_byte: float
    pools: _containers.RepeatedScalarFieldContainer[str]
    open_labels: bool
    given_entities: bool
    inputs: _containers.RepeatedScalarFieldContainer[InputKind]
    images: ImageInput
    created_unix_seconds: int
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., family: _Optional[str] = ..., tasks: _Optional[_Iterable[_Union[Task, str]]] = ..., representations: _Optional[_Iterable[_Union[_inference_pb2.Representation, str]]] = ..., dimensions: _Optional[int] = ..., multi_vector_dimensions: _Optional[int] = ..., max_tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ..., data_type: _Optional[str] = ..., prompts: _Optional[_Iterable[str]] = ..., tokens_per_byte: _Optional[float] = ..., pools: _Optional[_Iterable[str]] = ..., open_labels: bool = ..., given_entities: bool = ..., inputs: _Optional[_Iterable[_Union[InputKind, str]]] = ..., images: _Optional[_Union[ImageInput, _Mapping]] = ..., created_unix_seconds: _Optional[int] = ...) -> None: ...

class ModelPlace(_message.Message):
    __slots__ = ("worker_id", "state", "bytes", "load_seconds", "tokens_per_second", "last_error", "pinned", "downloaded_bytes", "download_bytes", "host_bytes", "adapters", "leaving")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    DOWNLOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: ModelState
    bytes: int
    load_seconds: float
    tokens_per_second: float
    last_error: str
    pinned: bool
    downloaded_bytes: int
    download_bytes: int
    host_bytes: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    leaving: bool
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., bytes: _Optional[int] = ..., load_seconds: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., last_error: _Optional[str] = ..., pinned: bool = ..., downloaded_bytes: _Optional[int] = ..., download_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., leaving: bool = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("model", "state", "card", "places", "queued_tokens", "last_error")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    model: str
    state: ModelState
    card: ModelCard
    places: _containers.RepeatedCompositeFieldContainer[ModelPlace]
    queued_tokens: int
    last_error: str
    def __init__(self, model: _Optional[str] = ..., state: _Optional[_Union[ModelState, str]] = ..., card: _Optional[_Union[ModelCard, _Mapping]] = ..., places: _Optional[_Iterable[_Union[ModelPlace, _Mapping]]] = ..., queued_tokens: _Optional[int] = ..., last_error: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("model", "pool")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    model: str
    pool: str
    def __init__(self, model: _Optional[str] = ..., pool: _Optional[str] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class EvictModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class EvictModelResponse(_message.Message):
    __slots__ = ("worker_ids",)
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class PinModelRequest(_message.Message):
    __slots__ = ("model", "pinned")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    model: str
    pinned: bool
    def __init__(self, model: _Optional[str] = ..., pinned: bool = ...) -> None: ...

class PinModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...
