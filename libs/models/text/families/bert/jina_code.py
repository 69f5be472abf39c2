"""jina-embeddings-v2-base-code and its variants: Jina BERT v2 with QK norm and another norm in each
layer.
"""

from __future__ import annotations

from torch import Tensor

from libs.models.layers.encoder import (
    Attention,
    AttentionType,
    Norm,
    PackedEncoder,
    PostNormLayer,
    Shared,
)
from libs.models.layers.spec import Config, EncoderSpec, LayerSpec
from libs.models.text.families.bert import jina
from libs.models.text.families.bert.jina import (
    COMMON,
    alibi,
    jina_embedding,
    jina_spec,
    norms_queries,
    uses_alibi,
)
from libs.models.weights import Rule

MODEL_TYPES = jina.MODEL_TYPES
PREFIXES = jina.PREFIXES

WEIGHTS: dict[str, Rule] = COMMON | {
    "encoder.layer.{}.attention.self.layer_norm_q": "layers.{}.attn.wide_q_norm",
    "encoder.layer.{}.attention.self.layer_norm_k": "layers.{}.attn.wide_k_norm",
    "encoder.layer.{}.layer_norm_1": "layers.{}.again_norm",
    "encoder.layer.{}.mlp.up_gated_layer": "layers.{}.ffn.up",
    "encoder.layer.{}.mlp.down_layer": "layers.{}.ffn.down",
    "encoder.layer.{}.layer_norm_2": "layers.{}.ffn_norm",
}


def claims(config: Config) -> bool:
    return uses_alibi(config) and norms_queries(config)


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    spec = jina_spec(config, gate_last=True)
    embed = jina_embedding(config, spec)
    return PackedEncoder(
        spec, embed, relative=alibi(spec, embed), attention=WideNormAttention, layer=TwiceAddedLayer
    )


class WideNormAttention(Attention):
    """Attention with QK norm over all heads at once, not per head."""

    def __init__(self, spec: EncoderSpec, layer: LayerSpec) -> None:
        super().__init__(spec, layer)
        self.wide_q_norm, self.wide_k_norm = Norm(spec), Norm(spec)

    def project(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, shared)
        q, k = (
            self.wide_q_norm.forward(q.flatten(1)).view_as(q),
            self.wide_k_norm.forward(k.flatten(1)).view_as(k),
        )
        return q, k, v


class TwiceAddedLayer(PostNormLayer):
    """BERT's layer, but the attention's input is added again to the normed sum, and the result is
    normed again.
    """

    def __init__(self, spec: EncoderSpec, layer: LayerSpec, attention: AttentionType) -> None:
        super().__init__(spec, layer, attention)
        self.again_norm = Norm(spec)

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        added = self.attn.out.add(mixed, x)
        normed = self.again_norm.forward(
            x + (added if self.attn_norm is None else self.attn_norm.forward(added))
        )
        return self.ffn_norm.forward(self.ffn.add(normed, normed))
