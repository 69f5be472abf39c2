"""The disk's budget: who must go, who must not, and who is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from libs.errors import ModelBroken, NoCapacity
from libs.store import DownloadProgress, ModelStore
from libs.store.cache import RECORD, Cache
from libs.store.objects import ObjectStore
from tests.store.checkpoints import WANTED, write_model
from tests.store.conftest import TRANSFER

NAMES = ("org/a", "org/b", "org/c", "org/d")


def ignore(progress: DownloadProgress) -> None:
    return


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four models of the same size."""
    root = tmp_path_factory.mktemp("originals")
    for seed, name in enumerate(NAMES):
        write_model(root / name, numbers=10_000, seed=seed)
    return root


@pytest.fixture
def size(originals: Path) -> int:
    return sum((originals / NAMES[0] / name).stat().st_size for name in WANTED)


class Shop:
    """A store of copies of `originals`."""

    def __init__(self, root: Path, originals: Path, budget_bytes: int) -> None:
        from fsspec.implementations.local import LocalFileSystem

        self.root = root
        source = ObjectStore(f"file://{originals}", LocalFileSystem(), str(originals))
        self.store = ModelStore([source], Cache(root), budget_bytes, TRANSFER)

    def names(self) -> set[str]:
        return {
            str(record.parent.relative_to(self.root / "models"))
            for record in (self.root / "models").glob(f"*/*/{RECORD}")
        }

    def used_at(self, name: str, seconds: float) -> None:
        os.utime(self.root / "models" / name / RECORD, (seconds, seconds))


def test_least_recently_used_model_is_evicted(tmp_path: Path, originals: Path, size: int) -> None:
    shop = Shop(tmp_path, originals, 2 * size + 10)
    for at, name in enumerate(("org/a", "org/b")):
        shop.store.get(name, ignore).close()
        shop.used_at(name, at)
    shop.store.get("org/a", ignore).close()
    shop.store.get("org/c", ignore).close()
    assert shop.names() == {"org/a", "org/c"}
    assert list((tmp_path / "trash").iterdir()) == []


def test_model_in_use_is_not_evicted(tmp_path: Path, originals: Path, size: int) -> None:
    shop = Shop(tmp_path, originals, 2 * size + 10)
    held = shop.store.get("org/a", ignore)
    shop.used_at("org/a", 0)
    shop.store.get("org/b", ignore).close()
    other = Shop(tmp_path, originals, 2 * size + 10)
    again = other.store.get("org/c", ignore)
    assert shop.names() == {"org/a", "org/c"}
    with pytest.raises(
        NoCapacity,
        match=(
            rf"org/d takes {size:,} bytes .* may keep {2 * size + 10:,}, of which {2 * size:,} "
            r"are in use"
        ),
    ):
        shop.store.get("org/d", ignore)
    held.close()
    again.close()
    shop.store.get("org/d", ignore)
    assert "org/d" in shop.names()


def test_model_larger_than_the_budget_is_refused_with_the_numbers(
    tmp_path: Path, originals: Path, size: int
) -> None:
    shop = Shop(tmp_path, originals, size - 1)
    with pytest.raises(
        ModelBroken,
        match=rf"org/a takes {size:,} bytes on disk; "
        rf".* may keep {size - 1:,} \(SHOAL_STORE_BYTES\)",
    ):
        shop.store.get("org/a", ignore)
    assert list((tmp_path / "incoming").glob("*/*")) == []


def test_abandoned_download_makes_room_too(tmp_path: Path, originals: Path, size: int) -> None:
    (tmp_path / "half").mkdir()
    shutil.copytree(originals / "org", tmp_path / "half" / "org")
    weights = tmp_path / "half" / "org" / "a" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[0] ^= 1  # the header's length
    weights.write_bytes(content)
    shop = Shop(tmp_path / "store", tmp_path / "half", 2 * size + 10)
    shop.store.get("org/b", ignore).close()
    with pytest.raises(ModelBroken, match=r"model\.safetensors"):
        shop.store.get("org/a", ignore)
    assert Cache(tmp_path / "store").used_bytes() == 2 * size
    for record in (tmp_path / "store" / "incoming").glob("*/*/listing.json"):
        os.utime(record, (0, 0))
    shop.store.get("org/c", ignore).close()
    assert shop.names() == {"org/b", "org/c"}
    assert Cache(tmp_path / "store").used_bytes() == 2 * size
