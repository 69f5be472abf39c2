from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_INT8: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]
    DATA_TYPE_BINARY: _ClassVar[DataType]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_INT8: DataType
DATA_TYPE_UINT8: DataType
DATA_TYPE_BINARY: DataType

class Tensor(_message.Message):
    __slots__ = ("data_type", "shape", "data", "scale", "offset")
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    data_type: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    scale: bytes
    offset: bytes
    def __init__(self, data_type: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., scale: _Optional[bytes] = ..., offset: _Optional[bytes] = ...) -> None: ...

class Ragged(_message.Message):
    __slots__ = ("values", "offsets")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    values: Tensor
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Union[Tensor, _Mapping]] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class SparseMatrix(_message.Message):
    __slots__ = ("columns", "offsets", "indices", "values", "truncated")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    columns: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    indices: bytes
    values: Tensor
    truncated: bool
    def __init__(self, columns: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ..., indices: _Optional[bytes] = ..., values: _Optional[_Union[Tensor, _Mapping]] = ..., truncated: bool = ...) -> None: ...
