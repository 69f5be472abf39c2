"""Sparse vectors against sentence-transformers' SparseEncoder: SPLADE of every architecture, and
queries without a forward.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from libs.catalog.overrides import Hints, Overrides
from libs.errors import InvalidInput, ModelBroken, TaskNotSupported
from libs.models import (
    DataType,
    EncodeResult,
    EncodeWork,
    PackedModel,
    Result,
    Role,
    ScoreResult,
    ScoreWork,
    Work,
    load_model,
)
from tests.models.restoring import restore
from tests.parity.checkpoints import Kind, write_checkpoint
from tests.parity.test_heads import TEXTS, assert_close, write_json

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS: tuple[Kind, ...] = (
    "bert",
    "electra",
    "distilbert",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "camembert",
    "mpnet",
    "modernbert",
    "gte",
    "jina_embeddings_v3",
)
Values = NDArray[np.float32]
IDF = {"rights": 2.5, "the": 0.25, ".": 0.0, "no token of any vocabulary": 3.0}


def write_splade(
    directory: Path,
    kind: Kind = "bert",
    *,
    config: dict[str, object] | None = None,
    **settings: object,
) -> Path:
    """Write a masked language model with SpladePooling, as sentence-transformers 6 saves it, with
    these `settings` of SpladePooling.
    """
    write_checkpoint(kind, directory / "base", head="masked_lm", config=config)
    pooling = SpladePooling(**settings)
    SparseEncoder(modules=[masked(directory / "base"), pooling], device="cpu").save(
        str(directory / "saved")
    )
    return directory / "saved"


def masked(directory: Path) -> Transformer:
    return Transformer(str(directory), transformer_task="fill-mask")


def load(
    directory: Path, dtype: torch.dtype = torch.float32, overrides: Overrides | None = None
) -> PackedModel:
    return load_model(directory, "test/model", torch.device("cpu"), dtype, overrides)


def process_job(model: PackedModel, work: Work) -> Result:
    """Answer as a worker does: a job without sequences does not use the device."""
    prepared = model.prepare(work)
    return model.finish(
        prepared, model.forward(prepared.head, prepared.sequences) if prepared.sequences else []
    )


def sparse(
    model: PackedModel, texts: Sequence[str], role: Role = "", data_type: DataType = "float32"
) -> Values:
    """Return a dense matrix, and check that the rows' columns rise."""
    result = process_job(model, EncodeWork(list(texts), role=role, data_type=data_type))
    assert isinstance(result, EncodeResult)
    assert result.dense is None
    assert result.sparse is not None
    rows = result.sparse
    whole = np.zeros((len(texts), rows.columns), np.float32)
    values = restore(rows.values)
    for number, (start, end) in enumerate(pairwise(rows.offsets)):
        assert (np.diff(rows.indices[start:end].astype(np.int64)) > 0).all()
        assert (values[start:end] != 0).all()
        whole[number, rows.indices[start:end]] = values[start:end]
    assert len(values) == len(rows.indices) == rows.offsets[-1]
    return whole


def scores(model: PackedModel, work: ScoreWork) -> Values:
    result = process_job(model, work)
    assert isinstance(result, ScoreResult)
    return result.scores


def assert_same(ours: Values, theirs: torch.Tensor) -> None:
    """Compare entries, and their weights to 1e-5 of the largest."""
    expected = theirs.to_dense().float().numpy()
    assert_close(ours, expected)
    assert ((ours != 0) == (expected != 0)).all()
    assert (expected != 0).any()


def check(directory: Path) -> None:
    """Compare both roles, scores, and each text alone."""
    model, reference = load(directory), SparseEncoder(str(directory), device="cpu")
    queries, documents = reference.encode_query(TEXTS), reference.encode_document(TEXTS)
    ours = sparse(model, TEXTS, "document")
    assert_same(sparse(model, TEXTS, "query"), queries)
    assert_same(ours, documents)
    assert_same(sparse(model, TEXTS), reference.encode(TEXTS))
    expected = reference.similarity(queries, documents)[0].numpy()
    assert_close(scores(model, ScoreWork(TEXTS[0], TEXTS)), expected)
    for number, text in enumerate(TEXTS):
        assert_close(sparse(model, [text], "document")[0], ours[number])


@pytest.mark.parametrize("kind", KINDS)
def test_splade_of_every_architecture_equals_the_reference(tmp_path: Path, kind: Kind) -> None:
    check(write_splade(tmp_path, kind))


def test_alibabas_model_type_of_gte_is_served(tmp_path: Path) -> None:
    """The model_type "new" of opensearch's doc-v3-gte, unknown to transformers, gives the same
    results with the same weights.
    """
    directory = write_splade(tmp_path, "gte")
    expected = SparseEncoder(str(directory), device="cpu").encode(TEXTS)
    config = json.loads((directory / "config.json").read_text())
    write_json(
        directory / "config.json",
        config | {"model_type": "new", "architectures": ["NewForMaskedLM"]},
    )
    assert_same(sparse(load(directory), TEXTS), expected)


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_poolings_and_activations_equal_the_reference(
    tmp_path: Path, pooling: str, activation: str
) -> None:
    check(write_splade(tmp_path, pooling_strategy=pooling, activation_function=activation))


@pytest.mark.parametrize("kind", ["bert", "distilbert", "electra", "mpnet"])
def test_untied_decoder_is_used(tmp_path: Path, kind: Kind) -> None:
    check(write_splade(tmp_path, kind, config={"tie_word_embeddings": False}))


def test_tied_decoder_takes_no_memory(tmp_path: Path) -> None:
    shared = load(write_splade(tmp_path / "shared"))
    own = load(write_splade(tmp_path / "own", config={"tie_word_embeddings": False}))
    assert shared.card.sparse is not None
    assert own.bytes - shared.bytes == shared.card.sparse.columns * 64 * 4


def test_padded_vocabulary_with_another_activation(tmp_path: Path) -> None:
    config: dict[str, object] = {
        "vocab_size": 448,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
    }
    directory = write_splade(tmp_path, config=config)
    check(directory)
    card = load(directory).card
    assert card.sparse is not None
    assert (card.kind, card.sparse.columns, card.representations, card.tasks) == (
        "sparse",
        448,
        ("sparse",),
        ("encode", "score"),
    )


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_only_the_strongest_weights_are_returned(tmp_path: Path, similarity: str) -> None:
    directory = write_splade(tmp_path)
    settings = json.loads((directory / "config_sentence_transformers.json").read_text())
    write_json(
        directory / "config_sentence_transformers.json",
        settings | {"max_active_dims": 7, "similarity_fn_name": similarity},
    )
    check(directory)
    assert ((sparse(load(directory), TEXTS) != 0).sum(1) == 7).all()


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_bfloat16_is_as_good_as_the_reference_in_bfloat16(tmp_path: Path, kind: Kind) -> None:
    directory = write_splade(tmp_path, kind)
    exact = SparseEncoder(str(directory), device="cpu").encode(TEXTS).to_dense().float().numpy()
    half = SparseEncoder(str(directory), device="cpu", model_kwargs={"torch_dtype": torch.bfloat16})
    own = np.abs(half.encode(TEXTS).to_dense().float().numpy() - exact).max()
    assert own > 0
    assert np.abs(sparse(load(directory, torch.bfloat16), TEXTS) - exact).max() < 3 * own


def test_module_names_of_version_5_are_read(tmp_path: Path) -> None:
    directory = write_splade(tmp_path)
    text = (directory / "modules.json").read_text()
    module = json.loads(text)[0]["type"]
    (directory / "modules.json").write_text(
        text.replace(module, "sentence_transformers.sparse_encoder.models.MLMTransformer")
    )
    check(directory)


def test_prompts_follow_the_role(tmp_path: Path) -> None:
    directory = write_splade(tmp_path)
    settings = json.loads((directory / "config_sentence_transformers.json").read_text())
    settings |= {"prompts": {"query": "find: ", "document": "text: "}}
    write_json(directory / "config_sentence_transformers.json", settings)
    check(directory)


def test_masked_language_model_without_modules_is_dense(tmp_path: Path) -> None:
    """Files do not show its purpose: it has dense vectors, unless a card or its model_type names
    SPLADE."""
    write_checkpoint("bert", tmp_path, head="masked_lm")
    plain = load(tmp_path).card
    assert (plain.kind, plain.representations) == ("dense", ("dense",))
    assert "kind: sparse" in plain.notes[0]
    expected = SparseEncoder(str(tmp_path), device="cpu").encode(TEXTS)
    assert_same(
        sparse(
            load(tmp_path, overrides=Overrides("cards.yaml:1", detect=Hints(kind="sparse"))), TEXTS
        ),
        expected,
    )
    write_json(tmp_path / "config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    assert_same(sparse(load(tmp_path), TEXTS), expected)


def write_router(directory: Path, default_route: str = "document") -> Path:
    """A model with fixed weights for queries and SPLADE for documents."""
    write_checkpoint("bert", directory / "base", head="masked_lm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "base")
    weight = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(3)) * 5
    weight[10:20] = 0
    static = SparseStaticEmbedding(tokenizer, weight)
    router = Router.for_query_document(
        [static], [masked(directory / "base"), SpladePooling("max", "log1p_relu")], default_route
    )
    SparseEncoder(modules=[router], device="cpu", similarity_fn_name="dot").save(
        str(directory / "saved")
    )
    return directory / "saved"


@pytest.mark.parametrize("default", ["document", "query"])
def test_static_queries_need_no_forward(tmp_path: Path, default: str) -> None:
    directory = write_router(tmp_path, default_route=default)
    check(directory)
    model = load(directory)
    query = model.prepare(EncodeWork(["a copy of this"], role="query"))
    pair = model.prepare(ScoreWork("a copy of this", ["a", "b"]))
    assert (query.sequences, len(pair.sequences)) == ([], 2)
    assert query.tokens == pair.tokens - sum(item.tokens for item in pair.sequences) > 0


def test_router_with_root_encoder_is_read(tmp_path: Path) -> None:
    """The encoder's folder has no name in opensearch's repositories."""
    directory = write_router(tmp_path)
    routes = json.loads((directory / "router_config.json").read_text())
    encoder = routes["structure"]["document"][0]
    routes["types"][""] = routes["types"].pop(encoder)
    routes["structure"]["document"][0] = ""
    write_json(directory / "router_config.json", routes)
    for path in (directory / encoder).iterdir():
        path.rename(directory / path.name)
    check(directory)


def test_query_weights_are_read_from_json(tmp_path: Path) -> None:
    """Opensearch's layout before sentence-transformers has a masked language model and an
    idf.json."""
    write_checkpoint("distilbert", tmp_path, head="masked_lm")
    write_json(tmp_path / "idf.json", IDF)
    model = load(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    static = SparseStaticEmbedding.from_json(str(tmp_path / "idf.json"), tokenizer)
    # A token outside the vocabulary would overwrite the unknown token's weight; it is dropped here.
    static.weight.data[tokenizer.unk_token_id] = 0
    router = Router.for_query_document([static], [masked(tmp_path), SpladePooling("max")])
    reference = SparseEncoder(modules=[router], device="cpu")
    texts = ["The rights. rights!", "the zebra"]
    assert_same(sparse(model, texts, "query"), reference.encode_query(texts))
    assert_same(sparse(model, TEXTS, "document"), reference.encode_document(TEXTS))
    expected = reference.similarity(
        reference.encode_query(texts[:1]), reference.encode_document(TEXTS)
    )[0]
    assert_close(scores(model, ScoreWork(texts[0], TEXTS)), expected.numpy())


@pytest.mark.parametrize(("data_type", "error"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_weights_have_requested_data_types(
    tmp_path: Path, data_type: DataType, error: float
) -> None:
    model = load(write_splade(tmp_path))
    exact = sparse(model, TEXTS)
    rounded = sparse(model, TEXTS, data_type=data_type)
    assert 0 < np.abs(rounded - exact).max() < error * exact.max()


def test_unsupported_requests_are_refused(tmp_path: Path) -> None:
    model = load(write_splade(tmp_path))
    for work, field in (
        (EncodeWork(["a"], dimensions=8), "dimensions"),
        (EncodeWork(["a"], data_type="int8"), "data_type"),
        (ScoreWork("a", ["b"], scale="probability"), "scale"),
    ):
        with pytest.raises(InvalidInput) as caught:
            model.prepare(work)
        assert caught.value.field == field
    with pytest.raises(TaskNotSupported) as refused:
        model.prepare(EncodeWork(["a"], representations=("sparse", "dense")))
    assert refused.value.field == "representations[1]"


def test_invalid_checkpoints_are_refused(tmp_path: Path) -> None:
    directory = write_splade(tmp_path, config={"tie_word_embeddings": False})
    tensors = load_file(directory / "model.safetensors")

    def broken(**changed: torch.Tensor | None) -> str:
        kept = {name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}
        save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelBroken) as caught:
            load(directory)
        return str(caught.value)

    head = "cls.predictions"
    transform = f"{head}.transform.dense"
    assert f"'{transform}' is missing" in broken(
        **{f"{transform}.weight": None, f"{transform}.bias": None}
    )
    assert "decoder's weight" in broken(**{f"{head}.decoder.weight": None})
    assert "`decoder.bias`" in broken(**{f"{head}.bias": None, f"{head}.decoder.bias": None})
    assert "`norm.weight` has the shape" in broken(
        **{f"{head}.transform.LayerNorm.weight": torch.ones(3)}
    )
