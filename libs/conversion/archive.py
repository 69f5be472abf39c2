"""Read the layout of a torch checkpoint without torch: the positions of its pickle and its
storages. Runs in the child.

The file's author is not trusted. A zip archive is read only if its layout is that of torch.save:
stored entries without duplicates or overlap, each as long as both of its headers say. A refusal
costs no more than reading the directory. Formats: torch/serialization.py (zip since torch 1.6; five
pickles and raw storages before); APPNOTE.TXT for zip.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import BinaryIO, Final

MAX_ENTRIES: Final = 20_000
MAX_TENSORS: Final = 20_000
"""Tensors of one file of any format."""

MAX_DIRECTORY_BYTES: Final = 4 << 20
MAX_PICKLE_BYTES: Final = 8 << 20
"""Maximum size of the pickle of names and shapes: some 100 bytes for each tensor."""

LEGACY_START: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The magic number of torch before 1.6, as a separate pickle."""

_ZIP_START: Final = b"PK\x03\x04"
_END: Final = struct.Struct("<4s4H2LH")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_ENCRYPTED: Final = 0x1
_SIZES_FOLLOW: Final = 0x8
_PROGRAM: Final = ("constants.pkl", "model.json", "code/")


class CheckpointRefused(Exception):
    """The file cannot be converted. The message is for the operator and names the fault."""


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """The bytes `begin` to `end` of the file."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """A zip archive of torch.save: its pickle, and its storages by key."""

    pickle: ByteSpan
    storages: Mapping[str, ByteSpan]


def detect_format(file: BinaryIO) -> str:
    """`zip` or `legacy`. Raises CheckpointRefused for everything else."""
    start = os.pread(file.fileno(), len(LEGACY_START), 0)
    if start.startswith(_ZIP_START):
        return "zip"
    if start == LEGACY_START:
        return "legacy"
    if start.startswith(b"\x80"):
        raise CheckpointRefused("is a plain pickle, not a checkpoint of torch.save")
    raise CheckpointRefused(
        "is neither a zip archive of torch.save nor its older format of stacked pickles"
    )


def read_archive(file: BinaryIO) -> TorchArchive:
    """Return the layout of a zip archive. Raises CheckpointRefused."""
    size = os.fstat(file.fileno()).st_size
    directory_begin = _check_end(file, size)
    try:
        with zipfile.ZipFile(file) as opened:
            entries = opened.infolist()
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError, OSError) as error:
        raise CheckpointRefused(f"has a damaged zip directory: {str(error)[:200]}") from None
    spans: dict[str, ByteSpan] = {}
    for entry in entries:
        if entry.filename in spans:
            raise CheckpointRefused(f"has the entry {entry.filename[:200]!r} twice")
        spans[entry.filename] = _span(file, entry, directory_begin)
    _refuse_overlap(spans)
    return _read_torch_layout(file, spans)


def _check_end(file: BinaryIO, size: int) -> int:
    """Return the start of the directory, from the record at the end of the file, which bounds the
    directory before it is read. Raises CheckpointRefused.
    """
    tail = os.pread(
        file.fileno(),
        _END64.size + _LOCATOR.size + _END.size,
        max(0, size - _END64.size - _LOCATOR.size - _END.size),
    )
    end = tail[-_END.size :]
    if len(end) < _END.size or not end.startswith(b"PK\x05\x06"):
        raise CheckpointRefused(
            "is truncated: a zip archive ends with its directory, and this one does not"
        )
    _, _, _, _, entries, length, begin, comment = _END.unpack(end)
    locator = tail[-_END.size - _LOCATOR.size : -_END.size]
    if locator.startswith(b"PK\x06\x07"):
        record = tail[: _END64.size]
        if len(record) < _END64.size or not record.startswith(b"PK\x06\x06"):
            raise CheckpointRefused("has a damaged end of its zip directory")
        entries, length, begin = _END64.unpack(record)[7:]
    if comment:
        raise CheckpointRefused(
            "has a comment in its zip directory, which torch.save does not write"
        )
    if entries > MAX_ENTRIES:
        raise CheckpointRefused(f"has {entries:,} entries; at most {MAX_ENTRIES:,} are read")
    if length > MAX_DIRECTORY_BYTES:
        raise CheckpointRefused(
            f"has a zip directory of {length:,} bytes; at most {MAX_DIRECTORY_BYTES:,} are read"
        )
    if begin + length > size:
        raise CheckpointRefused("is truncated, or its zip directory lies outside the file")
    return int(begin)


def _span(file: BinaryIO, entry: zipfile.ZipInfo, end: int) -> ByteSpan:
    """Return the bytes of an entry's content. Raises CheckpointRefused where its two headers do not
    agree.
    """
    name = entry.filename[:200]
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise CheckpointRefused(
            f"has the compressed entry {name!r}: torch.save stores entries as they are"
        )
    if entry.flag_bits & _ENCRYPTED:
        raise CheckpointRefused(f"has the encrypted entry {name!r}")
    head = (
        os.pread(file.fileno(), _LOCAL.size + 65536, entry.header_offset)
        if entry.header_offset >= 0
        else b""
    )
    if len(head) < _LOCAL.size or not head.startswith(_ZIP_START):
        raise CheckpointRefused(f"has no header for the entry {name!r} where its directory says")
    _, _, flags, method, _, _, _, compressed, size, name_size, extra_size = _LOCAL.unpack_from(head)
    own = head[_LOCAL.size : _LOCAL.size + name_size]
    if (
        method != zipfile.ZIP_STORED
        or flags & _ENCRYPTED
        or own != entry.orig_filename.encode("utf-8", "surrogateescape")
    ):
        raise CheckpointRefused(
            f"has another header for the entry {name!r} than its directory says"
        )
    has_sizes = not flags & _SIZES_FOLLOW and 0xFFFFFFFF not in (compressed, size)
    if has_sizes and (compressed != entry.compress_size or size != entry.file_size):
        raise CheckpointRefused(
            f"has two sizes for the entry {name!r}: {size:,} and {entry.file_size:,} bytes"
        )
    begin = entry.header_offset + _LOCAL.size + name_size + extra_size
    if begin + entry.file_size > end:
        raise CheckpointRefused(
            f"is truncated: the entry {name!r} ends at byte {begin + entry.file_size:,}, after "
            f"byte {end:,}"
        )
    return ByteSpan(begin, begin + entry.file_size)


def _refuse_overlap(spans: Mapping[str, ByteSpan]) -> None:
    before, end = "", 0
    for name, span in sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)):
        if span.begin < end:
            raise CheckpointRefused(
                f"has the entries {before[:100]!r} and {name[:100]!r} on the same bytes"
            )
        before, end = name, span.end


def _read_torch_layout(file: BinaryIO, spans: Mapping[str, ByteSpan]) -> TorchArchive:
    pickles = [
        name for name in spans if PurePosixPath(name).name == "data.pkl" and name.count("/") == 1
    ]
    if len(pickles) != 1:
        raise CheckpointRefused(
            f"has {len(pickles)} pickles named data.pkl; a checkpoint of torch.save has one"
        )
    root = pickles[0].removesuffix("data.pkl")
    if any(name.removeprefix(root).startswith(_PROGRAM) for name in spans):
        raise CheckpointRefused("is TorchScript, which is a program and not weights")
    span = spans[pickles[0]]
    if span.size > MAX_PICKLE_BYTES:
        raise CheckpointRefused(
            f"has {span.size:,} bytes of names and shapes (data.pkl); at most "
            f"{MAX_PICKLE_BYTES:,} are read"
        )
    order = spans.get(f"{root}byteorder")
    if order is not None and os.pread(file.fileno(), min(order.size, 16), order.begin) != b"little":
        raise CheckpointRefused("has numbers in another byte order than little-endian")
    storages = {
        name.removeprefix(f"{root}data/"): span
        for name, span in spans.items()
        if name.startswith(f"{root}data/")
    }
    return TorchArchive(span, storages)


class BoundedReader:
    """Reads the pickles of the older format from a file, at most MAX_PICKLE_BYTES of them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        # Mutable state: the bytes left to read.
        self._left = MAX_PICKLE_BYTES

    def read(self, size: int) -> bytes:
        data = self._file.read(self._counted(size))
        if len(data) < size:
            raise CheckpointRefused("is truncated: it ends within its pickles")
        return data

    def readline(self) -> bytes:
        line = self._file.readline(self._left + 1)
        self._counted(len(line))
        return line

    def _counted(self, size: int) -> int:
        self._left -= size
        if size < 0 or self._left < 0:
            raise CheckpointRefused(
                f"has more than {MAX_PICKLE_BYTES:,} bytes of names and shapes; no more are read"
            )
        return size


def legacy_storages(
    file: BinaryIO, begin: int, keys: Sequence[object], sizes: Mapping[str, tuple[int, int]]
) -> dict[str, ByteSpan]:
    """Return the storages of the older format: from byte `begin` on, for each key a count of
    numbers (8 bytes) and the numbers.

    `sizes`: the count of numbers and the bytes of one, by key, as the pickle says. Raises
    CheckpointRefused where the file does not agree.
    """
    size = os.fstat(file.fileno()).st_size
    found: dict[str, ByteSpan] = {}
    for key in keys:
        if not isinstance(key, str) or key in found or key not in sizes:
            raise CheckpointRefused(
                f"lists the storage {str(key)[:100]!r} twice, or no tensor has it"
            )
        count, item = sizes[key]
        recorded = int.from_bytes(os.pread(file.fileno(), 8, begin), "little", signed=True)
        if recorded != count:
            raise CheckpointRefused(
                f"has two sizes for the storage {key[:100]!r}: {recorded:,} and {count:,} numbers"
            )
        found[key] = ByteSpan(begin + 8, begin + 8 + count * item)
        begin = found[key].end
        if begin > size:
            raise CheckpointRefused(
                f"is truncated: the storage {key[:100]!r} ends at byte {begin:,} of {size:,}"
            )
    missing = next((key for key in sizes if key not in found), None)
    if missing is not None:
        raise CheckpointRefused(f"is truncated: the storage {missing[:100]!r} is missing")
    if begin != size:
        raise CheckpointRefused(f"has {size - begin:,} bytes after its last storage")
    return found
