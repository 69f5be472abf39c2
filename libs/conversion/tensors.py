"""Converts a torch checkpoint to a safetensors file: torch's weights-only machine names the
tensors, their bytes are copied from file to file. Runs in the child, the only module of this
package that imports torch.

The machine (`torch._weights_only_unpickler`, that of `torch.load(weights_only=True)`) knows some 35
opcodes and a list of constructors; nothing is imported or called that is not on the list. Storages
are made on the meta device, so torch holds no data: each tensor is copied from the bytes of its
storage, in blocks, and the whole conversion holds one block at a time.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import mmap
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, BinaryIO, Final

import torch
from torch import _weights_only_unpickler as machine

from libs.conversion.archive import (
    MAX_TENSORS,
    BoundedReader,
    ByteSpan,
    CheckpointRefused,
    detect_format,
    legacy_storages,
    read_archive,
)
from libs.conversion.writing import ALIGN, ConversionReport, Progress

MAX_AXES: Final = 8
MAX_NAME: Final = 512
"""Characters of a tensor's name."""

MAX_WRAPPERS: Final = 4
MAX_EXTRA_BYTES: Final = 16 << 20
"""Maximum bytes by which the tensors may exceed the checkpoint: views of one storage are copied
whole, and a file of a few bytes must not become one of gigabytes.
"""

BLOCK_BYTES: Final = 8 << 20
GATHER_BYTES: Final = 1 << 20
"""Block size for tensors with numbers out of order: torch holds such a block twice."""

_PROTOCOL: Final = 1001
_WRAPPERS: Final = ("state_dict", "model_state_dict", "model", "module")
_PREFIXES: Final = ("module.", "_orig_mod.")
"""Prefixes that DataParallel and torch.compile add to the names of all tensors."""

_DTYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_GLOBAL: Final = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")
_EMBEDDING: Final = re.compile(
    r"(^|\.)(shared|word_embeddings|embed_tokens|tok_embeddings|wte|word_embedding)\."
)
_TIED: Final = re.compile(
    r"(^|\.)((encoder|decoder)\.embed_tokens|lm_head|decoder|proj_out|embed_out|output_projection)\."
)


def _without_data(count: int, dtype: torch.dtype) -> Any:
    """Return a storage of `count` numbers on the meta device, in the form that the unpickler's
    constructors take.
    """
    untyped = torch.UntypedStorage(count * dtype.itemsize, device="meta")  # type: ignore[no-untyped-call]
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to write: `meta` has its type, shape and strides; `span`: the bytes of its storage
    in the file.
    """

    meta: torch.Tensor
    span: ByteSpan

    @property
    def bytes(self) -> int:
        return self.meta.numel() * self.meta.element_size()


@dataclass(slots=True)
class _Storages:
    """The storages that the pickle names, on the meta device, by key; with the count of numbers and
    the bytes of one.
    """

    made: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)

    def load(self, saved: object) -> Any:
        """Implement torch's `persistent_load`: for ("storage", class, key, location, count[,
        view]). Raises CheckpointRefused.
        """
        if (
            not isinstance(saved, tuple)
            or len(saved) not in (5, 6)
            or saved[0] not in ("storage", b"storage")
        ):
            raise CheckpointRefused(f"has a reference that is not to a storage: {str(saved)[:100]}")
        _, kind, key, _, count = saved[:5]
        if len(saved) == 6 and saved[5] is not None:
            raise CheckpointRefused(
                f"has a view of the storage {str(key)[:100]!r}, as only torch before 0.4 wrote: "
                "save it again"
            )
        if (
            not isinstance(key, str)
            or isinstance(count, bool)
            or not isinstance(count, int)
            or not 0 <= count < 1 << 48
        ):
            raise CheckpointRefused(
                f"has the storage {str(key)[:100]!r} of {str(count)[:40]} numbers"
            )
        dtype = torch.uint8 if kind is torch.UntypedStorage else getattr(kind, "dtype", None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointRefused(
                f"has the storage {key[:100]!r} of the class {str(kind)[:100]}, which is not one "
                "of numbers"
            )
        size = (count, dtype.itemsize)
        if key in self.made:
            if self.sizes[key] != size:
                raise CheckpointRefused(f"has the storage {key[:100]!r} with two sizes or types")
            return self.made[key]
        if len(self.made) >= MAX_TENSORS:
            raise CheckpointRefused(f"has more than {MAX_TENSORS:,} storages")
        self.made[key] = _without_data(count, dtype)
        self.sizes[key] = size
        self.keys[self.made[key]._untyped_storage._cdata] = key
        return self.made[key]


def warm() -> None:
    """Load everything that opens files or starts threads on first use, before the limits are
    set.
    """
    codecs.lookup(
        "cp437"
    )  # zipfile's codec for older names; decoding an empty string would not load it
    torch.set_num_threads(1)
    torch._utils._rebuild_tensor_v2(_without_data(4, torch.float32), 0, (2, 2), (2, 1), False, {})  # type: ignore[no-untyped-call]
    with mmap.mmap(-1, 16) as memory:
        view = torch.frombuffer(memory, dtype=torch.uint8, count=16).as_strided(
            (2, 2, 4), (4, 8, 1), 0
        )
        bytes(view.contiguous().flatten().numpy())
        del view


def convert(
    source: BinaryIO, mapping: mmap.mmap, output: BinaryIO, progress: Progress
) -> ConversionReport:
    """Write the tensors of a checkpoint to an empty file. Raises CheckpointRefused, naming the
    fault.

    Args:
        mapping: The source in memory, for tensors with numbers out of order.
    """
    storages = _Storages()
    loaded, spans = (
        _load_zip(source, storages)
        if detect_format(source) == "zip"
        else _load_legacy(source, storages)
    )
    found, left_out = _tensors(loaded, storages, spans)
    kept, tied = _without_ties(found)
    limit = os.fstat(source.fileno()).st_size + MAX_EXTRA_BYTES
    total = sum(tensor.bytes for tensor in kept.values())
    if total > limit:
        raise CheckpointRefused(
            f"has tensors of {total:,} bytes in all, which overlap: the file has "
            f"{limit - MAX_EXTRA_BYTES:,}"
        )
    digest = _write(kept, _Source(source, mapping), output, progress)
    return ConversionReport(len(kept), digest, f"torch {torch.__version__}", left_out, tied)


def _load_zip(source: BinaryIO, storages: _Storages) -> tuple[object, Mapping[str, ByteSpan]]:
    archive = read_archive(source)
    data = os.pread(source.fileno(), archive.pickle.size, archive.pickle.begin)
    loaded = _unpickled(io.BytesIO(data), storages)
    for key, (count, item) in storages.sizes.items():
        span = archive.storages.get(key)
        if span is None:
            raise CheckpointRefused(f"is truncated: the storage {key[:100]!r} is missing")
        if span.size != count * item:
            raise CheckpointRefused(
                f"has two sizes for the storage {key[:100]!r}: {span.size:,} and "
                f"{count * item:,} bytes"
            )
    return loaded, archive.storages


def _load_legacy(source: BinaryIO, storages: _Storages) -> tuple[object, Mapping[str, ByteSpan]]:
    """Five pickles one after another: magic number, version, a description of the machine, the
    object, the keys of its storages.
    """
    source.seek(0)
    reader = BoundedReader(source)
    _unpickled(reader, storages)
    if (version := _unpickled(reader, storages)) != _PROTOCOL:
        raise CheckpointRefused(
            f"has the version {str(version)[:40]} of torch's older format; {_PROTOCOL} is read"
        )
    host = _unpickled(reader, storages)
    if not isinstance(host, dict) or host.get("little_endian") is not True:
        raise CheckpointRefused("has numbers in another byte order than little-endian")
    loaded = _unpickled(reader, storages)
    keys = _unpickled(reader, storages)
    if not isinstance(keys, list):
        raise CheckpointRefused("is damaged: it has no list of storages")
    return loaded, legacy_storages(source, source.tell(), keys, storages.sizes)


def _unpickled(reader: Any, storages: _Storages) -> object:
    """Return the object of one pickle, by torch's weights-only machine. Raises
    CheckpointRefused.
    """
    unpickler: Any = machine.Unpickler(reader, encoding="utf-8")
    unpickler.persistent_load = storages.load
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of pickle protocols; unknown opcodes are refused.
            return unpickler.load()
    except CheckpointRefused:
        raise
    except MemoryError:
        raise CheckpointRefused("takes more memory to read than the limit") from None
    except pickle.UnpicklingError as error:
        asked = _GLOBAL.search(str(error))
        if asked:
            raise CheckpointRefused(
                f"asks for {asked[1][:200]!r}, which weights do not need and which could run code"
            ) from None
        raise CheckpointRefused(f"is not a pickle of tensors alone: {str(error)[:200]}") from None
    except (
        Exception
    ) as error:  # the machine raises what its opcodes raise: IndexError, KeyError, struct.error ...
        raise CheckpointRefused(
            f"is a damaged pickle: {type(error).__name__}: {str(error)[:200]}"
        ) from None


def _tensors(
    loaded: object, storages: _Storages, spans: Mapping[str, ByteSpan]
) -> tuple[dict[str, _Tensor], tuple[str, ...]]:
    """Return the tensors by name, and the names of entries that are none."""
    state = _unwrapped(loaded)
    found: dict[str, _Tensor] = {}
    left_out = []
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            left_out.append(name[:100])
            continue
        if len(name) > MAX_NAME or not name.isprintable():
            raise CheckpointRefused(
                f"has a tensor with the name {name[:100]!r}: a name has 1 to {MAX_NAME} "
                "printable characters"
            )
        found[name] = _checked(name, value, storages, spans)
    if not found:
        raise CheckpointRefused("has no tensors")
    if len(found) > MAX_TENSORS:
        raise CheckpointRefused(f"has {len(found):,} tensors; at most {MAX_TENSORS:,} are read")
    return _without_prefix(found), tuple(left_out[:20])


def _unwrapped(loaded: object) -> Mapping[str, object]:
    """Return the mapping of names to tensors, in the wrappers that trainers put around it. Raises
    CheckpointRefused.
    """
    for _ in range(MAX_WRAPPERS):
        if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
            raise CheckpointRefused(f"holds a {type(loaded).__name__}, not tensors by name")
        if any(isinstance(value, torch.Tensor) for value in loaded.values()):
            return loaded
        inner = [loaded[key] for key in _WRAPPERS if isinstance(loaded.get(key), dict)]
        inner = inner or [value for value in loaded.values() if isinstance(value, dict)]
        if not inner:
            break
        loaded = inner[0]
    raise CheckpointRefused(
        "has no tensors by name, nor in what trainers put around them (state_dict, model)"
    )


def _checked(
    name: str, value: torch.Tensor, storages: _Storages, spans: Mapping[str, ByteSpan]
) -> _Tensor:
    """Return the tensor with the bytes of its storage. Raises CheckpointRefused for anything but
    plain numbers within the storage.
    """
    quoted = f"the tensor {name!r}"
    if (
        type(value) not in (torch.Tensor, torch.nn.Parameter)
        or value.layout != torch.strided
        or value.is_quantized
    ):
        raise CheckpointRefused(
            f"has {quoted} as {type(value).__name__} of layout {value.layout}; only plain "
            "tensors are converted"
        )
    if value.dtype not in _DTYPES:
        raise CheckpointRefused(
            f"has {quoted} of {value.dtype}; {', '.join(_DTYPES.values())} are converted"
        )
    key = storages.keys.get(value.untyped_storage()._cdata)
    if key is None:
        raise CheckpointRefused(f"has {quoted} without a storage in the file")
    if value.dim() > MAX_AXES:
        raise CheckpointRefused(f"has {quoted} of {value.dim()} axes; at most {MAX_AXES} are read")
    if value.is_conj() or value.is_neg():
        raise CheckpointRefused(f"has {quoted} as a view that negates")
    span, item = spans[key], value.element_size()
    last = value.storage_offset() + sum(
        (size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True)
    )
    if value.numel() and (
        any(step < 0 for step in value.stride()) or (last + 1) * item > span.size
    ):
        raise CheckpointRefused(f"has {quoted} beyond the {span.size:,} bytes of its storage")
    return _Tensor(value.detach(), span)


def _without_prefix(found: dict[str, _Tensor]) -> dict[str, _Tensor]:
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) and len(name) > len(prefix) for name in found):
            found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def _without_ties(found: Mapping[str, _Tensor]) -> tuple[dict[str, _Tensor], dict[str, str]]:
    """Return the tensors to write, and the names left out, each with its equal: of the names of one
    tensor that of the embeddings is kept, as transformers' save_pretrained does. Views that only
    overlap are all kept.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in found.items():
        meta = tensor.meta
        place = (
            tensor.span.begin,
            meta.storage_offset(),
            tuple(meta.shape),
            meta.stride(),
            meta.dtype,
        )
        groups.setdefault(place if meta.numel() else (name,), []).append(name)
    tied: dict[str, str] = {}
    for names in groups.values():
        kept = min(
            names,
            key=lambda name: (
                bool(_TIED.search(name)),
                not _EMBEDDING.search(name),
                len(name),
                name,
            ),
        )
        tied.update({name: kept for name in names if name != kept})
    return {name: tensor for name, tensor in found.items() if name not in tied}, tied


@dataclass(frozen=True, slots=True)
class _Source:
    """The checkpoint as a file and in memory. Copying from the file leaves no pages of it in this
    process.
    """

    file: BinaryIO
    mapping: mmap.mmap


def _write(
    tensors: Mapping[str, _Tensor], source: _Source, output: BinaryIO, progress: Progress
) -> str:
    """Write header and tensors, and return the file's SHA-256. Larger items first, as safetensors
    does, so that all are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].meta.element_size(), item[0]))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        shape = list(tensor.meta.shape)
        entries[name] = {
            "dtype": _DTYPES[tensor.meta.dtype],
            "shape": shape,
            "data_offsets": [end, end + tensor.bytes],
        }
        end += tensor.bytes
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % ALIGN)
    digest = hashlib.sha256()
    done = 0
    for block in _blocks(header, ordered, source):
        digest.update(block)
        output.write(block)
        done += len(block)
        progress(done, 8 + len(header) + end)
    output.flush()
    os.fsync(output.fileno())
    return digest.hexdigest()


def _blocks(header: bytes, ordered: list[tuple[str, _Tensor]], source: _Source) -> Iterator[Any]:
    yield len(header).to_bytes(8, "little")
    yield header
    for _, tensor in ordered:
        if tensor.meta.numel():
            yield from (
                _copied(tensor, source.file)
                if tensor.meta.is_contiguous()
                else _gathered(tensor, source.mapping)
            )


def _copied(tensor: _Tensor, source: BinaryIO) -> Iterator[bytes]:
    begin = tensor.span.begin + int(tensor.meta.storage_offset()) * tensor.meta.element_size()
    end = begin + tensor.bytes
    while begin < end:
        block = os.pread(source.fileno(), min(BLOCK_BYTES, end - begin), begin)
        if not block:
            raise CheckpointRefused("became shorter while it was read")
        begin += len(block)
        yield block


def _gathered(tensor: _Tensor, mapping: mmap.mmap) -> Iterator[bytes]:
    """Yield the numbers of a tensor with other strides, in its order, from the file in memory. As
    bytes, with an axis more for those of a number: the older format does not align storages.
    """
    meta, item = tensor.meta, tensor.meta.element_size()
    numbers = torch.frombuffer(
        mapping, dtype=torch.uint8, count=tensor.span.size, offset=tensor.span.begin
    )
    view = numbers.as_strided(
        (*meta.shape, item),
        (*(step * item for step in meta.stride()), 1),
        meta.storage_offset() * item,
    )
    for part in _parts(view):
        yield bytes(part.contiguous().flatten().numpy())


def _parts(view: torch.Tensor) -> Iterator[torch.Tensor]:
    """Slices of a tensor of bytes of at most GATHER_BYTES each, in order."""
    row = prod(view.shape[1:])
    if view.shape[0] * row <= GATHER_BYTES:
        yield view
    elif row > GATHER_BYTES:
        for one in view:
            yield from _parts(one)
    else:
        yield from torch.split(view, GATHER_BYTES // row)
