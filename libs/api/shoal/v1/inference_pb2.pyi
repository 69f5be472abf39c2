from google.protobuf import struct_pb2 as _struct_pb2
from shoal.v1 import multiplex_pb2 as _multiplex_pb2
from shoal.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_INTERACTIVE: _ClassVar[Priority]
    PRIORITY_BULK: _ClassVar[Priority]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_QUERY: _ClassVar[Role]
    ROLE_DOCUMENT: _ClassVar[Role]

class Representation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPRESENTATION_UNSPECIFIED: _ClassVar[Representation]
    REPRESENTATION_DENSE: _ClassVar[Representation]
    REPRESENTATION_SPARSE: _ClassVar[Representation]
    REPRESENTATION_MULTI_VECTOR: _ClassVar[Representation]

class Truncation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUNCATION_UNSPECIFIED: _ClassVar[Truncation]
    TRUNCATION_NONE: _ClassVar[Truncation]
    TRUNCATION_END: _ClassVar[Truncation]
    TRUNCATION_START: _ClassVar[Truncation]
    TRUNCATION_WINDOWS: _ClassVar[Truncation]

class ScoreScale(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCORE_SCALE_UNSPECIFIED: _ClassVar[ScoreScale]
    SCORE_SCALE_LOGIT: _ClassVar[ScoreScale]
    SCORE_SCALE_PROBABILITY: _ClassVar[ScoreScale]

class Aggregation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGGREGATION_UNSPECIFIED: _ClassVar[Aggregation]
    AGGREGATION_NONE: _ClassVar[Aggregation]
    AGGREGATION_SIMPLE: _ClassVar[Aggregation]
    AGGREGATION_FIRST: _ClassVar[Aggregation]
    AGGREGATION_AVERAGE: _ClassVar[Aggregation]
    AGGREGATION_MAX: _ClassVar[Aggregation]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_INTERACTIVE: Priority
PRIORITY_BULK: Priority
ROLE_UNSPECIFIED: Role
ROLE_QUERY: Role
ROLE_DOCUMENT: Role
REPRESENTATION_UNSPECIFIED: Representation
REPRESENTATION_DENSE: Representation
REPRESENTATION_SPARSE: Representation
REPRESENTATION_MULTI_VECTOR: Representation
TRUNCATION_UNSPECIFIED: Truncation
TRUNCATION_NONE: Truncation
TRUNCATION_END: Truncation
TRUNCATION_START: Truncation
TRUNCATION_WINDOWS: Truncation
SCORE_SCALE_UNSPECIFIED: ScoreScale
SCORE_SCALE_LOGIT: ScoreScale
SCORE_SCALE_PROBABILITY: ScoreScale
AGGREGATION_UNSPECIFIED: Aggregation
AGGREGATION_NONE: Aggregation
AGGREGATION_SIMPLE: Aggregation
AGGREGATION_FIRST: Aggregation
AGGREGATION_AVERAGE: Aggregation
AGGREGATION_MAX: Aggregation
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class Image(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Document(_message.Message):
    __slots__ = ("data", "file", "first_page", "last_page", "dots_per_inch")
    DATA_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    LAST_PAGE_FIELD_NUMBER: _ClassVar[int]
    DOTS_PER_INCH_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    file: int
    first_page: int
    last_page: int
    dots_per_inch: int
    def __init__(self, data: _Optional[bytes] = ..., file: _Optional[int] = ..., first_page: _Optional[int] = ..., last_page: _Optional[int] = ..., dots_per_inch: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("text", "image", "document")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: Image
    document: Document
    def __init__(self, text: _Optional[str] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., document: _Optional[_Union[Document, _Mapping]] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("text", "image", "entities", "parts", "seed", "spans", "context")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    ENTITIES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: Image
    entities: _containers.RepeatedCompositeFieldContainer[Entity]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    seed: int
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    context: str
    def __init__(self, text: _Optional[str] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., entities: _Optional[_Iterable[_Union[Entity, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., seed: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., context: _Optional[str] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("start", "end", "context")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    context: str
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., context: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("input_tokens", "image_tokens", "output_tokens", "truncated_items", "truncated_query")
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_QUERY_FIELD_NUMBER: _ClassVar[int]
    input_tokens: int
    image_tokens: int
    output_tokens: int
    truncated_items: int
    truncated_query: bool
    def __init__(self, input_tokens: _Optional[int] = ..., image_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., truncated_items: _Optional[int] = ..., truncated_query: bool = ...) -> None: ...

class ResolvedAlias(_message.Message):
    __slots__ = ("model", "next_model", "previous_model", "revision")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NEXT_MODEL_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    model: str
    next_model: str
    previous_model: str
    revision: int
    def __init__(self, model: _Optional[str] = ..., next_model: _Optional[str] = ..., previous_model: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_seconds", "prepare_seconds", "wait_seconds", "forward_seconds", "finish_seconds", "total_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    prepare_seconds: float
    wait_seconds: float
    forward_seconds: float
    finish_seconds: float
    total_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., prepare_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., forward_seconds: _Optional[float] = ..., finish_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class Chunking(_message.Message):
    __slots__ = ("method", "max_tokens", "overlap", "late", "return_text")
    class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        METHOD_UNSPECIFIED: _ClassVar[Chunking.Method]
        METHOD_SENTENCES: _ClassVar[Chunking.Method]
        METHOD_TOKENS: _ClassVar[Chunking.Method]
        METHOD_MARKDOWN: _ClassVar[Chunking.Method]
        METHOD_SPANS: _ClassVar[Chunking.Method]
    METHOD_UNSPECIFIED: Chunking.Method
    METHOD_SENTENCES: Chunking.Method
    METHOD_TOKENS: Chunking.Method
    METHOD_MARKDOWN: Chunking.Method
    METHOD_SPANS: Chunking.Method
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    RETURN_TEXT_FIELD_NUMBER: _ClassVar[int]
    method: Chunking.Method
    max_tokens: int
    overlap: int
    late: bool
    return_text: bool
    def __init__(self, method: _Optional[_Union[Chunking.Method, str]] = ..., max_tokens: _Optional[int] = ..., overlap: _Optional[int] = ..., late: bool = ..., return_text: bool = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("model", "items", "role", "representations", "data_type", "dimensions", "normalize", "instruction", "truncation", "adapter", "priority", "pool", "pooling_factor", "files", "chunking", "expect_embedding_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REPRESENTATIONS_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    POOLING_FACTOR_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CHUNKING_FIELD_NUMBER: _ClassVar[int]
    EXPECT_EMBEDDING_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    items: _containers.RepeatedCompositeFieldContainer[Item]
    role: Role
    representations: _containers.RepeatedScalarFieldContainer[Representation]
    data_type: _tensor_pb2.DataType
    dimensions: int
    normalize: bool
    instruction: str
    truncation: Truncation
    adapter: str
    priority: Priority
    pool: str
    pooling_factor: int
    files: _containers.RepeatedScalarFieldContainer[bytes]
    chunking: Chunking
    expect_embedding_id: str
    def __init__(self, model: _Optional[str] = ..., items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., role: _Optional[_Union[Role, str]] = ..., representations: _Optional[_Iterable[_Union[Representation, str]]] = ..., data_type: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., dimensions: _Optional[int] = ..., normalize: bool = ..., instruction: _Optional[str] = ..., truncation: _Optional[_Union[Truncation, str]] = ..., adapter: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ..., pool: _Optional[str] = ..., pooling_factor: _Optional[int] = ..., files: _Optional[_Iterable[bytes]] = ..., chunking: _Optional[_Union[Chunking, _Mapping]] = ..., expect_embedding_id: _Optional[str] = ...) -> None: ...

class Chunks(_message.Message):
    __slots__ = ("offsets", "starts", "ends", "tokens", "pages", "texts", "continues")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    ends: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    pages: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    continues: bool
    def __init__(self, offsets: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., ends: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., pages: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ..., continues: bool = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("dense", "sparse", "multi_vector", "model_revision", "usage", "timings", "chunks", "embedding_id", "alias")
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    MULTI_VECTOR_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_ID_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    dense: _tensor_pb2.Tensor
    sparse: _tensor_pb2.SparseMatrix
    multi_vector: _tensor_pb2.Ragged
    model_revision: str
    usage: Usage
    timings: Timings
    chunks: Chunks
    embedding_id: str
    alias: ResolvedAlias
    def __init__(self, dense: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sparse: _Optional[_Union[_tensor_pb2.SparseMatrix, _Mapping]] = ..., multi_vector: _Optional[_Union[_tensor_pb2.Ragged, _Mapping]] = ..., model_revision: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., chunks: _Optional[_Union[Chunks, _Mapping]] = ..., embedding_id: _Optional[str] = ..., alias: _Optional[_Union[ResolvedAlias, _Mapping]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "query", "documents", "instruction", "scale", "top_n", "truncation", "adapter", "priority", "pool", "files", "window_overlap")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_OVERLAP_FIELD_NUMBER: _ClassVar[int]
    model: str
    query: Item
    documents: _containers.RepeatedCompositeFieldContainer[Item]
    instruction: str
    scale: ScoreScale
    top_n: int
    truncation: Truncation
    adapter: str
    priority: Priority
    pool: str
    files: _containers.RepeatedScalarFieldContainer[bytes]
    window_overlap: int
    def __init__(self, model: _Optional[str] = ..., query: _Optional[_Union[Item, _Mapping]] = ..., documents: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., instruction: _Optional[str] = ..., scale: _Optional[_Union[ScoreScale, str]] = ..., top_n: _Optional[int] = ..., truncation: _Optional[_Union[Truncation, str]] = ..., adapter: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ..., pool: _Optional[str] = ..., files: _Optional[_Iterable[bytes]] = ..., window_overlap: _Optional[int] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores", "ranking", "model_revision", "usage", "timings", "alias")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    RANKING_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    scores: _tensor_pb2.Tensor
    ranking: _containers.RepeatedScalarFieldContainer[int]
    model_revision: str
    usage: Usage
    timings: Timings
    alias: ResolvedAlias
    def __init__(self, scores: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., ranking: _Optional[_Iterable[int]] = ..., model_revision: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., alias: _Optional[_Union[ResolvedAlias, _Mapping]] = ...) -> None: ...

class EntitiesTask(_message.Message):
    __slots__ = ("labels", "threshold", "flat", "aggregation")
    LABELS_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    FLAT_FIELD_NUMBER: _ClassVar[int]
    AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.RepeatedScalarFieldContainer[str]
    threshold: float
    flat: bool
    aggregation: Aggregation
    def __init__(self, labels: _Optional[_Iterable[str]] = ..., threshold: _Optional[float] = ..., flat: bool = ..., aggregation: _Optional[_Union[Aggregation, str]] = ...) -> None: ...

class ClassifyTask(_message.Message):
    __slots__ = ("labels", "multi_label", "threshold", "hypothesis", "among_labels")
    LABELS_FIELD_NUMBER: _ClassVar[int]
    MULTI_LABEL_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESIS_FIELD_NUMBER: _ClassVar[int]
    AMONG_LABELS_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.RepeatedScalarFieldContainer[str]
    multi_label: bool
    threshold: float
    hypothesis: str
    among_labels: bool
    def __init__(self, labels: _Optional[_Iterable[str]] = ..., multi_label: bool = ..., threshold: _Optional[float] = ..., hypothesis: _Optional[str] = ..., among_labels: bool = ...) -> None: ...

class RelationsTask(_message.Message):
    __slots__ = ("labels", "entity_labels", "threshold")
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ENTITY_LABELS_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.RepeatedScalarFieldContainer[str]
    entity_labels: _containers.RepeatedScalarFieldContainer[str]
    threshold: float
    def __init__(self, labels: _Optional[_Iterable[str]] = ..., entity_labels: _Optional[_Iterable[str]] = ..., threshold: _Optional[float] = ...) -> None: ...

class RegionsTask(_message.Message):
    __slots__ = ("labels", "threshold")
    LABELS_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.RepeatedScalarFieldContainer[str]
    threshold: float
    def __init__(self, labels: _Optional[_Iterable[str]] = ..., threshold: _Optional[float] = ...) -> None: ...

class TextTask(_message.Message):
    __slots__ = ("kind", "max_tokens", "text_layer", "instruction", "region", "json_schema", "turns", "template_values", "sampling", "stop", "top_logprobs", "raw_prompt", "tools", "tool_choice", "tool", "single_tool_call", "item_role")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[TextTask.Kind]
        KIND_CAPTION: _ClassVar[TextTask.Kind]
        KIND_DETAILED_CAPTION: _ClassVar[TextTask.Kind]
        KIND_OCR: _ClassVar[TextTask.Kind]
        KIND_OCR_REGIONS: _ClassVar[TextTask.Kind]
    KIND_UNSPECIFIED: TextTask.Kind
    KIND_CAPTION: TextTask.Kind
    KIND_DETAILED_CAPTION: TextTask.Kind
    KIND_OCR: TextTask.Kind
    KIND_OCR_REGIONS: TextTask.Kind
    class TextLayer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TEXT_LAYER_UNSPECIFIED: _ClassVar[TextTask.TextLayer]
        TEXT_LAYER_PREFER: _ClassVar[TextTask.TextLayer]
        TEXT_LAYER_ONLY: _ClassVar[TextTask.TextLayer]
        TEXT_LAYER_NEVER: _ClassVar[TextTask.TextLayer]
    TEXT_LAYER_UNSPECIFIED: TextTask.TextLayer
    TEXT_LAYER_PREFER: TextTask.TextLayer
    TEXT_LAYER_ONLY: TextTask.TextLayer
    TEXT_LAYER_NEVER: TextTask.TextLayer
    class ToolChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TOOL_CHOICE_UNSPECIFIED: _ClassVar[TextTask.ToolChoice]
        TOOL_CHOICE_AUTO: _ClassVar[TextTask.ToolChoice]
        TOOL_CHOICE_REQUIRED: _ClassVar[TextTask.ToolChoice]
    TOOL_CHOICE_UNSPECIFIED: TextTask.ToolChoice
    TOOL_CHOICE_AUTO: TextTask.ToolChoice
    TOOL_CHOICE_REQUIRED: TextTask.ToolChoice
    KIND_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_LAYER_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VALUES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RAW_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    SINGLE_TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    ITEM_ROLE_FIELD_NUMBER: _ClassVar[int]
    kind: TextTask.Kind
    max_tokens: int
    text_layer: TextTask.TextLayer
    instruction: str
    region: Box
    json_schema: str
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    template_values: str
    sampling: Sampling
    stop: _containers.RepeatedScalarFieldContainer[str]
    top_logprobs: int
    raw_prompt: bool
    tools: str
    tool_choice: TextTask.ToolChoice
    tool: str
    single_tool_call: bool
    item_role: Turn.Role
    def __init__(self, kind: _Optional[_Union[TextTask.Kind, str]] = ..., max_tokens: _Optional[int] = ..., text_layer: _Optional[_Union[TextTask.TextLayer, str]] = ..., instruction: _Optional[str] = ..., region: _Optional[_Union[Box, _Mapping]] = ..., json_schema: _Optional[str] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., template_values: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., top_logprobs: _Optional[int] = ..., raw_prompt: bool = ..., tools: _Optional[str] = ..., tool_choice: _Optional[_Union[TextTask.ToolChoice, str]] = ..., tool: _Optional[str] = ..., single_tool_call: bool = ..., item_role: _Optional[_Union[Turn.Role, str]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("role", "text", "tool_calls")
    class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ROLE_UNSPECIFIED: _ClassVar[Turn.Role]
        ROLE_USER: _ClassVar[Turn.Role]
        ROLE_ASSISTANT: _ClassVar[Turn.Role]
        ROLE_SYSTEM: _ClassVar[Turn.Role]
        ROLE_TOOL: _ClassVar[Turn.Role]
    ROLE_UNSPECIFIED: Turn.Role
    ROLE_USER: Turn.Role
    ROLE_ASSISTANT: Turn.Role
    ROLE_SYSTEM: Turn.Role
    ROLE_TOOL: Turn.Role
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    role: Turn.Role
    text: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    def __init__(self, role: _Optional[_Union[Turn.Role, str]] = ..., text: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("name", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Box(_message.Message):
    __slots__ = ("left", "top", "right", "bottom")
    LEFT_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    BOTTOM_FIELD_NUMBER: _ClassVar[int]
    left: float
    top: float
    right: float
    bottom: float
    def __init__(self, left: _Optional[float] = ..., top: _Optional[float] = ..., right: _Optional[float] = ..., bottom: _Optional[float] = ...) -> None: ...

class SchemaLabel(_message.Message):
    __slots__ = ("label", "description", "threshold")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    label: str
    description: str
    threshold: float
    def __init__(self, label: _Optional[str] = ..., description: _Optional[str] = ..., threshold: _Optional[float] = ...) -> None: ...

class SchemaClassification(_message.Message):
    __slots__ = ("name", "labels", "multi_label", "threshold", "description")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    MULTI_LABEL_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    labels: _containers.RepeatedCompositeFieldContainer[SchemaLabel]
    multi_label: bool
    threshold: float
    description: str
    def __init__(self, name: _Optional[str] = ..., labels: _Optional[_Iterable[_Union[SchemaLabel, _Mapping]]] = ..., multi_label: bool = ..., threshold: _Optional[float] = ..., description: _Optional[str] = ...) -> None: ...

class SchemaField(_message.Message):
    __slots__ = ("name", "kind", "choices", "description", "threshold")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[SchemaField.Kind]
        KIND_LIST: _ClassVar[SchemaField.Kind]
        KIND_STRING: _ClassVar[SchemaField.Kind]
    KIND_UNSPECIFIED: SchemaField.Kind
    KIND_LIST: SchemaField.Kind
    KIND_STRING: SchemaField.Kind
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: SchemaField.Kind
    choices: _containers.RepeatedScalarFieldContainer[str]
    description: str
    threshold: float
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[SchemaField.Kind, str]] = ..., choices: _Optional[_Iterable[str]] = ..., description: _Optional[str] = ..., threshold: _Optional[float] = ...) -> None: ...

class SchemaStructure(_message.Message):
    __slots__ = ("name", "fields")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fields: _containers.RepeatedCompositeFieldContainer[SchemaField]
    def __init__(self, name: _Optional[str] = ..., fields: _Optional[_Iterable[_Union[SchemaField, _Mapping]]] = ...) -> None: ...

class StructureTask(_message.Message):
    __slots__ = ("entities", "classifications", "relations", "structures", "threshold")
    ENTITIES_FIELD_NUMBER: _ClassVar[int]
    CLASSIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    RELATIONS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURES_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    entities: _containers.RepeatedCompositeFieldContainer[SchemaLabel]
    classifications: _containers.RepeatedCompositeFieldContainer[SchemaClassification]
    relations: _containers.RepeatedCompositeFieldContainer[SchemaLabel]
    structures: _containers.RepeatedCompositeFieldContainer[SchemaStructure]
    threshold: float
    def __init__(self, entities: _Optional[_Iterable[_Union[SchemaLabel, _Mapping]]] = ..., classifications: _Optional[_Iterable[_Union[SchemaClassification, _Mapping]]] = ..., relations: _Optional[_Iterable[_Union[SchemaLabel, _Mapping]]] = ..., structures: _Optional[_Iterable[_Union[SchemaStructure, _Mapping]]] = ..., threshold: _Optional[float] = ...) -> None: ...

class ExtractRequest(_message.Message):
    __slots__ = ("model", "items", "entities", "classify", "relations", "regions", "text", "structure", "truncation", "adapter", "priority", "pool", "files", "window_overlap")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ENTITIES_FIELD_NUMBER: _ClassVar[int]
    CLASSIFY_FIELD_NUMBER: _ClassVar[int]
    RELATIONS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_OVERLAP_FIELD_NUMBER: _ClassVar[int]
    model: str
    items: _containers.RepeatedCompositeFieldContainer[Item]
    entities: EntitiesTask
    classify: ClassifyTask
    relations: RelationsTask
    regions: RegionsTask
    text: TextTask
    structure: StructureTask
    truncation: Truncation
    adapter: str
    priority: Priority
    pool: str
    files: _containers.RepeatedScalarFieldContainer[bytes]
    window_overlap: int
    def __init__(self, model: _Optional[str] = ..., items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., entities: _Optional[_Union[EntitiesTask, _Mapping]] = ..., classify: _Optional[_Union[ClassifyTask, _Mapping]] = ..., relations: _Optional[_Union[RelationsTask, _Mapping]] = ..., regions: _Optional[_Union[RegionsTask, _Mapping]] = ..., text: _Optional[_Union[TextTask, _Mapping]] = ..., structure: _Optional[_Union[StructureTask, _Mapping]] = ..., truncation: _Optional[_Union[Truncation, str]] = ..., adapter: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ..., pool: _Optional[str] = ..., files: _Optional[_Iterable[bytes]] = ..., window_overlap: _Optional[int] = ...) -> None: ...

class Entity(_message.Message):
    __slots__ = ("start", "end", "label", "score", "text")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    label: str
    score: float
    text: str
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., label: _Optional[str] = ..., score: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class LabelScore(_message.Message):
    __slots__ = ("label", "score")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    label: str
    score: float
    def __init__(self, label: _Optional[str] = ..., score: _Optional[float] = ...) -> None: ...

class Relation(_message.Message):
    __slots__ = ("head", "tail", "label", "score")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    head: Entity
    tail: Entity
    label: str
    score: float
    def __init__(self, head: _Optional[_Union[Entity, _Mapping]] = ..., tail: _Optional[_Union[Entity, _Mapping]] = ..., label: _Optional[str] = ..., score: _Optional[float] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("left", "top", "right", "bottom", "label", "score", "polygon")
    LEFT_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    BOTTOM_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    POLYGON_FIELD_NUMBER: _ClassVar[int]
    left: float
    top: float
    right: float
    bottom: float
    label: str
    score: float
    polygon: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, left: _Optional[float] = ..., top: _Optional[float] = ..., right: _Optional[float] = ..., bottom: _Optional[float] = ..., label: _Optional[str] = ..., score: _Optional[float] = ..., polygon: _Optional[_Iterable[float]] = ...) -> None: ...

class PageText(_message.Message):
    __slots__ = ("page", "text", "is_text_layer")
    PAGE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IS_TEXT_LAYER_FIELD_NUMBER: _ClassVar[int]
    page: int
    text: str
    is_text_layer: bool
    def __init__(self, page: _Optional[int] = ..., text: _Optional[str] = ..., is_text_layer: bool = ...) -> None: ...

class Classification(_message.Message):
    __slots__ = ("name", "labels")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    name: str
    labels: _containers.RepeatedCompositeFieldContainer[LabelScore]
    def __init__(self, name: _Optional[str] = ..., labels: _Optional[_Iterable[_Union[LabelScore, _Mapping]]] = ...) -> None: ...

class StructureValue(_message.Message):
    __slots__ = ("text", "score", "start", "end")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    text: str
    score: float
    start: int
    end: int
    def __init__(self, text: _Optional[str] = ..., score: _Optional[float] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class StructureField(_message.Message):
    __slots__ = ("name", "values", "list")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    name: str
    values: _containers.RepeatedCompositeFieldContainer[StructureValue]
    list: bool
    def __init__(self, name: _Optional[str] = ..., values: _Optional[_Iterable[_Union[StructureValue, _Mapping]]] = ..., list: bool = ...) -> None: ...

class Structure(_message.Message):
    __slots__ = ("name", "fields")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fields: _containers.RepeatedCompositeFieldContainer[StructureField]
    def __init__(self, name: _Optional[str] = ..., fields: _Optional[_Iterable[_Union[StructureField, _Mapping]]] = ...) -> None: ...

class Extraction(_message.Message):
    __slots__ = ("entities", "labels", "relations", "regions", "text", "finish_reason", "pages", "document_pages", "classifications", "structures", "json", "truncated", "tool_calls", "tokens")
    ENTITIES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    RELATIONS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_PAGES_FIELD_NUMBER: _ClassVar[int]
    CLASSIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURES_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    entities: _containers.RepeatedCompositeFieldContainer[Entity]
    labels: _containers.RepeatedCompositeFieldContainer[LabelScore]
    relations: _containers.RepeatedCompositeFieldContainer[Relation]
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    text: str
    finish_reason: FinishReason
    pages: _containers.RepeatedCompositeFieldContainer[PageText]
    document_pages: int
    classifications: _containers.RepeatedCompositeFieldContainer[Classification]
    structures: _containers.RepeatedCompositeFieldContainer[Structure]
    json: _struct_pb2.Struct
    truncated: bool
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, entities: _Optional[_Iterable[_Union[Entity, _Mapping]]] = ..., labels: _Optional[_Iterable[_Union[LabelScore, _Mapping]]] = ..., relations: _Optional[_Iterable[_Union[Relation, _Mapping]]] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., pages: _Optional[_Iterable[_Union[PageText, _Mapping]]] = ..., document_pages: _Optional[int] = ..., classifications: _Optional[_Iterable[_Union[Classification, _Mapping]]] = ..., structures: _Optional[_Iterable[_Union[Structure, _Mapping]]] = ..., json: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., truncated: bool = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tokens: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("text", "logprob", "top")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    text: str
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, text: _Optional[str] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class ExtractDelta(_message.Message):
    __slots__ = ("item", "page", "text", "restarted")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RESTARTED_FIELD_NUMBER: _ClassVar[int]
    item: int
    page: int
    text: str
    restarted: bool
    def __init__(self, item: _Optional[int] = ..., page: _Optional[int] = ..., text: _Optional[str] = ..., restarted: bool = ...) -> None: ...

class ExtractStreamResponse(_message.Message):
    __slots__ = ("deltas", "response")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[ExtractDelta]
    response: ExtractResponse
    def __init__(self, deltas: _Optional[_Iterable[_Union[ExtractDelta, _Mapping]]] = ..., response: _Optional[_Union[ExtractResponse, _Mapping]] = ...) -> None: ...

class ExtractResponse(_message.Message):
    __slots__ = ("results", "model_revision", "usage", "timings", "alias")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[Extraction]
    model_revision: str
    usage: Usage
    timings: Timings
    alias: ResolvedAlias
    def __init__(self, results: _Optional[_Iterable[_Union[Extraction, _Mapping]]] = ..., model_revision: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., alias: _Optional[_Union[ResolvedAlias, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "texts", "add_special_tokens", "truncation", "count_only", "return_tokens", "priority", "pool")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    COUNT_ONLY_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    model: str
    texts: _containers.RepeatedScalarFieldContainer[str]
    add_special_tokens: bool
    truncation: Truncation
    count_only: bool
    return_tokens: bool
    priority: Priority
    pool: str
    def __init__(self, model: _Optional[str] = ..., texts: _Optional[_Iterable[str]] = ..., add_special_tokens: bool = ..., truncation: _Optional[_Union[Truncation, str]] = ..., count_only: bool = ..., return_tokens: bool = ..., priority: _Optional[_Union[Priority, str]] = ..., pool: _Optional[str] = ...) -> None: ...

class Tokenization(_message.Message):
    __slots__ = ("count", "ids", "starts", "ends", "tokens", "special_before", "special_after", "kept_tokens", "kept_start", "kept_end")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_BEFORE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_AFTER_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_START_FIELD_NUMBER: _ClassVar[int]
    KEPT_END_FIELD_NUMBER: _ClassVar[int]
    count: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    ends: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    special_before: int
    special_after: int
    kept_tokens: int
    kept_start: int
    kept_end: int
    def __init__(self, count: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., ends: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[str]] = ..., special_before: _Optional[int] = ..., special_after: _Optional[int] = ..., kept_tokens: _Optional[int] = ..., kept_start: _Optional[int] = ..., kept_end: _Optional[int] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("results", "max_tokens", "model_revision", "usage", "timings", "alias")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[Tokenization]
    max_tokens: int
    model_revision: str
    usage: Usage
    timings: Timings
    alias: ResolvedAlias
    def __init__(self, results: _Optional[_Iterable[_Union[Tokenization, _Mapping]]] = ..., max_tokens: _Optional[int] = ..., model_revision: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., alias: _Optional[_Union[ResolvedAlias, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "sequences", "skip_special_tokens", "priority", "pool")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    model: str
    sequences: _containers.RepeatedCompositeFieldContainer[TokenIds]
    skip_special_tokens: bool
    priority: Priority
    pool: str
    def __init__(self, model: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., skip_special_tokens: bool = ..., priority: _Optional[_Union[Priority, str]] = ..., pool: _Optional[str] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("texts", "model_revision", "usage", "timings", "alias")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    model_revision: str
    usage: Usage
    timings: Timings
    alias: ResolvedAlias
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., model_revision: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., alias: _Optional[_Union[ResolvedAlias, _Mapping]] = ...) -> None: ...
