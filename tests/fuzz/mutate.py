"""Random inputs: bytes changed like in other fuzzers, and unusual values of every type."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final

from tests.fuzz.target import Random

MAX_BYTES: Final = 1 << 16

_EDGES: Final = (0, 1, 2, 7, 8, 15, 16, 31, 32, 63, 64, 100, 127, 128, 255, 256, 511, 512, 1000,
1024, 4095, 4096, 9_999, 10_000,
    10_001, 32_767, 32_768, 65_535, 65_536, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
    (1 << 53) + 1, (1 << 63) - 1,
    1 << 63, (1 << 64) - 1)  # fmt: skip
_FLOATS: Final = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 5e-324, 1e-9, 1e9, 3.4e38, 1e300, 1.7e308, float("inf"),
    float("-inf"), float("nan"),
)  # fmt: skip
_TEXTS: Final = (
    "", " ", "a", "\0", "\n", "\t", "..", "../..", "/etc/passwd", "a/b", "a/b@c", "org/name",
    "%s%n", "${x}", "{}", "{{7*7}}", "'",
    '"',
    "\\", "|", "!", ":", "*", "\u202e", "\ufeff", "\U0001f480", "é", "e\u0301" * 20, "\u0300" * 200,
    "Ǆ", "ß", "İ", "\u2028",
    "\ud7ff", "\ue000", "\uffff", "\U0010ffff", "ﷺ" * 10, "\uff10", "٣", "null", "NaN", "-1",
    "0x10", "1e999", "true", "[]", "-0",
)  # fmt: skip


def edge(random: Random, *, signed: bool = False) -> int:
    """Return an integer at or next to a limit of a type."""
    near = random.choice(_EDGES) + random.choice((-1, 0, 0, 1))
    value = near if random.random() < 0.8 else random.getrandbits(random.randrange(1, 65))
    return -value if signed and random.random() < 0.4 else max(0, value)


def floating(random: Random) -> float:
    if random.random() < 0.7:
        return random.choice(_FLOATS)
    return float(struct.unpack("<d", random.randbytes(8))[0])


def text(random: Random, most: int = 40) -> str:
    kind = random.random()
    if kind < 0.5:
        return random.choice(_TEXTS)
    if kind < 0.8:
        return "".join(random.choice(_TEXTS) for _ in range(random.randrange(1, 5)))
    if kind < 0.98:
        return "".join(chr(_code_point(random)) for _ in range(random.randrange(most)))
    return random.choice(_TEXTS[2:]) * random.randrange(1, 2000)


def _code_point(random: Random) -> int:
    point = random.choice(
        (
            random.randrange(128),
            random.randrange(0x800),
            random.randrange(0x10000),
            random.randrange(0x110000),
        )
    )
    return point if not 0xD800 <= point < 0xE000 else 0x20


def mutated(
    random: Random, data: bytes, words: Sequence[bytes] = (), others: Sequence[bytes] = ()
) -> bytes:
    """Return the data with a few changes.

    Args:
        random: The source of randomness.
        data: The original.
        words: Meaningful bytes of the format.
        others: Inputs from which to take pieces.
    """
    found = bytearray(data)
    for _ in range(1 << random.randrange(4)):
        random.choice(_CHANGES)(random, found, words, others)
    del found[MAX_BYTES:]
    return bytes(found)


def _place(random: Random, data: bytearray) -> int:
    return random.randrange(len(data) + 1)


def _piece(random: Random, data: bytes | bytearray) -> tuple[int, int]:
    begin = random.randrange(len(data) + 1)
    return begin, min(len(data), begin + 1 + random.randrange(1 << random.randrange(1, 9)))


def _flip(random: Random, data: bytearray, words: Sequence[bytes], others: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _set(random: Random, data: bytearray, words: Sequence[bytes], others: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice(
            (0, 1, 0x7F, 0x80, 0xFF, 0x20, random.randrange(256))
        )


def _number(
    random: Random, data: bytearray, words: Sequence[bytes], others: Sequence[bytes]
) -> None:
    """Insert a number as little-endian, big-endian or decimal."""
    value, width = edge(random), random.choice((2, 4, 8))
    form = random.randrange(3)
    piece = (
        str(value).encode()
        if form == 0
        else (value % (1 << 8 * width)).to_bytes(width, "little" if form == 1 else "big")
    )
    place = _place(random, data)
    data[place : place + random.choice((0, len(piece)))] = piece


def _cut(random: Random, data: bytearray, words: Sequence[bytes], others: Sequence[bytes]) -> None:
    begin, end = _piece(random, data)
    del data[begin:end]


def _truncate(
    random: Random, data: bytearray, words: Sequence[bytes], others: Sequence[bytes]
) -> None:
    del data[_place(random, data) :]


def _repeat(
    random: Random, data: bytearray, words: Sequence[bytes], others: Sequence[bytes]
) -> None:
    begin, end = _piece(random, data)
    place = _place(random, data)
    data[place:place] = data[begin:end] * (1 << random.randrange(6))


def _insert(
    random: Random, data: bytearray, words: Sequence[bytes], others: Sequence[bytes]
) -> None:
    place = _place(random, data)
    data[place:place] = random.randbytes(1 + random.randrange(8))


def _word(random: Random, data: bytearray, words: Sequence[bytes], others: Sequence[bytes]) -> None:
    word = random.choice(words) if words else text(random).encode()
    place = _place(random, data)
    data[place : place + random.choice((0, len(word)))] = word


def _splice(
    random: Random, data: bytearray, words: Sequence[bytes], others: Sequence[bytes]
) -> None:
    if others:
        other = random.choice(others)
        begin, end = _piece(random, other)
        place = _place(random, data)
        data[place : place + random.choice((0, end - begin))] = other[begin:end]


_CHANGES: Final[Sequence[Callable[[Random, bytearray, Sequence[bytes], Sequence[bytes]], None]]] = (
    _flip, _flip, _set, _set, _number, _number, _cut, _truncate, _repeat, _insert, _word, _word,
    _splice,
)  # fmt: skip


def value(random: Random, depth: int = 3) -> object:
    """Return any JSON value."""
    kind = random.randrange(9 if depth else 6)
    if kind == 0:
        return random.choice((None, True, False))
    if kind in (1, 2):
        return (
            edge(random, signed=True)
            if random.random() < 0.9
            else 10 ** random.choice((30, 39, 40, 400))
        )
    if kind == 3:
        return floating(random)
    if kind in (4, 5):
        return text(random)
    size = random.choice((0, 1, 1, 2, 3))
    if kind in (6, 7):
        return {text(random): value(random, depth - 1) for _ in range(size)}
    return [value(random, depth - 1) for _ in range(size)]


def changed(random: Random, given: object, words: Sequence[object] = ()) -> object:
    """Return a JSON value with one part changed, removed, duplicated or deeply nested. `words` are
    meaningful values.
    """
    if isinstance(given, dict) and given and random.random() < 0.9:
        key = random.choice(list(given))
        return _changed_object(random, given, key, words)
    if isinstance(given, list) and given and random.random() < 0.8:
        place = random.randrange(len(given))
        return [*given[:place], changed(random, given[place], words), *given[place + 1 :]]
    if random.random() < 0.02:
        return _deep(random)
    if words and random.random() < 0.3:
        return random.choice(words)
    return value(random)


def _changed_object(
    random: Random, given: dict[str, object], key: str, words: Sequence[object]
) -> object:
    kind = random.random()
    if kind < 0.1:
        return {name: one for name, one in given.items() if name != key}
    if kind < 0.2:
        return given | {text(random): given[key]}
    return given | {key: changed(random, given[key], words)}


def _deep(random: Random) -> object:
    found: object = 1
    for _ in range(random.choice((10, 60, 70, 900))):
        found = [found] if random.random() < 0.5 else {"a": found}
    return found
