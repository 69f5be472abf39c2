"""Bytes to request messages, before any handler sees them.

gRPC answers a request that it cannot parse with INTERNAL and a request that is too large with a transport error; callers deserve
INVALID_ARGUMENT and the place. So the interceptor takes requests as bytes and parses them here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, cast

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from libs.errors import InvalidInput

MAX_REQUEST_BYTES: Final = 64 * 1024 * 1024
TRANSPORT_LIMIT_BYTES: Final = 2 * MAX_REQUEST_BYTES + 16 * 1024 * 1024
"""What gRPC lets in: above our own limit, so that a request beyond it is refused in words and the connection lives on."""

_MAX_FIELDS_WALKED: Final = 100_000
"""A request of 64 MiB can hold 30 million fields; looking for the bad one must not stop the event loop for long."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@lru_cache(maxsize=256)
def request_type(method: str) -> type[Message] | None:
    """The request message of `/package.Service/Method`; None for a method that no loaded proto file declares."""
    service, _, name = method.lstrip("/").rpartition("/")
    try:
        declared = descriptor_pool.Default().FindMethodByName(f"{service}.{name}")
    except KeyError:
        return None
    return message_factory.GetMessageClass(declared.input_type)


def parse(kind: type[Message], data: bytes, limit: int = MAX_REQUEST_BYTES) -> Message:
    """The message in `data`. Raises InvalidInput, with the path of the first string that is not UTF-8 where that is the fault."""
    if len(data) > limit:
        raise InvalidInput(f"the request has {len(data):,} bytes, above the limit of {limit:,}: send fewer items at a time")
    try:
        return kind.FromString(data)
    except DecodeError:
        path = find_invalid_text(_descriptor(kind), data)
    if path:
        raise InvalidInput(f"{path} is not valid UTF-8", field=path)
    raise InvalidInput(f"the request is not a valid {kind.DESCRIPTOR.full_name}")


def _descriptor(kind: type[Message]) -> Descriptor:
    # The C implementation's descriptors have the same interface and another type.
    return cast(Descriptor, kind.DESCRIPTOR)


def find_invalid_text(descriptor: Descriptor, data: bytes) -> str:
    """Path of the first string field in `data` that is not UTF-8, such as `items[3].text`; empty if there is none.

    Walks the wire format (protobuf.dev/programming-guides/encoding), as far as it is whole.
    """
    try:
        return _Walk().search(descriptor, memoryview(data), "")
    except _MalformedError:
        return ""


class _MalformedError(Exception):
    """The bytes are no protobuf message, or too many fields were looked at."""


class _Walk:
    """One walk over a message's bytes, bounded in steps."""

    def __init__(self) -> None:
        self._steps = 0

    def search(self, descriptor: Descriptor, data: memoryview, prefix: str) -> str:
        counts: dict[int, int] = {}
        position = 0
        while position < len(data):
            self._step()
            key, position = _varint(data, position)
            field = descriptor.fields_by_number.get(key >> 3)
            start, end = _extent(data, position, key & 7)
            position = end
            if field is None or key & 7 != _LENGTH:
                continue
            name = prefix + _name(field, counts)
            if found := self._look(field, data[start:end], name):
                return found
        return ""

    def _look(self, field: FieldDescriptor, data: memoryview, path: str) -> str:
        if field.type == FieldDescriptor.TYPE_STRING:
            return "" if _is_text(data) else path
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            return self.search(field.message_type, data, path + ".")
        return ""

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _MAX_FIELDS_WALKED:
            raise _MalformedError


def _name(field: FieldDescriptor, counts: dict[int, int]) -> str:
    if not field.is_repeated:
        return field.name
    index = counts.get(field.number, 0)
    counts[field.number] = index + 1
    return f"{field.name}[{index}]"


def _is_text(data: memoryview) -> bool:
    try:
        str(data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _extent(data: memoryview, position: int, wire_type: int) -> tuple[int, int]:
    """Where a field's value begins and ends."""
    if wire_type == _VARINT:
        return position, _varint(data, position)[1]
    if wire_type == _LENGTH:
        length, position = _varint(data, position)
    elif wire_type in (_FIXED64, _FIXED32):
        length = 8 if wire_type == _FIXED64 else 4
    else:
        raise _MalformedError
    if position + length > len(data):
        raise _MalformedError
    return position, position + length


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _MalformedError
