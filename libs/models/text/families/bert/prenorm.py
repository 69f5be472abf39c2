"""RoBERTa with pre-LayerNorm (roberta-prelayernorm, arXiv 1904.01038)."""

from __future__ import annotations

from dataclasses import replace

from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config
from libs.models.text.families.bert.bert import BLOCKS, EMBEDDINGS, HEADS, bert_embedding, bert_spec
from libs.models.weights import Rule

MODEL_TYPES = ("roberta-prelayernorm",)
PREFIXES = ("", "roberta_prelayernorm.")

NORMS: dict[str, Rule] = {
    "encoder.layer.{}.attention.LayerNorm": "layers.{}.attn_norm",
    "encoder.layer.{}.intermediate.LayerNorm": "layers.{}.ffn_norm",
    "LayerNorm": "norm",
}

WEIGHTS = HEADS | EMBEDDINGS | BLOCKS | NORMS


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    spec = replace(bert_spec(config), norm="pre")
    return PackedEncoder(spec, bert_embedding(config, spec))
