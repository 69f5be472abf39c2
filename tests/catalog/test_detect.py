"""Cards from directories as libraries have written them over the years, and complaints that name
file and key.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from libs.catalog.card import DenseModule, Expansion
from libs.catalog.detect import read_card
from libs.errors import ModelBroken

CONFIG = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 32,
    "max_position_embeddings": 512,
}
POOLING = {
    "word_embedding_dimension": 32,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
}
Files = dict[str, object]


def write(directory: Path, files: Files, tensors: dict[str, list[int]] | None = None) -> Path:
    """A checkpoint of these JSON files over the defaults; a file that is None is left out."""
    for name, value in ({"config.json": CONFIG, "tokenizer.json": {}} | files).items():
        if value is not None:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))
    write_tensors(directory / "model.safetensors", tensors or {"a": [1]})
    return directory


def write_tensors(path: Path, shapes: dict[str, list[int]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}))


def modules(*entries: tuple[str, str]) -> list[dict[str, object]]:
    return [
        {"idx": number, "name": str(number), "path": path, "type": kind}
        for number, (path, kind) in enumerate(entries)
    ]


def old(*names: str) -> list[dict[str, object]]:
    """Return modules.json as sentence-transformers 2 to 5 write it."""
    folders = [
        "" if name == "Transformer" else f"{number}_{name}" for number, name in enumerate(names)
    ]
    return modules(
        *(
            (folder, f"sentence_transformers.models.{name}")
            for folder, name in zip(folders, names, strict=True)
        )
    )


def test_plain_encoder_embeds_by_the_mean(tmp_path: Path) -> None:
    card = read_card(write(tmp_path, {}), "org/name")
    assert (card.model, card.family, card.kind) == ("org/name", "bert", "dense")
    assert card.tasks == ("encode", "score", "classify")
    assert (card.pooling, card.dimensions, card.max_tokens, card.normalize) == (
        ("mean",),
        32,
        512,
        False,
    )


def test_sentence_transformers_before_version_6(tmp_path: Path) -> None:
    files: Files = {
        "modules.json": old("Transformer", "Pooling", "Dense", "Normalize"),
        "1_Pooling/config.json": POOLING
        | {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
        "2_Dense/config.json": {
            "in_features": 96,
            "out_features": 8,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
        "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": True},
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "3.0.0"},
            "prompts": {"query": "q: ", "passage": "p: ", "none": ""},
            "default_prompt_name": "passage",
            "similarity_fn_name": "cosine",
        },
    }
    directory = write(tmp_path, files)
    write_tensors(directory / "2_Dense/model.safetensors", {"linear.weight": [8, 96]})
    card = read_card(directory, "org/name")
    assert card.pooling == ("cls", "max", "mean")
    assert card.modules == (DenseModule("2_Dense", 96, 8, bias=True, activation="tanh"),)
    assert (card.dimensions, card.max_tokens, card.lowercase, card.normalize) == (
        8,
        256,
        True,
        True,
    )
    assert (card.prompts, card.default_prompt) == ({"query": "q: ", "passage": "p: "}, "passage")


def test_sentence_transformers_6(tmp_path: Path) -> None:
    files: Files = {
        "modules.json": modules(
            ("", "sentence_transformers.base.modules.transformer.Transformer"),
            ("1_Pooling", "sentence_transformers.sentence_transformer.modules.pooling.Pooling"),
            ("2_Normalize", "sentence_transformers.base.modules.normalize.Normalize"),
        ),
        "1_Pooling/config.json": {
            "embedding_dimension": 32,
            "pooling_mode": ["lasttoken", "cls"],
            "include_prompt": False,
        },
        "sentence_bert_config.json": {"transformer_task": "feature-extraction"},
        "tokenizer_config.json": {"model_max_length": 128},
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": {"query": None},
        },
    }
    card = read_card(write(tmp_path, files), "org/name")
    assert (card.pooling, card.pool_prompt, card.dimensions) == (("lasttoken", "cls"), False, 64)
    assert (card.max_tokens, card.prompts, card.normalize) == (128, {}, True)


def test_encoder_in_a_separate_folder(tmp_path: Path) -> None:
    """Folders such as 0_BERT were written by sentence-transformers 0 and 1."""
    files: Files = {
        "modules.json": modules(
            ("0_BERT", "sentence_transformers.models.Transformer"),
            ("1_Pooling", "sentence_transformers.models.Pooling"),
        ),
        "1_Pooling/config.json": POOLING,
        "0_BERT/sentence_bert_config.json": {"max_seq_length": 128},
        "0_BERT/config.json": CONFIG,
        "0_BERT/tokenizer.json": {},
        "config.json": None,
        "tokenizer.json": None,
    }
    directory = write(tmp_path, files)
    shutil.move(directory / "model.safetensors", directory / "0_BERT/model.safetensors")
    card = read_card(directory, "org/name")
    assert (card.encoder_folder, card.max_tokens) == ("0_BERT", 128)


@pytest.mark.parametrize(
    ("family", "sentence", "tokenizer", "expected"),
    [
        ("bert", 600, 128, 512),
        ("bert", None, 10**30, 512),
        ("bert", None, None, 512),
        ("roberta", None, 1e30, 510),
        ("mpnet", 512, 512, 510),
        ("xlm-roberta", 100, 512, 100),
    ],
)
def test_longest_text(
    tmp_path: Path, family: str, sentence: int | None, tokenizer: float | None, expected: int
) -> None:
    files: Files = {
        "config.json": CONFIG | {"model_type": family, "pad_token_id": 1},
        "sentence_bert_config.json": {"max_seq_length": sentence},
        "tokenizer_config.json": {"model_max_length": tokenizer},
    }
    assert read_card(write(tmp_path, files), "org/name").max_tokens == expected


def labelled(architecture: str, labels: list[str], **more: object) -> Files:
    names = {str(number): label for number, label in enumerate(labels)}
    return {"config.json": CONFIG | {"architectures": [architecture], "id2label": names} | more}


@pytest.mark.parametrize(
    ("labels", "problem", "tasks", "positive"),
    [
        (["LABEL_0"], None, ("score",), 0),
        (["toxic"], None, ("classify", "score"), 0),
        (["score"], "regression", ("score",), 0),
        (["contradiction", "neutral", "entailment"], None, ("classify", "score"), 2),
        (["no", "yes"], "single_label_classification", ("classify", "score"), 1),
        (["relevant", "irrelevant"], None, ("classify", "score"), 0),
        (["sport", "law", "love"], "multi_label_classification", ("classify",), 0),
        (["LABEL_0", "LABEL_1"], None, ("classify", "score"), 1),
    ],
)
def test_sequence_labels(
    tmp_path: Path, labels: list[str], problem: str | None, tasks: tuple[str, ...], positive: int
) -> None:
    files = labelled("BertForSequenceClassification", labels, problem_type=problem)
    card = read_card(write(tmp_path, files), "org/name")
    assert (card.kind, card.tasks, card.positive) == ("sequence_labels", tasks, positive)
    assert card.classes == tuple(labels)
    assert card.labels == (card.classes if "classify" in tasks else ())
    assert card.scoring == ("classifier" if "score" in tasks else "")


def test_labels_without_names_are_numbered(tmp_path: Path) -> None:
    config = CONFIG | {"architectures": ["BertForSequenceClassification"], "num_labels": 3}
    assert read_card(write(tmp_path, {"config.json": config}), "m").classes == (
        "LABEL_0",
        "LABEL_1",
        "LABEL_2",
    )


@pytest.mark.parametrize("place", ["version 6", "version 4", "version 3"])
def test_cross_encoders_activation(tmp_path: Path, place: str) -> None:
    path = "torch.nn.modules.activation.Sigmoid"
    more: Files = {
        "version 4": {"sentence_transformers": {"activation_fn": path}},
        "version 3": {"sbert_ce_default_activation_function": path},
    }
    files = labelled("BertForSequenceClassification", ["LABEL_0"], **dict(more.get(place, {})))  # type: ignore[call-overload]
    if place == "version 6":
        files["config_sentence_transformers.json"] = {
            "model_type": "CrossEncoder",
            "activation_fn": path,
        }
        files["modules.json"] = modules(
            ("", "sentence_transformers.base.modules.transformer.Transformer")
        )
    card = read_card(write(tmp_path, files), "org/name")
    assert (card.kind, card.score_activation) == ("sequence_labels", "sigmoid")


def test_token_labels_are_named_without_their_positions(tmp_path: Path) -> None:
    files = labelled("BertForTokenClassification", ["O", "B-PER", "I-PER", "I-LOC", "DATE"])
    card = read_card(write(tmp_path, files), "org/name")
    assert (card.kind, card.tasks, card.labels) == (
        "token_labels",
        ("entities",),
        ("PER", "LOC", "DATE"),
    )
    assert len(card.classes) == 5


def test_late_interaction_of_version_6(tmp_path: Path) -> None:
    files: Files = {
        "modules.json": modules(
            ("", "sentence_transformers.base.modules.transformer.Transformer"),
            ("1_Dense", "sentence_transformers.base.modules.dense.Dense"),
            ("2_Mask",
            "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"),
            ("3_Normalize", "sentence_transformers.base.modules.normalize.Normalize"),
        ),
        "1_Dense/config.json": {
            "in_features": 32, "out_features": 8, "bias": False,
            "module_input_name": "token_embeddings",
            "activation_function": "torch.nn.modules.linear.Identity",
        },
        "2_Mask/config.json": {"skiplist_words": ["!", "?"],
        "skiplist_tasks": ["query", "document"]},
        "sentence_bert_config.json": {"document_length": 300,
        "query_expansion": {"strategy": "min", "length": 32, "attend": True}},
        "config_sentence_transformers.json": {"model_type": "MultiVectorEncoder",
        "similarity_fn_name": "meanmaxsim"},
    }  # fmt: skip
    directory = write(tmp_path, files)
    write_tensors(directory / "1_Dense/model.safetensors", {"linear.weight": [8, 32]})
    card = read_card(directory, "org/name")
    assert (card.kind, card.representations, card.multi_vector_dimensions) == (
        "multi_vector",
        ("multi_vector",),
        8,
    )
    assert (card.tasks, card.scoring, card.normalize) == (("encode", "score"), "mean_maxsim", True)
    assert card.late is not None
    assert card.late.expansion == Expansion(32, attend=True, fixed=False)
    assert (card.late.document_tokens, card.late.skip_words) == (300, ("!", "?"))
    assert card.late.skip_roles == ("query", "document")


def test_pylate(tmp_path: Path) -> None:
    files: Files = {
        "modules.json": modules(
            ("", "sentence_transformers.models.Transformer"),
            ("1_Dense", "pylate.models.Dense.Dense"),
        ),
        "1_Dense/config.json": {
            "in_features": 32,
            "out_features": 8,
            "activation_function": "torch.nn.modules.linear.Identity",
        },
        "config_sentence_transformers.json": {
            "query_prefix": "[Q] ",
            "document_prefix": "[D] ",
            "query_length": 24,
            "prompts": {},
        },
    }
    directory = write(tmp_path, files)
    write_tensors(directory / "1_Dense/model.safetensors", {"linear.weight": [8, 32]})
    card = read_card(directory, "org/name")
    assert (card.kind, card.prompts, card.normalize) == (
        "multi_vector",
        {"query": "[Q] ", "document": "[D] "},
        True,
    )
    assert card.late is not None
    assert card.late.expansion == Expansion(24, attend=False, fixed=True)
    assert "!" in card.late.skip_words
    assert card.late.markers == ("[Q] ", "[D] ")


def test_stanford_colbert(tmp_path: Path) -> None:
    files: Files = {
        "config.json": CONFIG | {"architectures": ["HF_ColBERT"]},
        "artifact.metadata": {
            "query_maxlen": 16,
            "doc_maxlen": 180,
            "attend_to_mask_tokens": False,
            "mask_punctuation": False,
        },
    }
    card = read_card(write(tmp_path, files, {"linear.weight": [128, 32]}), "org/name")
    assert (card.kind, card.multi_vector_dimensions) == ("multi_vector", 128)
    assert card.prompts == {"query": "[unused0] ", "document": "[unused1] "}
    assert card.late is not None
    assert (card.late.expansion, card.late.document_tokens, card.late.skip_words) == (
        Expansion(16, False, True),
        180,
        (),
    )


def test_remote_code_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text("raise SystemExit('this must not run')")
    files: Files = {"config.json": CONFIG | {"auto_map": {"AutoModel": "modeling.Model"}}}
    assert read_card(write(tmp_path, files), "org/name").kind == "dense"


def test_revision_follows_configuration_and_headers(tmp_path: Path) -> None:
    first = read_card(write(tmp_path, {}), "org/name").revision
    assert len(first) == 12
    assert read_card(write(tmp_path, {}), "org/other").revision == first
    assert read_card(write(tmp_path, {}, {"a": [2]}), "org/name").revision != first
    assert (
        read_card(
            write(tmp_path, {"sentence_bert_config.json": {"max_seq_length": 9}}), "org/name"
        ).revision
        != first
    )
    assert read_card(tmp_path, "org/name@main").revision == "main"


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    index = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    directory = write(tmp_path, {"model.safetensors.index.json": index})
    write_tensors(directory / "model-00001-of-00002.safetensors", {"a": [1]})
    with pytest.raises(
        ModelBroken,
        match=r"model\.safetensors\.index\.json: names model-00002-of-00002\.safetensors",
    ):
        read_card(directory, "org/name")
    write_tensors(directory / "model-00002-of-00002.safetensors", {"b": [1]})
    assert read_card(directory, "org/name").kind == "dense"


SENTENCE: Files = {"modules.json": old("Transformer", "Pooling"), "1_Pooling/config.json": POOLING}
DENSE: Files = {
    "modules.json": old("Transformer", "Pooling", "Dense"),
    "1_Pooling/config.json": POOLING,
}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": None}, r"config\.json: missing"),
        ({"config.json": "{"}, r"config\.json: cannot be read as JSON"),
        ({"config.json": "[]"}, r"config\.json: must hold a JSON object"),
        ({"config.json": {"hidden_size": 32}}, r"config\.json: `model_type` is missing"),
        (
            {"config.json": CONFIG | {"hidden_size": "32"}},
            r"config\.json: `hidden_size` must be a whole number",
        ),
        (
            {"config.json": {"model_type": "bert", "max_position_embeddings": 4}},
            r"config\.json: `hidden_size` is missing",
        ),
        (
            {"config.json": {"model_type": "bert", "hidden_size": 32}},
            r"config\.json: `max_position_embeddings` is missing",
        ),
        ({"tokenizer.json": None}, r"tokenizer\.json: missing"),
        ({"modules.json": {}}, r"modules\.json: must hold a list"),
        ({"modules.json": []}, r"modules\.json: names no Transformer"),
        ({"modules.json": old("Transformer")}, r"modules\.json: names no Pooling"),
        (
            {"modules.json": old("Transformer", "CNN")},
            r"modules\.json: `type` is 'sentence_transformers\.models\.CNN'",
        ),
        ({"modules.json": old("Transformer", "Pooling")}, r"1_Pooling/config\.json: missing"),
        (
            SENTENCE | {"1_Pooling/config.json": {"pooling_mode": "middle"}},
            r"1_Pooling/config\.json: `pooling_mode` is 'middle'",
        ),
        (
            SENTENCE | {"1_Pooling/config.json": {"pooling_mode_min_tokens": True}},
            r"1_Pooling/config\.json: `pooling_mode_min_tokens`",
        ),
        (
            SENTENCE | {"sentence_bert_config.json": {"max_seq_length": -1}},
            r"sentence_bert_config\.json: `max_seq_length`",
        ),
        (
            DENSE | {"2_Dense/config.json": {"in_features": 32}},
            r"2_Dense/config\.json: `out_features`",
        ),
        (
            DENSE | {"2_Dense/config.json": {"in_features": 31, "out_features": 8}},
            r"2_Dense/config\.json: `in_features` is 31",
        ),
        (
            DENSE
            | {
                "2_Dense/config.json": {
                    "in_features": 32,
                    "out_features": 8,
                    "activation_function": "os.system",
                }
            },
            r"2_Dense/config\.json: `activation_function` is 'os\.system'",
        ),
        (
            {"config_sentence_transformers.json": {"prompts": []}},
            r"config_sentence_transformers\.json: `prompts` must be an object",
        ),
        (
            {"config_sentence_transformers.json": {"default_prompt_name": "q"}},
            r"config_sentence_transformers\.json: `default_prompt_name` is 'q'",
        ),
        (
            {"config_sentence_transformers.json": {"model_type": "VideoEncoder"}},
            r"`model_type` is 'VideoEncoder', which is not served",
        ),
        (
            labelled("BertForSequenceClassification", ["a"], problem_type="guess"),
            r"config\.json: `problem_type` is 'guess'",
        ),
        (
            {
                "config.json": CONFIG
                | {
                    "architectures": ["BertForTokenClassification"],
                    "id2label": {"0": "O", "2": "B-PER"},
                }
            },
            r"config\.json: `id2label` must have the keys 0 to 1",
        ),
        (
            labelled("BertForSequenceClassification", ["a", "\x9b2Jb"]),
            r"`id2label` has the control character U\+009B in '\\x9b2Jb'",
        ),
        (
            {"config.json": CONFIG | {"model_type": "bert\x1b"}},
            r"`model_type` has the control character U\+001B",
        ),
        (
            SENTENCE | {"config_sentence_transformers.json": {"prompts": {"a\u202eb": "x"}}},
            r"`prompts` has the control character U\+202E",
        ),
        (
            {"config.json": CONFIG | {"model_type": "cost_wise_gemma"}},
            r"`model_type` is 'cost_wise_gemma', .* use BAAI/bge-reranker-v2-gemma",
        ),
        (
            {"config.json": CONFIG | {"model_type": "big_bird"}},
            r"`model_type` is 'big_bird', .* Longformer .* ModernBERT",
        ),
        (
            SENTENCE
            | {
                "config.json": CONFIG
                | {
                    "model_type": "longformer",
                    "architectures": ["LongformerForSequenceClassification"],
                }
            },
            r"config\.json: `architectures` names a classifier, .* write LongformerModel",
        ),
        (
            {"config.json": CONFIG | {"architectures": ["HF_ColBERT"]}},
            r"model\.safetensors: has no matrix `linear\.weight`",
        ),
    ],
)
def test_complaints_name_the_file_and_the_key(tmp_path: Path, files: Files, message: str) -> None:
    directory = write(tmp_path, files)
    write_tensors(directory / "2_Dense/model.safetensors", {"linear.weight": [8, 32]})
    with pytest.raises(ModelBroken, match=message):
        read_card(directory, "org/name")


def test_pickles_are_refused_with_advice(tmp_path: Path) -> None:
    directory = write(tmp_path, {})
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(
        ModelBroken,
        match=r"pytorch_model\.bin: torch checkpoints are pickles.*shoal models convert",
    ):
        read_card(directory, "org/name")


def test_missing_and_damaged_weights(tmp_path: Path) -> None:
    directory = write(tmp_path, {})
    (directory / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelBroken, match=r"model\.safetensors: truncated, or not safetensors"):
        read_card(directory, "org/name")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelBroken, match=r"model\.safetensors: missing"):
        read_card(directory, "org/name")
    with pytest.raises(ModelBroken, match="not a directory"):
        read_card(directory / "nowhere", "org/name")
