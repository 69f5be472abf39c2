"""Each published model of the table, of the hub. Fetched ones stay where the product keeps them
(SHOAL_STORE_DIR).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from libs.store import open_store
from tests.published.reach import store_dir
from tests.published.serving import Published, published
from tests.published.table import MODELS

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    """Run a mesh on all processors; the packages use them when the mesh is idle."""
    processors, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    torch.set_num_threads(processors)
    store = open_store(("hf",), store_dir(), 0)
    with published(
        tmp_path_factory.mktemp("published"), store, {"SHOAL_THREADS": str(processors)}
    ) as made:
        yield made
    torch.set_num_threads(threads)


@pytest.mark.parametrize("model", MODELS)
def test_answers_as_its_own_package(model: str, running: Published) -> None:
    running.check(model, MODELS[model])
