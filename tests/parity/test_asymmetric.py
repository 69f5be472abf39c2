"""Embedding models with separate encoders for queries and documents (sentence-transformers'
Router), against sentence-transformers.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding

from libs.catalog.detect import read_card
from libs.errors import ModelBroken
from libs.models import ClassifyWork, ExtractResult, ScoreResult, ScoreWork
from tests.parity.checkpoints import Kind, write_checkpoint
from tests.parity.test_heads import TEXTS, assert_close, dense, load, run
from tests.parity.tokenizers import train_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = {"query": "find: ", "document": "text: "}


def write_router(
    directory: Path,
    *,
    kinds: tuple[Kind, Kind] = ("distilbert", "modernbert"),
    default: str | None = None,
    width: int = 64,
) -> Path:
    """A small encoder with a projection for queries, another one for documents, and one
    Normalize."""
    routes = []
    for number, kind in enumerate(kinds):
        hidden = 32 if number == 0 else 64
        write_checkpoint(kind, directory / kind, hidden=hidden, seed=number)
        routes.append(
            [Transformer(str(directory / kind)), Pooling(hidden, "mean" if number else "cls")]
        )
    routes[0].append(Dense(32, width, activation_function=torch.nn.Identity()))
    router = Router.for_query_document(*routes, default_route=default)
    model = SentenceTransformer(
        modules=[router, Normalize()], device="cpu", prompts=PROMPTS, similarity_fn_name="dot"
    )
    model.save(str(directory / "saved"))
    return directory / "saved"


@pytest.mark.parametrize("default", [None, "query", "document"])
def test_queries_and_documents_use_separate_encoders(tmp_path: Path, default: str | None) -> None:
    directory = write_router(tmp_path, default=default)
    model, reference = load(directory), SentenceTransformer(str(directory), device="cpu")
    queries, documents = reference.encode_query(TEXTS), reference.encode_document(TEXTS)
    assert_close(dense(model, TEXTS, "query"), queries)
    assert_close(dense(model, TEXTS, "document"), documents)
    assert_close(dense(model, TEXTS), reference.encode(TEXTS))
    assert_close(
        dense(model, TEXTS, dimensions=20),
        reference.encode(TEXTS, truncate_dim=20, normalize_embeddings=True),
    )
    assert_close(dense(model, [TEXTS[3]], "query")[0], queries[3])
    prepared = model.prepare(ScoreWork(TEXTS[0], TEXTS))
    result = model.finish(prepared, model.forward_all(prepared))
    assert isinstance(result, ScoreResult)
    assert_close(result.scores, reference.similarity(queries[:1], documents)[0].numpy())


def test_labels_use_the_default_route(tmp_path: Path) -> None:
    directory = write_router(tmp_path, default="query")
    model, reference = load(directory), SentenceTransformer(str(directory), device="cpu")
    result = run(model, ClassifyWork(TEXTS, labels=("law", "weather")))[0]
    assert isinstance(result, ExtractResult)
    vectors, labels = reference.encode(TEXTS), reference.encode(["law", "weather"])
    nearest = np.argmax(vectors @ labels.T, axis=1)
    assert [item.labels[0].label for item in result.items] == [
        ("law", "weather")[number] for number in nearest
    ]


def write_static_queries(directory: Path, *, default: str | None = None) -> Path:
    """Write a table of token vectors with a projection for queries, and an encoder for
    documents."""
    write_checkpoint("bert", directory / "bert")
    tokenizer = train_tokenizer("bert", 400)
    table = torch.randn(tokenizer.get_vocab_size(), 24, generator=torch.Generator().manual_seed(2))
    router = Router.for_query_document(
        [
            StaticEmbedding(copy.deepcopy(tokenizer), embedding_weights=table),
            Dense(24, 64, activation_function=torch.nn.Identity()),
        ],
        [Transformer(str(directory / "bert")), Pooling(64, "mean")],
        default_route=default,
    )
    SentenceTransformer(modules=[router, Normalize()], device="cpu", prompts=PROMPTS).save(
        str(directory / "saved")
    )
    return directory / "saved"


@pytest.mark.parametrize("default", [None, "document"])
def test_static_queries_need_no_forward(tmp_path: Path, default: str | None) -> None:
    directory = write_static_queries(tmp_path, default=default)
    model, reference = load(directory), SentenceTransformer(str(directory), device="cpu")
    texts = TEXTS[:3]
    queries, documents = reference.encode_query(texts), reference.encode_document(texts)
    assert_close(dense(model, texts, "query"), queries)
    assert_close(dense(model, texts, "document"), documents)
    assert_close(dense(model, texts), reference.encode(texts))
    prepared = model.prepare(ScoreWork(texts[0], texts))
    result = model.finish(prepared, model.forward_all(prepared))
    assert isinstance(result, ScoreResult)
    assert_close(result.scores, reference.similarity(queries[:1], documents)[0].numpy())
    card = model.card
    assert card.queries is not None
    assert (card.family, card.queries.family) == ("bert", "static_embedding")
    assert (card.queries.revision, card.queries.dimensions) == (card.revision, 64)


def test_static_queries_of_another_table_have_another_revision(tmp_path: Path) -> None:
    directory = write_static_queries(tmp_path)
    revision = read_card(directory, "test/model").revision
    folder = next(directory.glob("query_0_*"))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: table[:-1].contiguous() for name, table in tensors.items()},
        folder / "model.safetensors",
    )
    assert read_card(directory, "test/model").revision != revision
    with pytest.raises(ModelBroken, match="the tokenizer has"):
        load(directory)


def test_card_names_both_encoders(tmp_path: Path) -> None:
    card = read_card(write_router(tmp_path), "test/model")
    assert card.queries is not None
    assert (card.family, card.queries.family) == ("modernbert", "distilbert")
    assert (card.dimensions, card.normalize, card.queries.normalize) == (64, True, True)
    other = read_card(write_router(tmp_path / "other", kinds=("bert", "modernbert")), "test/model")
    assert other.revision != card.revision


def test_incomparable_vectors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelBroken, match="48 numbers of queries and of 64 of documents"):
        load(write_router(tmp_path, width=48))


def test_normalize_of_one_route_is_refused(tmp_path: Path) -> None:
    directory = write_router(tmp_path)
    listed = json.loads((directory / "modules.json").read_text())
    (directory / "modules.json").write_text(
        json.dumps([entry for entry in listed if not entry["type"].endswith("Normalize")])
    )
    routes = json.loads((directory / "router_config.json").read_text())
    routes["structure"]["query"].append("normal")
    routes["types"]["normal"] = "sentence_transformers.models.Normalize"
    (directory / "router_config.json").write_text(json.dumps(routes))
    with pytest.raises(ModelBroken, match="a Normalize for queries or for documents alone"):
        load(directory)
