"""Commits to folders and object stores, and reads from them."""

from __future__ import annotations

import errno
import fcntl
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import parquet
from shoal.bulk import places
from shoal.bulk.failures import StorageError
from shoal.bulk.places import Folder, ObjectFolder, OutputPlace, place

from tests.bulk.fake_client import FakeClient
from tests.bulk.jobs import run, write_parquet
from tests.support.s3 import s3_bucket

ROWS = 45


class ThrottledFiles(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Refuses the first attempts of each operation on each path, as a throttled store does."""

    cachable = False
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self._refusals, self._attempts = refusals, Counter[tuple[str, str]]()

    def _throttle(self, operation: str, path: str) -> None:
        self._attempts[operation, path] += 1
        if self._attempts[operation, path] <= self._refusals:
            raise OSError(f"503 Slow Down: {path}")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._throttle("put", path)
        super().pipe_file(path, value, mode=mode, **options)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._throttle("get", path)
        return super().cat_file(path, *arguments, **options)

    def ls(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._throttle("list", path)
        return super().ls(path, *arguments, **options)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_FIRST_STORE_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(places, "_MAX_STORE_RETRY_SECONDS", 0.001)


@pytest.fixture
def memory() -> Iterator[str]:
    """A URL in memory."""
    files = fsspec.filesystem("memory")
    yield "memory://bucket/out"
    files.rm("/bucket", recursive=True)


@pytest.fixture(params=["folder", "object"])
def where(request: pytest.FixtureRequest, tmp_path: Path, memory: str) -> OutputPlace:
    fsspec.filesystem("memory").pipe_file("/bucket/other", b"")
    return place(str(tmp_path / "out") if request.param == "folder" else memory)


def test_first_commit_wins(where: OutputPlace) -> None:
    with where.locked():
        assert where.create("part-1", b"first")
        assert not where.create("part-1", b"second")
        where.replace("manifest.json", b"1")
        where.replace("manifest.json", b"2")
        assert (where.read("part-1"), where.read("manifest.json")) == (b"first", b"2")
        assert where.read("absent") is None
        where.delete("part-1")
        where.delete("part-1")
        assert [name for name in where.names() if name != ".lock"] == ["manifest.json"]


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / f".tmp-{'0f' * 16}").write_bytes(b"half")
    with Folder(tmp_path).locked():
        assert Folder(tmp_path).names() == [".lock"]
        assert Folder(tmp_path).is_locked()
    assert not Folder(tmp_path).is_locked()


def test_other_files_that_look_temporary_are_kept(tmp_path: Path) -> None:
    (tmp_path / ".tmp-notes").write_bytes(b"of the user")
    (tmp_path / f".tmp-{'0f' * 16}.txt").write_bytes(b"of the user")
    (tmp_path / f".tmp-{'1f' * 16}").mkdir()
    (tmp_path / f".tmp-{'2f' * 16}").symlink_to(tmp_path / ".tmp-notes")
    before = Folder(tmp_path).names()
    with Folder(tmp_path).locked():
        assert Folder(tmp_path).names() == sorted([".lock", *before])


def test_questions_about_the_lock_neither_see_nor_stop_each_other(tmp_path: Path) -> None:
    with Folder(tmp_path).locked():
        pass
    with (tmp_path / ".lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # Another process asks.
        assert Folder(tmp_path).is_locked() is False


def test_job_starts_although_its_state_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_LOCK_SECONDS", 30.0)
    (tmp_path / ".lock").write_bytes(b"")
    with (tmp_path / ".lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # The process that asks ends while the job waits.
        monkeypatch.setattr(
            "shoal.bulk.places.time.sleep", lambda _: fcntl.flock(file, fcntl.LOCK_UN)
        )
        with Folder(tmp_path).locked():
            assert Folder(tmp_path).is_locked()


class UnconditionalFiles(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Has no conditional put; s3fs reports "501 Not Implemented" like this."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode == "create":
            raise OSError(self.error, "A header you provided implies functionality")
        super().pipe_file(path, value, mode=mode, **options)


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOTSUP])
def test_store_without_conditional_put_gets_plain_puts(
    memory: str, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(UnconditionalFiles, "error", error, raising=False)
    where = ObjectFolder(memory, UnconditionalFiles(), "/bucket/out")
    assert where.create("part-1", b"first")
    assert where.read("part-1") == b"first"


def test_read_only_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"file/out/\.lock cannot be read or written: Not a dir"):
        Folder(tmp_path / "file" / "out").locked().__enter__()


async def test_throttled_store_loses_no_part(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", ROWS)
    files = ThrottledFiles(3)
    where = ObjectFolder("throttled://bucket/out", files, "/bucket/out")
    manifest = await run(where, source, FakeClient())
    assert manifest.state == "completed"
    assert len([name for name in where.names() if name.startswith("part-")]) == 5


async def test_store_that_stays_unreachable_fails_the_job(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in.parquet", ROWS)
    where = ObjectFolder("throttled://bucket/out", ThrottledFiles(1000), "/bucket/out")
    with pytest.raises(StorageError, match=r"manifest\.json cannot be read or written: 503"):
        await run(where, source, FakeClient())


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_bucket(monkeypatch) as url:
        yield url


async def test_input_and_output_in_s3(bucket: str, tmp_path: Path) -> None:
    files = fsspec.filesystem("s3")
    files.put_file(str(write_parquet(tmp_path / "in.parquet", ROWS)), "jobs/in.parquet")
    where, client = place(f"{bucket}/out"), FakeClient()
    manifest = await run(where, f"{bucket}/in.parquet", client)
    assert (manifest.state, manifest.input.tag.startswith("ETag:")) == ("completed", True)
    assert not where.create(manifest.parts[0].name, b"another")
    found = pyarrow.concat_tables(
        parquet.read_table(pyarrow.BufferReader(where.read(name) or b"")).replace_schema_metadata()
        for name in where.names()
        if name.startswith("part-")
    )
    assert found["row"].to_pylist() == list(range(ROWS))


async def test_several_inputs_in_s3(bucket: str, tmp_path: Path) -> None:
    files = fsspec.filesystem("s3")
    for number in range(2):
        local = write_parquet(tmp_path / f"{number}.parquet", ROWS)
        files.put_file(str(local), f"jobs/docs/{number}.parquet")
    for output, source in (("out", "docs"), ("other", "docs/*.parquet")):
        where = place(f"{bucket}/{output}")
        manifest = await run(where, f"{bucket}/{source}", FakeClient())
        assert (manifest.state, manifest.rows) == ("completed", 2 * ROWS)
        assert {file.tag.partition(":")[0] for file in manifest.input.files} == {"ETag"}


@pytest.mark.parametrize("secret", ["secret", "se cret", "se@cret"])
def test_errors_of_a_storage_have_no_credentials(secret: str) -> None:
    class Unreachable:
        def cat_file(self, path: str) -> bytes:
            raise OSError(f"https://id:{secret}@store/{path} cannot be reached")

    uri = f"s3://id:{secret}@bucket/prefix"
    with pytest.raises(StorageError) as caught:
        ObjectFolder(uri, Unreachable(), "bucket/prefix").read("a@b")
    assert str(caught.value) == (
        "s3://bucket/prefix: a@b cannot be read or written: "
        "https://store/bucket/prefix/a@b cannot be reached"
    )
