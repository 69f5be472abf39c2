"""Decides which files of a checkpoint are converted, and into which files. Pure: names of files in,
steps out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, Literal

from libs.errors import ModelBroken

TorchCheckpoints = Literal["convert", "refuse"]
"""SHOAL_TORCH_CHECKPOINTS: the handling of weights that are published only in torch's formats."""

Kind = Literal["torch", "tokenizer", "gguf", "gguf_settings", "onnx"]
"""A sort of conversion; `child.py` has a function for each."""

WORDPIECE_FILE: Final = "vocab.txt"
BPE_FILES: Final = ("vocab.json", "merges.txt")
SENTENCEPIECE_FILES: Final = (
    "spm.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.model",
)
MARIAN_FILES: Final = ("source.spm", "vocab.json")
"""The pieces of the source language, and the ids of those of both languages."""

TOKENIZER: Final = "tokenizer.json"
VOCABULARY_FILES: Final = (
    *(WORDPIECE_FILE, *BPE_FILES, *SENTENCEPIECE_FILES, MARIAN_FILES[0]),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"),
)
"""All files of a folder that decide about its tokenizer."""

FOREIGN: Final = (".gguf", ".onnx")
"""Endings of weights that `shoal models convert` converts, and that are not converted when a model
is fetched.
"""

GGUF_SETTINGS: Final = "gguf_settings.json"
"""The files that a GGUF file says the settings of, as one JSON object by name; unpacked and
deleted.
"""

BASE_FOLDER: Final = "base_model"
"""The files of the base model that a GLiNER or GLiREL directory needs."""

VERSION: Final = 1
"""Version of the conversion's rules. It is recorded with each result; raise it when results change.
"""

SINGLE: Final = "pytorch_model.bin"
INDEX: Final = "pytorch_model.bin.index.json"
_SHARD: Final = re.compile(r"pytorch_model-(\d{5})-of-(\d{5})\.bin")
_ENDINGS: Final = (".bin", ".pt", ".pth", ".ckpt")
_TRAINING: Final = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state.*|random_states.*)\.\w+"
)
"""Files left behind by training; they are not weights."""

_OUTPUTS: Final = {
    SINGLE: "model.safetensors",
    "adapter_model.bin": "adapter_model.safetensors",
    "open_clip_pytorch_model.bin": "open_clip_model.safetensors",
    "sparse_linear.pt": "sparse_linear.safetensors",
    "colbert_linear.pt": "colbert_linear.safetensors",
}
_ADDITIONAL: Final = ("adapter_model.bin", "sparse_linear.pt", "colbert_linear.pt")
"""Files that are not a folder's own weights: an adapter, and the layers of bge-m3 in addition to
its encoder.
"""

_OPEN_CLIP: Final = "open_clip_pytorch_model.bin"


@dataclass(frozen=True, slots=True)
class ConversionStep:
    """A file to convert. `source` and `output` are paths from the checkpoint's root, with
    slashes.
    """

    kind: Kind
    source: str
    output: str


def is_torch(path: str) -> bool:
    """Return True for names of files that may be torch checkpoints with weights."""
    name = PurePosixPath(path).name
    return name.endswith(_ENDINGS) and not _TRAINING.fullmatch(name)


def torch_weights(names: Collection[str], *, is_open_clip: bool = False) -> tuple[str, ...]:
    """Return the torch checkpoints that hold the weights of a folder without safetensors, of the
    names of its files; empty if none does.

    Raises ModelBroken where shards are missing, or where several files could be the weights.
    """
    found = sorted(name for name in names if is_torch(name) and name not in _ADDITIONAL)
    if is_open_clip and _OPEN_CLIP in found:
        return (_OPEN_CLIP,)
    shards = {name: match for name in found if (match := _SHARD.fullmatch(name))}
    if shards and (INDEX in names or SINGLE not in found):
        return _all_shards(shards)
    if SINGLE in found:
        return (SINGLE,)
    found = [name for name in found if name != _OPEN_CLIP]
    if len(found) > 1:
        raise ModelBroken(
            f"{found[0]}: one of {len(found)} torch files ({', '.join(found[:5])}), and none is "
            f"named {SINGLE}"
        )
    return tuple(found)


def _all_shards(shards: dict[str, re.Match[str]]) -> tuple[str, ...]:
    counts = {match[2] for match in shards.values()}
    if len(counts) > 1:
        raise ModelBroken(
            f"{min(shards)}: shards of {len(counts)} different numbers of files: "
            f"{', '.join(sorted(counts))}"
        )
    count = counts.pop()
    wanted = [
        f"pytorch_model-{number:05}-of-{count}.bin"
        for number in range(1, min(int(count), 10_000) + 1)
    ]
    missing = next((name for name in wanted if name not in shards), None)
    if missing is not None or len(wanted) < len(shards):
        raise ModelBroken(f"{missing or min(shards)}: missing, or not one of {int(count)} shards")
    return tuple(wanted)


def additional_files(names: Collection[str]) -> tuple[str, ...]:
    """Return the torch files in addition to a folder's weights that have no copy as safetensors."""
    wanted = _ADDITIONAL if "adapter_config.json" in names else _ADDITIONAL[1:]
    return tuple(name for name in wanted if name in names and _OUTPUTS[name] not in names)


def is_additional(name: str) -> bool:
    """Return True for names of safetensors files that complement a folder's weights."""
    return name in [_OUTPUTS[torch] for torch in _ADDITIONAL]


def plan_steps(paths: Iterable[str]) -> tuple[ConversionStep, ...]:
    """Return the conversion of each torch checkpoint among the selected files, in the order of
    their paths, then that of each folder's vocabulary.
    """
    found = sorted(paths)
    folders: dict[str, list[str]] = {}
    for path in found:
        place = PurePosixPath(path)
        folders.setdefault(str(place.parent), []).append(place.name)
    tokenizers = [
        ConversionStep(
            "tokenizer", str(PurePosixPath(folder, name)), str(PurePosixPath(folder, TOKENIZER))
        )
        for folder, names in folders.items()
        if (name := find_vocabulary(names))
    ]
    return (
        *(ConversionStep("torch", path, _output(path)) for path in found if is_torch(path)),
        *tokenizers,
    )


def foreign_steps(paths: Collection[str]) -> tuple[ConversionStep, ...]:
    """Return the conversion of the GGUF or ONNX file of a directory, of the paths of its files;
    empty if it has neither.

    Raises ModelBroken if there are several, because they are most likely the same weights in other
    types.
    """
    for ending in FOREIGN:
        found = sorted(
            path
            for path in paths
            if path.endswith(ending) and path.count("/") <= path.startswith("onnx/")
        )
        if len(found) > 1:
            raise ModelBroken(
                f"{found[0]}: one of {len(found)} {ending} files; leave one of them in the "
                "directory"
            )
        if found and ending == ".gguf":
            return (
                ConversionStep("gguf", found[0], "model.safetensors"),
                ConversionStep("gguf_settings", found[0], GGUF_SETTINGS),
            )
        if found:
            return (ConversionStep("onnx", found[0], "model.safetensors"),)
    return ()


def find_vocabulary(names: Collection[str]) -> str:
    """Return the file with the vocabulary of a folder that has no fast tokenizer, of the names of
    its files; empty if none is needed.
    """
    if TOKENIZER in names:
        return ""
    whole = next((name for name in (*SENTENCEPIECE_FILES, WORDPIECE_FILE) if name in names), "")
    sets = (BPE_FILES, MARIAN_FILES)
    return whole or next((files[0] for files in sets if all(name in names for name in files)), "")


def _output(path: str) -> str:
    place = PurePosixPath(path)
    shard = _SHARD.fullmatch(place.name)
    name = (
        f"model-{shard[1]}-of-{shard[2]}.safetensors"
        if shard
        else _OUTPUTS.get(place.name, "model.safetensors")
    )
    return str(place.with_name(name))


def index_path(step: ConversionStep) -> str:
    """Return the path of the index that lists the shard's tensors with those of the others; empty
    if the output is not a shard.
    """
    place = PurePosixPath(step.source)
    return (
        str(place.with_name("model.safetensors.index.json")) if _SHARD.fullmatch(place.name) else ""
    )
