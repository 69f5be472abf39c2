"""shoal-chroma in collections, by Chroma's own validation of functions, and against the numbers of
`shoal.Client`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
import pytest
import shoal
from chromadb.api.types import (
    Schema,
    SparseVectorIndexConfig,
    validate_embedding_function,
    validate_sparse_embedding_function,
)
from chromadb.utils.embedding_functions import (
    known_embedding_functions,
    sparse_known_embedding_functions,
)
from shoal_chroma import ShoalEmbeddingFunction, ShoalSparseEmbeddingFunction

ALL = (ShoalEmbeddingFunction, ShoalSparseEmbeddingFunction)


@pytest.mark.parametrize("kind", ["dense", "prompted"])
def test_roles_are_those_of_the_client(
    kind: str, models: dict[str, str], client: shoal.Client, texts: list[str]
) -> None:
    function = ShoalEmbeddingFunction(models[kind])
    documents = client.encode(models[kind], texts, role="document").dense
    queries = client.encode(models[kind], texts, role="query").dense
    found = function(texts)
    np.testing.assert_array_equal(np.stack(found), documents)
    np.testing.assert_array_equal(np.stack(function.embed_query(texts)), queries)
    assert all(isinstance(row, np.ndarray) and row.dtype == np.float32 for row in found)
    assert np.array_equal(documents, queries) is (kind == "dense")


def test_sparse_vectors(models: dict[str, str], client: shoal.Client, texts: list[str]) -> None:
    function = ShoalSparseEmbeddingFunction(models["hybrid"])
    wanted = client.encode(
        models["hybrid"], texts, role="document", representations="sparse"
    ).sparse
    found = function(texts)
    assert [(one.indices, one.values) for one in found] == [
        (columns.tolist(), weights.tolist()) for columns, weights in wanted
    ]
    assert function.embed_query(texts) != found


def test_chroma_takes_them_as_functions() -> None:
    validate_embedding_function(ShoalEmbeddingFunction("org/model"))
    validate_sparse_embedding_function(ShoalSparseEmbeddingFunction("org/model"))
    assert not ShoalEmbeddingFunction("org/model").is_legacy()
    assert known_embedding_functions["shoal"] is ShoalEmbeddingFunction
    assert sparse_known_embedding_functions["shoal_sparse"] is ShoalSparseEmbeddingFunction


@pytest.mark.parametrize("kind", ALL)
def test_written_and_read_again_without_the_token(
    kind: Any, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", token)
    function = kind(
        "org/model", tenant="search", token_env_var="MY_TOKEN", options={"dimensions": 64}
    )
    text = json.dumps(function.get_config())
    assert token not in text
    again = kind.build_from_config(json.loads(text))
    assert again.get_config() == function.get_config()
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(ValueError, match="MY_TOKEN is not set"):
        kind.build_from_config(json.loads(text))
    with pytest.raises(ValueError, match="unknown fields: colour"):
        kind.validate_config(function.get_config() | {"colour": "red"})
    with pytest.raises(ValueError, match="no model"):
        kind.validate_config({})
    function.validate_config_update(
        function.get_config(), function.get_config() | {"address": "other:50051"}
    )
    for name, value in (("model", "org/other"), ("options", {})):
        with pytest.raises(ValueError, match=f"{name} cannot change"):
            function.validate_config_update(
                function.get_config(), function.get_config() | {name: value}
            )


def test_collection_is_opened_again(
    tmp_path: Path, models: dict[str, str], texts: list[str]
) -> None:
    settings = chromadb.config.Settings(anonymized_telemetry=False)
    function = ShoalEmbeddingFunction(models["prompted"])
    made = chromadb.PersistentClient(str(tmp_path), settings).create_collection(
        "texts", embedding_function=function
    )
    made.add(ids=[str(number) for number in range(len(texts))], documents=texts)
    wanted = made.query(query_texts=["fish"], n_results=3)
    chromadb.api.client.SharedSystemClient.clear_system_cache()
    opened = chromadb.PersistentClient(str(tmp_path), settings).get_collection(
        "texts"
    )  # says nothing of a function
    assert opened.query(query_texts=["fish"], n_results=3) == wanted
    assert opened.configuration["hnsw"]["space"] == "cosine"
    (query,) = function.embed_query(["fish"])
    by_vector = opened.query(query_embeddings=[query], n_results=3)
    assert by_vector["ids"] == wanted["ids"]


def test_schema_for_the_cloud_is_written_and_read_again(models: dict[str, str]) -> None:
    function = ShoalSparseEmbeddingFunction(models["hybrid"], tenant="search")
    schema = Schema().create_index(
        SparseVectorIndexConfig(source_key="#document", embedding_function=function), key="weights"
    )
    again = Schema.deserialize_from_json(json.loads(json.dumps(schema.serialize_to_json())))
    found = again.keys["weights"].sparse_vector.sparse_vector_index.config.embedding_function
    assert isinstance(found, ShoalSparseEmbeddingFunction)
    assert found.get_config() == function.get_config()
