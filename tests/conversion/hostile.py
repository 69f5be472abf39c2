"""Torch checkpoints that should be refused, as bytes, each with what its refusal names. Small,
whatever they stand for.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from libs.conversion.plan import Kind

MARKER = "SHOAL_TEST_MARKER"
"""A file of this name in the working directory means that code of a checkpoint ran."""


def saved(value: object, *, legacy: bool = False) -> bytes:
    """Return the bytes that torch.save writes."""
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=not legacy)
    return out.getvalue()


def archive(
    data: bytes, storages: Mapping[str, bytes], *, compression: int = zipfile.ZIP_STORED
) -> bytes:
    """A zip archive as torch.save lays it out, around a pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as made:
        made.writestr("archive/data.pkl", data)
        made.writestr("archive/byteorder", b"little")
        for key, content in storages.items():
            made.writestr(f"archive/data/{key}", content)
        made.writestr("archive/version", b"3\n")
    return out.getvalue()


class _Storage:
    """Pickled as a reference to a storage."""

    def __init__(self, key: str, count: int) -> None:
        self.key, self.count = key, count


class _Tensor:
    """Pickled as torch pickles a tensor, with whatever size and strides it is given."""

    def __init__(
        self, storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        self.parts: tuple[object, ...] = (storage, offset, size, stride, False, OrderedDict())

    def __reduce__(self) -> tuple[object, ...]:
        return torch._utils._rebuild_tensor_v2, self.parts


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        return (
            ("storage", torch.FloatStorage, value.key, "cpu", value.count)
            if isinstance(value, _Storage)
            else None
        )


def pickled(value: object) -> bytes:
    out = io.BytesIO()
    _Pickler(out, 2).dump(value)
    return out.getvalue()


def tensor_archive(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    *,
    offset: int = 0,
    count: int = 4,
    stored: int = 16,
) -> bytes:
    """An archive with one tensor over a storage of `count` numbers, of which `stored` bytes are
    there.
    """
    return archive(
        pickled({"w": _Tensor(_Storage("0", count), offset, size, stride)}), {"0": bytes(stored)}
    )


class _Call:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


def calling(function: Callable[..., object], *arguments: object) -> bytes:
    return archive(pickled({"w": _Call(function, *arguments)}), {})


def many_tensors(count: int) -> bytes:
    """Return as many names of one tensor of one number as fit: some 30 bytes each."""
    entries = b"".join(
        b"X\x06\x00\x00\x00%06xj\xff\xff\x00\x00" % number for number in range(count - 1)
    )
    first = pickled({"w": _Tensor(_Storage("0", 1), 0, (), ())})
    assert first.endswith(b"s.")  # SETITEM of one entry, which becomes the first of many
    start = first.index(b"X\x01\x00\x00\x00w")
    return archive(
        first[:start] + b"(" + first[start:-2] + b"r\xff\xff\x00\x00" + entries + b"u.",
        {"0": bytes(4)},
    )


def many_entries(count: int) -> bytes:
    return archive(pickled({}), {str(number): b"" for number in range(count)})


def nested(depth: int) -> bytes:
    return archive(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".", {})


def nested_key(depth: int) -> bytes:
    """Pickle a dict with a key of tuples nested so deeply that hashing overflows Python's stack."""
    return archive(b"\x80\x02})" + b"\x85" * depth + b"K\x01s.", {})


def gguf_of_numbers(arrays: int, count: int) -> bytes:
    """Return a GGUF file with lists of numbers as metadata; reading makes each a Python object."""
    numbers = b"\xff\x7f" * count
    listed = b"".join(
        struct.pack("<Q", 4) + b"k%03d" % number + struct.pack("<IIQ", 9, 2, count) + numbers
        for number in range(arrays)
    )
    return b"GGUF" + struct.pack("<IQQ", 3, 0, arrays) + listed


def onnx_of_readers(nodes: int, outputs: int) -> bytes:
    """An ONNX graph of a weight that is renamed as often as `outputs` says, with `nodes` readers of
    each name.
    """
    renaming = _field(1, _field(1, b"a.w") + _field(2, b"x") * outputs + _field(4, b"Identity"))
    reading = _field(1, _field(1, b"x") + _field(4, b"MatMul"))
    weight = _field(5, b"\x08\x01\x10\x01" + _field(8, b"a.w") + _field(9, bytes(4)))
    return _field(7, renaming + reading * nodes + weight)


def _field(number: int, content: bytes) -> bytes:
    """A field with a length of protobuf's wire format."""
    size, length = len(content), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def overlapping_views(count: int) -> bytes:
    """Views of one storage of 4 MB that would be written as `count` tensors of almost 4 MB."""
    storage = _Storage("0", 1 << 20)
    tensors = {
        f"w{number}": _Tensor(storage, number, ((1 << 20) - count,), (1,))
        for number in range(count)
    }
    return archive(pickled(tensors), {"0": bytes(4 << 20)})


def overlapping_entries() -> bytes:
    """The directory's entry of one storage says that it is where another is."""
    data = bytearray(
        archive(
            pickled({"w": _Tensor(_Storage("0", 4), 0, (4,), (1,))}),
            {"0": bytes(16), "1": bytes(16)},
        )
    )
    place = [index for index in range(len(data)) if data[index : index + 4] == b"PK\x01\x02"]
    first, second = place[2], place[3]
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    data[second + 46 : second + 46 + len(b"archive/data/1")] = b"archive/data/2"
    return bytes(data)


def lying_size() -> bytes:
    """The directory says that a storage is longer than its own header does."""
    data = bytearray(
        archive(pickled({"w": _Tensor(_Storage("0", 2), 0, (2,), (1,))}), {"0": bytes(16)})
    )
    place = [index for index in range(len(data)) if data[index : index + 4] == b"PK\x01\x02"][2]
    struct.pack_into("<2L", data, place + 20, 8, 8)
    return bytes(data)


def legacy_lie() -> bytes:
    data = bytearray(saved({"w": torch.zeros(4)}, legacy=True))
    data[-24:-16] = (1 << 40).to_bytes(8, "little")
    return bytes(data)


def self_containing() -> bytes:
    wrapper: dict[str, object] = {}
    wrapper["model"] = wrapper
    return archive(pickled(wrapper), {})


def torchscript() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        made.writestr("archive/data.pkl", pickled({}))
        made.writestr("archive/constants.pkl", pickled(()))
    return out.getvalue()


BOUNDED = (
    "os.system", "legacy with a global", "gigabytes of bytearray", "a million tensors",
    "a hundred thousand tensors", "a zip bomb",
    "overlapping views", "a hundred thousand entries", "deep nesting", "a key of nested tuples",
    "a truncated archive",
    "a tensor that repeats one number",
)  # fmt: skip
"""Files with which the limits of the child are measured."""

SOUND = saved({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)})
SOUND_LEGACY = saved(
    {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}, legacy=True
)

HOSTILE: Mapping[str, tuple[Callable[[], bytes], str]] = {
    "os.system": (lambda: calling(os.system, f"touch {MARKER}"), r"asks for 'posix\.system'"),
    "pathlib": (lambda: calling(Path.touch, Path(MARKER)), "asks for 'getattr'"),
    "builtins.eval": (lambda: calling(eval, f"open({MARKER!r}, 'w')"), "asks for 'eval'"),
    "builtins.exec": (lambda: calling(exec, f"open({MARKER!r}, 'w')"), "asks for 'exec'"),
    "torch.load": (lambda: calling(torch.load, MARKER), r"asks for 'torch\.\w*\.?load'"),
    "torch.hub": (lambda: calling(torch.hub.load, "a/b", "c"), r"asks for 'torch\.hub\.load'"),
    "a plain pickle": (
        lambda: pickle.dumps(_Call(os.system, f"touch {MARKER}")),
        "is a plain pickle",
    ),
    "legacy with a global": (
        lambda: saved({"w": torch.zeros(2), "x": _Call(os.system, f"touch {MARKER}")}, legacy=True),
        r"asks for 'posix\.system'",
    ),
    "a stack global": (
        lambda: archive(pickle.dumps(_Call(os.system, f"touch {MARKER}"), 4), {}),
        "is not a pickle of tensors alone",
    ),
    "a class of its own": (
        lambda: archive(b"\x80\x02cevil\nModel\n)\x81.", {}),
        r"asks for 'evil\.Model'",
    ),
    "gigabytes of bytearray": (lambda: calling(bytearray, 1 << 36), "more memory"),
    "a storage of petabytes": (
        lambda: tensor_archive((1 << 46,), (1,), count=1 << 46),
        "two sizes for the storage '0'",
    ),
    "a tensor beyond its storage": (lambda: tensor_archive((5,), (1,)), "'w'"),
    "strides beyond its storage": (
        lambda: tensor_archive((2, 2), (1 << 40, 1)),
        "'w'|damaged pickle",
    ),
    "an offset beyond its storage": (
        lambda: tensor_archive((2,), (1,), offset=3),
        "'w'|damaged pickle",
    ),
    "a negative stride": (lambda: tensor_archive((2,), (-1,), offset=3), "'w'|damaged pickle"),
    "an overflowing shape": (
        lambda: tensor_archive((1 << 40, 1 << 40), (1, 1)),
        "'w'|damaged pickle",
    ),
    "a tensor that repeats one number": (lambda: tensor_archive((1 << 40,), (0,)), "overlap"),
    "a storage shorter than it says": (
        lambda: tensor_archive((4,), (1,), stored=8),
        "two sizes for the storage '0'",
    ),
    "a storage longer than it says": (
        lambda: tensor_archive((4,), (1,), stored=32),
        "two sizes for the storage '0'",
    ),
    "a storage that is missing": (
        lambda: archive(pickled({"w": _Tensor(_Storage("7", 4), 0, (4,), (1,))}), {}),
        "'7' is missing",
    ),
    "overlapping views": (lambda: overlapping_views(64), "overlap: the file has"),
    "overlapping entries": (overlapping_entries, "another header|same bytes|twice"),
    "two sizes of an entry": (lying_size, "two sizes"),
    "two entries of a name": (lambda: SOUND.replace(b"data/1", b"data/0"), "twice"),
    "a zip bomb": (
        lambda: archive(pickled({}), {"0": bytes(64 << 20)}, compression=zipfile.ZIP_DEFLATED),
        "compressed entry",
    ),
    "a hundred thousand entries": (
        lambda: many_entries(65_000),
        "has 65,003 entries; at most 20,000",
    ),
    "a million tensors": (lambda: many_tensors(1_000_000), "bytes of names and shapes"),
    "a hundred thousand tensors": (
        lambda: many_tensors(100_000),
        "has 100,000 tensors; at most 20,000",
    ),
    "deep nesting": (lambda: nested(1_000_000), "holds a list, not tensors by name"),
    "a key of nested tuples": (
        lambda: nested_key(1_000_000),
        r"the process that converted it ended \(SIGSEGV\)",
    ),
    "a wrapper of itself": (self_containing, "has no tensors by name"),
    "no tensors": (lambda: saved({"epoch": 3}), "has no tensors by name"),
    "a list": (lambda: saved([torch.zeros(2)]), "holds a list"),
    "sparse tensors": (
        lambda: saved({"w": torch.eye(3).to_sparse()}),
        "'w' as Tensor of layout torch.sparse_coo",
    ),
    "complex numbers": (
        lambda: saved({"w": torch.zeros(2, dtype=torch.complex64)}),
        "'w' of torch.complex64",
    ),
    "a control character in a name": (
        lambda: saved({"w\x1b[2J": torch.zeros(2)}),
        "printable characters",
    ),
    "TorchScript": (torchscript, "is TorchScript, which is a program"),
    "a truncated archive": (lambda: SOUND[: len(SOUND) // 2], "is truncated"),
    "an archive without its end": (lambda: SOUND[:-1], "is truncated"),
    "truncated stacked pickles": (lambda: SOUND_LEGACY[:-8], "is truncated: the storage"),
    "stacked pickles cut in a pickle": (
        lambda: SOUND_LEGACY[:60],
        "is truncated: it ends within its pickles",
    ),
    "stacked pickles with a lie": (legacy_lie, "two sizes for the storage"),
    "bytes after stacked pickles": (
        lambda: SOUND_LEGACY + b"more",
        "has 4 bytes after its last storage",
    ),
    "an empty file": (lambda: b"", "is empty"),
    "no checkpoint": (
        lambda: b"version https://git-lfs.github.com/spec/v1\n",
        "is neither a zip archive",
    ),
    "a tar": (lambda: b"storages" + bytes(249) + b"ustar\x0000", "is neither a zip archive"),
}

FOREIGN: Mapping[str, tuple[Kind, Callable[[], bytes], str]] = {
    "lists of a GGUF file": (
        "gguf",
        lambda: gguf_of_numbers(15, 1 << 21),
        "takes more than 1024 MiB of memory to read|is truncated",
    ),
    "settings of a GGUF file": (
        "gguf_settings",
        lambda: gguf_of_numbers(15, 1 << 21),
        "the architecture ''|more than|is truncated",
    ),
    "readers in an ONNX graph": (
        "onnx",
        lambda: onnx_of_readers(100_000, 100_000),
        "takes more than 512 MiB of memory to read",
    ),
}
"""Hostile files of other formats, with the conversion that refuses them; measured as BOUNDED."""
