"""Object stores and mounted file systems through fsspec:
`<url>/<org>/<name>[@revision]/<files>`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from libs.errors import ModelBroken, ModelNotFound
from libs.store.source import OutOfReach, RemoteFile

_MD5: Final = re.compile(r"[0-9a-f]{32}")
_PLAIN_ENCRYPTION: Final = (None, "AES256")
"""Encryptions with which the ETag of an S3 object is its MD5 (AWS, "Checking object integrity":
SSE-C and SSE-KMS).
"""


class FileSystem(Protocol):
    """The methods of fsspec's AbstractFileSystem that are used."""

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, object]]: ...

    def cat_file(self, path: str, start: int, end: int) -> bytes: ...


@dataclass(frozen=True)
class ObjectStore:
    """`root` is the path that `url` names within the file system; `trouble`: the errors it raises
    when it is unreachable.
    """

    url: str
    files: FileSystem
    root: str
    trouble: tuple[type[Exception], ...] = ()

    def find(self, model: str) -> ObjectModel:
        """See `Source`. A revision is part of the folder's name."""
        folder = f"{self.root}/{model}"
        with self.translated(model):
            found = self.files.find(folder, detail=True)
            files = [
                _remote_file(self.files, folder, path, entry)
                for path, entry in sorted(found.items())
            ]
        if not files:
            raise ModelNotFound(f"{self.url} has no model {model}", field="model")
        marks = "\n".join(
            f"{path} {entry.get('size')} {_mark(entry)}" for path, entry in sorted(found.items())
        )
        return ObjectModel(
            self, folder, hashlib.sha256(marks.encode()).hexdigest()[:40], tuple(files)
        )

    @contextmanager
    def translated(self, model: str) -> Iterator[None]:
        """Translate fsspec's errors into ours."""
        trouble: tuple[type[Exception], ...] = (OSError, *self.trouble)
        try:
            yield
        except FileNotFoundError:
            raise ModelNotFound(f"{self.url} has no model {model}", field="model") from None
        except PermissionError:
            raise ModelBroken(
                f"{self.url} refuses {model}: give the worker credentials that may list and read it"
            ) from None
        except trouble as error:
            raise OutOfReach(
                f"{self.url} cannot be reached for {model}: {type(error).__name__}"
            ) from None


@dataclass(frozen=True)
class ObjectModel:
    """See `Remote`. `revision` is a digest of names, sizes and ETags (modification times where
    there are none).
    """

    store: ObjectStore
    folder: str
    revision: str
    files: tuple[RemoteFile, ...]

    @property
    def origin(self) -> str:
        return self.store.url

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        with self.store.translated(f"{self.folder}/{file.path}"):
            return self.store.files.cat_file(f"{self.folder}/{file.path}", start=start, end=end)

    def on_disk(self, files: Sequence[RemoteFile]) -> Path | None:
        return None


def _remote_file(
    files: FileSystem, folder: str, path: str, entry: Mapping[str, object]
) -> RemoteFile:
    size = entry.get("size")
    relative = path.partition(f"{folder.lstrip('/')}/")[2]
    return RemoteFile(relative, size if isinstance(size, int) else 0, _digest(files, path, entry))


def _digest(files: FileSystem, path: str, entry: Mapping[str, object]) -> str:
    """`md5Hash` of Google Cloud Storage; the ETag of S3 where it is the MD5, which it is not after
    a multipart upload.
    """
    md5 = entry.get("md5Hash")
    if isinstance(md5, str):
        return f"md5:{base64.b64decode(md5).hex()}"
    tag = str(entry.get("ETag", "")).strip('"')
    if not path.endswith(".safetensors") or not _MD5.fullmatch(tag):
        return ""
    return f"md5:{tag}" if _encryption(files, path) in _PLAIN_ENCRYPTION else ""


def _encryption(files: FileSystem, path: str) -> object:
    bucket, _, key = path.partition("/")
    head = files.call_s3("head_object", Bucket=bucket, Key=key)  # type: ignore[attr-defined]  # of s3fs alone
    return head.get("ServerSideEncryption")


def _mark(entry: Mapping[str, object]) -> object:
    return (
        entry.get("ETag")
        or entry.get("etag")
        or entry.get("md5Hash")
        or entry.get("mtime")
        or entry.get("created")
    )
