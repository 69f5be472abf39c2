"""Opens the sources that SHOAL_STORES names. A source's library is imported only where it is
configured.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from libs.conversion import TorchCheckpoints
from libs.errors import InvalidInput
from libs.store.cache import Cache
from libs.store.local import LocalCopies
from libs.store.source import ModelSource
from libs.store.store import ModelStore

_LIBRARIES: Final = {
    "s3": ("s3fs", "shoal-mesh[s3]"),
    "gs": ("gcsfs", "shoal-mesh[gs]"),
    "file": ("fsspec", "shoal-mesh[worker]"),
}
_HUB: Final = "hf"
_DISK_SHARE: Final = 0.9


def default_root(environ: Mapping[str, str]) -> Path:
    """Return the default of SHOAL_STORE_DIR, where copies are kept: `shoal/` below XDG_CACHE_HOME
    or ~/.cache.
    """
    home = environ.get("HOME") or "/tmp"  # noqa: S108
    return Path(environ.get("XDG_CACHE_HOME") or Path(home) / ".cache") / "shoal"


def check_urls(text: str) -> tuple[str, ...]:
    """Parse the sources of SHOAL_STORES: `hf`, `s3://bucket/prefix`, `gs://bucket/prefix`,
    `file:///folder`, separated by commas, in search order.

    Raises InvalidInput for anything else, and for a source without its library installed, naming
    the extra that installs it.
    """
    urls = tuple(entry.strip().rstrip("/") for entry in text.split(",") if entry.strip())
    for url in urls:
        _check(url)
    return urls


def _check(url: str) -> None:
    protocol, separator, place = url.partition("://")
    if url == _HUB:
        library, extra = "huggingface_hub", "shoal-mesh[worker]"
    elif separator and place and protocol in _LIBRARIES:
        library, extra = _LIBRARIES[protocol]
    else:
        raise InvalidInput(
            f"SHOAL_STORES: {url!r} is not hf, s3://…, gs://… or file:///…", field="SHOAL_STORES"
        )
    if protocol == "file" and not place.startswith("/"):
        raise InvalidInput(
            f"SHOAL_STORES: {url!r} is not an absolute path: write file:///…", field="SHOAL_STORES"
        )
    if find_spec(library) is None:
        raise InvalidInput(
            f"SHOAL_STORES: {url} needs {library}: pip install '{extra}'", field="SHOAL_STORES"
        )


def open_store(
    urls: tuple[str, ...],
    root: Path,
    budget_bytes: int,
    torch_checkpoints: TorchCheckpoints = "convert",
) -> ModelStore:
    """Return the store of these sources. `budget_bytes` 0: nine tenths of the disk's free space now
    plus the bytes of present copies.

    Raises InvalidInput if `root` cannot be written.
    """
    try:
        cache = Cache(root)
    except OSError as error:
        raise InvalidInput(
            f"SHOAL_STORE_DIR: {root} cannot be used: {error.strerror}", field="SHOAL_STORE_DIR"
        ) from error
    return ModelStore(
        [_open(url) for url in urls],
        cache,
        _budget(cache, budget_bytes),
        torch_checkpoints=torch_checkpoints,
    )


def open_copies(
    root: Path, budget_bytes: int, torch_checkpoints: TorchCheckpoints = "convert"
) -> LocalCopies:
    """Return the converted copies of directories outside the store, in its folder, which is created
    with the first of them.
    """
    return LocalCopies(root, lambda: _budget(Cache(root), budget_bytes), torch_checkpoints)


def _budget(cache: Cache, budget_bytes: int) -> int:
    return budget_bytes or int(
        (shutil.disk_usage(cache.root).free + cache.used_bytes()) * _DISK_SHARE
    )


def _open(url: str) -> ModelSource:
    if url == _HUB:
        # Read when huggingface_hub is imported; without it huggingface_hub sends the hub torch's
        # version and more.
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        from libs.store.hub import Hub

        return Hub(token=os.environ.get("HF_TOKEN", ""))
    import fsspec

    from libs.store.objects import ObjectStore

    protocol = url.partition("://")[0]
    options = {} if protocol == "file" else {"use_listings_cache": False}
    files = fsspec.filesystem(protocol, **options)
    return ObjectStore(url, files, str(files._strip_protocol(url)), _trouble(protocol))


def _trouble(protocol: str) -> tuple[type[Exception], ...]:
    """Return the errors, in addition to OSError, that a library raises when its service is
    unreachable or credentials are missing.
    """
    if protocol == "s3":
        from aiohttp import ClientError
        from botocore.exceptions import BotoCoreError

        return (BotoCoreError, ClientError)
    if protocol == "gs":
        from aiohttp import ClientError
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        return (GoogleAuthError, HttpError, ClientError)
    return ()
