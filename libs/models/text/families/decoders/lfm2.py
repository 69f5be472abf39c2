"""LFM2: short convolutions in most layers, attention with normalised queries and keys in the
others.

It is causal. The checkpoint's code of LFM2.5's retrievers (`Lfm2BidirectionalModel`) has attention
to both sides and centred convolutions.
"""

from __future__ import annotations

from dataclasses import replace

from libs.models.layers.convolution import mixer
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, ConvolutionSpec, EncoderSpec, LayerSpec
from libs.models.text.families.decoders.llama import decoder_spec, token_embedding
from libs.models.weights import Rule

MODEL_TYPES = ("lfm2",)
PREFIXES = ("", "model.", "lfm2.")

WEIGHTS: dict[str, Rule] = {
    "lm_head": None,
    "embed_tokens": "embed.token",
    "layers.{}.operator_norm": "layers.{}.attn_norm",
    "layers.{}.ffn_norm": "layers.{}.ffn_norm",
    "layers.{}.self_attn.q_proj": ("layers.{}.attn.qkv", 0),
    "layers.{}.self_attn.k_proj": ("layers.{}.attn.qkv", 1),
    "layers.{}.self_attn.v_proj": ("layers.{}.attn.qkv", 2),
    "layers.{}.self_attn.out_proj": "layers.{}.attn.out",
    "layers.{}.self_attn.q_layernorm": "layers.{}.attn.q_norm",
    "layers.{}.self_attn.k_layernorm": "layers.{}.attn.k_norm",
    "layers.{}.conv.in_proj": "layers.{}.attn.inputs",
    "layers.{}.conv.conv": "layers.{}.attn.conv",
    "layers.{}.conv.out_proj": "layers.{}.attn.out",
    "layers.{}.feed_forward.w1": ("layers.{}.ffn.up", 0),
    "layers.{}.feed_forward.w3": ("layers.{}.ffn.up", 1),
    "layers.{}.feed_forward.w2": "layers.{}.ffn.down",
    "embedding_norm": "norm",
}

_FULL, _CONVOLUTION = "full_attention", "conv"
_BOTH_WAYS = "Lfm2Bidir"
_THETA, _EPS, _WIDTH = 1_000_000.0, 1e-5, 3  # defaults for keys that config.json lacks
_MAX_WIDTH = 64  # tokens


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    named = {key: value for key, value in config.values.items() if value is not None}
    config = Config({"rope_theta": _THETA, **named, "intermediate_size": _inner_size(config)})
    both_ways = any(name.startswith(_BOTH_WAYS) for name in config.texts("architectures"))
    spec = decoder_spec(
        config,
        causal=config.flag("is_causal", not both_ways),
        windows=(None,),
        qk_norm=True,
    )
    spec = replace(spec, norm_eps=config.positive("norm_eps", _EPS), activation="silu")
    spec = replace(spec, layers=_layers(config, spec, both_ways))
    return PackedEncoder(spec, token_embedding(config), attention=mixer)


def _layers(config: Config, spec: EncoderSpec, both_ways: bool) -> tuple[LayerSpec, ...]:
    """Read the layers by `layer_types`, else by the numbers of those with attention."""
    count, kinds = config.layers("num_hidden_layers"), config.texts("layer_types")
    if not kinds:
        numbers = config.values.get("full_attn_idxs", list(range(count)))
        if not isinstance(numbers, list):
            raise config.unsupported("full_attn_idxs", "a list of layers is needed")
        kinds = tuple(_FULL if number in numbers else _CONVOLUTION for number in range(count))
    if len(kinds) != count or not set(kinds) <= {_FULL, _CONVOLUTION}:
        raise config.unsupported(
            "layer_types", f"{_FULL} or {_CONVOLUTION} is needed for each of the {count} layers"
        )
    width = config.size("conv_L_cache", _WIDTH)
    if width > _MAX_WIDTH:
        raise config.unsupported("conv_L_cache", f"at most {_MAX_WIDTH} is served")
    after = width - 1 - width // 2 if both_ways else 0
    convolution = ConvolutionSpec(width, after, config.flag("conv_bias", False))
    full, short = spec.layers[0], LayerSpec(convolution=convolution)
    return tuple(full if kind == _FULL else short for kind in kinds)


def _inner_size(config: Config) -> int:
    """Return the width of the feed-forward: two thirds of the given one, rounded up."""
    size = config.size("block_ff_dim" if config.has("block_ff_dim") else "intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    factor = config.ratio("block_ffn_dim_multiplier", 1.0)
    multiple = config.size("block_multiple_of", 256)
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple
