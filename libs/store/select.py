"""Selects the files of a model to fetch: those needed to serve it, none that are run. Decided
before any weights are fetched.

Weights are safetensors where a folder has them, else torch checkpoints, which are converted once
(`libs/conversion`)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

from libs.catalog.checkpoint import adapter, tasks
from libs.catalog.checkpoint.files import CheckpointConfig
from libs.conversion.plan import (
    BASE_FOLDER,
    FOREIGN,
    TorchCheckpoints,
    additional_files,
    is_additional,
    torch_weights,
)
from libs.errors import ModelBroken
from libs.kinds.images import card as images
from libs.kinds.registry import KINDS
from libs.store.source import Remote, RemoteFile

_WEIGHTS: Final = ".safetensors"
_TEXTS: Final = (".json", ".txt", ".model", ".spm", ".jinja")
"""`.model`: the vocabularies of SentencePiece. `.jinja`: chat templates."""

_METADATA: Final = "artifact.metadata"
"""The settings of Stanford's ColBERT."""

_DUPLICATES: Final = re.compile(r"consolidated.*\.safetensors")
"""Mistral's second copy of the weights, in its own format."""

_DESCRIPTION: Final = re.compile(
    r"(readme|licen[cs]e|notice|copying|changelog|citation|model_?card|training_|trainer_state)"
    r".*\.json|(.*[_-])?(results|metrics)\.json",
    re.IGNORECASE,
)
_VOCABULARY: Final = re.compile(r".*(vocab|merges).*\.txt", re.IGNORECASE)

_SAFE_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
_ROUTERS: Final = ("Router", "Asym")
"""Modules that hold other modules in folders."""

_TEXT_FOLDERS: Final = (
    "additional_chat_templates",
    BASE_FOLDER,
    *(folder for kind in KINDS for folder in kind.folders),
)
"""Folders next to modules: transformers' named templates, and the settings of kinds."""

CONFIGS: Final = (
    "config.json",
    "modules.json",
    *(name for kind in KINDS for name in kind.configs),
)
"""A directory with one of these is a checkpoint."""

_ANY_ADVICE: Final = "`shoal models convert DIR` writes model.safetensors"

_OTHERS: Final = (".pkl", ".pickle", ".msgpack", ".h5", ".onnx", ".gguf")
"""Endings of weights in formats that are not converted."""

_OWN_ADAPTER: Final = re.compile(rf"{tasks.FOLDER}/[^/]+/{re.escape(adapter.FILE)}")
"""The configuration of a task adapter in the model's checkpoint."""

_MAX_LIST_BYTES: Final = 1_000_000
_MAX_README_BYTES: Final = 64 << 10
_BASE_MODEL: Final = re.compile(r"^base_model:\s*(?:-\s*)?[\"']?([\w.-]+/[\w.-]+)", re.MULTILINE)


def select(
    model: str,
    remote: Remote,
    *,
    is_adapter: bool = True,
    torch_checkpoints: TorchCheckpoints = "convert",
) -> tuple[RemoteFile, ...]:
    """Select the files to fetch: configuration, vocabulary and weights of the root and of its
    modules' folders; for an adapter its two files, and those of its processor and tokenizer unless
    it is requested as an adapter (`is_adapter`) of a model that has these.

    Raises ModelBroken without a configuration, or if weights exist only in an unreadable format;
    NoCapacity as `Remote.read` does.
    """
    by_path = _by_path(model, remote)
    can_convert = torch_checkpoints == "convert"
    if adapter.FILE in by_path and not any(name in by_path for name in adapter.MODEL_WEIGHTS):
        return _adapter_files(
            model, remote, by_path, is_adapter=is_adapter, can_convert=can_convert
        )
    if not any(name in by_path for name in CONFIGS):
        _refuse_foreign(model, remote, [path for path in by_path if path.endswith(".gguf")])
        raise ModelBroken(f"config.json: missing from {model} in {remote.origin}")
    folders = _module_folders(remote, by_path)
    own_adapters = _own_adapters(remote, by_path)
    safe = [file for file in remote.files if _folder(file) in folders and _is_weights(file)]
    safe = _keep_one_layout(remote, by_path, safe)
    weights = [*safe]
    for folder in sorted(folders):
        weights += _torch_files(model, remote, by_path, folder, safe, can_convert=can_convert)
    if not weights:
        raise ModelBroken(f"model.safetensors: missing from {model} in {remote.origin}")
    places = {
        "",
        *folders,
        *(_inside(folder, name) for folder in folders for name in _TEXT_FOLDERS),
    }
    texts = [file for file in remote.files if _folder(file) in places and _is_text(file)]
    return tuple(sorted([*texts, *weights, *own_adapters], key=lambda file: file.path))


def _own_adapters(remote: Remote, by_path: dict[str, RemoteFile]) -> list[RemoteFile]:
    """Return the two files of each task adapter in a model's checkpoint (jina-embeddings-v5)."""
    folders = [
        path.removesuffix(f"/{adapter.FILE}") for path in by_path if _OWN_ADAPTER.fullmatch(path)
    ]
    config = _json(remote, by_path["config.json"]) if folders and "config.json" in by_path else None
    if not isinstance(config, dict) or config.get("model_type") != tasks.V5:
        return []
    names = [f"{folder}/{name}" for folder in folders for name in (adapter.FILE, adapter.WEIGHTS)]
    return [by_path[name] for name in names if name in by_path]


def _by_path(model: str, remote: Remote) -> dict[str, RemoteFile]:
    """Return the files with safe paths, by path. Raises ModelBroken for a listing that cannot be
    laid out on a disk.
    """
    found: dict[str, RemoteFile] = {}
    folders: set[str] = set()
    for file in remote.files:
        if not _is_safe(file.path):
            continue  # never fetched
        if file.path in found or file.size < 0:
            problem = (
                "is listed twice" if file.path in found else f"is listed with {file.size} bytes"
            )
            raise ModelBroken(f"{file.path}: {problem} in {model} of {remote.origin}")
        found[file.path] = file
        folders.update(str(parent) for parent in PurePosixPath(file.path).parents)
    for path in folders & found.keys():
        raise ModelBroken(
            f"{path}: is listed as a file and as a folder in {model} of {remote.origin}"
        )
    return found


def _adapter_files(
    model: str,
    remote: Remote,
    by_path: dict[str, RemoteFile],
    *,
    is_adapter: bool,
    can_convert: bool,
) -> tuple[RemoteFile, ...]:
    """Return the files of a LoRA adapter to fetch; others in its repository, such as training
    checkpoints, are skipped.

    Args:
        is_adapter: Whether the adapter is applied at run time, which needs only its configuration
            and weights. Otherwise it is merged into its base model, which also needs the text files
            next to them (tokenizer, prompts).
    """
    weights = by_path.get(adapter.WEIGHTS) or by_path.get(adapter.TORCH_WEIGHTS)
    if weights is None:
        raise ModelBroken(f"{adapter.WEIGHTS}: missing from {model} in {remote.origin}")
    if weights.path == adapter.TORCH_WEIGHTS and not can_convert:
        raise _refused(model, remote, weights.path)
    own = (by_path[adapter.FILE], weights)
    if is_adapter:
        return own
    texts = [
        file
        for file in by_path.values()
        if not _folder(file) and _is_text(file) and file not in own
    ]
    return (*own, *sorted(texts, key=lambda file: file.path))


def _folder(file: RemoteFile) -> str:
    parent = str(PurePosixPath(file.path).parent)
    return "" if parent == "." else parent


def _is_weights(file: RemoteFile) -> bool:
    name = PurePosixPath(file.path).name
    return name.endswith(_WEIGHTS) and not _DUPLICATES.fullmatch(name) and _is_safe(file.path)


def _keep_one_layout(
    remote: Remote, by_path: dict[str, RemoteFile], weights: list[RemoteFile]
) -> list[RemoteFile]:
    """Drop the copy of the weights that would not be read, of a repository with both open_clip's
    and transformers' layouts.
    """
    if images.OPEN_CLIP_WEIGHTS not in by_path or images.OPEN_CLIP not in by_path:
        return weights
    is_open_clip = _is_open_clip(remote, by_path)
    return [file for file in weights if (file.path == images.OPEN_CLIP_WEIGHTS) == is_open_clip]


def _is_open_clip(remote: Remote, by_path: dict[str, RemoteFile]) -> bool:
    """Return True if the weights in open_clip's layout are the ones to read."""
    if images.OPEN_CLIP not in by_path:
        return False
    config = _json(remote, by_path["config.json"]) if "config.json" in by_path else None
    return not images.describes_towers(
        CheckpointConfig("config.json", config) if isinstance(config, dict) else None
    )


def _is_text(file: RemoteFile) -> bool:
    return (file.path.endswith(_TEXTS) or PurePosixPath(file.path).name == _METADATA) and _is_safe(
        file.path
    )


def is_served(file: RemoteFile) -> bool:
    """Return True for weights and texts, in whatever folder."""
    return _is_weights(file) or _is_text(file)


def is_readable_by_loader(path: str) -> bool:
    """Return False for texts that no model is made of: descriptions, results of a training, and all
    .txt files but vocabularies.
    """
    name = PurePosixPath(path).name
    if name.endswith(".txt"):
        return _VOCABULARY.fullmatch(name) is not None
    return _DESCRIPTION.fullmatch(name) is None


def named_folders(remote: Remote) -> set[str]:
    """Return patterns of the folders that `select` may choose files of, as far as the listed files
    name them. Raises ModelBroken as `select` does.
    """
    by_path = {file.path: file for file in remote.files}
    folders = _module_folders(remote, by_path, is_partial=True)
    texts = {_inside(folder, name) for folder in folders for name in _TEXT_FOLDERS}
    return (folders | texts | {f"{tasks.FOLDER}/*"}) - {""}


def _is_safe(path: str) -> bool:
    """Return True if a path stays within its target directory and names no hidden file."""
    return all(_SAFE_PART.fullmatch(part) for part in path.split("/"))


def _torch_files(
    model: str,
    remote: Remote,
    by_path: dict[str, RemoteFile],
    folder: str,
    safe: Sequence[RemoteFile],
    *,
    can_convert: bool,
) -> list[RemoteFile]:
    """Return the torch checkpoints to convert in a folder: its weights, if it has none as
    safetensors, and files in addition to them.

    Raises ModelBroken if weights are there only in a format that is not read, or as torch
    checkpoints where these are refused.
    """
    names = {PurePosixPath(path).name for path in by_path if _folder(by_path[path]) == folder}
    more = additional_files(names) if not folder else ()
    has_weights = any(
        _folder(file) == folder and not is_additional(PurePosixPath(file.path).name)
        for file in safe
    )
    main = (
        ()
        if has_weights
        else torch_weights(names, is_open_clip=not folder and _is_open_clip(remote, by_path))
    )
    if main and not can_convert:
        raise _refused(model, remote, _inside(folder, main[0]))
    others = sorted(name for name in names if name.endswith(_OTHERS))
    if not folder and not main and not has_weights:
        _refuse_foreign(model, remote, [path for path in by_path if path.endswith(FOREIGN)])
    if others and not main and not has_weights:
        raise ModelBroken(
            f"{_inside(folder, others[0])}: {model} has these weights in {remote.origin} in a "
            "format that is not read; safetensors "
            "and torch checkpoints are"
        )
    return [by_path[_inside(folder, name)] for name in (*main, *(more if can_convert else ()))]


def _refuse_foreign(model: str, remote: Remote, paths: Sequence[str]) -> None:
    """Raise ModelBroken with an alternative for a repository with weights in GGUF or ONNX files
    alone.
    """
    if not paths:
        return
    name = PurePosixPath(min(paths))
    base = _base_model(remote)
    instead = (
        f"its base model {base!r}, if that is published as safetensors"
        if base
        else "the repository that it was made from"
    )
    raise ModelBroken(
        f"{name}: {model} has its weights in {remote.origin} only as {name.suffix[1:].upper()}. "
        f"Use {instead}; or download it, run "
        "`shoal models convert DIR`, and put the result into a folder of SHOAL_MODELS"
    )


def _base_model(remote: Remote) -> str:
    """Return the model that the repository's README says it was made from; empty if it
    says none.
    """
    readme = next((file for file in remote.files if file.path == "README.md"), None)
    if readme is None:
        return ""
    text = remote.read(readme, 0, min(readme.size, _MAX_README_BYTES)).decode("utf-8", "replace")
    found = _BASE_MODEL.search(text.split("\n---", 1)[0])
    return found[1] if found else ""


def is_root_text(file: RemoteFile) -> bool:
    """Return True for a settings or vocabulary file of the root."""
    return not _folder(file) and _is_text(file)


def _refused(model: str, remote: Remote, path: str) -> ModelBroken:
    return ModelBroken(
        f"{path}: {model} has these weights in {remote.origin} only as a torch checkpoint, a "
        "pickle, and this worker converts none "
        f"(SHOAL_TORCH_CHECKPOINTS=refuse). {_ANY_ADVICE}; put the directory into a folder of "
        "SHOAL_MODELS or your store"
    )


def _module_folders(
    remote: Remote, by_path: dict[str, RemoteFile], *, is_partial: bool = False
) -> set[str]:
    """Folders of the modules that sentence-transformers loads ("" is the root); without
    modules.json, only the root. `is_partial`: skip Routers without a listed configuration.

    modules.json is a list of objects with `type` and `path`. A Router's router_config.json (an
    Asym's config.json) has `types`, an object keyed by folders within its own.
    """
    if "modules.json" not in by_path:
        return {""}
    listed = _json(remote, by_path["modules.json"])
    if not isinstance(listed, list):
        raise ModelBroken("modules.json: must hold a list of objects")
    found: set[str] = set()
    for entry in listed:
        path, kind = (
            (entry.get("path"), entry.get("type")) if isinstance(entry, dict) else (None, None)
        )
        if isinstance(path, str):
            folder = _checked("modules.json", path)
            found.add(folder)
            is_router = str(kind).rpartition(".")[2] in _ROUTERS
            if is_router and not (is_partial and _router_config(by_path, folder) is None):
                found.update(_routed(remote, by_path, folder))
    return found


def _routed(remote: Remote, by_path: dict[str, RemoteFile], folder: str) -> list[str]:
    name = _router_config(by_path, folder)
    value = _json(remote, by_path[name]) if name is not None else None
    types = value.get("types") if isinstance(value, dict) else None
    if name is None or not isinstance(types, dict):
        file = name or _inside(folder, "router_config.json")
        raise ModelBroken(f"{file}: names no `types` of modules")
    return [_inside(folder, _checked(name, path)) for path in types]


def _router_config(by_path: dict[str, RemoteFile], folder: str) -> str | None:
    names = (_inside(folder, "router_config.json"), _inside(folder, "config.json"))
    return next((name for name in names if name in by_path), None)


def _checked(name: str, path: str) -> str:
    folder = "" if path == "." else path.rstrip("/")  # "." is the root, in the files of Model2Vec
    if folder and not _is_safe(folder):
        raise ModelBroken(f"{name}: names {path!r}, which is not a folder of the model")
    return folder


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _json(remote: Remote, file: RemoteFile) -> object:
    if file.size > _MAX_LIST_BYTES:
        raise ModelBroken(f"{file.path}: {file.size:,} bytes are too many for a list of modules")
    try:
        return json.loads(remote.read(file, 0, file.size))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelBroken(f"{file.path}: cannot be read as JSON: {error}") from error
