"""Cards of sparse and hybrid models, from the layouts in which sentence-transformers, opensearch
and FlagEmbedding leave them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.catalog.card import LateInteraction, SparseOutput, StaticQueries
from libs.catalog.detect import read_card
from libs.errors import ModelBroken
from tests.catalog.test_detect import CONFIG, POOLING, Files, modules, old, write, write_tensors

MASKED = CONFIG | {"architectures": ["BertForMaskedLM"], "vocab_size": 100}
SPARSE = {"model_type": "SparseEncoder", "similarity_fn_name": "dot"}
ENCODER = "sentence_transformers.sparse_encoder.models."
STATIC = f"{ENCODER}SparseStaticEmbedding"
SPLADE: Files = {
    "config.json": MASKED,
    "modules.json": modules(
        ("", f"{ENCODER}MLMTransformer"), ("1_SpladePooling", f"{ENCODER}SpladePooling")
    ),
    "1_SpladePooling/config.json": {
        "pooling_strategy": "max",
        "activation_function": "relu",
        "word_embedding_dimension": 100,
    },
    "config_sentence_transformers.json": SPARSE,
}


def router(
    query: list[str], document: list[str], types: dict[str, str], **parameters: object
) -> Files:
    routes = {
        "types": types,
        "structure": {"query": query, "document": document},
        "parameters": parameters,
    }
    return {
        "config.json": MASKED,
        "modules.json": modules(("", "sentence_transformers.models.Router")),
        "router_config.json": routes,
        "document_1_SpladePooling/config.json": {
            "pooling_strategy": "max",
            "activation_function": "log1p_relu",
        },
        "query_0_SparseStaticEmbedding/config.json": {"frozen": False},
        "config_sentence_transformers.json": SPARSE,
    }


OPENSEARCH_TYPES = {
    "query_0_SparseStaticEmbedding": STATIC, "": f"{ENCODER}MLMTransformer",
    "document_1_SpladePooling": f"{ENCODER}SpladePooling",
}  # fmt: skip
OPENSEARCH = router(
    ["query_0_SparseStaticEmbedding"],
    ["", "document_1_SpladePooling"],
    OPENSEARCH_TYPES,
    default_route="document",
)


def test_splade(tmp_path: Path) -> None:
    card = read_card(write(tmp_path, SPLADE), "org/name")
    assert (card.kind, card.tasks, card.representations, card.scoring) == (
        "sparse",
        ("encode", "score"),
        ("sparse",),
        "dot",
    )
    assert card.sparse == SparseOutput(100, pooling="max", activation="log1p_relu")
    assert (card.dimensions, card.notes) == (0, ())


def test_version_6_names_the_task_apart(tmp_path: Path) -> None:
    files = SPLADE | {
        "modules.json": modules(
            ("", "sentence_transformers.base.modules.transformer.Transformer"),
            (
                "1_SpladePooling",
                "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling",
            ),
        ),
        "1_SpladePooling/config.json": {
            "pooling_strategy": "sum",
            "activation_function": "log1p_relu",
        },
        "config_sentence_transformers.json": SPARSE
        | {"max_active_dims": 64, "similarity_fn_name": "cosine"},
    }
    card = read_card(write(tmp_path, files), "org/name")
    assert card.sparse == SparseOutput(
        100, pooling="sum", activation="log1p_relu_twice", strongest=64
    )
    assert card.scoring == "sparse_cosine"


@pytest.mark.parametrize(
    ("default", "queries_by_default"), [("document", False), ("query", True), (None, True)]
)
def test_router_with_fixed_query_weights(
    tmp_path: Path, default: str | None, queries_by_default: bool
) -> None:
    routes = router(
        ["query_0_SparseStaticEmbedding"],
        ["", "document_1_SpladePooling"],
        OPENSEARCH_TYPES,
        default_route=default,
        allow_empty_key=True,
    )
    folder = "query_0_SparseStaticEmbedding"
    write_tensors(tmp_path / folder / "model.safetensors", {"weight": [100]})
    card = read_card(write(tmp_path, routes), "org/name")
    assert card.sparse is not None
    assert card.sparse.queries == StaticQueries(
        folder, f"{folder}/model.safetensors", queries_by_default
    )
    assert (card.sparse.activation, card.encoder_folder) == ("log1p_relu_twice", "")


def test_query_weights_by_name(tmp_path: Path) -> None:
    files = OPENSEARCH | {
        "query_0_SparseStaticEmbedding/config.json": {"path": "org/name/idf.json"},
        "idf.json": {"a": 1.5},
    }
    card = read_card(write(tmp_path, files), "org/name")
    assert card.sparse is not None
    assert card.sparse.queries == StaticQueries("query_0_SparseStaticEmbedding", "idf.json", False)


def test_router_with_one_way_for_both_roles(tmp_path: Path) -> None:
    both = ["", "document_1_SpladePooling"]
    card = read_card(write(tmp_path, router(both, both, OPENSEARCH_TYPES)), "org/name")
    assert card.sparse == SparseOutput(100, activation="log1p_relu_twice")


def test_idf_with_a_masked_language_model(tmp_path: Path) -> None:
    card = read_card(write(tmp_path, {"config.json": MASKED, "idf.json": {"a": 1.5}}), "org/name")
    assert card.sparse == SparseOutput(100, queries=StaticQueries("", "idf.json", False))


def test_masked_language_model_alone_is_dense_and_says_so(tmp_path: Path) -> None:
    card = read_card(write(tmp_path, {"config.json": MASKED}), "org/name")
    assert (card.kind, card.pooling) == ("dense", ("mean",))
    assert "BertForMaskedLM" in card.notes[0]
    assert read_card(write(tmp_path, {}), "org/name").notes == ()


def test_revision_follows_sparse_files(tmp_path: Path) -> None:
    directory = write(tmp_path, OPENSEARCH)
    weights = directory / "query_0_SparseStaticEmbedding/model.safetensors"
    write_tensors(weights, {"weight": [100]})
    first = read_card(directory, "org/name").revision
    write_tensors(weights, {"weight": [99]})
    second = read_card(directory, "org/name").revision
    write(
        directory,
        {
            "document_1_SpladePooling/config.json": {"pooling_strategy": "sum"},
            "config.json": MASKED,
        },
    )
    assert len({first, second, read_card(directory, "org/name").revision}) == 3


M3: Files = {
    "config.json": CONFIG | {"model_type": "xlm-roberta", "vocab_size": 100},
    "modules.json": old("Transformer", "Pooling", "Normalize"),
    "1_Pooling/config.json": POOLING
    | {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
}


def test_hybrid(tmp_path: Path) -> None:
    directory = write(tmp_path, M3)
    write_tensors(directory / "sparse_linear.safetensors", {"weight": [1, 32], "bias": [1]})
    write_tensors(directory / "colbert_linear.safetensors", {"weight": [16, 32], "bias": [16]})
    card = read_card(directory, "BAAI/bge-m3")
    assert (card.kind, card.representations, card.scoring) == (
        "hybrid",
        ("dense", "sparse", "multi_vector"),
        "hybrid",
    )
    assert (card.dimensions, card.multi_vector_dimensions, card.sparse) == (
        32,
        16,
        SparseOutput(100),
    )
    assert (card.late, card.pooling, card.normalize) == (LateInteraction(leading=1), ("cls",), True)
    assert card.tasks == ("encode", "score", "classify")
    (directory / "colbert_linear.safetensors").rename(directory / "colbert_linear.pt")
    card = read_card(directory, "BAAI/bge-m3")
    assert (card.representations, card.late) == (("dense", "sparse"), None)
    assert card.notes[0].startswith(
        "colbert_linear.pt: multi_vector vectors are missing: torch checkpoints are pickles"
    )


def test_unsafe_layers_leave_the_dense_vectors(tmp_path: Path) -> None:
    directory = write(tmp_path, M3)
    (directory / "sparse_linear.pt").write_bytes(b"never opened")
    card = read_card(directory, "BAAI/bge-m3")
    assert (card.kind, card.representations) == ("dense", ("dense",))
    assert "`shoal models convert DIR`" in card.notes[0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            SPLADE | {"1_SpladePooling/config.json": {"pooling_strategy": "mean"}},
            r"1_SpladePooling/config\.json: `pooling_strategy`",
        ),
        (
            SPLADE | {"1_SpladePooling/config.json": {"activation_function": "gelu"}},
            r"`activation_function` is 'gelu'",
        ),
        (SPLADE | {"1_SpladePooling/config.json": None}, r"1_SpladePooling/config\.json: missing"),
        (
            SPLADE | {"config.json": MASKED | {"architectures": ["BertModel"]}},
            r"`architectures` is 'BertModel': SPLADE needs",
        ),
        (
            SPLADE | {"config.json": MASKED | {"vocab_size": None}},
            r"config\.json: `vocab_size` is missing",
        ),
        (
            {
                "config_sentence_transformers.json": SPARSE,
                "modules.json": old("Transformer", "Pooling"),
                "1_Pooling/config.json": POOLING,
            },
            "modules.json names no SpladePooling",
        ),
        (
            {
                "modules.json": old("Transformer", "Pooling", "SparseAutoEncoder"),
                "1_Pooling/config.json": POOLING,
            },
            r"SparseAutoEncoder', which is not served",
        ),
        (
            router([""], ["", "document_1_SpladePooling"], OPENSEARCH_TYPES),
            r"modules\.json: its Router has separate modules for queries",
        ),
        (OPENSEARCH, r"model\.safetensors: missing from .*query_0_SparseStaticEmbedding"),
        (
            OPENSEARCH | {"router_config.json": {"structure": {"text": []}}},
            r"router_config\.json: `structure` has the routes text",
        ),
        (
            OPENSEARCH | {"query_0_SparseStaticEmbedding/config.json": {"path": "../../idf.json"}},
            r"`path` is '\.\./\.\./idf\.json'",
        ),
        (
            SPLADE | {"modules.json": modules(("../other", f"{ENCODER}MLMTransformer"))},
            "leads out of the checkpoint",
        ),
    ],
)
def test_complaints_name_the_file_and_the_key(tmp_path: Path, files: Files, message: str) -> None:
    with pytest.raises(ModelBroken, match=message):
        read_card(write(tmp_path, files), "org/name")
