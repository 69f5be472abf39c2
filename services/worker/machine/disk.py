"""Models on this machine's disk: maps model IDs to directories, and computes the size of their
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from libs.catalog.checkpoint import adapter as lora
from libs.catalog.checkpoint.files import tensor_entries
from libs.errors import ModelNotFound
from libs.kinds.images import card as images
from libs.names import is_model_id
from libs.store.select import CONFIGS
from services.worker.settings import Shelf

_ROW_BYTES = 12
"""Added bytes per matrix row in int8: scale, sum, bias."""
_FRACTIONS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def find(shelves: tuple[Shelf, ...], model: str) -> Path:
    """Return the directory of a model on the first shelf that has it. A revision is part of the ID.
    Raises ModelNotFound.
    """
    for directory in _directories(shelves, model):
        if _is_checkpoint(directory):
            return directory
    raise ModelNotFound(f"this worker has no directory with the model {model!r}", field="model")


def find_adapter(shelves: tuple[Shelf, ...], adapter: str) -> Path:
    """Return the directory of a LoRA adapter, as `find` does for a model."""
    for directory in _directories(shelves, adapter):
        if (directory / lora.FILE).is_file():
            return directory
    raise ModelNotFound(
        f"this worker has no directory with the adapter {adapter!r}", field="adapter"
    )


def _directories(shelves: tuple[Shelf, ...], name: str) -> list[Path]:
    """Return the directories that may have a model or adapter with that ID."""
    if not is_model_id(name):
        return []
    return [
        shelf.path / name if not shelf.model else shelf.path
        for shelf in shelves
        if shelf.model in ("", name)
    ]


def listing(shelves: tuple[Shelf, ...]) -> dict[str, Path]:
    """Return every model on disk, by ID."""
    return _first(shelves, _is_checkpoint)


def adapters(shelves: tuple[Shelf, ...]) -> dict[str, Path]:
    """Return every LoRA adapter on disk, by ID."""
    return _first(
        shelves,
        lambda directory: (directory / lora.FILE).is_file() and not _is_checkpoint(directory),
    )


def _first(shelves: tuple[Shelf, ...], is_wanted: Callable[[Path], bool]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for shelf in shelves:
        candidates = [(shelf.model, shelf.path)] if shelf.model else _below(shelf.path)
        for model, directory in candidates:
            if model not in found and is_model_id(model) and is_wanted(directory):
                found[model] = directory
    return found


def _is_checkpoint(directory: Path) -> bool:
    """Return whether the directory has a model. Adapters may include their base's config.json, but
    are not models.
    """
    if (directory / lora.FILE).is_file() and not any(
        (directory / name).is_file() for name in lora.MODEL_WEIGHTS
    ):
        return False
    return any((directory / name).is_file() for name in CONFIGS)


def _below(root: Path) -> list[tuple[str, Path]]:
    return sorted(
        (f"{directory.parent.name}/{directory.name}", directory)
        for directory in root.glob("*/*")
        if directory.is_dir()
    )


def weight_bytes(directory: Path, item_bytes: int) -> int:
    """Return the memory of a checkpoint's tensors, including module folders, with `item_bytes` per
    floating-point number.

    With 1 (int8), a matrix takes _ROW_BYTES more per row, and all other tensors are float32. Reads
    only headers. If weights exist in the layouts of both open_clip and transformers, only those
    that are loaded count. Raises ModelBroken for an invalid safetensors file.
    """
    files = [
        str(file.relative_to(directory)) for file in sorted(directory.glob("**/*.safetensors"))
    ]
    if images.OPEN_CLIP_WEIGHTS in files:
        is_read = images.is_open_clip(directory)
        files = [name for name in files if (name == images.OPEN_CLIP_WEIGHTS) == is_read]
    return sum(_file_bytes(directory, name, item_bytes) for name in files)


def _file_bytes(directory: Path, name: str, item_bytes: int) -> int:
    total = 0
    for entry in tensor_entries(directory, name).values():
        size, own = entry.end - entry.begin, _FRACTIONS.get(entry.dtype)
        if own is None:
            total += size
        elif item_bytes > 1:
            total += size // own * item_bytes
        else:
            total += (
                size // own + entry.shape[0] * _ROW_BYTES
                if len(entry.shape) == 2
                else size // own * 4
            )
    return total
