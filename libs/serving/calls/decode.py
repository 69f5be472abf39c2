"""Parses requests from bytes, before they reach a handler.

gRPC answers an unparsable request with INTERNAL and a too large one with a transport error, not
with INVALID_ARGUMENT and the path of the error. So the interceptor takes requests as bytes and
parses them here.
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
"""gRPC's limit. Higher than MAX_REQUEST_BYTES, so that larger requests get an error with a reason
and the connection survives.
"""

SMALL_REQUEST_BYTES: Final = 64 * 1024
"""The limit of services with requests that have names and no texts."""
SMALL_TRANSPORT_BYTES: Final = 1024 * 1024
"""gRPC's limit for a server with only such services."""

SCANNED_BYTES: Final = 1024 * 1024
"""Requests above this size are scanned before they are parsed: 64 MiB of empty items would become
gigabytes of messages.
"""
MAX_FIELDS: Final = 200_000
"""Maximum fields of a request above SCANNED_BYTES, including list entries. Scanning them takes a
tenth of a second.
"""

_MAX_FIELDS_WALKED: Final = 100_000
"""Limit on the search for an invalid field: a request of 64 MiB can have 30 million fields."""

_VARINT, _FIXED64, _LENGTH, _BEGIN, _END, _FIXED32 = 0, 1, 2, 3, 4, 5
_FEW_BYTES: Final = 8
"""Messages up to this size are not scanned: their lists are too short to matter."""
_SIZES: Final = {_FIXED64: 8, _FIXED32: 4, _BEGIN: 0, _END: 0}


@lru_cache(maxsize=256)
def request_type(method: str) -> type[Message] | None:
    """Return the request message of `/package.Service/Method`, None if no loaded proto file
    declares the method.
    """
    service, _, name = method.lstrip("/").rpartition("/")
    try:
        declared = descriptor_pool.Default().FindMethodByName(f"{service}.{name}")
    except KeyError:
        return None
    return message_factory.GetMessageClass(declared.input_type)


def parse(kind: type[Message], data: bytes, limit: int = MAX_REQUEST_BYTES) -> Message:
    """Parse a message. Raises InvalidInput, with the path of the first string that is not UTF-8."""
    if len(data) > limit:
        raise InvalidInput(
            f"the request has {len(data):,} bytes, limit {limit:,}: send fewer items per request"
        )
    if len(data) > SCANNED_BYTES:
        _refuse_crowded(kind, data)
    try:
        return kind.FromString(data)
    except DecodeError:
        path = find_invalid_text(_descriptor(kind), data)
    if path:
        raise InvalidInput(f"{path} is not valid UTF-8", field=path)
    raise InvalidInput(f"the request is not a valid {kind.DESCRIPTOR.full_name}")


def _refuse_crowded(kind: type[Message], data: bytes) -> None:
    """Raise InvalidInput for more than MAX_FIELDS fields. Malformed bytes are left to the parser,
    which also stops there.
    """
    waiting = [(_descriptor(kind), 0, len(data))]
    left = MAX_FIELDS
    try:
        while waiting:
            left = _scan(data, *waiting.pop(), waiting, left)
            if left < 0:
                raise InvalidInput(
                    f"the request has more than {MAX_FIELDS:,} fields and list entries: send "
                    "fewer items per request"
                )
    except (_MalformedError, IndexError):
        return


def _scan(
    data: bytes,
    descriptor: Descriptor,
    position: int,
    end: int,
    waiting: list[tuple[Descriptor, int, int]],
    left: int,
) -> int:
    """Count the fields of one message, add nested messages with lists to `waiting`, and return the
    remaining budget.
    """
    fields = _lists(descriptor)
    while position < end and left >= 0:
        left -= 1
        key = data[position]
        if key < 0x80:
            position += 1
        else:
            key, position = _varint(data, position)
        wire = key & 7
        if wire == _VARINT:
            while data[position] >= 0x80:
                position += 1
            position += 1
        elif wire == _LENGTH:
            length = data[position]
            if length < 0x80:
                position += 1
            else:
                length, position = _varint(data, position)
            within = fields.get(key >> 3)
            if isinstance(within, int):
                left -= length // within
            elif within is not None and length > _FEW_BYTES:
                waiting.append((within, position, min(position + length, end)))
            position += length
        elif wire in _SIZES:
            position += _SIZES[wire]
        else:
            raise _MalformedError
    return left


@lru_cache(maxsize=256)
def _lists(descriptor: Descriptor) -> dict[int, Descriptor | int]:
    """Map field numbers to the type of a nested message to scan, or the minimum bytes per entry of
    a packed list.
    """
    found: dict[int, Descriptor | int] = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            if any(
                one.is_repeated or one.message_type is not None for one in field.message_type.fields
            ):
                found[field.number] = field.message_type
        elif field.is_repeated and field.type not in (
            FieldDescriptor.TYPE_STRING,
            FieldDescriptor.TYPE_BYTES,
        ):
            found[field.number] = _WIDTHS.get(field.type, 1)
    return found


def _descriptor(kind: type[Message]) -> Descriptor:
    # The C implementation's descriptors have a different type with the same interface.
    return cast(Descriptor, kind.DESCRIPTOR)


def find_invalid_text(descriptor: Descriptor, data: bytes) -> str:
    """Return the path of the first string field that is not UTF-8, such as `items[3].text`, or "".

    Walks the wire format (protobuf.dev/programming-guides/encoding) as far as it is well-formed.
    """
    try:
        return _Walk().search(descriptor, memoryview(data), "")
    except _MalformedError:
        return ""


class _MalformedError(Exception):
    """The bytes are not a protobuf message, or the walk has reached its limit of fields."""


class _Walk:
    """A walk over a message's bytes, with a bounded number of steps."""

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
            if found := self._check(field, data[start:end], name):
                return found
        return ""

    def _check(self, field: FieldDescriptor, data: memoryview, path: str) -> str:
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


_WIDTHS: Final[dict[int, int]] = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}


def _extent(data: memoryview, position: int, wire_type: int) -> tuple[int, int]:
    """Return where a field's value begins and ends."""
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


def _varint(data: memoryview | bytes, position: int) -> tuple[int, int]:
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
