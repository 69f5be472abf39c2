from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MultiplexedCall(_message.Message):
    __slots__ = ("number", "request_id", "traceparent", "tracestate", "timeout_seconds", "encode", "score", "extract", "cancelled", "pull", "complete", "deltas")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    EXTRACT_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    traceparent: str
    tracestate: str
    timeout_seconds: float
    encode: bytes
    score: bytes
    extract: bytes
    cancelled: bool
    pull: bytes
    complete: bytes
    deltas: bytes
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., timeout_seconds: _Optional[float] = ..., encode: _Optional[bytes] = ..., score: _Optional[bytes] = ..., extract: _Optional[bytes] = ..., cancelled: bool = ..., pull: _Optional[bytes] = ..., complete: _Optional[bytes] = ..., deltas: _Optional[bytes] = ...) -> None: ...

class MultiplexRequest(_message.Message):
    __slots__ = ("calls",)
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[MultiplexedCall]
    def __init__(self, calls: _Optional[_Iterable[_Union[MultiplexedCall, _Mapping]]] = ...) -> None: ...

class MultiplexedFailure(_message.Message):
    __slots__ = ("code", "message", "details")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    details: bytes
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[bytes] = ...) -> None: ...

class MultiplexedAnswer(_message.Message):
    __slots__ = ("number", "response", "failure")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    number: int
    response: bytes
    failure: MultiplexedFailure
    def __init__(self, number: _Optional[int] = ..., response: _Optional[bytes] = ..., failure: _Optional[_Union[MultiplexedFailure, _Mapping]] = ...) -> None: ...

class MultiplexResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[MultiplexedAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[MultiplexedAnswer, _Mapping]]] = ...) -> None: ...
