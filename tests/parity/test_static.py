"""Static embedding models equal sentence-transformers' StaticEmbedding, and Model2Vec as its
package computes it (version 0.10).

model2vec is not a dependency of the tests: `model2vec_vectors` is its `encode` in numpy, line by
line.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer

from libs.errors import InputTooLong, ModelBroken
from libs.models import EncodeWork, ScoreWork
from tests.parity.test_heads import assert_close, dense, load, scores
from tests.parity.tokenizers import train_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

DIMENSIONS = 24
TEXTS = [
    "The battery has a warranty of two years",
    "unknown 漢字 signs",
    "",
    "a",
    "many more words " * 250,
    "x" * 3000,
]


def copied_tokenizer() -> Tokenizer:
    return Tokenizer.from_str(train_tokenizer("bert", 400).to_str())


def write_model2vec(
    directory: Path,
    *,
    normalize: bool = True,
    quantised: bool = False,
    dtype: str = "float32",
    **settings: object,
) -> Tokenizer:
    """Write the files of Model2Vec's save_pretrained, with the modules.json of its published
    models."""
    tokenizer = copied_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    random, count = np.random.default_rng(1), tokenizer.get_vocab_size()
    rows = 50 if quantised else count
    table = random.normal(size=(rows, DIMENSIONS)).astype(np.float32)
    tensors: dict[str, NDArray[np.generic]] = {
        "embeddings": table.astype(dtype) if dtype != "int8" else (table * 30).astype(np.int8)
    }
    if quantised:
        tensors["mapping"] = random.integers(0, rows, count)
        tensors["weights"] = random.uniform(0.1, 2.0, count).astype(np.float32)
    save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "model2vec",
        "architectures": ["StaticModel"],
        "hidden_dim": DIMENSIONS,
        "normalize": normalize,
    }
    (directory / "config.json").write_text(json.dumps(config | settings))
    modules = [
        {"idx": 0, "name": "0", "path": ".", "type": "sentence_transformers.models.StaticEmbedding"}
    ]
    if normalize:
        modules.append(
            {
                "idx": 1,
                "name": "1",
                "path": "1_Normalize",
                "type": "sentence_transformers.models.Normalize",
            }
        )
    (directory / "modules.json").write_text(json.dumps(modules))
    return tokenizer


def model2vec_vectors(directory: Path, texts: list[str]) -> NDArray[np.float32]:
    """Compute model2vec.StaticModel.encode (0.10): `_encode_dispatch`, `tokenize`,
    `_encode_helper`, `_encode_batch`.
    """
    from safetensors.numpy import load_file

    tensors, config = (
        load_file(directory / "model.safetensors"),
        json.loads((directory / "config.json").read_text()),
    )
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    limit = config.get("max_length", 512)
    if limit is not None:
        tokenizer.enable_truncation(limit)
        length = int(np.median([len(token) for token in tokenizer.get_vocab()]))
        texts = [text[: limit * length] for text in texts]
    unknown = tokenizer.token_to_id("[UNK]")
    found = np.zeros((len(texts), DIMENSIONS), dtype=np.float32)
    for number, encoding in enumerate(tokenizer.encode_batch_fast(texts, add_special_tokens=False)):
        ids = np.array([one for one in encoding.ids if one != unknown], dtype=np.int64)
        if len(ids):
            rows = tensors["embeddings"][
                tensors["mapping"][ids] if "mapping" in tensors else ids
            ].astype(np.float64)
            found[number] = (
                rows * tensors["weights"][ids][:, None] if "weights" in tensors else rows
            ).mean(axis=0)
    return (
        found / (np.linalg.norm(found, axis=1, keepdims=True) + 1e-32)
        if config["normalize"]
        else found
    )


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_model2vec_equals_the_package(
    tmp_path: Path, dtype: str, quantised: bool, normalize: bool
) -> None:
    write_model2vec(tmp_path, normalize=normalize, quantised=quantised, dtype=dtype)
    model = load(tmp_path)
    assert (model.card.dimensions, model.card.max_tokens, model.card.family) == (
        DIMENSIONS,
        512,
        "model2vec",
    )
    assert_close(dense(model, TEXTS), model2vec_vectors(tmp_path, TEXTS))


@pytest.mark.parametrize("limit", [7, None])
def test_model2vec_honours_another_limit(tmp_path: Path, limit: int | None) -> None:
    write_model2vec(tmp_path, max_length=limit)
    assert_close(dense(load(tmp_path), TEXTS), model2vec_vectors(tmp_path, TEXTS))


def test_model2vec_without_modules_is_served(tmp_path: Path) -> None:
    write_model2vec(tmp_path)
    (tmp_path / "modules.json").unlink()
    assert_close(dense(load(tmp_path), TEXTS), model2vec_vectors(tmp_path, TEXTS))


def test_model2vec_ignores_the_truncation_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = write_model2vec(tmp_path)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert_close(dense(load(tmp_path), TEXTS), model2vec_vectors(tmp_path, TEXTS))


@pytest.mark.parametrize("projected", [False, True])
def test_static_embedding_equals_sentence_transformers(tmp_path: Path, projected: bool) -> None:
    tokenizer = copied_tokenizer()
    table = torch.randn(
        tokenizer.get_vocab_size(), DIMENSIONS, generator=torch.Generator().manual_seed(2)
    )
    layers: list[torch.nn.Module] = [StaticEmbedding(tokenizer, embedding_weights=table)]
    if projected:
        layers += [Dense(DIMENSIONS, 10), Normalize()]
    prompts = {"query": "find: ", "document": ""}
    SentenceTransformer(
        modules=layers, device="cpu", prompts=prompts, similarity_fn_name="dot"
    ).save(str(tmp_path))
    model, reference = load(tmp_path), SentenceTransformer(str(tmp_path), device="cpu")
    assert (model.card.dimensions, model.card.family) == (
        10 if projected else DIMENSIONS,
        "static_embedding",
    )
    texts = TEXTS[:4]  # in long texts the reference's own sums differ from the exact ones by more
    assert_close(dense(model, texts), reference.encode(texts))
    assert_close(dense(model, texts, "query"), reference.encode_query(texts))
    expected = reference.similarity(
        reference.encode_query(["warranty"]), reference.encode_document(texts)
    )[0].numpy()
    assert_close(scores(model, ScoreWork("warranty", texts)), expected)


def test_truncation_of_the_tokenizer_applies(tmp_path: Path) -> None:
    tokenizer = copied_tokenizer()
    tokenizer.enable_truncation(5)
    SentenceTransformer(
        modules=[StaticEmbedding(tokenizer, embedding_dim=DIMENSIONS)], device="cpu"
    ).save(str(tmp_path))
    reference = SentenceTransformer(str(tmp_path), device="cpu")
    assert_close(dense(load(tmp_path), TEXTS), reference.encode(TEXTS))


def test_text_beyond_the_limit_is_refused_or_loses_its_start(tmp_path: Path) -> None:
    write_model2vec(tmp_path, max_length=4)
    model = load(tmp_path)
    with pytest.raises(InputTooLong, match=r"items\[1\]\.text has .* tokens"):
        model.prepare(
            EncodeWork(["a", "the battery has a warranty of two years"], truncation="none")
        )
    kept = (
        model.prepare(EncodeWork(["the battery has a warranty of two years"], truncation="start"))
        .sequences[0]
        .ids
    )
    whole = model.prepare(EncodeWork(["warranty of two years"])).sequences[0].ids
    assert kept.tolist() != whole[:4].tolist()
    assert len(kept) == 4


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"other": np.zeros((9, 4), np.float32)}, "needs a table"),
        ({"embeddings": np.zeros(9, np.float32)}, "needs a table"),
        ({"embeddings": np.zeros((9, 4), np.float32)}, "vectors exist for 9 tokens"),
        ({"embeddings": np.zeros((9, 4), np.float32), "mapping": np.array([9])}, "names a row"),
        ({"embeddings": np.zeros((9, 4), np.float32), "mapping": np.array([0.5])}, "whole numbers"),
        (
            {"embeddings": np.zeros((9, 4), np.float32), "weights": np.zeros(3, np.float32)},
            "9 numbers",
        ),
        (
            {"embeddings": np.zeros((9, 4), np.float32), "more": np.zeros(3, np.float32)},
            "it contains",
        ),
    ],
)
def test_mismatched_tables_are_refused(
    tmp_path: Path, tensors: dict[str, NDArray[np.generic]], message: str
) -> None:
    write_model2vec(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelBroken, match=message):
        load(tmp_path)
