"""Inputs with unusable rows, and inputs of stores that fail."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import parquet
from shoal.bulk import inputs, places
from shoal.bulk.failures import JobError, StorageError
from shoal.bulk.inputs import RowChunk, open_source
from shoal.bulk.matching import find_input
from shoal.bulk.places import Folder
from shoal.bulk.spec import BulkRecipe

from tests.bulk.fake_client import FakeClient
from tests.bulk.jobs import recipe, run, table, write_lines, write_parquet

ROWS = 45


class StoreError(Exception):
    """An error of a store's library, which is not an OSError."""


class FailingStream(io.BytesIO):
    """Fails before each read that the store refuses."""

    def __init__(self, store: FailingStore, data: bytes) -> None:
        super().__init__(data)
        self._store = store

    def read(self, size: int | None = -1, /) -> bytes:
        self._store.refuse()
        return super().read(size)


class FailingStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store of which every second read fails, or all reads."""

    protocol = "failing"
    cachable = False
    reads = opens = 0
    is_down = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("failing://", "memory://")))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        type(self).opens += 1
        return FailingStream(self, self.cat_file(path))

    def refuse(self) -> None:
        type(self).reads += 1
        if self.is_down or self.reads % 2:
            raise StoreError("connection reset")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FailingStore]]:
    monkeypatch.setattr(places, "_FIRST_STORE_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(places, "_MAX_STORE_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(FailingStore, "reads", 0)
    monkeypatch.setattr(FailingStore, "opens", 0)
    monkeypatch.setattr(FailingStore, "is_down", False)
    fsspec.register_implementation("failing", FailingStore, clobber=True)
    yield FailingStore
    fsspec.filesystem("memory").rm("/inputs", recursive=True)


def put(source: Path) -> str:
    """Copy a file to the failing store and return its URL."""
    fsspec.filesystem("memory").pipe_file(f"/inputs/{source.name}", source.read_bytes())
    return f"failing://inputs/{source.name}"


def read(uri: str, made: BulkRecipe) -> list[RowChunk]:
    return list(open_source(find_input(uri), made).chunks(lambda number: True))


def make_texts(values: list[bytes | None], *, dictionary: bool = False) -> pyarrow.Array:
    """Return an array of texts that are not checked."""
    raw = pyarrow.array(values, pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(
        len(raw), raw.buffers()[1], raw.buffers()[2], raw.buffers()[0]
    )
    return texts.dictionary_encode() if dictionary else texts


@pytest.mark.parametrize("dictionary", [False, True])
async def test_parquet_texts_that_are_not_utf8_are_failed_rows(
    tmp_path: Path, dictionary: bool
) -> None:
    texts = make_texts([b"first", b"\xff\xfe", None, b"last"], dictionary=dictionary)
    parquet.write_table(pyarrow.table({"id": range(4), "text": texts}), tmp_path / "in.parquet")
    manifest = await run(Folder(tmp_path / "out"), tmp_path / "in.parquet", FakeClient())
    assert (manifest.state, manifest.rows, manifest.failed) == ("completed", 4, 2)
    found = table(tmp_path / "out")
    assert found["error"].to_pylist() == [
        None,
        "the text in 'text' is not valid UTF-8",
        "the row has no text in 'text'",
        None,
    ]
    assert [vector is None for vector in found["dense"].to_pylist()] == [False, True, True, False]


def test_queries_that_are_not_utf8_are_problems_of_their_rows(tmp_path: Path) -> None:
    columns = {"text": ["a", "b"], "q": make_texts([b"\xff", b"query"])}
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    made = BulkRecipe("score", "org/small", query_column="q")
    [chunk] = read(str(tmp_path / "in.parquet"), made)
    assert chunk.problems == {0: "the text in 'q' is not valid UTF-8"}
    assert (chunk.texts, chunk.queries) == (["", "b"], ["", "query"])


@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("TSV", "\t")])
async def test_rows_of_tables_are_texts(tmp_path: Path, suffix: str, delimiter: str) -> None:
    """Cells may have line breaks; blank lines are ignored, and rows that cannot be read fail."""
    rows = [
        '"id",text,other',
        '1,"a, text\nof ""two"" lines",x',
        "",
        "2,\xff,x",
        "3,a,b,c",
        "4,,",
        "5,b,",
    ]
    content = "\r\n".join(rows).replace(",", delimiter).replace(f"a{delimiter} text", "a, text")
    source = tmp_path / f"in.{suffix}"
    source.write_bytes(b"\xef\xbb\xbf" + content.encode("latin-1"))
    client = FakeClient()
    manifest = await run(Folder(tmp_path / "out"), source, client, made=recipe(chunk_rows=2))
    assert (manifest.state, manifest.rows, manifest.failed) == ("completed", 5, 3)
    found = table(tmp_path / "out")
    assert found["id"].to_pylist() == ["1", "2", None, "4", "5"]
    assert found["error"].to_pylist() == [
        None,
        "the text in 'text' is not valid Unicode",
        "the row has 4 columns; the header has 3",
        "the row has no text in 'text'",
        None,
    ]
    [first, *_] = read(str(source), recipe())
    assert [first.texts[0], first.texts[4]] == ['a, text\nof "two" lines', "b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("id,body\n1,a\n", "in.csv has no column 'text'; its columns are id, body"),
        ("id,text,text\n1,a,b\n", "in.csv has several columns 'text'"),
        ("", "in.csv has no column 'text'"),
        ('id,text\n1,"a"b\n', "line 2 of .*in.csv is not a row of a table"),
        ('id,text\n1,"a\n', "line 2 of .*in.csv is not a row of a table"),
    ],
)
def test_file_that_is_no_table_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "in.csv").write_text(content)
    with pytest.raises(JobError, match=words):
        read(str(tmp_path / "in.csv"), recipe())


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_bytes_of_a_chunk_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(inputs, "MAX_CHUNK_BYTES", 100_000)
    path, rows = tmp_path / f"in.{suffix}", [{"id": "a", "text": "x" * 15_000}] * 12
    if suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)
    elif suffix == "jsonl":
        write_lines(path, rows)
    else:
        path.write_text("id,text\n" + "".join(f"a,{row['text']}\n" for row in rows))
    assert [len(chunk) for chunk in read(str(path), recipe(chunk_rows=6))] == [6, 6]
    with pytest.raises(JobError, match=r"row \d of .* at most 100,000 .* fewer chunk_rows"):
        read(str(path), recipe(chunk_rows=7))


@pytest.mark.parametrize("dictionary", [False, True])
def test_small_file_of_large_texts_is_refused(tmp_path: Path, dictionary: bool) -> None:
    texts = pyarrow.array(["x" * 200_000] * 1024)
    texts = texts.dictionary_encode() if dictionary else texts
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    with pytest.raises(JobError, match=r"row \d+ of .* fewer chunk_rows"):
        read(str(path), BulkRecipe("encode", "org/small"))


def test_few_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text(",".join(f"column{number}" for number in range(200_000)) + "\n")
    with pytest.raises(JobError, match="column19 and 199,980 more") as caught:
        open_source(find_input(str(path)), recipe())
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_failed_reads_of_a_store_are_repeated_at_their_row(
    tmp_path: Path, store: type[FailingStore], monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(inputs, "_BUFFER_BYTES", 128)
    local = tmp_path / f"in.{suffix}"
    if suffix == "parquet":
        write_parquet(local, ROWS)
    elif suffix == "csv":
        local.write_text("id,text\n" + "".join(f"{n},text {n}\n" for n in range(ROWS)))
    else:
        write_lines(local, [{"id": n, "text": f"text {n}"} for n in range(ROWS)])
    expected = [text for chunk in read(str(local), recipe()) for text in chunk.texts]
    chunks = read(put(local), recipe())
    assert [text for chunk in chunks for text in chunk.texts] == expected
    assert store.opens > store.reads // 2 > 2


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_store_that_stays_unreachable_is_named(
    tmp_path: Path, store: type[FailingStore], monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(inputs, "_BUFFER_BYTES", 128)
    local = tmp_path / f"in.{suffix}"
    if suffix == "parquet":
        write_parquet(local, ROWS)
    elif suffix == "csv":
        local.write_text("id,text\n" + "".join(f"{n},text {n}\n" for n in range(ROWS)))
    else:
        write_lines(local, [{"id": n, "text": f"text {n}"} for n in range(ROWS)])
    chunks = open_source(find_input(put(local)), recipe()).chunks(lambda number: True)
    assert next(chunks).number == 0
    store.is_down = True
    with pytest.raises(StorageError, match=rf"failing://inputs/in\.{suffix} .*connection reset"):
        list(chunks)


def test_input_that_cannot_be_opened_is_named(
    tmp_path: Path, store: type[FailingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = put(write_lines(tmp_path / "in.jsonl", [{"text": "a"}]))

    def refuse(*_: object, **options: object) -> None:
        raise StoreError("no route to host")

    monkeypatch.setattr(store, "_open", refuse)
    with pytest.raises(StorageError, match=r"failing://inputs/in\.jsonl .*no route to host"):
        open_source(find_input(uri), recipe())


class FailingDisk(io.RawIOBase):
    """A local file of which no read succeeds."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_failed_read_of_a_local_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(
        find_input(str(write_lines(tmp_path / "in.jsonl", [{"text": "a"}]))), recipe()
    )
    monkeypatch.setattr(inputs, "opened", lambda uri: FailingDisk())
    with pytest.raises(StorageError, match=r"in\.jsonl cannot be read: .*Input/output error"):
        list(source.chunks(lambda number: True))
