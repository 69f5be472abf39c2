"""config.json with values that differ from transformers' defaults: every key that changes a forward
is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.parity.checkpoints import Kind, random_model, write_checkpoint
from tests.parity.test_families import load, packed, random_ids, reference, worst

pytestmark = pytest.mark.filterwarnings("ignore")

LINEAR = {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 700.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 700.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope", "rope_theta": 700.0, "original_max_position_embeddings": 32,
    "short_factor": [1.1] * 10, "long_factor": [3.0] * 10,
}  # fmt: skip
BOTH = {"full_attention": YARN, "sliding_attention": LINEAR}

CONFIGURATIONS: list[tuple[Kind, dict[str, Any]]] = [
    ("albert", {"hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 1}),
    ("albert", {"embedding_size": 64, "num_hidden_groups": 1}),
    ("bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "type_vocab_size": 3}),
    ("roberta", {"pad_token_id": 3, "hidden_act": "relu", "max_position_embeddings": 132}),
    ("xlm-roberta", {"type_vocab_size": 2, "layer_norm_eps": 1e-3}),
    ("distilbert", {"activation": "relu"}),
    ("mpnet", {"hidden_act": "silu", "layer_norm_eps": 1e-3}),
    ("electra", {"embedding_size": 64, "hidden_act": "relu"}),
    (
        "deberta-v2",
        {
            "position_biased_input": True,
            "type_vocab_size": 2,
            "share_att_key": False,
            "position_buckets": -1,
        },
    ),
    ("deberta-v2", {"pos_att_type": ["c2p"], "norm_rel_ebd": "none", "max_relative_positions": 40}),
    ("deberta-v2", {"relative_attention": False, "position_biased_input": True}),
    ("modernbert", {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "norm_eps": 1e-3}),
    (
        "modernbert",
        {
            "hidden_activation": "silu",
            "local_attention": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    ("modernbert", {"rope_parameters": BOTH}),
    ("nomic_bert", {"hidden_act": "gelu", "rope_parameters": LINEAR, "layer_norm_eps": 1e-3}),
    ("eurobert", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    ("eurobert", {"hidden_act": "gelu", "rms_norm_eps": 1e-3, "num_key_value_heads": 1}),
    ("gte", {"rope_parameters": LINEAR, "hidden_act": "gelu_new", "type_vocab_size": 1}),
    (
        "jina_embeddings_v3",
        {"rope_parameters": LINEAR, "hidden_act": "relu", "layer_norm_eps": 1e-3},
    ),
    ("llama", {"rope_parameters": LONG}),
    ("llama", {"hidden_act": "relu", "rms_norm_eps": 1e-3, "attention_bias": False}),
    ("mistral", {"rope_parameters": LLAMA3, "hidden_act": "gelu"}),
    (
        "qwen2",
        {
            "rope_parameters": YARN,
            "layer_types": ["sliding_attention", "full_attention"],
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    ("qwen3", {"rope_parameters": LONG, "hidden_act": "gelu"}),
    ("gemma", {"rope_parameters": LINEAR, "attention_bias": True}),
    ("gemma2", {"rope_parameters": LLAMA3, "attention_bias": True, "attn_logit_softcapping": None}),
    (
        "gemma2",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "hidden_activation": "silu",
            "head_dim": 8,
        },
    ),
    ("gemma3_text", {"attention_bias": True, "hidden_activation": "silu", "rms_norm_eps": 1e-3}),
    (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 700.0,
                "partial_rotary_factor": 1.0,
            }
        },
    ),
    (
        "phi3",
        {
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-3,
            "sliding_window": None,
            "num_key_value_heads": 4,
        },
    ),
    ("bart", {"activation_function": "relu"}),
    ("t5", {"layer_norm_epsilon": 1e-3, "num_decoder_layers": 3}),
    ("mt5", {"feed_forward_proj": "gated-silu", "dense_act_fn": "silu"}),
    (
        "openai_privacy_filter",
        {
            "sliding_window": 9,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "rms_norm_eps": 1e-3,
        },
    ),
]


@pytest.mark.parametrize(("kind", "config"), CONFIGURATIONS)
def test_values_that_differ_from_the_defaults_are_read(
    kind: Kind, config: dict[str, Any], tmp_path: Path
) -> None:
    encoder = load(write_checkpoint(kind, tmp_path, config=config))
    ids = random_ids()
    assert worst(packed(encoder, ids), reference(random_model(kind, config=config), ids)) <= 1e-5


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_old_names_of_longrope_are_read_as_transformers_reads_them(
    name: str, tmp_path: Path
) -> None:
    """The reference is the model as loaded from the files, which renames the scaling."""
    path = write_checkpoint("phi3", tmp_path) / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_type"] = name
    path.write_text(json.dumps(config))
    model = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert model.config.rope_parameters["rope_type"] == "longrope"
    ids = random_ids()
    assert worst(packed(load(tmp_path), ids), reference(model, ids)) <= 1e-5
