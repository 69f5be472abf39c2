"""The names that clients of this edge send, from a file in YAML, read again when it changes
(SHOAL_ALIASES). A name stands for a model or for an alias of the mesh, which routers resolve.

aliases:
  text-embedding-3-small: {model: BAAI/bge-small-en-v1.5}
  e5-query: {model: intfloat/e5-small-v2, role: query}
  rerank-v3.5: {model: cross-encoder/ms-marco-MiniLM-L6-v2}
  text-embedding-ada-002: {alias: docs-search}   # of the mesh
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from libs.errors import InvalidInput
from libs.names import is_adapter_name, is_alias, is_model_id
from libs.serving.watched import Watched
from services.edge.messages.names import ROLES, AliasNames, AliasTarget

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:/-]{0,255}")
_KEYS: Final = frozenset({"model", "alias", "role", "dimensions", "adapter"})


def watch_aliases(path: Path) -> Watched[AliasNames]:
    """Read the aliases now and again whenever the file changes. Raises InvalidInput as
    `read_aliases`.
    """
    return Watched([path], partial(read_aliases, path))


def read_aliases(path: Path) -> AliasNames:
    """Read the aliases. Raises InvalidInput that names the file, the alias and the key at fault."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise InvalidInput(
            f"SHOAL_ALIASES: {path} cannot be read: {error.strerror}", field="SHOAL_ALIASES"
        ) from error
    except yaml.YAMLError as error:
        raise InvalidInput(
            f"SHOAL_ALIASES: {path} is not YAML: {error}", field="SHOAL_ALIASES"
        ) from error
    found = content.get("aliases", {}) if isinstance(content, Mapping) else None
    if not isinstance(found, Mapping) or (
        isinstance(content, Mapping) and set(content) - {"aliases"}
    ):
        raise _wrong(path, "it must have one key, aliases, with a map from names to models")
    return AliasNames({str(name): _target(path, str(name), entry) for name, entry in found.items()})


def _target(path: Path, name: str, entry: Any) -> AliasTarget:
    entry = {"model": entry} if isinstance(entry, str) else entry
    if not _NAME.fullmatch(name):
        raise _wrong(
            path,
            f"{name!r} is not a valid name: use 1..256 letters, digits, '.', '_', ':', '/' or '-'",
        )
    if not isinstance(entry, Mapping) or set(entry) - _KEYS:
        raise _wrong(
            path, f"{name}: it must be a model id, or a map with {', '.join(sorted(_KEYS))}"
        )
    model, role, dimensions = entry.get("model"), entry.get("role", ""), entry.get("dimensions", 0)
    adapter = entry.get("adapter", "")
    if "alias" in entry:
        model = _alias_of_the_mesh(path, name, entry)
    elif not isinstance(model, str) or not is_model_id(model):
        raise _wrong(path, f"{name}.model must be org/name or org/name@revision")
    if role not in ("", *ROLES):
        raise _wrong(path, f"{name}.role must be {' or '.join(ROLES)}")
    if (
        not isinstance(dimensions, int)
        or isinstance(dimensions, bool)
        or not 0 <= dimensions < 1 << 31
    ):
        raise _wrong(path, f"{name}.dimensions must be a whole number from 0")
    if adapter and not (isinstance(adapter, str) and is_adapter_name(adapter)):
        raise _wrong(
            path, f"{name}.adapter must be org/name, or the name of one of the model's adapters"
        )
    return AliasTarget(model, role, dimensions, adapter)


def _alias_of_the_mesh(path: Path, name: str, entry: Mapping[str, Any]) -> str:
    alias = entry["alias"]
    if "model" in entry or not isinstance(alias, str) or not is_alias(alias):
        raise _wrong(
            path,
            f"{name}.alias must be an alias of the mesh, a name without a slash; omit {name}.model",
        )
    return alias


def _wrong(path: Path, message: str) -> InvalidInput:
    return InvalidInput(f"SHOAL_ALIASES: {path}: {message}", field="SHOAL_ALIASES")
