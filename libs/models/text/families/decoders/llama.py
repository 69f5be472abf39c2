"""Llama and Mistral: pre-RMSNorm, rotary positions, grouped-query attention, SwiGLU. Causal, unless
config.json says otherwise.

Mistral has sliding-window attention in every layer. GritLM is a Mistral without windows and
bidirectional when it embeds. `llama_bidirec` is NVIDIA's bidirectional Llama
(llama-embed-nemotron), `bidir_mistral` its bidirectional Mistral (NV-Embed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libs.kinds.dense.gritlm import is_gritlm
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.rotary import read_rope
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import Rule

MODEL_TYPES = ("llama", "llama_bidirec", "mistral", "bidir_mistral")
PREFIXES = ("", "model.")

# Heads of transformers' own classes, and frequencies stored by older versions. A kind that uses a
# head names it in its head table.
HEADS: dict[str, Rule] = {
    "lm_head": None,
    "score": None,
    "layers.{}.self_attn.rotary_emb.inv_freq": None,
}

BLOCKS: dict[str, Rule] = {
    "embed_tokens": "embed.token",
    "layers.{}.self_attn.q_proj": ("layers.{}.attn.qkv", 0),
    "layers.{}.self_attn.k_proj": ("layers.{}.attn.qkv", 1),
    "layers.{}.self_attn.v_proj": ("layers.{}.attn.qkv", 2),
    "layers.{}.self_attn.o_proj": "layers.{}.attn.out",
    "layers.{}.mlp.gate_proj": ("layers.{}.ffn.up", 0),
    "layers.{}.mlp.up_proj": ("layers.{}.ffn.up", 1),
    "layers.{}.mlp.down_proj": "layers.{}.ffn.down",
    "layers.{}.input_layernorm": "layers.{}.attn_norm",
    "norm": "norm",
}

WEIGHTS: dict[str, Rule] = (
    HEADS | BLOCKS | {"layers.{}.post_attention_layernorm": "layers.{}.ffn_norm"}
)

_FULL, _SLIDING = "full_attention", "sliding_attention"
_BOTH_WAYS = ("llama_bidirec", "bidir_mistral")
# transformers' defaults for keys that a nested configuration omits.
_MISTRAL: dict[str, object] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
_MISTRALS_WINDOW = 4096  # default if config.json has no key for it; null: no window


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    if config.text("model_type") == "bidir_mistral":
        config = Config({**_MISTRAL, **config.values})
    kind, both_ways = config.text("model_type"), is_gritlm(config.values)
    causal = config.flag("is_causal", kind not in _BOTH_WAYS and not both_ways)
    window = None
    if kind == "mistral" and not both_ways and not config.is_null("sliding_window"):
        window = read_window(config, causal, _MISTRALS_WINDOW)
    bias, ffn_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    windows = (window,) * config.layers("num_hidden_layers")
    spec = decoder_spec(
        config, causal=causal, windows=windows, qkv_bias=bias, out_bias=bias, ffn_bias=ffn_bias
    )
    return PackedEncoder(spec, token_embedding(config))


def decoder_spec(
    config: Config,
    *,
    causal: bool,
    windows: Sequence[int | None],
    head_size: int | None = None,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    ffn_bias: bool = False,
    partial: bool = False,
) -> EncoderSpec:
    """Read the layers that most decoders share.

    Args:
        windows: The window of each layer.
        head_size: None for the rule of transformers' Llama.
        partial: The family reads `partial_rotary_factor`.
    """
    hidden, heads = config.size("hidden_size"), config.heads("num_attention_heads")
    if head_size is None:
        fitting = (
            None
            if config.has("head_dim")
            else hidden // config.head_count("num_attention_heads", hidden)
        )
        head_size = config.size("head_dim", fitting)
    rope = read_rope(config, head_size, partial=partial)
    return EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=head_size,
        ffn=config.size("intermediate_size"),
        layers=tuple(LayerSpec(rope=rope, window=window) for window in windows),
        norm="pre",
        norm_eps=config.number("rms_norm_eps", 1e-6),
        activation=config.activation("hidden_act") if config.has("hidden_act") else "silu",
        kv_heads=key_heads(config, heads),
        norm_kind="rms",
        qk_norm=qk_norm,
        gated=True,
        causal=causal,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        up_bias=ffn_bias,
        down_bias=ffn_bias,
    )


def token_embedding(config: Config) -> TokenEmbedding:
    """Build token embeddings without positions, which are rotary, and without a norm."""
    positions = config.size("max_position_embeddings")
    return TokenEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            config.size("hidden_size"),
            positions=positions,
            norm_eps=None,
            table=False,
        )
    )


def key_heads(config: Config, heads: int) -> int:
    """Return the number of key/value heads (grouped-query attention), a divisor of the number of
    attention heads.
    """
    shared = config.size("num_key_value_heads", heads)
    if heads % shared:
        raise config.unsupported(
            "num_key_value_heads", f"it does not divide the {heads} attention heads"
        )
    return shared


def read_window(config: Config, causal: bool, default: int | None = None) -> int:
    """Return the tokens visible on each side. In a causal model `sliding_window` includes the
    query's own token, as in transformers.
    """
    return config.size("sliding_window", default) - (1 if causal else 0)


def sliding_layers(config: Config, slides: Callable[[int], bool]) -> tuple[bool, ...]:
    """Return whether each layer has a window: by `layer_types`, else by its number."""
    layers = config.layers("num_hidden_layers")
    kinds = config.texts("layer_types")
    if not kinds:
        return tuple(slides(number) for number in range(layers))
    if len(kinds) != layers or not set(kinds) <= {_FULL, _SLIDING}:
        raise config.unsupported(
            "layer_types", f"{_FULL} or {_SLIDING} is needed for each of the {layers} layers"
        )
    return tuple(kind == _SLIDING for kind in kinds)
