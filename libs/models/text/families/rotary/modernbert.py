"""ModernBERT (arXiv 2412.13663): pre-norm without biases, rotary positions, and sliding-window
attention in most layers.
"""

from __future__ import annotations

from dataclasses import replace

from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.rotary import read_rope
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import Rule

MODEL_TYPES = ("modernbert",)
PREFIXES = ("", "model.")

WEIGHTS: dict[str, Rule] = {
    "embeddings.tok_embeddings": "embed.token",
    "embeddings.norm": "embed.norm",
    "layers.{}.attn_norm": "layers.{}.attn_norm",
    "layers.{}.attn.Wqkv": "layers.{}.attn.qkv",
    "layers.{}.attn.Wo": "layers.{}.attn.out",
    "layers.{}.mlp_norm": "layers.{}.ffn_norm",
    "layers.{}.mlp.Wi": "layers.{}.ffn.up",
    "layers.{}.mlp.Wo": "layers.{}.ffn.down",
    "final_norm": "norm",
    "head.dense": None,
    "head.norm": None,
    "classifier": None,
    "decoder": None,
}

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    hidden = config.size("hidden_size")
    heads = config.head_count("num_attention_heads", hidden)
    head_size = hidden // heads
    kinds = {
        _GLOBAL: LayerSpec(
            read_rope(
                config, head_size, theta=config.number("global_rope_theta", 160_000.0), kind=_GLOBAL
            )
        ),
        _LOCAL: LayerSpec(
            read_rope(
                config, head_size, theta=config.number("local_rope_theta", 10_000.0), kind=_LOCAL
            ),
            window=config.size("local_attention", 128) // 2,
        ),
    }
    layers = [kinds[name] for name in _layer_types(config)]
    spec = EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=head_size,
        ffn=config.size("intermediate_size"),
        layers=(_without_norm(layers[0]), *layers[1:]),
        norm="pre",
        norm_eps=config.number("norm_eps", 1e-5),
        norm_bias=config.flag("norm_bias", False),
        activation=config.activation("hidden_activation"),
        gated=True,
        qkv_bias=config.flag("attention_bias", False),
        out_bias=config.flag("attention_bias", False),
        up_bias=config.flag("mlp_bias", False),
        down_bias=config.flag("mlp_bias", False),
    )
    embed = TokenEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            hidden,
            positions=config.size("max_position_embeddings"),
            norm_eps=spec.norm_eps,
            norm_bias=spec.norm_bias,
            table=False,
        )
    )
    return PackedEncoder(spec, embed)


def _layer_types(config: Config) -> tuple[str, ...]:
    """Return the kind of each layer: by `layer_types` or, before transformers 5, every n-th is
    global."""
    count, every = config.layers("num_hidden_layers"), config.size("global_attn_every_n_layers", 3)
    names = config.texts("layer_types") or tuple(
        _LOCAL if number % every else _GLOBAL for number in range(count)
    )
    if len(names) != count or not {_GLOBAL, _LOCAL}.issuperset(names):
        raise config.unsupported("layer_types", f"{count} times {_GLOBAL} or {_LOCAL} is needed")
    return names


def _without_norm(layer: LayerSpec) -> LayerSpec:
    """Return the first layer without its attention norm, because the embedding layer ends with a
    norm."""
    return replace(layer, attention_norm=False)
