"""Rotary positions of config.json against transformers: frequencies equal to the last bit, in both
spellings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from libs.errors import ModelBroken
from libs.models.layers.rotary import read_rope
from libs.models.layers.spec import Config
from tests.parity.checkpoints import random_model, write_checkpoint
from tests.parity.test_families import load, packed, random_ids, reference, worst

# transformers warns of odd combinations, which these tests use.
pytestmark = pytest.mark.filterwarnings("ignore")

SCALINGS: dict[str, Mapping[str, object]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn, uneven": {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 100,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn, own factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.5,
    },
    "yarn, two scales": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
    },
    "partial": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("base", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers(name: str, base: float) -> None:
    size = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "rope_theta": base,
    }
    settings = transformers.AutoConfig.for_model("llama", **size, rope_scaling=dict(SCALINGS[name]))
    frequencies, factor = ROPE_INIT_FUNCTIONS[str(SCALINGS[name]["rope_type"])](settings)
    old = read_rope(Config(size | {"rope_scaling": SCALINGS[name]}), 64, partial=True)
    new = read_rope(Config(settings.to_dict()), 64, partial=True)
    assert old == new
    assert torch.equal(torch.tensor(old.frequencies), frequencies)
    assert old.factor == factor


def test_layer_types_have_separate_scalings() -> None:
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    config = Config({"rope_parameters": parameters, "rope_theta": 7.0})
    assert read_rope(config, 4, kind="full_attention").frequencies == pytest.approx(
        (0.5, 0.5 / 500**0.5)
    )
    assert read_rope(config, 4, kind="sliding_attention", theta=3.0).frequencies == pytest.approx(
        (1.0, 0.1)
    )


def test_scaling_of_other_layers_is_ignored() -> None:
    config = Config({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 100.0})
    assert read_rope(config, 4).frequencies == pytest.approx((0.5, 0.05))
    assert read_rope(config, 4, scaled=False).frequencies == pytest.approx((1.0, 0.1))
    assert read_rope(config, 4, scaled=False, theta=10_000.0).frequencies == pytest.approx(
        (1.0, 0.01)
    )


def test_ntk_equals_the_published_formulas() -> None:
    """Pair i in kexue.fm/archives/9706, from 1, is slowed by factor^(2i / d); mixed, by
    factor^((2i / d)^b)."""
    config = Config({"rope_theta": 100.0, "rope_scaling": {"type": "ntk", "factor": 8.0}})
    plain = [100.0 ** (-2 * i / 16) for i in range(8)]
    wanted = [value * 8.0 ** (-2 * (i + 1) / 16) for i, value in enumerate(plain)]
    assert read_rope(config, 16).frequencies == pytest.approx(wanted, rel=1e-6)
    mixed = Config(
        {"rope_theta": 100.0, "rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.7}}
    )
    wanted = [value * 8.0 ** -(((i + 1) / 8) ** 0.7) for i, value in enumerate(plain)]
    assert read_rope(mixed, 16).frequencies == pytest.approx(wanted, rel=1e-6)
    assert read_rope(
        Config({"rope_theta": 100.0, "rope_scaling": {"type": "ntk", "factor": 1.0}}), 16
    ).frequencies == pytest.approx(plain)


@pytest.mark.parametrize(
    ("values", "size", "named"),
    [
        (
            {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
            64,
            "rope_scaling.rope_type is 'spiral'",
        ),
        (
            {"max_position_embeddings": 9, "rope_scaling": {"rope_type": "longrope"}},
            64,
            "rope_scaling.short_factor is missing",
        ),
        (
            {
                "max_position_embeddings": 9,
                "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]},
            },
            64,
            "rope_scaling.short_factor is [1.0]: a list of 32 numbers is needed",
        ),
        ({"rope_scaling": {"type": "linear"}}, 64, "rope_scaling.factor is missing"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
            64,
            "rope_parameters.factor is '2'",
        ),
        ({"rope_parameters": [1]}, 64, "rope_parameters is [1]"),
        ({}, 11, "even"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, 6, "even"),
    ],
)
def test_refusals_name_the_key(values: Mapping[str, object], size: int, named: str) -> None:
    with pytest.raises(ModelBroken) as caught:
        read_rope(Config(values), size, partial=True)
    assert named in str(caught.value)


def test_scaled_family_of_whole_heads_refuses_a_partial_rotation() -> None:
    config = Config(
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5}
    )
    with pytest.raises(ModelBroken, match=r"partial_rotary_factor is 0\.5"):
        read_rope(config, 64)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gemma", "eurobert"])
def test_families_of_whole_heads_ignore_partial_rotation(kind: str, tmp_path: Path) -> None:
    config = {"partial_rotary_factor": 0.5}
    ids = random_ids((1, 20, 128))
    encoder = load(write_checkpoint(kind, tmp_path, config=config))
    assert json.loads((tmp_path / "config.json").read_text())["partial_rotary_factor"] == 0.5
    assert worst(packed(encoder, ids), reference(random_model(kind, config=config), ids)) <= 1e-5


@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3", "yarn"])
@pytest.mark.parametrize("kind", ["gte", "nomic_bert", "jina_embeddings_v3"])
def test_scaled_encoders_equal_transformers(kind: str, name: str, tmp_path: Path) -> None:
    config = {"rope_parameters": {"rope_theta": 5000.0, **SCALINGS[name]}}
    ids = random_ids((1, 20, 128))
    encoder = load(write_checkpoint(kind, tmp_path, config=config))
    assert worst(packed(encoder, ids), reference(random_model(kind, config=config), ids)) <= 1e-5
