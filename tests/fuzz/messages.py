"""Random protobuf messages by their descriptors: every field, every limit of its type, and invalid
encodings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tests.fuzz import mutate
from tests.fuzz.target import Random

Words = Mapping[str, Sequence[Any]]
"""Meaningful values by field name."""

_SIGNED: Final = (
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_SINT32,
    FieldDescriptor.TYPE_SINT64,
)
_WIDE: Final = (
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_FIXED64,
)


def message(random: Random, kind: type[Message], words: Words, depth: int = 4) -> Message:
    """Return a message of that kind with some of its fields set."""
    made = kind()
    fill(random, made, words, depth)
    return made


def fill(random: Random, made: Message, words: Words, depth: int) -> None:
    descriptor = cast(Descriptor, made.DESCRIPTOR)
    for field in descriptor.fields:
        if random.random() < 0.5 and (field.message_type is None or depth):
            _set(random, made, field, words, depth)


class Maker:
    """Serialised messages of one kind. A few are generated; most are earlier ones with a changed
    field or changed bytes, which is twenty times as fast and accumulates changes.
    """

    def __init__(self, kind: type[Message], words: Words, *bases: Message) -> None:
        self._kind, self._words, self._bases = kind, words, bases
        # The state: earlier messages.
        self._pool: list[Message] = list(bases)

    def make(self, random: Random) -> bytes:
        way = random.random()
        if way < 0.04 or not self._pool:
            return self._keep(random, message(random, self._kind, self._words)).SerializeToString()
        chosen = random.choice(
            self._pool if random.random() < 0.6 or not self._bases else self._bases
        )
        if way < 0.55:
            made = self._kind()
            made.CopyFrom(chosen)
            _touch(random, made, self._words)
            if random.random() < 0.1:
                self._keep(random, made)
            return made.SerializeToString()
        return mutate.mutated(random, chosen.SerializeToString(), _WIRE)

    def _keep(self, random: Random, made: Message) -> Message:
        if made.ByteSize() <= _MAX_KEPT:
            if len(self._pool) < _MAX_POOL:
                self._pool.append(made)
            else:
                self._pool[random.randrange(_MAX_POOL)] = made
        return made


def parsed(kind: type[Message], data: bytes) -> Message | None:
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


_MAX_POOL: Final = 256
_MAX_KEPT: Final = 4096
_WIRE: Final = (
    b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x80" * 10 + b"\x01",
    b"\xff" * 9 + b"\x01", b"\x0b",
    b"\x0c",
    b"\xfb\x07", b"\x0a\x00", b"\x12\x00", b"\x0a\xff\xff\xff\xff\x0f", b"\x00", b"\x07",
    b"\xa0\x06\x01",
)  # fmt: skip


def _touch(random: Random, made: Message, words: Words) -> None:
    """Set a few fields to new values, possibly at a deep level."""
    for _ in range(random.randrange(1, 4)):
        one = made
        while True:
            descriptor = cast(Descriptor, one.DESCRIPTOR)
            if not descriptor.fields:
                break
            field = random.choice(descriptor.fields)
            below = getattr(one, field.name)
            if field.message_type is None or field.is_repeated or random.random() < 0.3:
                _set(random, one, field, words, 3)
                break
            one = below


def _set(random: Random, made: Message, field: FieldDescriptor, words: Words, depth: int) -> None:
    if not field.is_repeated:
        if field.message_type is not None:
            getattr(made, field.name).SetInParent()
            fill(random, getattr(made, field.name), words, depth - 1)
        else:
            setattr(made, field.name, _value(random, field, words))
        return
    made.ClearField(field.name)
    values = getattr(made, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _fill_map(random, values, field.message_type, words, depth)
        return
    for _ in range(_count(random, field)):
        if field.message_type is not None:
            fill(random, values.add(), words, depth - 1)
        else:
            values.append(_value(random, field, words))


def _count(random: Random, field: FieldDescriptor) -> int:
    if random.random() < 0.995:
        return random.choice((0, 1, 1, 1, 2, 3, 8))
    return (
        random.choice((129, 257, 1000))
        if field.message_type is not None
        else random.choice((257, 10_001))
    )


def _fill_map(random: Random, values: Any, entry: Descriptor, words: Words, depth: int) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    for _ in range(random.randrange(3)):
        name = _value(random, key, words)
        if value.message_type is not None:
            fill(random, values[name], words, depth - 1)
        else:
            values[name] = _value(random, value, words)


def _value(random: Random, field: FieldDescriptor, words: Words) -> Any:
    known = words.get(field.name)
    if known and random.random() < 0.7:
        return random.choice(known)
    kind = field.type
    if kind == FieldDescriptor.TYPE_STRING:
        return mutate.text(random)
    if kind == FieldDescriptor.TYPE_BYTES:
        return random.randbytes(random.choice((0, 1, 4, 8, 100)))
    if kind == FieldDescriptor.TYPE_BOOL:
        return random.random() < 0.5
    if kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return mutate.floating(random)
    if kind == FieldDescriptor.TYPE_ENUM:
        numbers = [value.number for value in cast(EnumDescriptor, field.enum_type).values]
        return random.choice([*numbers, *numbers, len(numbers), 99, -1, (1 << 31) - 1, -(1 << 31)])
    return _whole(random, kind)


def _whole(random: Random, kind: int) -> int:
    signed, bits = kind in _SIGNED, 64 if kind in _WIDE else 32
    number = mutate.edge(random, signed=signed)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return min(max(number, low), high)
