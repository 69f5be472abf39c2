"""Finds the files of a model that is named on the command line, without a mesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.cli.console import size

from libs.catalog.checkpoint.adapter import read_base_model
from libs.errors import ModelNotFound
from libs.store import Copy, DownloadProgress, is_model_id, open_copies, open_store
from libs.store.select import CONFIGS
from services.worker.memory.files import ModelFiles
from services.worker.settings import Settings

OnProgress = Callable[[str], None]


def find_model(
    settings: Settings, target: str, name: str, on_progress: OnProgress
) -> tuple[str, Copy]:
    """Return the ID and files of a model: a directory, or an ID in the folders of SHOAL_MODELS or
    the stores of SHOAL_STORES.

    Raises ShoalError if no model is found or its files cannot be fetched.

    Args:
        target: A directory or an ID.
        name: The ID for a directory. Empty: the last two components of its path.
        on_progress: Receives messages about the progress of a download.
    """
    path, files = Path(target), _files(settings)
    if path.is_dir():
        _refuse_folder_of_models(path)
        model = name or _own_id(path.resolve())
        copy = files.readable(path, _progress_reporter(model, on_progress, "converting"))
        return model, (
            files.with_base(copy, model, _progress_reporter(model, on_progress))
            if read_base_model(path)
            else copy
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
                f"{target} is in no folder of SHOAL_MODELS; give its directory, or set "
                "SHOAL_STORES=hf to fetch it"
            ) from None
    return target, files.fetch(target, _progress_reporter(target, on_progress))


def _refuse_folder_of_models(path: Path) -> None:
    """Raise ModelNotFound if the path is a folder of several models, as `shoal up --model` accepts;
    the message says how to check each of them.
    """
    if any((path / name).is_file() for name in CONFIGS):
        return
    found = sorted(each for name in CONFIGS for each in path.glob(f"*/*/{name}"))
    if found:
        raise ModelNotFound(
            f"{path} is a folder of models: name one, such as {found[0].parent}; "
            f"`shoal models check {path}/*/*` checks all"
        )


def _files(settings: Settings) -> ModelFiles:
    store_settings = (settings.store_dir, settings.store_bytes, settings.torch_checkpoints)
    store = open_store(settings.stores, *store_settings) if settings.stores else None
    return ModelFiles(
        settings.models, store, settings.catalog, item_bytes=4, copies=open_copies(*store_settings)
    )


def _progress_reporter(
    model: str, on_progress: OnProgress, what: str = "fetching"
) -> Callable[[DownloadProgress], None]:
    return lambda progress: on_progress(
        f"{model}: {what}, {size(progress.done)} of {size(progress.total)}"
    )


def _own_id(directory: Path) -> str:
    """Return a directory's last two path components if they form an ID, as in the layout of
    SHOAL_MODELS, else `local/model`.
    """
    own = f"{directory.parent.name}/{directory.name}"
    return own if is_model_id(own) else "local/model"
