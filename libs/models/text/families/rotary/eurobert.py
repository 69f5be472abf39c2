"""EuroBERT (arXiv 2503.05500): Llama's layers with bidirectional attention, as in
jina-embeddings-v5-text-nano.
"""

from __future__ import annotations

from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.rotary import read_rope
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.weights import Rule

MODEL_TYPES = ("eurobert", "jina_embeddings_v5")
PREFIXES = ("", "model.")

WEIGHTS: dict[str, Rule] = {
    "embed_tokens": "embed.token",
    "layers.{}.input_layernorm": "layers.{}.attn_norm",
    "layers.{}.self_attn.q_proj": ("layers.{}.attn.qkv", 0),
    "layers.{}.self_attn.k_proj": ("layers.{}.attn.qkv", 1),
    "layers.{}.self_attn.v_proj": ("layers.{}.attn.qkv", 2),
    "layers.{}.self_attn.o_proj": "layers.{}.attn.out",
    "layers.{}.post_attention_layernorm": "layers.{}.ffn_norm",
    "layers.{}.mlp.gate_proj": ("layers.{}.ffn.up", 0),
    "layers.{}.mlp.up_proj": ("layers.{}.ffn.up", 1),
    "layers.{}.mlp.down_proj": "layers.{}.ffn.down",
    "norm": "norm",
    "lm_head": None,
    "classifier": None,
    "dense": None,
}


def claims(config: Config) -> bool:
    """Return whether it is not a Qwen3. Only the config.json of jina-embeddings-v5-text-nano, not
    that of -small, sets is_decoder to false.
    """
    return config.text("model_type") == "eurobert" or not config.flag("is_decoder", True)


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    hidden, heads = config.size("hidden_size"), config.heads("num_attention_heads")
    size = config.size("head_dim", hidden // heads)
    spec = EncoderSpec(
        hidden=hidden,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", heads),
        head_size=size,
        ffn=config.size("intermediate_size"),
        layers=(LayerSpec(rope=read_rope(config, size)),) * config.layers("num_hidden_layers"),
        norm="pre",
        norm_kind="rms",
        norm_eps=config.number("rms_norm_eps", 1e-5),
        activation=config.activation("hidden_act"),
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
            norm_eps=None,
            table=False,
        )
    )
    return PackedEncoder(spec, embed)
