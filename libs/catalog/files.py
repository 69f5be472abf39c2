"""Reading a checkpoint directory's files; every complaint is a ModelBroken that names the file and the key at fault."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from libs.catalog.trace import note
from libs.errors import ModelBroken

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


@dataclass(frozen=True, slots=True)
class Config:
    """A JSON object of the checkpoint. A key that is missing or null has the default; one of another type is an error."""

    file: str
    values: Mapping[str, object]

    def broken(self, key: str, problem: str) -> ModelBroken:
        return ModelBroken(f"{self.file}: `{key}` {problem}")

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

    def number(self, key: str, default: int = 0) -> int:
        """A count. Tokenizers write a huge float for "no limit"."""
        value = self._value(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
            raise self.broken(key, f"must be a whole number of at least 0, not {value!r}")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.broken(key, f"must be true or false, not {value!r}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; a single string counts as a list of one."""
        value = self._value(key)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise self.broken(key, f"must be a list of strings, not {value!r}")
        return tuple(items)

    def part(self, key: str) -> Config:
        """An object within this one; empty if it is missing."""
        value = self._value(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.broken(key, f"must be an object, not {value!r}")
        return Config(f"{self.file} ({key})", value)


def read_config(directory: Path, name: str) -> Config | None:
    """The JSON object in a file, or None if there is no such file."""
    value = read_json(directory, name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ModelBroken(f"{name}: must hold a JSON object")
    return Config(name, value)


def need_config(directory: Path, name: str) -> Config:
    config = read_config(directory, name)
    if config is None:
        raise ModelBroken(f"{name}: missing from {directory}")
    return config


def read_json(directory: Path, name: str) -> object:
    """What a JSON file holds; None if there is no such file."""
    path = directory / name
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelBroken(f"{name}: cannot be read as JSON: {error}") from error


def tensor_files(directory: Path, folder: str) -> list[str]:
    """The safetensors files of a folder, shards in the index's order, as paths from the checkpoint's root."""
    base = directory / folder
    index = read_config(directory, str(Path(folder) / "model.safetensors.index.json"))
    if index is not None:
        shards = index.part("weight_map").values.values()
        names = list(dict.fromkeys(str(shard) for shard in shards))
    else:
        names = ["model.safetensors"] if (base / "model.safetensors").exists() else []
    missing = [name for name in names if not (base / name).exists()]
    if missing:
        raise ModelBroken(f"model.safetensors.index.json: names {missing[0]}, which is missing from {base}")
    if not names:
        raise ModelBroken(_no_weights(base))
    return [str(Path(folder) / name) for name in names]


def _no_weights(base: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in base.glob(pattern))
    if not pickles:
        return f"model.safetensors: missing from {base}"
    return (
        f"{pickles[0]}: pickle files can run code and are never opened. Convert it once, where you trust it: "
        "`AutoModel.from_pretrained(...).save_pretrained(...)` of transformers writes model.safetensors"
    )


def tensor_header(directory: Path, name: str) -> bytes:
    """The JSON header of a safetensors file (8 bytes of length, then that many of JSON)."""
    with (directory / name).open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
        header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    if not header or len(header) != length:
        raise ModelBroken(f"{name}: not a safetensors file, or cut short")
    return header


def tensor_shape(directory: Path, files: list[str], tensor: str) -> tuple[int, ...] | None:
    """The shape of a tensor, from the headers alone; None if no file has it."""
    for name in files:
        try:
            entry = json.loads(tensor_header(directory, name)).get(tensor)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelBroken(f"{name}: its header is not JSON: {error}") from error
        if entry is not None:
            return tuple(int(size) for size in entry["shape"])
    return None


def digest(directory: Path, configs: list[str], tensors: list[str]) -> str:
    """Twelve hexadecimal digits over the configuration files that exist and the headers of the tensor files."""
    total = hashlib.sha256()
    for name in sorted(set(configs)):
        path = directory / name
        if path.is_file():
            total.update(f"{name}\0".encode() + path.read_bytes())
    for name in sorted(set(tensors)):
        total.update(f"{name}\0".encode() + tensor_header(directory, name))
    return total.hexdigest()[:12]
