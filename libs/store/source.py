"""The interface of the sources from which the store fetches models, such as a hub or a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from libs.errors import NoCapacity


class OutOfReach(NoCapacity):
    """No connection to the source could be made. A source that responds that it is busy raises a
    plain NoCapacity instead.

    Where the store searches for a model, it converts this error to ModelUnreachable.
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
        """Return the source's address, for messages."""

    @property
    def revision(self) -> str:
        """Return a commit hash, or a digest of the list of files. It differs if the content
        differs.
        """

    @property
    def files(self) -> Sequence[RemoteFile]:
        """Return all files, including those that Shoal does not need."""

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Return the bytes `start` to `end` (exclusive) of a file. Raises NoCapacity if a retry may
        help, else ModelBroken.
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
