"""Reads a checkpoint directory's JSON files and safetensors headers; every error is a ModelBroken
naming the file and the key.

The author of the directory is not trusted (docs/fuzzing.md): only regular files within the
checkpoint are read, up to a size, and numbers, nesting and counts are bounded before they are used.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Never, TypeVar

from libs.catalog.checkpoint.trace import note
from libs.errors import ModelBroken

T = TypeVar("T", bound=str)

MAX_JSON_BYTES: Final = 16 << 20
MAX_HEADER_BYTES: Final = 16 << 20
"""Maximum size of a safetensors file's JSON. The format allows 100 MB, which would take a gigabyte
when parsed in Python.
"""
MAX_TENSORS: Final = 20_000
"""Maximum number of tensors of a file: each takes 25 microseconds to check. Files of mixtures of
experts, with a tensor for each, have some thousands.
"""
MAX_SHARDS: Final = 1_000
MAX_INDEXED_TENSORS: Final = 100_000
"""Maximum number of tensors of all shards."""
_MAX_COMMAS: Final = 32 * MAX_TENSORS

NOT_OPENED: Final = (
    "torch checkpoints are pickles, which can run code, and are never opened where a model is "
    "loaded. The store converts them "
    "without running any (SHOAL_TORCH_CHECKPOINTS=convert), and `shoal models convert DIR` does"
)
"""The advice about a torch checkpoint that is still there when a model is read, for messages:
"file: NOT_OPENED".
"""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MAX_COUNT: Final = (1 << 31) - 1
_MAX_DIGITS: Final = 40  # tokenizers write 10^30 for "no limit"
_MAX_DEPTH: Final = 64
_MAX_MESSAGE: Final = 600  # characters
_MAX_AXES: Final = 8
_SHARD: Final = re.compile(r"[A-Za-z0-9_][\w.+-]{0,200}\.safetensors", re.ASCII)
_HALF_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_ITEM_BYTES: Final[Mapping[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8,
    "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """A JSON object of the checkpoint. A key that is missing or null has the default; a value of
    another type is an error.

    Attributes:
        file: The file's path from the checkpoint's root, and the keys that lead to the object, for
            error messages.
    """

    file: str
    values: Mapping[str, object]

    def broken(self, key: str, problem: str) -> ModelBroken:
        """Return the error for a key, for the caller to raise: "file: `key` problem"."""
        return ModelBroken(shortened(f"{self.file}: `{shortened(key, 100)}` {problem}"))

    def _value(self, key: str) -> object:
        value = self.values.get(key)
        note(self.file, key, value)
        return value

    def text(self, key: str, default: str = "") -> str:
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.broken(key, f"must be a string, not {value!r}")
        return value

    def choice(self, key: str, served: Sequence[T], default: str = "") -> T:
        """Return one of the values that are served."""
        name = self.text(key, default)
        for value in served:
            if value == name:
                return value
        raise self.broken(key, f"is {name!r}; served are {', '.join(filter(None, served))}")

    def number(self, key: str, default: int = 0, *, most: float = MAX_COUNT) -> int:
        """Return a whole number of at least 0. `most`: infinite where tokenizers may write a huge
        number for "no limit".
        """
        value = self._value(key)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value < 0
            or value != value // 1
        ):
            raise self.broken(key, f"must be a whole number of at least 0, not {value!r}")
        if value > most:
            raise self.broken(key, f"is {value}; at most {most} is served")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.broken(key, f"must be true or false, not {value!r}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; a single string counts as a list of one."""
        value = self._value(key)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise self.broken(key, f"must be a list of strings, not {value!r}")
        return tuple(items)

    def part(self, key: str) -> CheckpointConfig:
        """Return an object within this one; empty if it is missing."""
        value = self._value(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.broken(key, f"must be an object, not {value!r}")
        return CheckpointConfig(f"{self.file} ({key})", value)


def read_config(directory: Path, name: str) -> CheckpointConfig | None:
    """Return the JSON object in a file; None without the file."""
    value = read_json(directory, name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ModelBroken(f"{name}: must hold a JSON object")
    return CheckpointConfig(name, value)


def need_config(directory: Path, name: str) -> CheckpointConfig:
    """Return the JSON object in a file. Raises ModelBroken without the file."""
    config = read_config(directory, name)
    if config is None:
        raise ModelBroken(f"{name}: missing from {directory}")
    return config


def read_json(directory: Path, name: str) -> object:
    """Return the value of a JSON file; None without the file. Its numbers have at most 40 digits,
    its texts are valid Unicode.
    """
    data = read_file(directory, name, MAX_JSON_BYTES)
    return None if data is None else parse_json(data, name)


def parse_json(data: bytes, name: str) -> object:
    """Return the JSON value of a file's content; `name` is the file's, for errors. Raises
    ModelBroken.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_int=_whole)
        if _HALF_PAIR.search(data):
            json.dumps(value, ensure_ascii=False).encode(
                "utf-8"
            )  # half of a surrogate pair fails here, not in protobuf later
    except (ValueError, RecursionError) as error:
        raise ModelBroken(
            shortened(f"{name}: cannot be read as JSON: {error or type(error).__name__}")
        ) from error
    _refuse_depth(value, name)
    return value


def _whole(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, more than {_MAX_DIGITS}")
    return int(digits)


def _refuse_depth(value: object, name: str) -> None:
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH):
        level = [child for one in level for child in _children(one)]
        if not level:
            return
    raise ModelBroken(f"{name}: is nested more than {_MAX_DEPTH} levels deep")


def _children(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def read_file(directory: Path, name: str, limit: int) -> bytes | None:
    """Return a file of the checkpoint, of at most `limit` bytes; None if there is none of that
    name. Raises as `locate`.
    """
    path = locate(directory, name)
    if path is None:
        return None
    try:
        size = path.stat().st_size
        if size > limit:
            raise ModelBroken(
                shortened(f"{name}: has {size:,} bytes, above the limit of {limit:,}")
            )
        return path.read_bytes()
    except OSError as error:
        raise ModelBroken(shortened(f"{name}: cannot be read: {error.strerror}")) from error


def locate(directory: Path, name: str) -> Path | None:
    """Return the path of a regular file of the checkpoint, symbolic links resolved; None if there
    is none of that name.

    Raises ModelBroken if the name or a link leads out of the checkpoint, and for other than regular
    files: a pipe might never end. The Hugging Face cache keeps files as links to blobs outside its
    snapshots; these count as part of the checkpoint.
    """
    try:
        found = (directory / name).resolve(strict=True)
        kind = found.stat().st_mode
        roots = _roots(directory.resolve())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, an invalid name
        raise ModelBroken(shortened(f"{name!r}: cannot be read: {error}")) from error
    if not any(found.is_relative_to(root) for root in roots):
        advice = "Links within a checkpoint are followed, no others: copy the file"
        raise ModelBroken(shortened(f"{name!r}: leads out of the checkpoint {directory}. {advice}"))
    if not stat.S_ISREG(kind):
        raise ModelBroken(shortened(f"{name!r}: is not a regular file"))
    return found


def _roots(directory: Path) -> tuple[Path, ...]:
    """Return the folders that may hold a checkpoint's files;
    `<cache>/models--org--name/snapshots/<commit>` has them in `blobs`.
    """
    for parent in (directory, *directory.parents):
        if parent.parent.name == "snapshots" and parent.parent.parent.name.startswith("models--"):
            return directory, parent.parent.parent / "blobs"
    return (directory,)


def shortened(text: str, most: int = _MAX_MESSAGE) -> str:
    """Return the text, truncated to `most` characters: error messages quote checkpoints, and are
    sent to routers and clients.
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def tensor_files(directory: Path, folder: str) -> list[str]:
    """Return the safetensors files of a folder, shards in the index's order, as paths from the
    checkpoint's root. Raises ModelBroken.
    """
    base = directory / folder
    index = read_config(directory, str(Path(folder) / "model.safetensors.index.json"))
    single = ["model.safetensors"] if (base / "model.safetensors").exists() else []
    names = single if index is None else shard_names(index)
    missing = [name for name in names if not (base / name).exists()]
    if missing:
        raise ModelBroken(
            f"model.safetensors.index.json: names {missing[0]}, which is missing from {base}"
        )
    if not names:
        raise ModelBroken(_missing_weights(base))
    return [str(Path(folder) / name) for name in names]


def shard_names(index: CheckpointConfig) -> list[str]:
    """Return the shards that an index names, each once. Raises ModelBroken if there are none, or
    for a path to another folder.
    """
    places = index.part("weight_map").values
    if len(places) > MAX_INDEXED_TENSORS:
        raise index.broken(
            "weight_map", f"has {len(places):,} tensors; at most {MAX_INDEXED_TENSORS:,} are served"
        )
    names = list(dict.fromkeys(_shard_name(index, shard) for shard in places.values()))
    if len(names) > MAX_SHARDS:
        raise index.broken(
            "weight_map", f"names {len(names):,} files; at most {MAX_SHARDS:,} are served"
        )
    for name in names:
        if not _SHARD.fullmatch(name):
            raise index.broken(
                "weight_map",
                f"names {name!r}, which is not a name of a safetensors file in the same folder",
            )
    if not names:
        raise index.broken("weight_map", "is missing or empty: it must map each tensor to its file")
    return names


def _shard_name(index: CheckpointConfig, shard: object) -> str:
    if not isinstance(shard, str):
        raise index.broken("weight_map", f"must map tensors to names of files, not to {shard!r}")
    return shard


def _missing_weights(base: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in base.glob(pattern))
    if not pickles:
        return f"model.safetensors: missing from {base}"
    return f"{pickles[0]}: {NOT_OPENED}"


def tensor_header(directory: Path, name: str) -> bytes:
    """Return the JSON header of a safetensors file: the bytes after the first 8, which are its
    length. Raises ModelBroken.
    """
    path = locate(directory, name)
    if path is None:
        raise ModelBroken(shortened(f"{name}: missing from {directory}"))
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) == 8 and MAX_HEADER_BYTES < length <= path.stat().st_size:
                raise ModelBroken(
                    f"{name}: its header has {length:,} bytes, above the limit of "
                    f"{MAX_HEADER_BYTES:,}"
                )
            header = file.read(length) if len(start) == 8 and length <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise ModelBroken(shortened(f"{name}: cannot be read: {error.strerror}")) from error
    if not header or len(header) != length:
        raise ModelBroken(f"{name}: truncated, or not safetensors")
    return header


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a safetensors file: data type as the format names it, shape, and the bytes
    `begin` to `end` of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def tensor_entries(directory: Path, name: str) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name, from its header alone.

    Raises ModelBroken naming the tensor if one lies outside the file, overlaps another, or has not
    the size of its shape.
    """
    header = tensor_header(directory, name)
    _refuse_crowd(header, name)
    size, first = (directory / name).stat().st_size, 8 + len(header)
    try:
        values = json.loads(
            header.decode("utf-8"),
            object_pairs_hook=once,
            parse_int=_whole,
            parse_constant=_refuse_constant,
        )
        if _HALF_PAIR.search(header):
            json.dumps(values, ensure_ascii=False).encode("utf-8")
        values.pop("__metadata__", None)
        entries = {
            tensor: _entry(name, tensor, value, first, size) for tensor, value in values.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelBroken(
            shortened(f"{name}: damaged header: {error or type(error).__name__}")
        ) from error
    _refuse_overlap(name, entries)
    return entries


def _refuse_crowd(header: bytes, name: str) -> None:
    """Raise ModelBroken for more objects or entries of lists than MAX_TENSORS tensors have, before
    an object is made of one.
    """
    tensors = header.count(b"{") - 1
    if tensors > MAX_TENSORS + 1:  # one is of metadata
        raise ModelBroken(
            shortened(
                f"{name}: its header has {tensors:,} tensors; at most {MAX_TENSORS:,} are served"
            )
        )
    if header.count(b",") > _MAX_COMMAS:
        raise ModelBroken(
            shortened(
                f"{name}: its header has more than {_MAX_COMMAS:,} commas, above the limit for "
                "its tensors"
            )
        )


def once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object, for `object_pairs_hook`. Raises ValueError for duplicate names: some
    parsers keep the first, some the last.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _refuse_constant(word: str) -> Never:
    raise ValueError(f"{word} is not a number")


def _entry(file: str, name: str, value: Mapping[str, object], first: int, size: int) -> TensorEntry:
    dtype, shape = value["dtype"], _counts(value["shape"])
    begin, end = _counts(value["data_offsets"])
    if not isinstance(dtype, str) or len(shape) > _MAX_AXES:
        raise TypeError(f"tensor {name[:100]!r} has no data type, or more than {_MAX_AXES} axes")
    place = f"{file}: tensor {name[:200]!r}"
    item = _ITEM_BYTES.get(dtype)
    if item is not None and end - begin != math.prod(shape) * item:
        raise ModelBroken(f"{place} has {end - begin} bytes, not those of its shape {list(shape)}")
    if end < begin or first + end > size:
        raise ModelBroken(
            f"{file}: truncated: tensor {name[:200]!r} ends at byte {first + end} of {size}"
        )
    return TensorEntry(dtype[:20], shape, first + begin, first + end)


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(number) is int and 0 <= number < 1 << 63 for number in value
    ):
        raise TypeError("`shape` and `data_offsets` must be lists of whole numbers of at least 0")
    return tuple(value)


def _refuse_overlap(file: str, entries: Mapping[str, TensorEntry]) -> None:
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < end and entry.begin < entry.end:
            raise ModelBroken(f"{file}: tensors {before[:200]!r} and {name[:200]!r} share bytes")
        if entry.end > end:
            end, before = entry.end, name


def tensor_shape(directory: Path, files: list[str], tensor: str) -> tuple[int, ...] | None:
    """Return the shape of a tensor, from the headers alone; None if no file has it."""
    for name in files:
        entry = tensor_entries(directory, name).get(tensor)
        if entry is not None:
            return entry.shape
    return None


def need_tokenizer(directory: Path) -> None:
    """Raise ModelBroken, with a remedy, without a tokenizer.json."""
    if not (directory / "tokenizer.json").exists():
        raise ModelBroken(
            f"tokenizer.json: missing from {directory}. transformers' AutoTokenizer writes it with "
            "save_pretrained"
        )


def digest(directory: Path, configs: list[str], tensors: list[str]) -> str:
    """Return a digest of the configuration files that exist and the headers of the tensor files: 12
    hexadecimal digits.
    """
    total = hashlib.sha256()
    for name in sorted(set(configs)):
        data = read_file(directory, name, MAX_JSON_BYTES)
        if data is not None:
            total.update(f"{name}\0".encode() + data)
    for name in sorted(set(tensors)):
        total.update(f"{name}\0".encode() + tensor_header(directory, name))
    return total.hexdigest()[:12]
