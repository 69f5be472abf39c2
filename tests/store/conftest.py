"""A hub with one model, and a store that knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session

from libs.store import ModelSource, ModelStore, TorchCheckpoints
from libs.store.cache import Cache
from libs.store.download import Transfer
from libs.store.hub import Hub
from tests.store.checkpoints import MODEL, write_model
from tests.store.fake_hub import FakeHub, serving

TRANSFER = Transfer(range_bytes=64 * 1024, threads=4, retry_seconds=(0.0, 0.0, 0.0))

MakeStore = Callable[..., ModelStore]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "original")


@pytest.fixture
def hub(model: Path) -> Iterator[FakeHub]:
    with serving(FakeHub(models={MODEL: model})) as running:
        yield running
    close_session()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def make_store(hub: FakeHub, root: Path, tmp_path: Path) -> MakeStore:
    """`make_store(*sources, budget_bytes=…, token=…, torch_checkpoints=…)`; without sources: of the
    hub.
    """

    def make(
        *sources: ModelSource,
        budget_bytes: int = 1 << 40,
        token: str = "",
        torch_checkpoints: TorchCheckpoints = "convert",
    ) -> ModelStore:
        own = Hub(token=token, endpoint=hub.endpoint, cache=tmp_path / "hf")
        return ModelStore(sources or [own], Cache(root), budget_bytes, TRANSFER, torch_checkpoints)

    return make
