"""ModernBERT, Nomic BERT, Alibaba's "new" and Jina's XLM-RoBERTa in the form of their published
checkpoints, and their unsupported settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from torch import Tensor

from libs.catalog.detect import read_card
from libs.errors import ModelBroken
from libs.models import ScoreWork
from tests.parity.checkpoints import (
    SentenceFiles,
    random_model,
    write_checkpoint,
    write_sentence_files,
)
from tests.parity.reference_hub import HUB, write_hub
from tests.parity.test_families import load, packed, random_ids, reference, worst
from tests.parity.test_heads import TEXTS, assert_close, dense, scores
from tests.parity.test_heads import load as load_model

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = ("modernbert", "nomic_bert", "gte", "new", "jina_embeddings_v3")
IDS = random_ids((1, 9, 40, 128))
Values = dict[str, object]


def reconfigure(directory: Path, change: Callable[[Values], Values]) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return directory


def without(values: Values, *keys: str) -> Values:
    return {key: value for key, value in values.items() if key not in keys}


def encoder_of(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    return cast(transformers.PreTrainedModel, model.base_model)


# Spellings of published checkpoints that transformers 5 writes differently


def published_modernbert(values: Values) -> Values:
    """Use answerdotai/ModernBERT-base's settings; its position_embedding_type has no effect."""
    bases = {
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "global_attn_every_n_layers": 3,
    }
    return (
        without(values, "rope_parameters", "layer_types")
        | bases
        | {"position_embedding_type": "absolute"}
    )


def published_nomic(values: Values) -> Values:
    """Use nomic-ai/nomic-embed-text-v1.5's settings."""
    return {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "activation_function": "swiglu",
        "causal": False,
        "layer_norm_epsilon": values["layer_norm_eps"],
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "qkv_proj_bias": False,
        "n_embd": values["hidden_size"],
        "n_head": values["num_attention_heads"],
        "n_inner": values["intermediate_size"],
        "n_layer": values["num_hidden_layers"],
        "n_positions": 128,
        "parallel_block": False,
        "prenorm": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "max_trained_positions": 2048,
        "type_vocab_size": 2,
        "use_rms_norm": False,
        "vocab_size": values["vocab_size"],
    }


def published_gte(values: Values) -> Values:
    """Use Snowflake/snowflake-arctic-embed-m-v2.0's settings."""
    own = {
        "rope_theta": 160000,
        "rope_scaling": None,
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
    }
    return (
        without(values, "rope_parameters")
        | own
        | {"pack_qkv": True, "logn_attention_scale": False, "unpad_inputs": True}
    )


def published_flash(values: Values) -> Values:
    """Use the settings of jinaai/jina-colbert-v2's encoder."""
    own: Values = {
        "model_type": "xlm-roberta",
        "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0,
    }
    return (
        without(values, "rope_parameters")
        | own
        | {"auto_map": {"AutoConfig": "x--configuration_xlm_roberta.XLMRobertaFlashConfig"}}
    )


PUBLISHED = {
    "modernbert": published_modernbert,
    "nomic_bert": published_nomic,
    "gte": published_gte,
    "jina_embeddings_v3": published_flash,
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configs_equal_transformers(kind: str, tmp_path: Path) -> None:
    directory = reconfigure(write_checkpoint(kind, tmp_path, layers=4), PUBLISHED[kind])
    assert worst(packed(load(directory), IDS), reference(random_model(kind, layers=4), IDS)) <= 1e-5
    assert read_card(directory, "test/model").max_tokens == (
        126 if kind == "jina_embeddings_v3" else 128
    )


def test_ntk_of_new_equals_stretched_positions_of_gte(tmp_path: Path) -> None:
    """Linear scaling by factor^(2 / head size) with a base of factor x theta equals NTK, which
    transformers does not have.
    """
    scaled = {"rope_type": "linear", "factor": 8.0 ** (2 / 16), "rope_theta": 160000.0}
    ntk: Values = {
        "rope_theta": 20000,
        "rope_scaling": {"type": "ntk", "factor": 8.0},
        "position_embedding_type": "rope",
    }
    directory = reconfigure(
        write_checkpoint("new", tmp_path), lambda values: without(values, "rope_parameters") | ntk
    )
    model = random_model("gte", config={"rope_parameters": scaled})
    assert worst(packed(load(directory), IDS), reference(model, IDS)) <= 1e-5


@pytest.mark.parametrize("types", [0, 1, 2])
def test_new_supports_any_number_of_segments(types: int, tmp_path: Path) -> None:
    config = {"type_vocab_size": types}
    directory = write_checkpoint("new", tmp_path, config=config)
    assert (
        worst(packed(load(directory), IDS), reference(random_model("new", config=config), IDS))
        <= 1e-5
    )


# ModernBERT's choices

MODERN: dict[str, Mapping[str, object]] = {
    "biases": {"norm_bias": True, "attention_bias": True, "mlp_bias": True},
    "wide window": {"local_attention": 1000},
    "narrow window": {"local_attention": 2},
    "another activation": {"hidden_activation": "gelu_pytorch_tanh"},
    "an untied decoder": {"tie_word_embeddings": False},
    "a decoder without bias": {"decoder_bias": False},
    "a padded vocabulary": {"vocab_size": 512},
}


@pytest.mark.parametrize("name", MODERN)
def test_modernbert_variants_equal_transformers(name: str, tmp_path: Path) -> None:
    """They are masked language models with a decoder, which is dropped."""
    config = MODERN[name]
    directory = write_checkpoint("modernbert", tmp_path, head="masked_lm", layers=3, config=config)
    model = random_model("modernbert", head="masked_lm", layers=3, config=config)
    assert worst(packed(load(directory), IDS), reference(encoder_of(model), IDS)) <= 1e-5


def test_modernbert_layer_types_may_have_any_order(tmp_path: Path) -> None:
    config = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    directory = write_checkpoint("modernbert", tmp_path, layers=3, config=config)
    encoder, model = load(directory), random_model("modernbert", layers=3, config=config)
    assert worst(packed(encoder, IDS), reference(model, IDS)) <= 1e-5


@pytest.mark.parametrize(
    "config",
    [
        {"classifier_pooling": "mean"},
        {
            "classifier_pooling": "cls",
            "classifier_activation": "silu",
            "classifier_bias": True,
            "norm_bias": True,
            "norm_eps": 1e-3,
        },
    ],
)
def test_modernbert_rerankers_equal_transformers(
    config: Mapping[str, object], tmp_path: Path
) -> None:
    write_checkpoint("modernbert", tmp_path, head="sequence_classification", config=config)
    wanted = CrossEncoder(str(tmp_path), device="cpu", activation_fn=torch.nn.Identity()).predict(
        [(TEXTS[0], text) for text in TEXTS]
    )
    assert_close(scores(load_model(tmp_path), ScoreWork(TEXTS[0], TEXTS, scale="logit")), wanted)


# Properties of all families


@pytest.mark.parametrize("kind", KINDS)
def test_masked_language_models_are_encoders(kind: str, tmp_path: Path) -> None:
    directory = write_checkpoint(kind, tmp_path, head="masked_lm")
    model = random_model(kind, head="masked_lm")
    assert worst(packed(load(directory), IDS), reference(encoder_of(model), IDS)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_half_precision_checkpoints_are_loaded(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    write_checkpoint(kind, tmp_path, dtype=dtype, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = random_model(kind)
    for (
        parameter
    ) in model.parameters():  # Only these are stored: `model.to` would round its rotations too.
        parameter.data = parameter.data.to(dtype).float()
    assert worst(packed(load(tmp_path), IDS), reference(model, IDS)) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_padded_vocabulary_is_supported(kind: str, tmp_path: Path) -> None:
    """The table has more rows than the tokenizer has tokens."""
    directory = write_checkpoint(
        kind, tmp_path, config={"vocab_size": 512}, sentence=SentenceFiles()
    )
    alone = load_model(directory)
    assert alone.card.dimensions == 64
    vectors = [
        hidden.mean(0)
        for hidden in reference(
            random_model(kind, config={"vocab_size": 512}), tokenize_all(directory)
        )
    ]
    wanted = torch.stack(vectors)
    assert_close(dense(alone, TEXTS), (wanted / wanted.norm(dim=1, keepdim=True)).numpy())


def tokenize_all(directory: Path) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    return [
        np.array(tokenizer(text, truncation=True, max_length=64)["input_ids"], np.int32)
        for text in TEXTS
    ]


# Families that exist only as code on the hub, from text to answer


def write_tokenizer(directory: Path, like: str) -> None:
    for file in write_checkpoint(like, directory / "other").glob("tokenizer*"):
        file.rename(directory / file.name)


def test_jina_reranker_equals_the_reference(tmp_path: Path) -> None:
    """XLM-RoBERTa's classifier in flash-attn's layout, as in jina-reranker-v2."""
    family, config = HUB["xlmr-flash"], HUB["xlmr-flash"].config(64, 4, 2) | {"vocab_size": 400}
    state = write_hub(family, tmp_path, config)
    add_tensors(
        tmp_path,
        {
            "classifier.dense.weight": torch.randn(64, 64) * 0.2,
            "classifier.dense.bias": torch.randn(64),
            "classifier.out_proj.weight": torch.randn(1, 64),
            "classifier.out_proj.bias": torch.randn(1),
        },
    )
    write_tokenizer(tmp_path, "xlm-roberta")
    model = load_model(tmp_path)
    assert model.card.max_tokens == 128
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    head = load_file(tmp_path / "model.safetensors")
    wanted = []
    for text in TEXTS:
        ids = torch.tensor(tokenizer(TEXTS[0], text, truncation=True, max_length=128)["input_ids"])
        first = family.forward(state, config, ids, torch.zeros_like(ids))[0]
        inner = (head["classifier.dense.weight"] @ first + head["classifier.dense.bias"]).tanh()
        wanted.append(
            (head["classifier.out_proj.weight"] @ inner + head["classifier.out_proj.bias"]).item()
        )
    assert_close(
        scores(model, ScoreWork(TEXTS[0], TEXTS, scale="logit")), np.array(wanted, np.float32)
    )


@pytest.mark.parametrize("name", ["jina", "jina-code", "nomic-moe"])
def test_embeddings_equal_the_reference(name: str, tmp_path: Path) -> None:
    family, config = HUB[name], HUB[name].config(64, 4, 2) | {"vocab_size": 400}
    state = write_hub(family, tmp_path, config)
    write_tokenizer(tmp_path, "bert")
    write_sentence_files(tmp_path, SentenceFiles(normalize=False), hidden=64)
    rows = [torch.from_numpy(ids).long() for ids in tokenize_all(tmp_path)]
    wanted = torch.stack(
        [family.forward(state, config, ids, torch.zeros_like(ids)).mean(0) for ids in rows]
    )
    model = load_model(tmp_path)
    assert (model.card.dimensions, model.card.max_tokens) == (64, 64)
    assert_close(dense(model, TEXTS), wanted.numpy())


def add_tensors(directory: Path, more: Mapping[str, Tensor]) -> None:
    path = directory / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in load_file(path).items()} | dict(more), path)


# Limits


def test_limits_of_published_configs_are_read(tmp_path: Path) -> None:
    directory = reconfigure(write_checkpoint("nomic_bert", tmp_path), published_nomic)
    (directory / "tokenizer_config.json").unlink()
    changes: list[tuple[Values, int]] = [
        ({"n_positions": 8192}, 8192),
        ({"n_positions": 8192, "rotary_scaling_factor": 2}, 2048),
        ({"n_positions": 8192, "model_max_length": 512}, 512),
    ]
    for change, limit in changes:
        reconfigure(
            directory,
            lambda values, change=change: without(values, "rotary_scaling_factor") | change,  # type: ignore[misc]
        )
        card = read_card(directory, "test/model")
        assert (card.max_tokens, card.dimensions) == (limit, 64)
        assert load(directory).max_positions >= limit


# Refusals

REFUSED: list[tuple[str, Values, str]] = [
    ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
    ("modernbert", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    ("modernbert", {"norm_bias": "no"}, "norm_bias"),
    ("modernbert", {"hidden_activation": "quick"}, "hidden_activation"),
    ("nomic_bert", {"activation_function": "glu"}, "activation_function"),
    ("nomic_bert", {"prenorm": True}, "prenorm"),
    ("nomic_bert", {"rotary_emb_interleaved": True}, "rotary_emb_interleaved"),
    ("nomic_bert", {"rotary_emb_fraction": 0.0}, "rotary"),
    ("new", {"position_embedding_type": "absolute"}, "position_embedding_type"),
    ("new", {"layer_norm_type": "rms_norm"}, "layer_norm_type"),
    ("new", {"pack_qkv": False}, "pack_qkv"),
    ("new", {"logn_attention_scale": True}, "logn_attention_scale"),
    (
        "bert",
        {"position_embedding_type": "alibi", "feed_forward_type": "original"},
        "feed_forward_type",
    ),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    (
        "xlm-roberta",
        {"use_flash_attn": True, "position_embedding_type": "alibi"},
        "position_embedding_type",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "key"), REFUSED)
def test_refusals_name_the_key(kind: str, changes: Values, key: str, tmp_path: Path) -> None:
    directory = write_checkpoint(kind, tmp_path)
    if kind == "nomic_bert":
        reconfigure(directory, published_nomic)
    reconfigure(directory, lambda values: values | changes)
    with pytest.raises(ModelBroken) as caught:
        load(directory)
    assert key in str(caught.value)


def test_unknown_pooling_of_a_classifier_is_refused(tmp_path: Path) -> None:
    write_checkpoint("modernbert", tmp_path, head="sequence_classification")
    reconfigure(tmp_path, lambda values: values | {"classifier_pooling": "max"})
    with pytest.raises(ModelBroken, match="classifier_pooling"):
        load_model(tmp_path)
