"""Qwen3.5's text model: gated delta nets (`layers/delta.py`), and in every fourth layer attention
with an output gate.

RMSNorm adds 1 to its weights, and a quarter of each head is rotated. Attention is causal unless
`is_causal` is false; delta nets always are.
"""

from __future__ import annotations

from dataclasses import replace

from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.hybrid import mixer
from libs.models.layers.spec import Config, DeltaSpec, EncoderSpec, LayerSpec
from libs.models.text.families.decoders import llama
from libs.models.text.families.decoders.llama import decoder_spec, token_embedding
from libs.models.weights import Rule

MODEL_TYPES = ("qwen3_5_text",)
PREFIXES = ("", "model.", "language_model.", "model.language_model.")

_BLOCKS: dict[str, Rule] = llama.WEIGHTS | {
    "layers.{}.self_attn.q_norm": "layers.{}.attn.q_norm",
    "layers.{}.self_attn.k_norm": "layers.{}.attn.k_norm",
}
# An encoder does not need the layer that predicts a second token; transformers skips it too.
_PREDICTION = (
    "fc",
    "norm",
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    *(name for name in _BLOCKS if "layers" in name),
)

WEIGHTS: dict[str, Rule] = (
    _BLOCKS
    | {
        "layers.{}.linear_attn.in_proj_qkv": ("layers.{}.attn.inputs", 0),
        "layers.{}.linear_attn.in_proj_z": ("layers.{}.attn.inputs", 1),
        "layers.{}.linear_attn.in_proj_b": ("layers.{}.attn.inputs", 2),
        "layers.{}.linear_attn.in_proj_a": ("layers.{}.attn.inputs", 3),
        "layers.{}.linear_attn.conv1d": "layers.{}.attn.conv",
        "layers.{}.linear_attn": "layers.{}.attn",  # A_log and dt_bias
        "layers.{}.linear_attn.norm": "layers.{}.attn.norm",
        "layers.{}.linear_attn.out_proj": "layers.{}.attn.out",
    }
    | {f"mtp.{name}": None for name in _PREDICTION}
)

_FULL, _LINEAR = "full_attention", "linear_attention"
# Defaults for keys that config.json lacks.
_HEAD_SIZE = 256
_INTERVAL = 4  # every fourth layer has attention
_ROTATED = 0.25
# Keys of topk-embed. Its undocumented code also uses them to mask scores, read images and round
# frequencies.
_UNKNOWN = ("scoring_skip_ids", "image_token_budget")


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    for key in _UNKNOWN:
        if config.has(key):
            raise config.unsupported(
                key, "topk-embed's head and rules for documents are not served"
            )
    config.require("attn_output_gate", True)
    config = Config({"partial_rotary_factor": _ROTATED, **config.values})
    causal, bias, size = (
        config.flag("is_causal", True),
        config.flag("attention_bias", False),
        config.size("head_dim", _HEAD_SIZE),
    )
    spec = decoder_spec(
        config,
        causal=causal,
        windows=(None,),
        head_size=size,
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        partial=True,
    )
    spec = replace(spec, norm_shift=1.0, layers=_layers(config, spec))
    return PackedEncoder(spec, token_embedding(config), attention=mixer)


def _layers(config: Config, spec: EncoderSpec) -> tuple[LayerSpec, ...]:
    """Read the layers by `layer_types`, else by a layer's number."""
    count, kinds = config.layers("num_hidden_layers"), config.texts("layer_types")
    if not kinds:
        interval = config.size("full_attention_interval", _INTERVAL)
        kinds = tuple(_LINEAR if (number + 1) % interval else _FULL for number in range(count))
    if len(kinds) != count or not set(kinds) <= {_FULL, _LINEAR}:
        raise config.unsupported(
            "layer_types", f"{_FULL} or {_LINEAR} is needed for each of the {count} layers"
        )
    full, linear = spec.layers[0], LayerSpec(delta=_delta(config))
    return tuple(full if kind == _FULL else linear for kind in kinds)


def _delta(config: Config) -> DeltaSpec:
    keys, values = (
        config.heads("linear_num_key_heads", 16),
        config.heads("linear_num_value_heads", 32),
    )
    if values % keys:
        raise config.unsupported(
            "linear_num_value_heads", f"it is not a multiple of the {keys} key heads"
        )
    sizes = config.size("linear_key_head_dim", 128), config.size("linear_value_head_dim", 128)
    return DeltaSpec(keys, values, *sizes, config.size("linear_conv_kernel_dim", 4))
