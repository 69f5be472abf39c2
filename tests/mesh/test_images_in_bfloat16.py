"""Images through a mesh in bfloat16: as near to float32 as transformers in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import shoal
import torch
from numpy.typing import NDArray

from tests.parity.image_models import pictures
from tests.parity.image_repositories import Family, Reference, write_repository
from tests.parity.vlm_models import QUERIES, Small, opened, pages, small
from tests.support.cluster import Cluster

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES: tuple[Family, ...] = ("clip", "siglip")
KINDS = ("colpali", "idefics3", "qwen2_vl", "colqwen2")
FACTOR = 3
"""Maximum ratio of an error to the error of transformers in bfloat16."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "random").mkdir()
    return folder


@pytest.fixture(scope="module")
def towers(root: Path) -> dict[Family, Reference]:
    return {
        family: write_repository(family, root / "random" / f"{family}-images")
        for family in FAMILIES
    }


@pytest.fixture(scope="module")
def client(
    root: Path, towers: dict[Family, Reference], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[shoal.Client]:
    del towers
    for kind in KINDS:
        small(kind).save(root / "random" / f"{kind}-pages")
    with (
        Cluster(tmp_path_factory.mktemp("mesh"), models=str(root), dtype="bfloat16") as cluster,
        shoal.Client(cluster.address, timeout=300) as made,
    ):
        yield made


def unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_of_images(
    family: Family, client: shoal.Client, towers: dict[Family, Reference]
) -> None:
    files, theirs = pictures()[:5], towers[family]
    exact = unit(theirs.images(files))
    halved = replace(theirs, model=copy.deepcopy(theirs.model).to(torch.bfloat16))
    error = np.linalg.norm(unit(halved.images(files)) - exact)
    found = client.encode(f"random/{family}-images", [*files]).dense
    assert found is not None
    assert 0 < np.linalg.norm(unit(np.asarray(found, np.float32)) - exact) <= FACTOR * error


@pytest.mark.parametrize("kind", KINDS)
def test_token_vectors_of_pages(kind: str, client: shoal.Client) -> None:
    files, theirs = pages()[:4], small(kind)
    halved = Small(copy.deepcopy(theirs.model).to(torch.bfloat16), theirs.processor)
    images = [opened(data) for data in files]
    exact = torch.cat(theirs.pages(images) + theirs.queries(QUERIES))
    reference = torch.cat(
        halved.pages(images, torch.bfloat16) + halved.queries(QUERIES, torch.bfloat16)
    )
    model = f"random/{kind}-pages"
    rows = [
        *(client.encode(model, [*files]).multi_vector or ()),
        *(client.encode(model, QUERIES, role="query").multi_vector or ()),
    ]
    found = torch.from_numpy(np.concatenate([np.asarray(one, np.float32) for one in rows]))
    assert 0 < (found - exact).norm() <= FACTOR * (reference - exact).norm()
