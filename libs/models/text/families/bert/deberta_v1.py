"""DeBERTa v1: disentangled attention (arXiv 2006.03654) with a vector for each distance, projected
by each layer's own projections.

The checkpoint stores each head's queries, keys and values side by side. Only queries and values
have biases.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from libs.models.layers.encoder import PackedEncoder, Shared
from libs.models.layers.spec import Config, EncoderSpec, LayerSpec
from libs.models.text.families.bert import deberta
from libs.models.text.families.bert.deberta import (
    DebertaEncoder,
    DisentangledAttention,
    DistanceEmbedding,
    Distances,
)
from libs.models.weights import Rule

MODEL_TYPES = ("deberta",)
PREFIXES = deberta.PREFIXES

WEIGHTS: dict[str, Rule] = deberta.WEIGHTS | {
    "encoder.layer.{}.attention.self.in_proj": "layers.{}.attn.qkv",
    "encoder.layer.{}.attention.self": "layers.{}.attn",
    "encoder.layer.{}.attention.self.pos_proj": "layers.{}.attn.distance_key",
    "encoder.layer.{}.attention.self.pos_q_proj": "layers.{}.attn.distance_query",
}


class InterleavedAttention(DisentangledAttention):
    """Disentangled attention with one projection, in which the rows of a head's query, key and
    value are adjacent.
    """

    def __init__(
        self, spec: EncoderSpec, layer: LayerSpec, *, distances: Distances, kinds: tuple[str, ...]
    ) -> None:
        super().__init__(spec, layer, distances=distances, kinds=kinds, own=True, key_bias=False)
        size = spec.heads * spec.head_size
        self.q_bias: Tensor = nn.Parameter(torch.empty(size), requires_grad=False)
        self.v_bias: Tensor = nn.Parameter(torch.empty(size), requires_grad=False)

    def project(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Implement `Attention.project`."""
        fused = self.qkv.forward(x).view(-1, self.parts[0], 3, self.head_size)
        q, k, v = fused.unbind(2)
        own = self.parts[0], self.head_size
        return q + self.q_bias.view(own), k, v + self.v_bias.view(own)


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    if not config.flag("relative_attention", False):
        raise config.unsupported("relative_attention", "only true is supported")
    config.require("talking_head", False)
    kinds = deberta.distance_kinds(config)
    spec = deberta.deberta_spec(config, kinds, qkv_bias=False)
    distances = Distances.exact(deberta.farthest_distance(config))
    return DebertaEncoder(
        spec,
        deberta.deberta_embedding(config, spec),
        DistanceEmbedding(spec, distances, normed=False),
        partial(InterleavedAttention, distances=distances, kinds=kinds),
        None,
    )
