"""Adds the files of a base model to a model whose repository lacks its tokenizer and its encoder's configuration.

GLiNER's repositories name the base model in gliner_config.json (`model_name`). Its files are fetched from the same source, below
`base_model/`, and `libs/conversion/gliner.py` completes the directory with them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.catalog.kinds.extraction import gliner
from libs.conversion.plan import BASE_FOLDER, TOKENIZER, VOCABULARY_FILES, vocabulary_of
from libs.errors import ModelBroken, ModelNotFound
from libs.names import is_model_id
from libs.store.source import Remote, RemoteFile, Source

_MAX_CONFIG_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class _Joined:
    """A model with the files of its base model, as one `Remote`."""

    own: Remote
    base: Remote
    files: tuple[RemoteFile, ...]
    revision: str

    @property
    def origin(self) -> str:
        return self.own.origin

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        name = file.path.removeprefix(f"{BASE_FOLDER}/")
        if name == file.path:
            return self.own.read(file, start, end)
        return self.base.read(RemoteFile(name, file.size, file.digest), start, end)

    def on_disk(self, files: Sequence[RemoteFile]) -> Path | None:
        return None


def with_base_model(model: str, found: Remote, source: Source) -> Remote:
    """Return the model itself, or together with the files of its base model where it lacks them.

    Raises ModelBroken where the base model cannot be found, NoCapacity where a retry may help.
    """
    by_path = {file.path: file for file in found.files}
    if gliner.FILE not in by_path or any(path.startswith(f"{BASE_FOLDER}/") for path in by_path):
        return found
    config = _config(found, by_path[gliner.FILE])
    needs_tokenizer = TOKENIZER not in by_path and not vocabulary_of(by_path)
    if not needs_tokenizer and config.get("encoder_config"):
        return found
    name = config.get("model_name")
    if not isinstance(name, str) or not is_model_id(name):
        shown = repr(str(name)[:100])
        raise ModelBroken(f"{gliner.FILE}: `model_name` is {shown}; it must name the base model of {model}, as org/name")
    try:
        base = source.find(name)
    except ModelNotFound as error:
        raise ModelBroken(f"{gliner.FILE}: `model_name` is {name}, the base model of {model}, which {error.message}") from error
    if isinstance(base, Path):
        raise ModelBroken(f"{gliner.FILE}: `model_name` is {name}, of which only a copy in this machine's cache was found")
    wanted = {"config.json", *((TOKENIZER, *VOCABULARY_FILES) if needs_tokenizer else ())}
    files = [RemoteFile(f"{BASE_FOLDER}/{file.path}", file.size, file.digest) for file in base.files if file.path in wanted]
    revision = hashlib.sha256(f"{found.revision} {base.revision}".encode()).hexdigest()[:40]
    return _Joined(found, base, (*found.files, *files), revision)


def _config(found: Remote, file: RemoteFile) -> dict[str, object]:
    if file.size > _MAX_CONFIG_BYTES:
        raise ModelBroken(f"{file.path}: has {file.size:,} bytes; at most {_MAX_CONFIG_BYTES:,} are read")
    try:
        config = json.loads(found.read(file, 0, file.size))
    except ValueError as error:
        raise ModelBroken(f"{file.path}: is not JSON: {error}") from None
    return config if isinstance(config, dict) else {}
