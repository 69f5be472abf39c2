"""Reads the layout of a GGUF file: its metadata, and where its tensors are. The file's author is
not trusted.

The `gguf` package knows the quantised types and dequantises them (`gguf_tensors.py`). The header is
read here, because each of its counts and lengths has to be bounded before memory is taken for it.
Format: ggml/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from libs.conversion.archive import MAX_TENSORS, CheckpointRefused

MAX_KEYS: Final = 4_096
MAX_TEXT_BYTES: Final = 1 << 20
MAX_ELEMENTS: Final = 1 << 21
"""Maximum length of an array in the metadata, such as the merges of a tokenizer."""

MAX_HEADER_BYTES: Final = 64 << 20
MAX_AXES: Final = 4
MAX_NAME_BYTES: Final = 256

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_TEXT, _ARRAY = 8, 9
_NUMBERS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file.

    Attributes:
        shape: The slowest axis first, as in torch.
        kind: A number of GGMLQuantizationType.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    begin: int

    @property
    def numbers(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """The metadata and tensors of a GGUF file."""

    values: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    def number(self, key: str, default: float | None = None) -> Any:
        """Return the number of the architecture's key. Raises CheckpointRefused if there is none
        and no default.
        """
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointRefused(f"has no number {self.architecture}.{key} in its metadata")
        return value

    def texts(self, key: str) -> list[str]:
        """Return the array of texts of a key, empty if there is none."""
        found = self.values.get(key, [])
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise CheckpointRefused(f"has {key} in its metadata, which is not a list of texts")
        return found


def read_layout(mapping: mmap.mmap) -> GgufLayout:
    """Return the layout of a GGUF file. Raises CheckpointRefused."""
    reader = _Reader(mapping)
    if reader.take(4) != _MAGIC:
        raise CheckpointRefused("is not a GGUF file")
    version = reader.number("<I")
    if version not in _VERSIONS:
        raise CheckpointRefused(
            f"has version {version} of GGUF, or big-endian numbers; versions 2 and 3 are read"
        )
    tensors, keys = reader.number("<Q"), reader.number("<Q")
    if tensors > MAX_TENSORS or keys > MAX_KEYS:
        raise CheckpointRefused(
            f"has {tensors:,} tensors and {keys:,} keys; at most {MAX_TENSORS:,} and "
            f"{MAX_KEYS:,} are read"
        )
    values: dict[str, Any] = {}
    for _ in range(keys):
        key = reader.text(MAX_NAME_BYTES)
        values[key] = reader.value(reader.number("<I"))
    found = [_tensor(reader) for _ in range(tensors)]
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
        raise CheckpointRefused(f"has an alignment of {str(alignment)[:40]} bytes")
    data = -(-reader.place // alignment) * alignment
    names = {name for name, *_ in found}
    if len(names) < len(found):
        raise CheckpointRefused("has a tensor twice")
    return GgufLayout(
        values,
        tuple(GgufTensor(name, shape, kind, data + offset) for name, shape, kind, offset in found),
    )


def _tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.text(MAX_NAME_BYTES)
    axes = reader.number("<I")
    if not 1 <= axes <= MAX_AXES:
        raise CheckpointRefused(
            f"has the tensor {name!r} of {axes:,} axes; 1 to {MAX_AXES} are read"
        )
    shape = tuple(reader.number("<Q") for _ in range(axes))
    return name, shape[::-1], reader.number("<I"), reader.number("<Q")


class _Reader:
    """Reads numbers and texts one after another, at most MAX_HEADER_BYTES of the file."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._end = min(len(mapping), MAX_HEADER_BYTES)
        # Mutable state: the next byte to read.
        self.place = 0

    def take(self, size: int) -> bytes:
        begin, self.place = self.place, self.place + size
        if self.place > self._end:
            raise CheckpointRefused(
                f"is truncated within its metadata, or has more than {MAX_HEADER_BYTES:,} bytes of "
                "it"
            )
        return self._mapping[begin : self.place]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, most: int = MAX_TEXT_BYTES) -> str:
        size = self.number("<Q")
        if size > most:
            raise CheckpointRefused(
                f"has a text of {size:,} bytes in its metadata; at most {most:,} are read"
            )
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointRefused(
                f"has a text that is not UTF-8 in its metadata: {error.reason}"
            ) from None

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise CheckpointRefused(f"has a value of the unknown type {kind} in its metadata")
        inner, count = self.number("<I"), self.number("<Q")
        if count > MAX_ELEMENTS:
            raise CheckpointRefused(
                f"has a list of {count:,} values in its metadata; at most {MAX_ELEMENTS:,} are read"
            )
        if inner == _TEXT:
            return [self.text() for _ in range(count)]
        if inner not in _NUMBERS:
            raise CheckpointRefused(
                f"has a list of the type {inner} in its metadata; numbers and texts are read"
            )
        form = _NUMBERS[inner]
        data = self.take(count * struct.calcsize(form))
        return [number for (number,) in struct.iter_unpack(form, data)]
