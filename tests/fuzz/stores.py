"""Listings of a model by a hub or an object store: their names become paths on this machine's
disk.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from libs.errors import ModelBroken, NoCapacity
from libs.names import is_model_id
from libs.store.select import select
from libs.store.source import RemoteFile
from tests.fuzz import mutate
from tests.fuzz.target import Broken, Random, Target, plain

_NAMES: Final = (
    "config.json", "model.safetensors", "modules.json", "tokenizer.json", "1_Pooling/config.json",
    "2_Dense/model.safetensors",
    "README.md",
    "../config.json", "/etc/passwd.json", "a/../../b.json", "a//b.json", "./config.json",
    "config.json/", "CONFIG.JSON",
    "config.json\0.json",
    ".hidden.json", "a\\..\\b.json", "model-00001-of-00002.safetensors",
    "model.safetensors.index.json", "pytorch_model.bin",
    "x/" * 100 + "a.json",
    "adapter_config.json", "adapter_model.safetensors", "router_config.json",
    "1_Router/router_config.json", "C:config.json", "..",
    "", "a" * 300 + ".json",
    "config.json ", "\u202econfig.json", "1_Pooling", ".shoal.json", "listing.json",
    "config.json.part",
    "labels_tokenizer/tokenizer.json",
)  # fmt: skip
_MODULES: Final[Sequence[object]] = (
    [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "x.Pooling"},
    ],
    [{"path": "1_Router", "type": "x.Router"}],
    {"types": {"0": "x"}, "structure": {}},
)
_WORDS: Final[Sequence[object]] = (
    "..",
    "/etc",
    "../..",
    "1_Pooling",
    "",
    7,
    None,
    "a\0",
    "\ud800",
    {"types": {"../x": "y"}},
    "1_Router",
    "x.Router",
)


@dataclass(frozen=True)
class Listed:
    """A model in a store with a configurable listing."""

    files: tuple[RemoteFile, ...]
    modules: bytes
    origin: str = "fuzz"
    revision: str = "0"

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        return self.modules

    def on_disk(self, files: Sequence[RemoteFile]) -> Path | None:
        return None


def _make(random: Random, known: Sequence[bytes]) -> bytes:
    names = [
        mutate.text(random) if random.random() < 0.2 else random.choice(_NAMES)
        for _ in range(random.randrange(12))
    ]
    files = [
        [name, mutate.edge(random, signed=True) if random.random() < 0.1 else 100]
        for name in ["config.json", "model.safetensors", *names]
    ]
    modules = mutate.changed(random, random.choice(_MODULES), _WORDS)
    try:
        return json.dumps(
            {"files": files, "modules": modules, "model": mutate.text(random)}
        ).encode()
    except (RecursionError, ValueError):
        return b"{}"


def _try(data: bytes) -> None:
    try:
        said: Any = json.loads(data)
        files = tuple(RemoteFile(str(name), int(size)) for name, size in said["files"])
        modules, model = json.dumps(said["modules"]).encode(), str(said["model"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return
    if is_model_id(model) and (".." in model.split("/") or model.startswith("/") or "\0" in model):
        raise Broken(f"{model!r} passes for a model's id")
    with suppress(ModelBroken, NoCapacity):
        chosen = select("org/name", Listed(files, modules))
        _check(chosen)


def _check(chosen: Sequence[RemoteFile]) -> None:
    for file in chosen:
        path = PurePosixPath(file.path)
        if (
            path.is_absolute()
            or ".." in path.parts
            or "\0" in file.path
            or str(path) != file.path
            or path.name.startswith(".")
        ):
            raise Broken(f"a file would be written to {file.path!r}")
        if file.size < 0:
            raise Broken(f"{file.path!r} would have {file.size} bytes")
    paths = [file.path for file in chosen]
    if len(set(paths)) < len(paths):
        raise Broken("two files would be written to one path")
    folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    if folders & set(paths):
        raise Broken("a file would be written where a folder is")


TARGETS: Final = (Target("listings", _make, plain(_try), share=0.5),)
