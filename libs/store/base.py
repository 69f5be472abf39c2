"""Add files of base models to a model that lacks a tokenizer or an encoder configuration.

Repositories of GLiNER and GLiREL name the base model in their configuration (`model_name`), and
those of GLiNER with two encoders also the encoder of labels (`labels_encoder`). The files of these
models are fetched from the same source into `base_model/` and `labels_tokenizer/`, from where
`libs/conversion/base_model.py` completes the directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.conversion.plan import BASE_FOLDER, TOKENIZER, VOCABULARY_FILES, find_vocabulary
from libs.errors import ModelBroken, ModelNotFound
from libs.kinds.gliner import card as gliner
from libs.kinds.glirel import card as glirel
from libs.names import is_model_id
from libs.store.source import ModelSource, Remote, RemoteFile

_MAX_CONFIG_BYTES: Final = 1_000_000
_SETTINGS: Final = ("config.json",)


@dataclass(frozen=True, slots=True)
class _Joined:
    """A model together with files of other models in subfolders, as one `Remote`."""

    own: Remote
    others: Mapping[str, Remote]
    """The other models by the folder that their files are put into."""

    files: tuple[RemoteFile, ...]
    revision: str

    @property
    def origin(self) -> str:
        return self.own.origin

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        folder, _, name = file.path.partition("/")
        if folder not in self.others:
            return self.own.read(file, start, end)
        return self.others[folder].read(RemoteFile(name, file.size, file.digest), start, end)

    def on_disk(self, files: Sequence[RemoteFile]) -> Path | None:
        return None


@dataclass(frozen=True, slots=True)
class _Need:
    """Files that a model lacks.

    Attributes:
        file: The configuration file that names the model with these files.
        key: The key of that name in the configuration.
        folder: The folder into which the files are put.
        names: The names of the files.
    """

    file: str
    key: str
    folder: str
    names: Collection[str]


def with_base_model(model: str, found: Remote, source: ModelSource) -> Remote:
    """Return the model, with files of its base models added if it lacks them.

    Raises ModelBroken if a base model cannot be found, NoCapacity if a retry may help.
    """
    by_path = {file.path: file for file in found.files}
    file = next((name for name in (gliner.FILE, glirel.FILE) if name in by_path), "")
    if not file or any(path.startswith(f"{BASE_FOLDER}/") for path in by_path):
        return found
    config = _config(found, by_path[file])
    needs = _needs(file, config, by_path)
    if not needs:
        return found
    others = {need.folder: _base(model, need, config.get(need.key), source) for need in needs}
    files = [
        RemoteFile(f"{need.folder}/{file.path}", file.size, file.digest)
        for need in needs
        for file in others[need.folder].files
        if file.path in need.names
    ]
    revisions = " ".join([found.revision, *(base.revision for base in others.values())])
    return _Joined(
        found, others, (*found.files, *files), hashlib.sha256(revisions.encode()).hexdigest()[:40]
    )


def _needs(file: str, config: Mapping[str, object], paths: Collection[str]) -> list[_Need]:
    needs = []
    needs_tokenizer = TOKENIZER not in paths and not find_vocabulary(paths)
    if needs_tokenizer or not config.get("encoder_config"):
        names = (*_SETTINGS, *((TOKENIZER, *VOCABULARY_FILES) if needs_tokenizer else ()))
        needs.append(_Need(file, "model_name", BASE_FOLDER, names))
    in_folder = [
        path.removeprefix(f"{gliner.LABELS_FOLDER}/")
        for path in paths
        if path.startswith(f"{gliner.LABELS_FOLDER}/")
    ]
    if (
        config.get("labels_encoder")
        and TOKENIZER not in in_folder
        and not find_vocabulary(in_folder)
    ):
        needs.append(
            _Need(
                file,
                "labels_encoder",
                gliner.LABELS_FOLDER,
                (*_SETTINGS, TOKENIZER, *VOCABULARY_FILES),
            )
        )
    return needs


def _base(model: str, need: _Need, name: object, source: ModelSource) -> Remote:
    """Return the model that has the missing files. Raises ModelBroken."""
    if not isinstance(name, str) or not is_model_id(name):
        shown = repr(str(name)[:100])
        raise ModelBroken(
            f"{need.file}: `{need.key}` is {shown}; it must name the base model of {model}, as "
            "org/name"
        )
    try:
        base = source.find(name)
    except ModelNotFound as error:
        raise ModelBroken(
            f"{need.file}: `{need.key}` is {name}, the base model of {model}, which {error.message}"
        ) from error
    if isinstance(base, Path):
        raise ModelBroken(
            f"{need.file}: `{need.key}` is {name}, of which only a copy in this machine's cache "
            "was found"
        )
    return base


def _config(found: Remote, file: RemoteFile) -> dict[str, object]:
    if file.size > _MAX_CONFIG_BYTES:
        raise ModelBroken(
            f"{file.path}: has {file.size:,} bytes; at most {_MAX_CONFIG_BYTES:,} are read"
        )
    try:
        config = json.loads(found.read(file, 0, file.size))
    except ValueError as error:
        raise ModelBroken(f"{file.path}: is not JSON: {error}") from None
    return config if isinstance(config, dict) else {}
