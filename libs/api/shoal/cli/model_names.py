"""The MODEL argument of commands, of which shells complete the names.

A shell waits for completions, so they are quick, bounded, and without any message if they fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import typer

from shoal.cli.options import ConnectionOptions

COMPLETION_SECONDS: Final = 0.5
"""The longest wait for a router's list of models."""
MAX_FOLDER_NAMES: Final = 1000


def complete_model(context: typer.Context) -> list[str]:
    """Return the names of the mesh's models, and of those in local folders."""
    return sorted({*_mesh_names(context), *local_names(os.environ)})


def complete_local_model() -> list[str]:
    """Return the names of the models in local folders."""
    return sorted(local_names(os.environ))


def _mesh_names(context: typer.Context) -> list[str]:
    """Return the names of the mesh that the typed options and the environment name."""
    typed = {field.name: context.params.get(field.name) for field in fields(ConnectionOptions)}
    connection = ConnectionOptions(
        **{name: value for name, value in typed.items() if value is not None}
    )
    os.environ["GRPC_VERBOSITY"] = "NONE"  # Half an address is usual while one is typed.
    with suppress(Exception), connection.open() as client:
        found = client.models.list(timeout=COMPLETION_SECONDS)
        return [model.model for model in found if model.state != "failed"]
    return []


def local_names(environ: Mapping[str, str]) -> set[str]:
    """Return the names of models in the folders of SHOAL_MODELS, and of the copies that workers on
    this computer have downloaded (SHOAL_STORE_DIR).
    """
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/tmp") / ".cache"  # noqa: S108
    store = Path(environ.get("SHOAL_STORE_DIR") or Path(cache) / "shoal")
    names = {*islice(_names_below(store / "models"), MAX_FOLDER_NAMES)}
    for entry in filter(None, environ.get("SHOAL_MODELS", "").split(":")):
        name, equals, _ = entry.partition("=")
        names |= {name} if equals else {*islice(_names_below(Path(entry)), MAX_FOLDER_NAMES)}
    return names


def _names_below(root: Path) -> Iterator[str]:
    """Yield the names of the models of a folder with subfolders <org>/<name>."""
    with suppress(OSError):
        for config in root.glob("*/*/*config.json"):
            yield "/".join(config.parts[-3:-1])


ModelId = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="org/name, or org/name@revision.",
        show_default=False,
        autocompletion=complete_model,
    ),
]
NextModel = Annotated[
    str,
    typer.Option(
        metavar="MODEL", help="The new model.", show_default=False, autocompletion=complete_model
    ),
]
