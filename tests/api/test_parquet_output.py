"""The metadata of Parquet files of vectors, and inputs that they cannot hold as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import shoal
from pyarrow import parquet as reader
from shoal.cli.failures import InputError
from shoal.cli.inference import parquet
from shoal.cli.inference.files import TextRecord

from tests.api.fake_router import MODEL, FakeRouter


def records(*fields: dict[str, object]) -> list[TextRecord]:
    return [
        TextRecord("a", f"in.jsonl:{number}", one) for number, one in enumerate(fields, start=1)
    ]


def write(router: FakeRouter, output: Path, found: Sequence[TextRecord], *ids: str) -> None:
    """Write a part for each record, with these embedding ids."""
    with (
        shoal.Client(router.address) as client,
        parquet.writing(output, MODEL, found) as append,
    ):
        for record, embedding_id in zip(found, ids or [""] * len(found), strict=True):
            result = client.encode(MODEL, [record.text])
            append(replace(result, embedding_id=embedding_id), [record])


@pytest.mark.parametrize(
    ("ids", "noted"),
    [
        (("12.float32", "12.float32"), b"12.float32"),
        (("12.float32", "12.bfloat16-1"), b"12"),
    ],
)
def test_embedding_id_of_all_vectors_is_noted(
    router: FakeRouter, tmp_path: Path, ids: tuple[str, str], noted: bytes
) -> None:
    output = tmp_path / "out.parquet"
    write(router, output, records({"id": 1}, {"id": 2}), *ids)
    metadata = reader.ParquetFile(output).metadata.metadata
    assert metadata[b"shoal.embedding_id"] == noted
    assert metadata[b"shoal.model"] == MODEL.encode()


def test_vectors_that_cannot_be_compared_are_refused(router: FakeRouter, tmp_path: Path) -> None:
    with pytest.raises(shoal.errors.ModelChanged, match="12 and 34"):
        write(router, tmp_path / "out.parquet", records({}, {}), "12.float32", "34.float32")
    assert list(tmp_path.iterdir()) == []


def test_objects_and_lists_become_json(router: FakeRouter, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    write(router, output, records({"m": {}, "t": []}, {"m": {"a": 1}, "t": ["x"]}))
    table = reader.read_table(output)
    assert table["m"].to_pylist() == ["{}", '{"a": 1}']
    assert table["t"].to_pylist() == ["[]", '["x"]']


def test_invalid_text_is_refused_before_any_request(router: FakeRouter, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not valid Unicode"):
        write(router, tmp_path / "out.parquet", records({"m": "\ud800"}))
    assert router.calls == []
    assert list(tmp_path.iterdir()) == []
