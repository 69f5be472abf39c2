"""One small model of each kind, written once and loaded once; models are never changed by a
test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from libs.models import PackedModel, load_model
from tests.parity.checkpoints import SentenceFiles, write_checkpoint


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much where other tests want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(directory: Path) -> PackedModel:
    return load_model(directory, "test/model", torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    files = SentenceFiles(max_seq_length=16, prompts={"query": "query: "})
    return load(write_checkpoint("bert", tmp_path_factory.mktemp("embedder"), sentence=files))


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    return load(
        write_checkpoint(
            "roberta",
            tmp_path_factory.mktemp("reranker"),
            head="sequence_classification",
            positions=32,
        )
    )


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    labels = ("sport", "law", "weather")
    return load(
        write_checkpoint(
            "bert",
            tmp_path_factory.mktemp("classes"),
            head="sequence_classification",
            labels=labels,
        )
    )


@pytest.fixture(scope="session")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    labels = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    directory = tmp_path_factory.mktemp("tagger")
    return load(
        write_checkpoint(
            "bert", directory, head="token_classification", labels=labels, positions=24, seed=5
        )
    )
