"""MPNet: BERT with a bias on the attention scores by distance, shared by all layers, and without segments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.worker.models.embeddings import Table, TokenEmbedding
from services.worker.models.encoder import PositionBias, TextEncoder
from services.worker.models.families.bert import bert_spec
from services.worker.models.spec import Config
from services.worker.models.weights import Rule

MODEL_TYPES = ("mpnet",)
PREFIXES = ("", "mpnet.")

WEIGHTS: dict[str, Rule] = {
    "embeddings.position_ids": None,
    "embeddings.word_embeddings": "embed.token",
    "embeddings.position_embeddings": "embed.position",
    "embeddings.LayerNorm": "embed.norm",
    "encoder.relative_attention_bias": "relative.buckets",
    "encoder.layer.{}.attention.attn.q": ("layers.{}.attn.qkv", 0),
    "encoder.layer.{}.attention.attn.k": ("layers.{}.attn.qkv", 1),
    "encoder.layer.{}.attention.attn.v": ("layers.{}.attn.qkv", 2),
    "encoder.layer.{}.attention.attn.o": "layers.{}.attn.out",
    "encoder.layer.{}.attention.LayerNorm": "layers.{}.attn_norm",
    "encoder.layer.{}.intermediate.dense": "layers.{}.ffn.up",
    "encoder.layer.{}.output.dense": "layers.{}.ffn.down",
    "encoder.layer.{}.output.LayerNorm": "layers.{}.ffn_norm",
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

_OFFSET = 2  # the reference counts positions from 2, whatever the padding token
_FARTHEST = 128  # distances from here on share the last bucket


class BucketBias(PositionBias):
    """T5's relative attention bias (arXiv 1910.10683, section 2.1): distances share buckets that widen with the logarithm."""

    def __init__(self, buckets: int, heads: int, positions: int) -> None:
        super().__init__()
        self.buckets = Table(buckets, heads)
        self._reach = positions - 1
        self.register_buffer("table", None, persistent=False)

    def prepare(self) -> None:
        """Once loaded: spread the buckets over all distances."""
        weight = self.buckets.weight
        distances = torch.arange(-self._reach, self._reach + 1, device=weight.device)
        self.table = weight[bucket_of(distances, weight.shape[0])].T.contiguous()


def bucket_of(distance: Tensor, buckets: int) -> Tensor:
    """The bucket of each distance (key minus query). One half is for keys after the query; half of each is for exact distances."""
    half = buckets // 2
    exact = half // 2
    far = distance.abs()
    ratio = (far.clamp(min=1).float() / exact).log() / math.log(_FARTHEST / exact)
    wide = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(far < exact, far, wide) + torch.where(distance > 0, half, 0)


def build(config: Config) -> TextEncoder:
    """The encoder that config.json describes, without weights."""
    spec = bert_spec(config)
    embed = TokenEmbedding(
        config.size("vocab_size"),
        spec.hidden,
        positions=config.size("max_position_embeddings"),
        norm_eps=spec.norm_eps,
        offset=_OFFSET,
    )
    bias = BucketBias(config.size("relative_attention_num_buckets", 32), spec.heads, embed.max_positions)
    return TextEncoder(spec, embed, relative=bias)
