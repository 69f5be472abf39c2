"""Heads against sentence-transformers and transformers, on random checkpoints: equal numbers from
the same directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling

from libs.errors import InvalidInput, ModelBroken
from libs.models import (
    Aggregation,
    ClassifyWork,
    EncodeResult,
    EncodeWork,
    EntitiesWork,
    ExtractResult,
    PackedModel,
    Result,
    Role,
    ScoreResult,
    ScoreWork,
    Work,
    load_model,
)
from tests.models.restoring import restore
from tests.parity.checkpoints import Kind, SentenceFiles, write_checkpoint

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
    "longformer",
    "modernbert",
    "nomic_bert",
    "gte",
    "jina_embeddings_v3",
    "deberta",
    "deberta-v2",
    "albert",
    "eurobert",
    "t5",
)
IDENTITY = "torch.nn.modules.linear.Identity"
# colbertv2.0, and jina-colbert-v2, in which queries attend to their added mask tokens and have
# special markers.
STANFORD: tuple[tuple[Kind, str, Mapping[str, object]], ...] = (
    ("bert", "bert.", {"query_maxlen": 20, "doc_maxlen": 50, "mask_punctuation": True}),
    (
        "jina_embeddings_v3",
        "",
        {
            "query_maxlen": 24,
            "attend_to_mask_tokens": True,
            "query_token_id": "the",
            "doc_token_id": "copy",
        },
    ),
)
TEXTS = [
    'Each licensee is addressed as "you".',
    "Programs, GPL; warranty (none)!",
    "a",
    "To protect your rights, we need to prevent others from denying you these rights or asking you "
    "to surrender the rights. " * 6,
    "Überraschung — naïve café, 東京 and so on",
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose much if other tests need the cores (oneDNN's
    barriers).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(model: PackedModel, *works: Work) -> list[Result]:
    """Run all works in one forward, as a worker does."""
    prepared = [model.prepare(work) for work in works]
    ends = np.cumsum([0, *(len(item.sequences) for item in prepared)])
    outputs = model.forward(
        prepared[0].head, [sequence for item in prepared for sequence in item.sequences]
    )
    return [
        model.finish(item, outputs[start:end])
        for item, (start, end) in zip(prepared, pairwise(ends), strict=True)
    ]


def load(directory: Path) -> PackedModel:
    return load_model(directory, "test/model", torch.device("cpu"), torch.float32)


def dense(
    model: PackedModel, texts: list[str], role: Role = "", **wishes: object
) -> NDArray[np.float32]:
    result = run(model, EncodeWork(texts, role=role, **wishes))[0]  # type: ignore[arg-type]
    assert isinstance(result, EncodeResult)
    assert result.dense is not None
    return restore(result.dense)


def token_vectors(model: PackedModel, texts: list[str], role: Role) -> list[NDArray[np.float32]]:
    result = run(model, EncodeWork(texts, role=role))[0]
    assert isinstance(result, EncodeResult)
    assert result.multi_vector is not None
    values, offsets = restore(result.multi_vector.values), result.multi_vector.offsets
    return [values[start:end] for start, end in pairwise(offsets)]


def scores(model: PackedModel, work: ScoreWork) -> NDArray[np.float32]:
    result = run(model, work)[0]
    assert isinstance(result, ScoreResult)
    return result.scores


def assert_close(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """Return the error relative to the largest number, as in the parity of whole families."""
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("modes", "projected", "normalized"),
    [
        ("cls", 0, False),
        ("mean", 0, True),
        ("max", 0, False),
        ("lasttoken", 0, True),
        ("weightedmean", 0, True),
        ("mean_sqrt_len_tokens", 0, False),
        (("cls", "max", "mean"), 0, True),
        ("mean", 24, True),
        (("cls", "lasttoken"), 24, False),
    ],
)
def test_pooling_and_dense_layers_equal_the_reference(
    tmp_path: Path, modes: str | tuple[str, ...], projected: int, normalized: bool
) -> None:
    write_checkpoint("bert", tmp_path / "base")
    pooling = Pooling(64, pooling_mode=modes)
    layers: list[torch.nn.Module] = [Transformer(str(tmp_path / "base")), pooling]
    width = pooling.pooling_output_dimension
    if projected:
        layers.append(Dense(width, projected, activation_function=torch.nn.Tanh()))
    if normalized:
        layers.append(Normalize())
    SentenceTransformer(modules=layers, device="cpu").save(str(tmp_path / "saved"))
    model, reference = (
        load(tmp_path / "saved"),
        SentenceTransformer(str(tmp_path / "saved"), device="cpu"),
    )
    assert model.card.dimensions == (projected or width)
    assert_close(dense(model, TEXTS), reference.encode(TEXTS))


@pytest.mark.parametrize(
    ("activation", "residual"),
    [("ReLU", True), ("GELU", False), ("Identity", True), ("Sigmoid", False)],
)
def test_dense_layers_with_other_activations_equal_the_reference(
    tmp_path: Path, activation: str, residual: bool
) -> None:
    write_checkpoint("distilbert", tmp_path / "base")
    function = getattr(torch.nn, activation)()
    layers = [Transformer(str(tmp_path / "base")), Pooling(64, "mean")]
    layers += [Dense(64, 64, activation_function=function, use_residual=residual)]
    layers += [Dense(64, 16, bias=False, activation_function=function, use_residual=residual)]
    SentenceTransformer(modules=layers, device="cpu").save(str(tmp_path / "saved"))
    reference = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert_close(dense(load(tmp_path / "saved"), TEXTS), reference.encode(TEXTS))


def test_checkpoint_without_modules_is_pooled_by_the_mean(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path, head="masked_lm")
    assert_close(
        dense(load(tmp_path), TEXTS), SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    )


def test_prompts_follow_the_role(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path / "base")
    layers = [
        Transformer(str(tmp_path / "base")),
        Pooling(64, "mean", include_prompt=False),
        Normalize(),
    ]
    prompts = {"query": "find: ", "document": "text: ", "other": "other: "}
    SentenceTransformer(
        modules=layers, device="cpu", prompts=prompts, default_prompt_name="other"
    ).save(str(tmp_path / "saved"))
    model, reference = (
        load(tmp_path / "saved"),
        SentenceTransformer(str(tmp_path / "saved"), device="cpu"),
    )
    assert_close(dense(model, TEXTS, "query"), reference.encode_query(TEXTS))
    assert_close(dense(model, TEXTS, "document"), reference.encode_document(TEXTS))
    assert_close(dense(model, TEXTS), reference.encode(TEXTS))
    assert_close(
        dense(model, TEXTS, "query", instruction="told: "), reference.encode(TEXTS, prompt="told: ")
    )


def test_empty_prompt_of_documents_precedes_other_names(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path / "base")
    layers = [Transformer(str(tmp_path / "base")), Pooling(64, "mean")]
    prompts = {"query": "find: ", "document": "", "passage": "passage: "}
    SentenceTransformer(modules=layers, device="cpu", prompts=prompts).save(str(tmp_path / "saved"))
    model, reference = (
        load(tmp_path / "saved"),
        SentenceTransformer(str(tmp_path / "saved"), device="cpu"),
    )
    assert_close(dense(model, TEXTS, "document"), reference.encode_document(TEXTS))
    assert_close(dense(model, TEXTS, "query"), reference.encode_query(TEXTS))


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
@pytest.mark.parametrize("normalized", [False, True])
def test_scores_use_the_similarity_of_the_checkpoint(
    tmp_path: Path, similarity: str, normalized: bool
) -> None:
    write_checkpoint("bert", tmp_path / "base")
    layers: list[torch.nn.Module] = [Transformer(str(tmp_path / "base")), Pooling(64, "mean")]
    if normalized:
        layers.append(Normalize())
    SentenceTransformer(modules=layers, device="cpu", similarity_fn_name=similarity).save(
        str(tmp_path / "saved")
    )
    model, reference = (
        load(tmp_path / "saved"),
        SentenceTransformer(str(tmp_path / "saved"), device="cpu"),
    )
    vectors = reference.encode(["warranty", *TEXTS])
    expected = reference.similarity(vectors[:1], vectors[1:])[0].numpy()
    assert_close(scores(model, ScoreWork("warranty", TEXTS)), expected)
    if similarity != "cosine":
        with pytest.raises(InvalidInput, match="by " + similarity):
            scores(model, ScoreWork("warranty", TEXTS, scale="probability"))


def test_unknown_similarity_is_refused(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path, sentence=SentenceFiles(similarity="hamming"))
    with pytest.raises(ModelBroken, match="`similarity_fn_name` is 'hamming'"):
        load(tmp_path)


def test_cross_encoder_without_an_activation_has_both_scales(tmp_path: Path) -> None:
    """The default scale here is the logit; sentence-transformers applies a sigmoid if no file names
    an activation.
    """
    write_checkpoint("bert", tmp_path, head="sequence_classification")
    reference = CrossEncoder(str(tmp_path), device="cpu")
    pairs = [("warranty", text) for text in TEXTS]
    model = load(tmp_path)
    assert_close(
        scores(model, ScoreWork("warranty", TEXTS, scale="probability")), reference.predict(pairs)
    )
    logits = reference.predict(pairs, activation_fn=torch.nn.Identity())
    assert_close(scores(model, ScoreWork("warranty", TEXTS)), logits)
    assert_close(scores(model, ScoreWork("warranty", TEXTS, scale="logit")), logits)


def test_matryoshka_is_truncated_then_normalised(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path / "base")
    layers = [Transformer(str(tmp_path / "base")), Pooling(64, "cls"), Normalize()]
    SentenceTransformer(modules=layers, device="cpu").save(str(tmp_path / "saved"))
    model, reference = (
        load(tmp_path / "saved"),
        SentenceTransformer(str(tmp_path / "saved"), device="cpu"),
    )
    theirs = reference.encode(TEXTS, truncate_dim=10, normalize_embeddings=True)
    assert_close(dense(model, TEXTS, dimensions=10), theirs)
    whole = dense(model, TEXTS, normalize=False)
    assert np.linalg.norm(whole, axis=1).max() > 1.5
    assert_close(dense(model, TEXTS, dimensions=10, normalize=False), whole[:, :10])


def test_text_alone_equals_the_same_text_among_others(tmp_path: Path) -> None:
    write_checkpoint("mpnet", tmp_path)
    model = load(tmp_path)
    together = dense(model, TEXTS)
    for number, text in enumerate(TEXTS):
        assert_close(dense(model, [text])[0], together[number])


@pytest.mark.parametrize("kind", KINDS)
def test_cross_encoder_of_every_architecture_equals_the_reference(
    tmp_path: Path, kind: Kind
) -> None:
    write_checkpoint(kind, tmp_path, head="sequence_classification")
    model, reference = load(tmp_path), CrossEncoder(str(tmp_path), device="cpu")
    # T5 has sharp scores, where two float32 implementations differ by more than either does from
    # the exact result.
    reference.model.double()
    query, documents = "What must a licensee do?", [*TEXTS, "copy " * 300]
    theirs = reference.predict(
        [(query, text) for text in documents], activation_fn=torch.nn.Identity()
    )
    assert_close(scores(model, ScoreWork(query, documents)), theirs)
    sigmoid = reference.predict(
        [(query, text) for text in documents], activation_fn=torch.nn.Sigmoid()
    )
    assert_close(scores(model, ScoreWork(query, documents, scale="probability")), sigmoid)


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_are_truncated_as_by_the_tokenizer(tmp_path: Path, kind: Kind, side: str) -> None:
    write_checkpoint(kind, tmp_path, head="sequence_classification")
    model = load(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, truncation_side=side)
    work = ScoreWork(
        "What must a licensee do?", TEXTS, truncation="end" if side == "right" else "start"
    )
    theirs = tokenizer(
        [work.query] * len(TEXTS), TEXTS, truncation="only_second", max_length=model.max_tokens
    )
    ours = model.prepare(work).sequences
    assert [item.ids.tolist() for item in ours] == theirs["input_ids"]
    if "token_type_ids" in theirs:
        assert [item.type_ids.tolist() for item in ours if item.type_ids is not None] == theirs[
            "token_type_ids"
        ]


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
def test_cross_encoder_keeps_its_own_scale(tmp_path: Path, activation: str) -> None:
    write_checkpoint("bert", tmp_path / "base", head="sequence_classification")
    function = getattr(torch.nn, activation)()
    CrossEncoder(str(tmp_path / "base"), device="cpu", activation_fn=function).save(
        str(tmp_path / "saved")
    )
    reference = CrossEncoder(str(tmp_path / "saved"), device="cpu")
    ours = scores(load(tmp_path / "saved"), ScoreWork("warranty", TEXTS))
    assert_close(ours, reference.predict([("warranty", text) for text in TEXTS]))


def test_several_classes_score_the_entailment(tmp_path: Path) -> None:
    labels = ("contradiction", "Entailment", "neutral")
    write_checkpoint("roberta", tmp_path, head="sequence_classification", labels=labels)
    reference = CrossEncoder(str(tmp_path), device="cpu")
    pairs = [("warranty", text) for text in TEXTS]
    model = load(tmp_path)
    assert_close(scores(model, ScoreWork("warranty", TEXTS)), reference.predict(pairs)[:, 1])
    shares = reference.predict(pairs, apply_softmax=True)[:, 1]
    assert_close(scores(model, ScoreWork("warranty", TEXTS, scale="probability")), shares)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_sequence_classification_equals_the_pipeline(
    tmp_path: Path, kind: Kind, problem: str
) -> None:
    labels = ("sport", "law", "weather", "love")
    write_checkpoint(
        kind,
        tmp_path,
        head="sequence_classification",
        labels=labels,
        config={"problem_type": problem},
    )
    model = load(tmp_path)
    pipeline = transformers.pipeline("text-classification", str(tmp_path), device="cpu")

    # With `top_k` given, even as None, a text's labels are a list, which transformers does not
    # type.
    def theirs() -> list[list[dict[str, Any]]]:
        return cast(
            list[list[dict[str, Any]]],
            pipeline(TEXTS, top_k=None, truncation=True, max_length=model.max_tokens),
        )

    rounded = theirs()
    pipeline.model.double()
    exact = theirs()
    # T5 has sharp scores, of which float32 in transformers is further than 1e-5 from float64.
    error = max(
        abs(one["score"] - other["score"])
        for ones, others in zip(rounded, exact, strict=True)
        for one, other in zip(ones, others, strict=True)
    )
    result = run(model, ClassifyWork(TEXTS))[0]
    assert isinstance(result, ExtractResult)
    for ours, expected in zip(result.items, exact, strict=True):
        assert [item.label for item in ours.labels] == [item["label"] for item in expected]
        assert [item.score for item in ours.labels] == pytest.approx(
            [item["score"] for item in expected], rel=1e-5, abs=max(1e-7, error)
        )


@pytest.mark.parametrize("kind", [*KINDS, "qwen3", "llama", "gemma2", "phi3", "mt5"])
def test_entities_equal_the_pipeline(tmp_path: Path, kind: Kind) -> None:
    labels = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "DATE")
    write_checkpoint(kind, tmp_path, head="token_classification", labels=labels, seed=5)
    pipeline, model = (
        transformers.pipeline("token-classification", str(tmp_path), device="cpu"),
        load(tmp_path),
    )
    for aggregation in get_args(Aggregation):
        result = run(model, EntitiesWork(TEXTS, aggregation=aggregation))[0]
        assert isinstance(result, ExtractResult)
        assert_same_entities(result, pipeline(TEXTS, aggregation_strategy=aggregation), aggregation)


def assert_same_entities(
    result: ExtractResult,
    reference: Sequence[Sequence[Mapping[str, object]]],
    aggregation: Aggregation,
) -> None:
    name = "entity" if aggregation == "none" else "entity_group"
    for text, ours, theirs in zip(TEXTS, result.items, reference, strict=True):
        assert [(item.label, item.start, item.end) for item in ours.entities] == [
            (e[name], e["start"], e["end"]) for e in theirs
        ]
        assert [item.score for item in ours.entities] == pytest.approx(
            [e["score"] for e in theirs], rel=1e-5
        )
        assert all(item.text == text[item.start : item.end] for item in ours.entities)
    assert sum(len(item.entities) for item in result.items) > 0


@pytest.mark.parametrize("strategy", ["fixed", "min"])
@pytest.mark.parametrize("attend", [True, False])
def test_late_interaction_equals_the_reference(tmp_path: Path, strategy: str, attend: bool) -> None:
    write_checkpoint("bert", tmp_path / "base")
    expansion = {"strategy": strategy, "attend": attend, "length": 20}
    layers = [
        Transformer(str(tmp_path / "base"), query_expansion=expansion, document_length=30),
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
    prompts = {"query": "q: ", "document": "d: "}
    MultiVectorEncoder(modules=layers, device="cpu", prompts=prompts).save(str(tmp_path / "saved"))
    check_late_interaction(tmp_path / "saved")


def check_late_interaction(directory: Path) -> None:
    model, reference = load(directory), MultiVectorEncoder(str(directory), device="cpu")
    queries, documents = reference.encode_query(TEXTS), reference.encode_document(TEXTS)
    for ours, theirs in zip(token_vectors(model, TEXTS, "query"), queries, strict=True):
        assert_close(ours, theirs.numpy())
    for ours, theirs in zip(token_vectors(model, TEXTS, "document"), documents, strict=True):
        assert_close(ours, theirs.numpy())
    expected = reference.similarity(queries[:1], documents)[0].numpy()
    assert_close(scores(model, ScoreWork(TEXTS[0], TEXTS)), expected)


@pytest.mark.parametrize(
    "kind",
    ["roberta-prelayernorm", "mpnet", "modernbert", "gte", "jina_embeddings_v3", "nomic_bert"],
)
def test_expansion_tokens_in_other_architectures(tmp_path: Path, kind: Kind) -> None:
    write_checkpoint(kind, tmp_path / "base")
    transformer = Transformer(
        str(tmp_path / "base"), query_expansion={"strategy": "fixed", "length": 24}
    )
    layers = [transformer, MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    MultiVectorEncoder(modules=layers, device="cpu").save(str(tmp_path / "saved"))
    check_late_interaction(tmp_path / "saved")


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@pytest.mark.parametrize("sizes", [(64, 8), (64, 48, 48, 8)])
def test_pylate_checkpoint_equals_the_reference(
    tmp_path: Path, kind: Kind, sizes: tuple[int, ...]
) -> None:
    """PyLate 1.x has prefixes, lengths and expansion at the top level, its own Dense layers, and no
    masking or scaling modules.

    Several layers, some of them residual, are mxbai-edge-colbert's.
    """
    write_checkpoint(kind, tmp_path)
    settings = {
        "query_prefix": "[unused0]",
        "document_prefix": "copy ",
        "query_length": 24,
        "document_length": 40,
    }
    write_json(
        tmp_path / "config_sentence_transformers.json", {"model_type": "ColBERT", **settings}
    )
    modules = [("", "sentence_transformers.models.Transformer")]
    for number, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        write_pylate_dense(tmp_path / f"{number}_Dense", inputs, outputs, residual=len(sizes) > 2)
        modules.append((f"{number}_Dense", "pylate.models.Dense.Dense"))
    write_json(
        tmp_path / "modules.json",
        [{"idx": i, "name": str(i), "path": p, "type": t} for i, (p, t) in enumerate(modules)],
    )
    check_late_interaction(tmp_path)


def write_pylate_dense(folder: Path, inputs: int, outputs: int, *, residual: bool) -> None:
    """Return a layer without a bias; the residual of a layer that changes the size passes a
    matrix."""
    settings = {
        "in_features": inputs,
        "out_features": outputs,
        "bias": False,
        "activation_function": IDENTITY,
    }
    write_json(folder / "config.json", settings | {"use_residual": residual})
    generator = torch.Generator().manual_seed(inputs + outputs)
    names = ["linear.weight", *(["residual.weight"] if residual and inputs != outputs else [])]
    save_file(
        {name: torch.randn(outputs, inputs, generator=generator) for name in names},
        folder / "model.safetensors",
    )


@pytest.mark.parametrize(("kind", "prefix", "settings"), STANFORD)
def test_stanford_checkpoint_equals_the_reference(
    tmp_path: Path, kind: Kind, prefix: str, settings: Mapping[str, object]
) -> None:
    """The projection of colbert-ir's layout is among the encoder's tensors, and settings are in
    artifact.metadata.
    """
    write_checkpoint(kind, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"architectures": ["HF_ColBERT"]})
    write_json(tmp_path / "artifact.metadata", settings)
    tensors = {
        f"{prefix}{name}": tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["linear.weight"] = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_late_interaction(tmp_path)


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))
