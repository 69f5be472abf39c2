"""Files into a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from libs.errors import NoCapacity
from libs.store import DownloadProgress
from libs.store.download import PartialFile, download, patiently
from libs.store.objects import ObjectStore
from libs.store.source import Remote, RemoteFile
from tests.store.checkpoints import MODEL, write_model
from tests.store.conftest import TRANSFER


def ignore(progress: DownloadProgress) -> None:
    return


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    write_model(tmp_path / "remote" / MODEL)
    return ObjectStore("file://", LocalFileSystem(), str(tmp_path / "remote")).find(MODEL)


def test_disk_that_cannot_be_written_lets_others_try(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "here" / "model.safetensors.part").mkdir(parents=True)
    with pytest.raises(
        NoCapacity,
        match=r"model\.safetensors: cannot be written to this worker's disk: Is a directory",
    ):
        download(remote, remote.files, tmp_path / "here", TRANSFER, ignore)


def test_note_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    part = PartialFile(RemoteFile("a/weights", 25), tmp_path)
    part.write(0, b"x" * 10)
    part.write(20, b"x" * 5)
    assert part.done_bytes() == 15
    assert part.missing(10) == [10]
    with (tmp_path / "a" / "weights.part.ranges").open("a") as notes:
        notes.write("10 2")
    assert PartialFile(RemoteFile("a/weights", 25), tmp_path).missing(10) == [10]
    assert part.missing(25) == [0], "ranges of another size are fetched anew"


def test_tries_end(tmp_path: Path) -> None:
    tries = []

    def fail() -> None:
        tries.append(1)
        raise NoCapacity(f"try {len(tries)}")

    with pytest.raises(NoCapacity, match="try 3"):
        patiently(fail, (0, 0))
