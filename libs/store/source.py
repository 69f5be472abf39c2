"""What the store asks of the places that models come from, and the values that pass between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from libs.errors import NoCapacity


class OutOfReach(NoCapacity):
    """No connection to the place could be made; one that answers that it is busy is another matter."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one download, in bytes."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a model in a source: `path` from the model's root, with slashes; `size` in bytes.

    `digest` is `sha256:<hex>`, `git:<hex>` (SHA-1 of the git blob), `md5:<hex>`, or empty if the source tells none.
    """

    path: str
    size: int
    digest: str = ""


class Remote(Protocol):
    """One model in a source at one immutable revision."""

    @property
    def origin(self) -> str:
        """Where it is, for people."""

    @property
    def revision(self) -> str:
        """A commit hash, or a digest of the listing: another content has another one."""

    @property
    def files(self) -> Sequence[RemoteFile]:
        """All of them, wanted or not."""

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Bytes `start` to `end` (exclusive) of a file. Raises NoCapacity if another try may help, else ModelBroken."""

    def on_disk(self, files: Sequence[RemoteFile]) -> Path | None:
        """A directory of this machine that already has all these files of this revision; None if there is none."""


class Source(Protocol):
    """A place that models come from. Called in threads; blocks."""

    def find(self, model: str) -> Remote | Path:
        """The model, or a directory of this machine that has it. `model` is a model id.

        Raises ModelNotFound, ModelBroken (it is there but cannot be had, with advice) or NoCapacity (another try may help).
        """
