"""Parse sentence-transformers' Router (Asym): modules by role, for models with different modules
for queries and documents. Called by `modules.py`.

Format: `types` maps each module's folder to its class, `structure` each role to folders,
`parameters` has the options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from libs.catalog.card import StaticQueries
from libs.catalog.checkpoint.files import CheckpointConfig, need_config, read_config

STATIC = "SparseStaticEmbedding"
_ROLES = ("query", "document")


@dataclass(frozen=True, slots=True)
class ModuleRoutes:
    """Entries in the format of modules.json.

    Attributes:
        modules: The modules for documents, and for queries too unless `static` or the entries
            `queries` encode them.
        query_default: Whether texts without a role are queries.
    """

    modules: tuple[CheckpointConfig, ...]
    static: StaticQueries | None = None
    queries: tuple[CheckpointConfig, ...] = ()
    query_default: bool = False


def read_routes(directory: Path, folder: str) -> ModuleRoutes:
    """Return the router in a folder of the checkpoint. Raises ModelBroken for other routes than
    query and document.
    """
    config = read_config(directory, inside(folder, "router_config.json")) or need_config(
        directory, inside(folder, "config.json")
    )
    structure, parameters = config.part("structure"), config.part("parameters")
    if sorted(structure.values) != sorted(_ROLES) or parameters.part("route_mappings").values:
        raise config.broken(
            "structure",
            f"has the routes {', '.join(structure.values)}; only query and document are served",
        )
    types = config.part("types")
    query, document = (structure.texts(role) for role in _ROLES)
    entries = tuple(_entry(config, types, name, folder) for name in document)
    if query == document:
        return ModuleRoutes(entries)
    first = next(iter(structure.values)) if parameters.flag("allow_empty_key", True) else "document"
    default = parameters.text("default_route", first) == "query"
    own = tuple(_entry(config, types, name, folder) for name in query)
    if [class_name(entry) for entry in own] == [STATIC]:
        return ModuleRoutes(
            entries, static_queries(directory, inside(folder, query[0]), default=default)
        )
    return ModuleRoutes(entries, queries=own, query_default=default)


def class_name(entry: CheckpointConfig) -> str:
    """Return the last word of a module's dotted class path."""
    return entry.text("type").rpartition(".")[2]


def inside(folder: str, name: str) -> str:
    """Return the path of `name` in `folder`, from the checkpoint's root; either may be empty."""
    return "/".join(filter(None, (folder, name)))


def static_queries(directory: Path, folder: str, *, default: bool) -> StaticQueries:
    """Return a SparseStaticEmbedding's weights: the JSON file that its `path` names, or without one
    its model.safetensors.
    """
    config = need_config(directory, inside(folder, "config.json"))
    path = config.text("path")
    if not path:
        return StaticQueries(folder, inside(folder, "model.safetensors"), default)
    places: Sequence[str] = (inside(folder, Path(path).name), Path(path).name)
    found = next((name for name in places if (directory / name).is_file()), None)
    if found is None or not path.endswith(".json"):
        raise config.broken("path", f"is {path!r}, which is not a JSON file of this checkpoint")
    return StaticQueries(folder, found, default)


def _entry(
    config: CheckpointConfig, types: CheckpointConfig, name: str, folder: str
) -> CheckpointConfig:
    return CheckpointConfig(config.file, {"type": types.text(name), "path": inside(folder, name)})
