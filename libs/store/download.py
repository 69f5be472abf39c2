"""Downloads a model's files into a directory: in byte ranges, several in parallel; an interrupted
download resumes.

A file is written as `<name>.part`, with a line in `<name>.part.ranges` for each range that has
reached the disk. It is renamed to its own name when it is complete and verified.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from libs.catalog.checkpoint.files import tensor_entries, tensor_header
from libs.errors import ModelBroken, NoCapacity
from libs.store.source import DownloadProgress, OutOfReach, Remote, RemoteFile

_ROUNDS: Final = 2
"""A file that arrives corrupt is fetched once more; if it is corrupt again, the source's copy is
broken.
"""

_READ_BYTES: Final = 1024 * 1024

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Transfer:
    """The parameters of downloads. An interruption loses at most `threads` ranges; that is also the
    memory in use.
    """

    range_bytes: int = 8 * 1024 * 1024
    threads: int = 8
    retry_seconds: Sequence[float] = (0.5, 1.0, 2.0, 4.0)
    """Pauses between tries of one request."""


def patiently(
    work: Callable[[], _Answer], pauses: Sequence[float], *, most_unreached: int = 1_000
) -> _Answer:
    """Retry `work` after each pause while it raises NoCapacity, at most `most_unreached` times
    for OutOfReach; raise its last error."""
    for number, pause in enumerate(pauses):
        try:
            return work()
        except NoCapacity as error:
            if isinstance(error, OutOfReach) and number >= most_unreached:
                raise
            time.sleep(pause)
    return work()


def download(
    remote: Remote,
    files: Sequence[RemoteFile],
    directory: Path,
    transfer: Transfer,
    report: Callable[[DownloadProgress], None],
) -> None:
    """Download and verify all `files` into `directory`. No other process may write there at the
    same time.

    `report` is called from several threads, one at a time. Raises ModelBroken (the source's copy is
    broken, or access denied) and NoCapacity (source unreachable, or the disk not writable); ranges
    on disk by then are kept for the next attempt.
    """
    parts = [PartialFile(file, directory) for file in files]
    problems: list[str] = []
    for _ in range(_ROUNDS):
        tally = _Tally(parts, report)
        ranges = [(part, start) for part in parts for start in part.missing(transfer.range_bytes)]
        _all(
            [partial(_fetch, remote, part, start, transfer, tally) for part, start in ranges],
            transfer,
        )
        _all([part.finish for part in parts], transfer)
        problems = [part.problem for part in parts if part.problem]
        if not problems:
            return
    raise ModelBroken(
        f"{problems[0]}. Two downloads gave the same bytes: the copy in {remote.origin} is broken"
    )


def done_bytes(files: Sequence[RemoteFile], directory: Path) -> int:
    """Return how many bytes of the files are on disk, whichever process downloads them."""
    return sum(PartialFile(file, directory).done_bytes() for file in files)


def _all(tasks: Sequence[Callable[[], None]], transfer: Transfer) -> None:
    """Run the tasks in threads; after the first error, start no more and raise it."""
    with ThreadPoolExecutor(transfer.threads, "download") as pool:
        futures = [pool.submit(task) for task in tasks]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        pool.shutdown(wait=True, cancel_futures=True)
    for future in done:
        future.result()


def _fetch(
    remote: Remote, part: PartialFile, start: int, transfer: Transfer, tally: _Tally
) -> None:
    end = min(start + transfer.range_bytes, part.file.size)

    def read() -> bytes:
        data = remote.read(part.file, start, end)
        if len(data) != end - start:
            raise NoCapacity(
                f"{part.file.path}: {remote.origin} sent {len(data):,} bytes instead of "
                f"{end - start:,}"
            )
        return data

    data = patiently(read, transfer.retry_seconds)
    try:
        part.write(start, data)
    except OSError as error:
        raise NoCapacity(
            f"{part.file.path}: cannot be written to this worker's disk: {error.strerror}"
        ) from error
    tally.add(end - start)


class _Tally:
    """Counts bytes over threads."""

    def __init__(
        self, parts: Sequence[PartialFile], report: Callable[[DownloadProgress], None]
    ) -> None:
        self._lock = threading.Lock()
        self._total = sum(part.file.size for part in parts)
        self._report = report
        # Mutable state.
        self._done = sum(part.done_bytes() for part in parts)
        report(DownloadProgress(self._done, self._total))

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._report(DownloadProgress(self._done, self._total))


class PartialFile:
    """One file being downloaded into `directory`. `problem`: why the last `finish` found it
    corrupt; empty if it did not.
    """

    def __init__(self, file: RemoteFile, directory: Path) -> None:
        self.file = file
        self._path = directory / file.path
        self._partial = self._path.with_name(f"{self._path.name}.part")
        self._ranges = self._path.with_name(f"{self._path.name}.part.ranges")
        self._lock = threading.Lock()
        # Mutable state.
        self.problem = ""

    def done_bytes(self) -> int:
        """Bytes that have reached the disk."""
        return (
            self.file.size
            if self._is_complete()
            else sum(end - start for start, end in self._arrived())
        )

    def missing(self, range_bytes: int) -> list[int]:
        """Return the starts of the ranges that are still to be fetched."""
        if self._is_complete():
            return []
        arrived = self._arrived()
        ranges = [
            (start, min(start + range_bytes, self.file.size))
            for start in range(0, self.file.size, range_bytes)
        ]
        return [
            start
            for start, end in ranges
            if not any(first <= start and end <= last for first, last in arrived)
        ]

    def write(self, start: int, data: bytes) -> None:
        """Write a range; return when it is on disk and recorded."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._partial, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(handle, view, start + len(data) - len(view))
                view = view[written:]
            os.fdatasync(handle)
        finally:
            os.close(handle)
        with self._lock, self._ranges.open("a") as ranges:
            ranges.write(f"{start} {start + len(data)}\n")

    def finish(self) -> None:
        """Verify and rename the file, or delete a corrupt one and set `problem`."""
        self.problem = ""
        if self._is_complete():
            return
        if not self.file.size:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._partial.touch()
        self.problem = self._complaint()
        if self.problem:
            self._partial.unlink()
        else:
            self._partial.rename(self._path)
        self._ranges.unlink(missing_ok=True)

    def _is_complete(self) -> bool:
        return self._path.is_file()

    def _arrived(self) -> set[tuple[int, int]]:
        """Return the ranges on disk. A line that a crash cut short does not count."""
        try:
            lines = self._ranges.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return set()
        if not self._partial.is_file():
            return set()
        whole = [line.split() for line in lines if line.endswith("\n")]
        return {(int(start), int(end)) for start, end in whole}

    def _complaint(self) -> str:
        size = self._partial.stat().st_size
        if size != self.file.size:
            return f"{self.file.path}: has {size:,} bytes, not {self.file.size:,}"
        kind, _, expected = self.file.digest.partition(":")
        if expected and (found := _digest(self._partial, kind)) != expected:
            return f"{self.file.path}: its {kind} digest is {found}, not {expected}"
        return _misfit(self._partial, self.file) if self.file.path.endswith(".safetensors") else ""


def _digest(path: Path, kind: str) -> str:
    """`git` is SHA-1 over `blob <size>`, a zero byte and the content (git-hash-object)."""
    if kind == "git":
        total = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    else:
        total = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            total.update(block)
    return total.hexdigest()


def _misfit(path: Path, file: RemoteFile) -> str:
    """Why a safetensors file does not end where its header says; empty if it does. The layout: 8
    bytes of length, the header, then the tensors without gaps."""
    try:
        ends = [entry.end for entry in tensor_entries(path.parent, path.name).values()]
        expected = max(ends, default=8 + len(tensor_header(path.parent, path.name)))
    except ModelBroken as error:
        return f"{file.path}: not a safetensors file: {error.message}"
    return (
        ""
        if expected == file.size
        else f"{file.path}: its header stands for {expected:,} bytes, but it has {file.size:,}"
    )
