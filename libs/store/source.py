"""The interface of the sources that the store fetches models from, and its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from libs.errors import NoCapacity


class OutOfReach(NoCapacity):
    """The source could not be connected to. A source that answers that it is busy raises a plain
    NoCapacity.

    The store raises ModelUnreachable instead where a model is looked for.
    """


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """The progress of one download, in bytes."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a model in a source: `path` from the model's root, with slashes; `size` in bytes.

    `digest` is `sha256:<hex>`, `git:<hex>` (SHA-1 of the git blob), `md5:<hex>`, or empty if the
    source gives none.
    """

    path: str
    size: int
    digest: str = ""


class Remote(Protocol):
    """One model in a source at one immutable revision."""

    @property
    def origin(self) -> str:
        """The source's address, for messages."""

    @property
    def revision(self) -> str:
        """A commit hash, or a digest of the listing: differs whenever the content differs."""

    @property
    def files(self) -> Sequence[RemoteFile]:
        """All of them, wanted or not."""

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Bytes `start` to `end` (exclusive) of a file. Raises NoCapacity if a retry may help, else
        ModelBroken.
        """

    def on_disk(self, files: Sequence[RemoteFile]) -> Path | None:
        """Return a directory of this machine that already has all these files of this revision;
        None if there is none.
        """


class ModelSource(Protocol):
    """A place from which models are fetched. Called in threads; blocks."""

    def find(self, model: str) -> Remote | Path:
        """Return the model, or a directory of this machine that holds it. `model` is a model id.

        Raises ModelNotFound, ModelBroken (it exists but cannot be fetched, with advice) or
        NoCapacity (a retry may help).
        """
