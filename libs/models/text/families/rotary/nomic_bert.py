"""Nomic BERT (arXiv 2402.01613), in nomic-embed-text-v1 and v1.5: BERT with rotary positions,
SwiGLU and no biases.

config.json has GPT-2's keys if Nomic wrote it and BERT's if transformers did; tensor names are the
same.
"""

from __future__ import annotations

from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.rotary import read_rope
from libs.models.layers.spec import Activation, Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import Rule

MODEL_TYPES = ("nomic_bert",)
PREFIXES = ("", "nomic_bert.", "bert.")

COMMON: dict[str, Rule] = {
    "embeddings.word_embeddings": "embed.token",
    "embeddings.token_type_embeddings": "embed.segment",
    "emb_ln": "embed.norm",
    "encoder.layers.{}.attn.Wqkv": "layers.{}.attn.qkv",
    "encoder.layers.{}.attn.out_proj": "layers.{}.attn.out",
    "encoder.layers.{}.norm1": "layers.{}.attn_norm",
    "encoder.layers.{}.mlp.fc2": "layers.{}.ffn.down",
    "encoder.layers.{}.norm2": "layers.{}.ffn_norm",
    "pooler.dense": None,
    "classifier": None,
    "cls.predictions.bias": None,
    "cls.predictions.decoder": None,
    "cls.predictions.transform.dense": None,
    "cls.predictions.transform.layer_norm": None,
}

WEIGHTS = COMMON | {
    "encoder.layers.{}.mlp.fc12": ("layers.{}.ffn.up", 0),  # the gate
    "encoder.layers.{}.mlp.fc11": ("layers.{}.ffn.up", 1),
}

MODULES: dict[str, Rule] = {
    "layers.{}.self_attn.q_proj": ("layers.{}.attn.qkv", 0),
    "layers.{}.self_attn.k_proj": ("layers.{}.attn.qkv", 1),
    "layers.{}.self_attn.v_proj": ("layers.{}.attn.qkv", 2),
    "layers.{}.self_attn.o_proj": "layers.{}.attn.out",
    "layers.{}.mlp.gate_proj": ("layers.{}.ffn.up", 0),
    "layers.{}.mlp.up_proj": ("layers.{}.ffn.up", 1),
    "layers.{}.mlp.down_proj": "layers.{}.ffn.down",
}

_GATED: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu"}


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    if not config.has("n_embd"):
        return _transformers(config)
    name = config.text("activation_function")
    if name not in _GATED:
        raise config.unsupported("activation_function", f"supported are {', '.join(_GATED)}")
    spec = nomic_spec(config, _GATED[name], gated=True)
    return PackedEncoder(spec, nomic_embedding(config, spec))


def nomic_spec(config: Config, activation: Activation, *, gated: bool) -> EncoderSpec:
    """Read the layers from Nomic's keys.

    Raises ModelBroken for settings that Nomic's code supports and no checkpoint uses.
    """
    for key in ("prenorm", "parallel_block", "causal", "use_rms_norm", "rotary_emb_interleaved"):
        config.require(key, False)
    config.require("rotary_emb_scale_base", None)
    hidden = config.size("n_embd")
    heads = config.head_count("n_head", hidden)
    turned = int(hidden // heads * config.positive("rotary_emb_fraction", 1.0, most=1.0))
    rope = read_rope(config, turned, theta=config.number("rotary_emb_base", 10_000.0))
    return EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=config.size("n_inner", 4 * hidden),
        layers=(LayerSpec(rope),) * config.layers("n_layer"),
        norm="post",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        activation=activation,
        gated=gated,
        qkv_bias=config.flag("qkv_proj_bias", True),
        out_bias=config.flag("qkv_proj_bias", True),
        up_bias=config.flag("mlp_fc1_bias", True),
        down_bias=config.flag("mlp_fc2_bias", True),
    )


def nomic_embedding(config: Config, spec: EncoderSpec) -> TokenEmbedding:
    return _embedding(config, spec, _positions(config))


def _positions(config: Config) -> int:
    """Return the length of the longest sequence. With `rotary_scaling_factor` it is the trained
    length, beyond which frequencies would depend on the length.
    """
    positions = config.size("n_positions")
    return (
        min(positions, config.size("max_trained_positions", 2048))
        if config.has("rotary_scaling_factor")
        else positions
    )


def _transformers(config: Config) -> PackedEncoder:
    hidden = config.size("hidden_size")
    heads = config.heads("num_attention_heads")
    head_size = config.size("head_dim", hidden // heads)
    spec = EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=head_size,
        ffn=config.size("intermediate_size"),
        layers=(LayerSpec(read_rope(config, head_size, theta=1000.0)),)
        * config.layers("num_hidden_layers"),
        norm="post",
        norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=config.activation("hidden_act"),
        gated=True,
        qkv_bias=False,
        out_bias=False,
        up_bias=False,
        down_bias=False,
    )
    return PackedEncoder(spec, _embedding(config, spec, config.size("max_position_embeddings")))


def _embedding(config: Config, spec: EncoderSpec, positions: int) -> TokenEmbedding:
    return TokenEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            spec.hidden,
            positions=positions,
            norm_eps=spec.norm_eps,
            segments=config.integer("type_vocab_size", 2),
            table=False,
        )
    )
