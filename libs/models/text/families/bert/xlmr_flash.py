"""Jina's XLM-RoBERTa with flash-attn's tensor names: jina-reranker-v2 (learned positions),
jina-colbert-v2 (rotary ones), jina-embeddings-v3 (rotary ones, and LoRA adapters for its tasks:
`libs/models/runtime/loaded/tasks.py`).

It shares XLM-RoBERTa's model_type; transformers calls its rotary variant jina_embeddings_v3.
"""

from __future__ import annotations

from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.rotary import read_rope
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec, Rope
from libs.models.weights import Rule

MODEL_TYPES = ("xlm-roberta", "jina_embeddings_v3")
PREFIXES = ("", "roberta.")

WEIGHTS: dict[str, Rule] = {
    "embeddings.word_embeddings": "embed.token",
    "embeddings.position_embeddings": "embed.position",
    "embeddings.token_type_embeddings": "embed.segment",
    "emb_ln": "embed.norm",
    "encoder.layers.{}.mixer.Wqkv": "layers.{}.attn.qkv",
    "encoder.layers.{}.mixer.out_proj": "layers.{}.attn.out",
    "encoder.layers.{}.norm1": "layers.{}.attn_norm",
    "encoder.layers.{}.mlp.fc1": "layers.{}.ffn.up",
    "encoder.layers.{}.mlp.fc2": "layers.{}.ffn.down",
    "encoder.layers.{}.norm2": "layers.{}.ffn_norm",
    "pooler.dense": None,
    "classifier": None,
    "classifier.dense": None,
    "classifier.out_proj": None,
    "lm_head.bias": None,
    "lm_head.decoder": None,
    "lm_head.dense": None,
    "lm_head.layer_norm": None,
    "qa_outputs": None,
}

MODULES: dict[str, Rule] = {
    "layers.{}.self_attn.q_proj": ("layers.{}.attn.qkv", 0),
    "layers.{}.self_attn.k_proj": ("layers.{}.attn.qkv", 1),
    "layers.{}.self_attn.v_proj": ("layers.{}.attn.qkv", 2),
    "layers.{}.self_attn.o_proj": "layers.{}.attn.out",
    "layers.{}.mlp.fc1": "layers.{}.ffn.up",
    "layers.{}.mlp.fc2": "layers.{}.ffn.down",
}

_TRANSFORMERS = "jina_embeddings_v3"


def claims(config: Config) -> bool:
    flash = config.has("use_flash_attn") or "XLMRobertaFlash" in config.part("auto_map").text(
        "AutoConfig", ""
    )
    return flash or config.text("model_type") == _TRANSFORMERS


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    config.require("rotary_emb_interleaved", False)
    config.require("rotary_emb_scale_base", None)
    hidden = config.size("hidden_size")
    heads = config.head_count("num_attention_heads", hidden)
    rope = _rope(config, hidden // heads)
    spec = EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=hidden // heads,
        ffn=config.size("intermediate_size"),
        layers=(LayerSpec(rope),) * config.layers("num_hidden_layers"),
        norm="post",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        activation=config.activation("hidden_act"),
    )
    embed = TokenEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            hidden,
            positions=config.size("max_position_embeddings"),
            norm_eps=spec.norm_eps,
            offset=config.integer("pad_token_id", 1) + 1 if rope is None else 0,
            segments=config.integer("type_vocab_size", 1),
            table=rope is None,
        )
    )
    return PackedEncoder(spec, embed)


def _rope(config: Config, size: int) -> Rope | None:
    """Return the rotation; None for learned positions."""
    if config.text("model_type") == _TRANSFORMERS:
        return read_rope(config, size, theta=20_000.0)
    kind = config.text("position_embedding_type", "absolute")
    if kind not in ("absolute", "rotary"):
        raise config.unsupported("position_embedding_type", "supported are absolute and rotary")
    if kind == "absolute":
        return None
    return read_rope(
        config,
        config.size("rotary_emb_dim", size),
        theta=config.number("rotary_emb_base", 10_000.0),
    )
