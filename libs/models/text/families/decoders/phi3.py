"""Phi-3 and Phi-4 (arXiv 2404.14219): Llama with fused projections, and LongRoPE if the context was
extended.

LongRoPE (arXiv 2402.13753) has two sets of frequencies: one for sequences that fit the original
context, one for longer ones.
"""

from __future__ import annotations

from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config
from libs.models.text.families.decoders.llama import (
    BLOCKS,
    HEADS,
    decoder_spec,
    read_window,
    token_embedding,
)
from libs.models.weights import Rule

MODEL_TYPES = ("phi3",)
PREFIXES = ("", "model.")

_SEPARATE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_SHARED = {stem: rule for stem, rule in BLOCKS.items() if not stem.endswith(_SEPARATE)}
WEIGHTS: dict[str, Rule] = HEADS | _SHARED | {
    "layers.{}.self_attn.qkv_proj": "layers.{}.attn.qkv",
    "layers.{}.mlp.gate_up_proj": "layers.{}.ffn.up",
    "layers.{}.post_attention_layernorm": "layers.{}.ffn_norm",
}  # fmt: skip

_OLD_NAMES = ("su", "yarn")
_NORM_EPS = 1e-5  # default if config.json has no key for it


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    config = Config({"rms_norm_eps": _NORM_EPS, **config.values, **_scalings(config)})
    window = read_window(config, causal=True) if config.has("sliding_window") else None
    windows = (window,) * config.layers("num_hidden_layers")
    return PackedEncoder(
        decoder_spec(config, causal=True, windows=windows, partial=True), token_embedding(config)
    )


def _scalings(config: Config) -> dict[str, object]:
    """Return the scalings of positions with the name that LongRoPE has today. The first files of
    Phi-3 call it `su` and `yarn`, as transformers reads them.
    """
    places = ("rope_scaling", "rope_parameters")
    return {place: _renamed(config.part(place)) for place in places if config.has(place)}


def _renamed(values: Config) -> dict[str, object]:
    old = [key for key in ("rope_type", "type") if values.values.get(key) in _OLD_NAMES]
    return {**values.values, **dict.fromkeys(old, "longrope")}
