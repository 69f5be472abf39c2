from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Alias(_message.Message):
    __slots__ = ("name", "model", "next_model", "previous_model", "output", "revision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NEXT_MODEL_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MODEL_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    next_model: str
    previous_model: str
    output: str
    revision: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., next_model: _Optional[str] = ..., previous_model: _Optional[str] = ..., output: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class ListAliasesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAliasesResponse(_message.Message):
    __slots__ = ("aliases",)
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    aliases: _containers.RepeatedCompositeFieldContainer[Alias]
    def __init__(self, aliases: _Optional[_Iterable[_Union[Alias, _Mapping]]] = ...) -> None: ...

class SetAliasRequest(_message.Message):
    __slots__ = ("alias", "expect_revision")
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    EXPECT_REVISION_FIELD_NUMBER: _ClassVar[int]
    alias: Alias
    expect_revision: int
    def __init__(self, alias: _Optional[_Union[Alias, _Mapping]] = ..., expect_revision: _Optional[int] = ...) -> None: ...

class SetAliasResponse(_message.Message):
    __slots__ = ("alias",)
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    alias: Alias
    def __init__(self, alias: _Optional[_Union[Alias, _Mapping]] = ...) -> None: ...

class RemoveAliasRequest(_message.Message):
    __slots__ = ("name", "expect_revision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECT_REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    expect_revision: int
    def __init__(self, name: _Optional[str] = ..., expect_revision: _Optional[int] = ...) -> None: ...

class RemoveAliasResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    def __init__(self, removed: bool = ...) -> None: ...
