"""Parsing of SHOAL_STORES and the stores it opens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from libs.errors import InvalidInput
from libs.store import check_urls, default_root, open, open_store
from libs.store.hub import Hub


def test_stores_in_order(tmp_path: Path) -> None:
    assert check_urls(f"hf, file://{tmp_path}/ ,") == ("hf", f"file://{tmp_path}")
    assert check_urls("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "hub",
        "http://host/models",
        "hf://org",
        "s3://",
        "file://relative",
        "memory://x",
        "ftp://x/y",
    ],
)
def test_invalid_store_url_is_named(text: str) -> None:
    with pytest.raises(InvalidInput, match="SHOAL_STORES") as caught:
        check_urls(text)
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("url", "library", "extra"), [("s3://b/p", "s3fs", "s3"), ("gs://b/p", "gcsfs", "gs")]
)
def test_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, url: str, library: str, extra: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(open, "find_spec", lambda name: None if name == library else found(name))
    with pytest.raises(
        InvalidInput, match=rf"needs {library}: pip install 'shoal-mesh\[{extra}\]'"
    ):
        check_urls(url)


def test_token_is_read_only_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert open_store(("hf",), tmp_path, 1)._sources == [Hub(token="")]
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert open_store(("hf",), tmp_path, 1)._sources == [Hub(token="hf_x")]


def test_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="SHOAL_STORE_DIR"):
        open_store(("hf",), tmp_path / "file" / "store", 0)


def test_default_folder() -> None:
    assert default_root({"XDG_CACHE_HOME": "/x"}) == Path("/x/shoal")
    assert default_root({"HOME": "/h"}) == Path("/h/.cache/shoal")
