"""The Hugging Face hub as a source, and the cache that other programs of this machine have filled
from it.

Names, revisions, redirects, authorisation and errors are left to huggingface_hub. The bytes are
read in ranges by `download.py`, because huggingface_hub (2.4) restarts a file after an
interruption: its partial files have random names and are removed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    get_session,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]  # not in its __all__

from libs.catalog.checkpoint import adapter
from libs.catalog.checkpoint.files import tensor_files
from libs.conversion.plan import is_torch
from libs.errors import ModelBroken, ModelNotFound, NoCapacity
from libs.kinds.images.card import OPEN_CLIP_WEIGHTS
from libs.names import split_revision
from libs.store.select import CONFIGS
from libs.store.source import OutOfReach, RemoteFile
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

# httpx2 logs every URL at INFO, and the URLs of large files carry a signature that grants access.
logging.getLogger("httpx2").setLevel(logging.WARNING)

_BUSY: Final = (408, 425, 429)
_CACHED: Final = [
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.json",
    "*.txt",
    "*.model",
    "*.spm",
    "*.jinja",
    "artifact.metadata",
]


@dataclass(frozen=True)
class Hub:
    """`endpoint` and `cache` default to huggingface_hub's (HF_ENDPOINT, HF_HOME). No token but
    `token` is ever sent.
    """

    token: str = ""
    endpoint: str | None = None
    cache: Path | None = None

    def find(self, model: str) -> HubModel | Path:
        """See `Source`. With HF_HUB_OFFLINE, or while the hub is unreachable, returns the copy in
        the cache of this machine.
        """
        try:
            return self._look_up(model)
        except NoCapacity:
            with suppress(ModelBroken):
                cached = self._cached(model)
                if cached is not None:
                    log.warning(
                        "the hub cannot be reached: a model is taken from its cache",
                        extra=fields({"model": model}),
                    )
                    return cached
            raise
        except OfflineModeIsEnabled:
            cached = self._cached(model)
            if cached is None:
                raise ModelNotFound(
                    (
                        f"the Hugging Face cache of this machine does not have {model}, and "
                        "HF_HUB_OFFLINE forbids to fetch it"
                    ),
                    field="model",
                ) from None
            return cached

    def _look_up(self, model: str) -> HubModel:
        name, revision = split_revision(model)
        api = HfApi(endpoint=self.endpoint, token=self.token or False)
        with _translated(model, api.endpoint):
            info = api.model_info(
                name,
                revision=revision or None,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
        if info.sha is None:
            raise ModelBroken(f"{api.endpoint} returned no commit for {model}")
        files = [
            RemoteFile(
                entry.rfilename,
                entry.size or 0,
                f"sha256:{entry.lfs.sha256}"
                if entry.lfs is not None
                else f"git:{entry.blob_id}"
                if entry.blob_id
                else "",
            )
            for entry in info.siblings or []
        ]
        return HubModel(self, name, info.sha, tuple(files), api.endpoint)

    def _cached(self, model: str) -> Path | None:
        """Return a complete snapshot, as far as the cache can show: it does not know of files that
        no program ever requested.

        None if it has no configuration of a model or an adapter. Raises ModelBroken if its weights
        are missing.
        """
        name, revision = split_revision(model)
        try:
            found = snapshot_download(
                name,
                revision=revision or None,
                cache_dir=self.cache,
                local_files_only=True,
                allow_patterns=_CACHED,
            )
        except LocalEntryNotFoundError:
            return None
        snapshot = Path(found)
        names = {path.name for path in snapshot.iterdir()}
        if not names & {adapter.FILE, *CONFIGS}:
            return None
        if not names & {"modules.json", adapter.WEIGHTS, OPEN_CLIP_WEIGHTS} and not any(
            map(is_torch, names)
        ):
            tensor_files(snapshot, "")
        return snapshot


@dataclass(frozen=True)
class HubModel:
    """See `Remote`. `revision` is the commit."""

    hub: Hub
    name: str
    revision: str
    files: tuple[RemoteFile, ...]
    origin: str

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        is_whole = end - start == file.size
        headers = build_hf_headers(token=self.hub.token or False) | {"Accept-Encoding": "identity"}
        if not is_whole:
            headers["Range"] = f"bytes={start}-{end - 1}"
        url = hf_hub_url(self.name, file.path, revision=self.revision, endpoint=self.hub.endpoint)
        with (
            _translated(self.name, self.origin),
            get_session().stream(
                "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as response,
        ):
            hf_raise_for_status(response)
            if not is_whole and response.status_code != httpx2.codes.PARTIAL_CONTENT:
                raise ModelBroken(
                    f"{file.path}: {self.origin} does not answer requests for a range of it"
                )
            return response.read()

    def on_disk(self, files: Sequence[RemoteFile]) -> Path | None:
        root: Path | None = None
        for file in files:
            cached = try_to_load_from_cache(
                self.name, file.path, cache_dir=self.hub.cache, revision=self.revision
            )
            if not isinstance(cached, str) or Path(cached).stat().st_size != file.size:
                return None
            root = Path(cached.removesuffix(file.path))
        return root


@contextmanager
def _translated(model: str, endpoint: str) -> Iterator[None]:
    """Translate huggingface_hub's errors into ours. Texts are our own: a server's answer is not
    passed on to clients.
    """
    try:
        yield
    except GatedRepoError:
        page = f"{endpoint}/{split_revision(model)[0]}"
        raise ModelBroken(
            f"{model} is gated: accept its terms at {page} and give the worker a token "
            "(HF_TOKEN) of that account"
        ) from None
    except RepositoryNotFoundError:
        raise ModelNotFound(
            (
                f"{endpoint} has no model {model}, or it is private and the worker's token "
                "(HF_TOKEN) does not open it"
            ),
            field="model",
        ) from None
    except RevisionNotFoundError:
        raise ModelNotFound(f"{endpoint} has no such revision of {model}", field="model") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
            raise ModelBroken(
                f"{endpoint} refuses {model} with status {status}: give the worker a token "
                "(HF_TOKEN) that may read it"
            ) from None
        if status in _BUSY or status >= httpx2.codes.INTERNAL_SERVER_ERROR:
            raise NoCapacity(f"{endpoint} answers with status {status} for {model}") from None
        raise ModelBroken(f"{endpoint} answers with status {status} for {model}") from None
    except OfflineModeIsEnabled:
        raise
    except httpx2.HTTPError as error:
        raise OutOfReach(
            f"{endpoint} cannot be reached for {model}: {type(error).__name__}"
        ) from None
