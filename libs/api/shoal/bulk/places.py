"""Folders and object stores that files of a job are committed to.

A commit is atomic: a reader sees the whole file or none. Parts are written once (the first wins);
the manifest is replaced.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Protocol, TypeVar, cast

from shoal.bulk.failures import Busy, StorageError
from shoal.bulk.spec import InputFile

T = TypeVar("T")
LOCK: Final = ".lock"
_TEMPORARY: Final = ".tmp-"
_TEMPORARY_NAME: Final = re.compile(r"\.tmp-[0-9a-f]{32}")
_LOCK_SECONDS: Final = 1.0
"""Seconds to wait for a lock, which a process that asks for a job's state holds for an instant."""
_LOCK_RETRY_SECONDS: Final = 0.05
_REMOTE_ATTEMPTS: Final = 8
_FIRST_STORE_RETRY_SECONDS: Final = 0.2
_MAX_STORE_RETRY_SECONDS: Final = 15.0
_UNSUPPORTED: Final = frozenset((errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS))
_NO_LINKS: Final = _UNSUPPORTED | {errno.EPERM}
_BLOCK_BYTES: Final = 8 << 20


class OutputPlace(Protocol):
    """The output location of a job. All methods raise StorageError."""

    uri: str

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if it does not exist."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a new file. Return False, and leave it as it is, if it exists."""

    def replace(self, name: str, data: bytes) -> None:
        """Write a file or replace it."""

    def delete(self, name: str) -> None: ...

    def locked(self) -> AbstractContextManager[None]:
        """Prevent other processes from running the job. Raises Busy."""

    def is_locked(self) -> bool | None:
        """Return whether a process runs the job; None if that cannot be known."""

    def full_path(self, name: str) -> str:
        """Return the path or URL of a file, for other programs."""


class Folder:
    """A folder of a local or mounted file system."""

    def __init__(self, path: Path) -> None:
        self.path, self.uri = path, str(path)

    def names(self) -> list[str]:
        with self._named(self.path):
            return sorted(os.listdir(self.path)) if self.path.exists() else []

    def read(self, name: str) -> bytes | None:
        with self._named(self.path / name):
            try:
                return (self.path / name).read_bytes()
            except FileNotFoundError:
                return None

    def create(self, name: str, data: bytes) -> bool:
        with self._written(name, data) as temporary:
            try:
                os.link(temporary, self.path / name)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # The lock excludes other writers on file systems without hard links.
                if (self.path / name).exists():
                    return False
                os.replace(temporary, self.path / name)
        return True

    def replace(self, name: str, data: bytes) -> None:
        with self._written(name, data) as temporary:
            os.replace(temporary, self.path / name)

    def delete(self, name: str) -> None:
        with self._named(self.path / name):
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._named(self.path / LOCK):
            self.path.mkdir(parents=True, exist_ok=True)
            # A link here may be to a file that its author may not write.
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            file = os.fdopen(os.open(self.path / LOCK, flags, 0o666), "r+b")
        with file:
            try:
                _lock_within(file, _LOCK_SECONDS)
            except BlockingIOError:
                raise Busy(f"another process runs the job in {self.uri}") from None
            self._delete_temporary()
            yield

    def is_locked(self) -> bool | None:
        try:
            with (self.path / LOCK).open("rb") as file:
                _lock(file, shared=True)  # So that two that ask do not see each other.
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        except (OSError, ImportError):
            return None
        return False

    def full_path(self, name: str) -> str:
        return str(self.path / name)

    def _delete_temporary(self) -> None:
        """Delete files that were left by a process that was killed."""
        for name in filter(_TEMPORARY_NAME.fullmatch, self.names()):
            with self._named(self.path / name):
                if stat.S_ISREG((self.path / name).lstat().st_mode):
                    self.delete(name)

    @contextmanager
    def _written(self, name: str, data: bytes) -> Iterator[Path]:
        """Yield a temporary file with this content, on disk; then make its new name durable."""
        temporary = self.path / f"{_TEMPORARY}{uuid.uuid4().hex}"
        with self._named(self.path / name):
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                yield temporary
                _sync_folder(self.path)
            finally:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)

    @contextmanager
    def _named(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{path} cannot be read or written: {error.strerror or error}"
            ) from error


class ObjectFolder:
    """A prefix of an object store, through fsspec."""

    def __init__(self, uri: str, files: Any, root: str) -> None:
        self.uri, self._files, self._root = uri.rstrip("/"), files, root.rstrip("/")

    def names(self) -> list[str]:
        def listed() -> list[str]:
            self._files.invalidate_cache()
            try:
                return [str(path) for path in self._files.ls(self._root, detail=False)]
            except FileNotFoundError:
                return []

        paths = self._retried(self._root, listed)
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def read(self, name: str) -> bytes | None:
        def content() -> bytes | None:
            try:
                return bytes(self._files.cat_file(self._key(name)))
            except FileNotFoundError:
                return None

        return self._retried(name, content)

    def create(self, name: str, data: bytes) -> bool:
        return self._retried(name, lambda: self._create(name, data))

    def replace(self, name: str, data: bytes) -> None:
        self._retried(name, lambda: self._files.pipe_file(self._key(name), data))

    def delete(self, name: str) -> None:
        def removed() -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(self._key(name))

        self._retried(name, removed)

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()  # Object stores have no locks that end with their process.

    def is_locked(self) -> bool | None:
        return None

    def full_path(self, name: str) -> str:
        return f"{self.uri}/{name}"

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _create(self, name: str, data: bytes) -> bool:
        """Put an object if it is absent, where the store supports that. Names are made of the
        content's origin, so a plain put replaces an object by an equivalent one.
        """
        try:
            self._files.pipe_file(self._key(name), data, mode="create")
        except FileExistsError:
            return False
        except (TypeError, NotImplementedError):
            self._files.pipe_file(self._key(name), data)
        except OSError as error:
            if "PreconditionFailed" in str(error) or "pre-conditions" in str(error):
                return False
            if error.errno not in _UNSUPPORTED:  # s3fs: 501 Not Implemented
                raise
            self._files.pipe_file(self._key(name), data)
        return True

    def _retried(self, name: str, act: Callable[[], T]) -> T:
        try:
            return _repeated(act)
        except Exception as error:
            raise StorageError(f"{self.uri}: {name} cannot be read or written: {error}") from error


def _repeated(act: Callable[[], T]) -> T:
    """Return `act()`, which is repeated while a store is throttled or cannot be reached."""
    delay = _FIRST_STORE_RETRY_SECONDS
    for _ in range(_REMOTE_ATTEMPTS - 1):
        try:
            return act()
        except (PermissionError, FileNotFoundError):
            raise
        except Exception:
            time.sleep(delay)
            delay = min(2 * delay, _MAX_STORE_RETRY_SECONDS)
    return act()


def place(uri: str) -> OutputPlace:
    """Return the output location of a path or URL. Raises StorageError."""
    if _is_local(uri):
        return Folder(_local(uri))
    files, root = _remote(uri)
    return ObjectFolder(uri, files, root)


def absolute(uri: str) -> str:
    """Return the location independently of the working directory."""
    return str(_local(uri).absolute()) if _is_local(uri) else uri


def local_path(uri: str) -> Path | None:
    """Return the path of a local file or folder; None for an object."""
    return _local(uri) if _is_local(uri) else None


def entries(uri: str) -> tuple[list[str], list[str]] | None:
    """Return the sorted names of the files and of the folders in a location; None if it does not
    exist. A symbolic link counts as a file. Raises StorageError.
    """
    try:
        if _is_local(uri):
            with os.scandir(_local(uri)) as listed:
                names = [(one.name, one.is_dir(follow_symlinks=False)) for one in listed]
        else:
            files, root = _remote(uri)
            names = _repeated(partial(_listed, files, root.rstrip("/")))
    except FileNotFoundError:
        return None
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(f"{uri} cannot be listed: {error}") from error
    found: tuple[list[str], list[str]] = ([], [])
    for name, is_dir in sorted(names):
        found[is_dir].append(name)
    return found


def _listed(files: Any, root: str) -> list[tuple[str, bool]]:
    files.invalidate_cache()
    found = [
        (str(entry["name"]).rstrip("/"), entry["type"] == "directory")
        for entry in files.ls(root, detail=True)
    ]
    # Some stores list an empty object for the folder itself.
    return [(path.rpartition("/")[2], is_dir) for path, is_dir in found if path != root]


def read_file_version(uri: str) -> InputFile:
    """Return the state of an input file now. Raises StorageError."""
    try:
        if _is_local(uri):
            found = _local(uri).stat()
            return InputFile(uri, found.st_size, f"mtime:{found.st_mtime_ns}")
        files, path = _remote(uri)
        return _to_input_file(uri, _repeated(partial(_info, files, path)))
    except StorageError:
        raise
    except FileNotFoundError:
        raise StorageError(f"the input {uri} does not exist") from None
    except Exception as error:
        raise StorageError(f"the input {uri} cannot be read: {error}") from error


def detect_url_kind(uri: str) -> str:
    """Return whether a URL of an object store is a `file` or a `directory`; empty for neither.
    Raises StorageError.
    """
    try:
        files, path = _remote(uri)
        return str(_repeated(partial(_info, files, path))["type"])
    except StorageError:
        raise
    except FileNotFoundError:
        return ""
    except Exception as error:
        raise StorageError(f"the input {uri} cannot be read: {error}") from error


def found_below(uri: str, *, is_pattern: bool) -> list[InputFile]:
    """Return the objects that a pattern matches, or those below a prefix. Raises StorageError."""
    try:
        files, path = _remote(uri)
        found = _repeated(partial(_matched, files, path, is_pattern))
    except StorageError:
        raise
    except FileNotFoundError:
        return []
    except Exception as error:
        raise StorageError(f"the input {uri} cannot be listed: {error}") from error
    return [
        _to_input_file(str(files.unstrip_protocol(name)), entry)
        for name, entry in found.items()
        if entry["type"] == "file"
    ]


def _matched(files: Any, path: str, is_pattern: bool) -> dict[str, dict[str, Any]]:
    files.invalidate_cache()
    found: dict[str, dict[str, Any]] = (files.glob if is_pattern else files.find)(path, detail=True)
    return found


def _to_input_file(uri: str, entry: dict[str, Any]) -> InputFile:
    tags = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "created")
    tag = next((f"{name}:{_plain(entry[name])}" for name in tags if entry.get(name)), "")
    return InputFile(uri, int(entry.get("size") or 0), tag)


def _info(files: Any, path: str) -> dict[str, Any]:
    files.invalidate_cache()
    found: dict[str, Any] = files.info(path)
    return found


def _plain(value: object) -> object:
    """Return a tag in the form that is the same for a listed object and for one that is asked for.
    Stores quote ETags, and give times as objects or numbers, in one of the two.
    """
    if isinstance(value, datetime):
        return value.timestamp()
    return value.strip('"') if isinstance(value, str) else value


def opened(uri: str) -> BinaryIO:
    """Open an input file. Raises StorageError."""
    try:
        if _is_local(uri):
            return _local(uri).open("rb")
    except OSError as error:
        raise StorageError(f"the input {uri} cannot be read: {error.strerror or error}") from error
    return cast(BinaryIO, RemoteInput(uri, *_remote(uri)))


class RemoteInput(io.RawIOBase):
    """An input in an object store. After a failed read it is opened again at the same position.

    All methods raise StorageError.
    """

    def __init__(self, uri: str, files: Any, path: str) -> None:
        self._uri, self._files, self._path = uri, files, path
        self._file: Any = None
        self._position = 0
        self._retried(self._opened)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            self._position = self._retried(lambda: int(self._opened().seek(offset, whence)))
            return self._position
        position = offset + (self._position if whence == os.SEEK_CUR else 0)
        if position != self._position:  # Some stores have only streams, which cannot seek.
            self._retried(lambda: self._opened().seek(position))
            self._position = position
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._retried(lambda: bytes(self._opened().read(len(buffer))))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._discard()
        super().close()

    def _opened(self) -> Any:
        """Return the file at the current position."""
        if self._file is None:
            # Reads are forward by pages of columns, so one block is enough.
            file = self._files.open(
                self._path, "rb", block_size=_BLOCK_BYTES, cache_type="readahead"
            )
            if self._position:
                file.seek(self._position)
            self._file = file
        return self._file

    def _discard(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(Exception):  # Nothing is written, so nothing is lost.
                file.close()

    def _retried(self, act: Callable[[], T]) -> T:
        """Return `act()`. While the store cannot be read, retry with a newly opened file."""

        def attempt() -> T:
            try:
                return act()
            except Exception:
                self._discard()
                raise

        try:
            return _repeated(attempt)
        except FileNotFoundError:
            raise StorageError(f"the input {self._uri} does not exist") from None
        except Exception as error:
            raise StorageError(
                f"the input {self._uri} cannot be read: {error}; run the job again when its store "
                "can be read"
            ) from error


def _is_local(uri: str) -> bool:
    return "://" not in uri or uri.startswith("file://")


def _local(uri: str) -> Path:
    return Path(uri.removeprefix("file://"))


def _remote(uri: str) -> tuple[Any, str]:
    """Return fsspec's file system and the path within it."""
    try:
        import fsspec
    except ImportError:
        raise StorageError(f"{uri} needs fsspec: pip install fsspec s3fs (or gcsfs)") from None
    try:
        files, path = fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise StorageError(f"{uri} cannot be opened: {error}") from None
    return files, str(path)


def _lock(file: IO[bytes], *, shared: bool = False) -> None:
    """Lock a file until it is closed or the process ends. Raises BlockingIOError."""
    import fcntl  # Imported here, because Windows does not have it.

    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def _lock_within(file: IO[bytes], seconds: float) -> None:
    """Lock a file as soon as it is free. Raises BlockingIOError."""
    give_up_at = time.monotonic() + seconds
    while True:
        try:
            return _lock(file)
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                raise
        time.sleep(_LOCK_RETRY_SECONDS)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
