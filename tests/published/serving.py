"""Runs of published models: fetched by Shoal's store, served by a mesh, compared and evicted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import shoal
import transformers

from libs.errors import ModelBroken
from libs.store import ModelStore
from tests.published.table import Comparison
from tests.support.cluster import Cluster

SECONDS: Final = 3600.0
"""Timeout of a call: the largest model generates a page on a CPU."""


@dataclass(frozen=True)
class Published:
    """A store, and a client of a mesh with a worker that uses the same directory.

    `folder` holds models that had to be converted.
    """

    store: ModelStore
    client: shoal.Client
    folder: Path

    def check(self, model: str, comparison: Comparison) -> None:
        """Fetch the model unless it is on this machine, and compare the mesh's results with those
        of the model's package.
        """
        try:
            copy = self.store.get(model, lambda progress: None)
        except ModelBroken as error:
            pytest.fail(
                f"{model} cannot be had as it is published: {error}. If files are missing, its "
                "card (about.missing) should say so"
            )
        try:
            comparison(self.client, model, self._converted(model, copy.directory))
            self.client.models.evict(model)
        finally:
            copy.close()

    def _converted(self, model: str, directory: Path) -> Path:
        """A copy with the tokenizer's file for a model without one, as `shoal models check`
        advises; else the directory.
        """
        if any(directory.rglob("tokenizer.json")):
            return directory
        own = self.folder / model
        shutil.copytree(directory, own)
        transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(own)
        return own


@contextmanager
def published(root: Path, store: ModelStore, environment: Mapping[str, str]) -> Iterator[Published]:
    """Run a router and a worker on this machine's CPU, in float32.

    Args:
        root: The folder of logs.
        environment: Variables of the worker.
    """
    folder = root / "converted"
    folder.mkdir()
    settings = {
        "SHOAL_STORES": "hf",
        "SHOAL_STORE_DIR": str(store.models.parent),
        "SHOAL_DEVICE": "cpu",
        "SHOAL_LOAD_SECONDS": str(SECONDS),
        **environment,
    }
    with (
        Cluster(root, models=str(folder), environment=settings) as cluster,
        shoal.Client(cluster.address, timeout=SECONDS) as client,
    ):
        yield Published(store, client, folder)
