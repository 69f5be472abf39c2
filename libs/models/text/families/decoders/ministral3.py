"""Ministral 3: Mistral with scaled rotary positions. Queries grow with their position beyond the
original context. Causal unless `is_causal` is false (Nemotron-3-Embed).
"""

from __future__ import annotations

from dataclasses import replace

from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, QueryGrowth
from libs.models.text.families.decoders import llama
from libs.models.text.families.decoders.llama import decoder_spec, read_window, token_embedding

MODEL_TYPES = ("ministral3",)
PREFIXES = llama.PREFIXES
WEIGHTS = llama.WEIGHTS

# transformers' defaults for keys that config.json lacks.
_DEFAULTS: dict[str, object] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
}
_ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    config = Config({**_DEFAULTS, **config.values})
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = Config({**config.values, "rope_parameters": _ROPE})
    causal = config.flag("is_causal", True)
    window = read_window(config, causal) if config.has("sliding_window") else None
    windows = (window,) * config.layers("num_hidden_layers")
    spec = replace(decoder_spec(config, causal=causal, windows=windows), growth=_growth(config))
    return PackedEncoder(spec, token_embedding(config))


def _growth(config: Config) -> QueryGrowth | None:
    rope = config.part("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    share = rope.number("llama_4_scaling_beta", 0.0)
    return QueryGrowth(share, rope.size("original_max_position_embeddings")) if share else None
