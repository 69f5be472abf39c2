"""Finds the files of a model that is named on the command line. No mesh is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.cli.console import size

from libs.catalog.checkpoint.adapter import base_of
from libs.errors import ModelNotFound
from libs.store import Copy, Progress, is_model_id, open_copies, open_store
from services.worker.memory.files import ModelFiles
from services.worker.settings import Settings

Tell = Callable[[str], None]


def found(settings: Settings, target: str, name: str, tell: Tell) -> tuple[str, Copy]:
    """The id and files of a model: a directory as it is; an id in the folders of SHOAL_MODELS, else
    in the stores of SHOAL_STORES.

    `name`: the id of a directory; empty: its last two path components. `tell` gets the progress of
    a download. Raises ShoalError.
    """
    path, files = Path(target), _files(settings)
    if path.is_dir():
        model = name or _own_id(path.resolve())
        copy = files.readable(path, _telling(model, tell, "converting"))
        return model, (
            files.with_base(copy, model, _telling(model, tell)) if base_of(path) else copy
        )
    try:
        return target, files.find(target)
    except ModelNotFound:
        if not is_model_id(target):
            raise ModelNotFound(
                f"{target} is neither a directory nor a model id of the form org/name"
            ) from None
        if not settings.stores:
            raise ModelNotFound(
                f"{target} is in no folder of SHOAL_MODELS; give its directory, or set SHOAL_STORES=hf to fetch it"
            ) from None
    return target, files.fetch(target, _telling(target, tell))


def _files(settings: Settings) -> ModelFiles:
    place = (settings.store_dir, settings.store_bytes, settings.torch_checkpoints)
    store = open_store(settings.stores, *place) if settings.stores else None
    return ModelFiles(
        settings.models, store, settings.catalog, item_bytes=4, copies=open_copies(*place)
    )


def _telling(model: str, tell: Tell, what: str = "fetching") -> Callable[[Progress], None]:
    return lambda progress: tell(
        f"{model}: {what}, {size(progress.done)} of {size(progress.total)}"
    )


def _own_id(directory: Path) -> str:
    """A directory's last two path components if they form an id, as in the layout of SHOAL_MODELS;
    else `local/model`.
    """
    own = f"{directory.parent.name}/{directory.name}"
    return own if is_model_id(own) else "local/model"
