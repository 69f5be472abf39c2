"""nomic-embed-text-v2-moe (arXiv 2502.07972): Nomic BERT with biases, ungated GELU, and a mixture
of experts in every other layer.
"""

from __future__ import annotations

from dataclasses import replace

from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config
from libs.models.text.families.rotary import nomic_bert
from libs.models.text.families.rotary.nomic_bert import COMMON, nomic_embedding, nomic_spec
from libs.models.weights import Rule

MODEL_TYPES = nomic_bert.MODEL_TYPES
PREFIXES = nomic_bert.PREFIXES

WEIGHTS: dict[str, Rule] = COMMON | {
    "encoder.layers.{}.mlp.fc1": "layers.{}.ffn.up",
    "encoder.layers.{}.mlp.router.layer": "layers.{}.ffn.router",
    "encoder.layers.{}.mlp.experts.mlp": "layers.{}.ffn.weights",
    "encoder.layers.{}.mlp.experts": "layers.{}.ffn",
}


def claims(config: Config) -> bool:
    return config.integer("num_experts", 0) > 0


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    config.require("moe_normalize_expert_weights", False)
    spec = nomic_spec(config, config.activation("activation_function"), gated=False)
    experts, every = config.size("num_experts"), config.size("moe_every_n_layers")
    layers = tuple(
        replace(layer, experts=experts) if i % every == 1 else layer
        for i, layer in enumerate(spec.layers)
    )
    spec = replace(spec, layers=layers, experts_used=config.size("moe_top_k"))
    return PackedEncoder(spec, nomic_embedding(config, spec))
