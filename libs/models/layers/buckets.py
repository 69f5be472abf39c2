"""Relative position bias by buckets of distances, which T5 and MPNet add to the attention scores of
all layers.

The table is computed once, when a model is loaded; a forward only reads it
(`libs/kernels/attention/varlen.py`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from libs.models.layers.embeddings import EmbeddingTable
from libs.models.layers.encoder import PositionBias
from libs.models.layers.spec import Config


class BucketBias(PositionBias):
    """T5's relative attention bias (arXiv 1910.10683, section 2.1): distances share buckets that
    widen logarithmically.

    Args:
        reach: The largest possible distance.
        farthest: All distances from this one on share the last bucket.
    """

    def __init__(self, buckets: int, heads: int, *, reach: int, farthest: int = 128) -> None:
        super().__init__()
        self.buckets = EmbeddingTable(buckets, heads)
        self._reach, self._farthest = reach, farthest
        self.register_buffer("table", None, persistent=False)

    @classmethod
    def from_config(
        cls, config: Config, heads: int, *, reach: int, farthest: int = 128
    ) -> BucketBias:
        """Read the bias from config.json.

        Raises ModelBroken if no bucket is left for exact or for shared distances.
        """
        buckets = config.size("relative_attention_num_buckets", 32)
        if not 4 <= buckets < 4 * farthest:
            raise config.unsupported(
                "relative_attention_num_buckets",
                f"at least 4 are needed, and less than four times the distance {farthest}",
            )
        return cls(buckets, heads, reach=reach, farthest=farthest)

    def prepare(self) -> None:
        """Spread the buckets over all distances. Call it after loading."""
        weight = self.buckets.weight
        distances = torch.arange(-self._reach, self._reach + 1, device=weight.device)
        self.table = weight[
            distance_buckets(distances, weight.shape[0], self._farthest)
        ].T.contiguous()


def distance_buckets(distance: Tensor, buckets: int, farthest: int) -> Tensor:
    """Return the bucket of each distance (key minus query).

    Half of the buckets are for keys after the query. Half of each half is for exact distances.
    """
    half = buckets // 2
    exact = half // 2
    far = distance.abs()
    ratio = (far.clamp(min=1).float() / exact).log() / math.log(farthest / exact)
    wide = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(far < exact, far, wide) + torch.where(distance > 0, half, 0)
