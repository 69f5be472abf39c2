"""A batch of packed sequences for attention, and what attention is of it by definition, written out
naively.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import BatchLayout

# Queries and keys of each sequence: one token; runs that are viewed as one batch; long enough for
# any block; a prefix computed elsewhere; only the last row; and queries that no token attends to
# (ColBERT's expansion).
SHAPES = (
    (1, 1),
    (1, 1),
    (7, 7),
    (7, 7),
    (7, 7),
    (30, 30),
    (64, 64),
    (200, 200),
    (40, 90),
    (1, 33),
    (9, 3),
    (9, 3),
)


@dataclass(frozen=True)
class Batch:
    """Queries, keys and values of packed sequences, and the arguments of attention."""

    shapes: tuple[tuple[int, int], ...]
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    causal: bool
    window: int | None
    scale: float = 0.3
    softcap: float | None = None

    @staticmethod
    def create(
        heads: tuple[int, int, int],
        sight: tuple[bool, int | None] = (False, None),
        *,
        biased: bool = False,
        shapes: tuple[tuple[int, int], ...] = SHAPES,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        reach: int = 255,
        softcap: float | None = None,
    ) -> Batch:
        """Views of fused projections, as in an encoder."""
        own, shared, dim = heads
        generator = torch.Generator().manual_seed(own * 100 + dim)
        q = torch.randn(sum(own for own, _ in shapes), own + shared, dim, generator=generator)[
            :, :own
        ]
        k, v = torch.randn(
            sum(seen for _, seen in shapes), 2 * shared, dim, generator=generator
        ).split(shared, dim=1)
        bias = torch.randn(own, 2 * reach + 1, generator=generator) if biased else None
        q, k, v = (t.to(dtype).to(device) for t in (q, k, v))
        return Batch(
            shapes, q, k, v, None if bias is None else bias.to(device), *sight, softcap=softcap
        )

    @property
    def layout(self) -> BatchLayout:
        return BatchLayout.from_lengths(
            [own for own, _ in self.shapes], [seen for _, seen in self.shapes], self.q.device
        )

    def attend(self, layout: BatchLayout | None = None) -> Tensor:
        layout = self.layout if layout is None else layout
        return varlen_attention(
            self.q,
            self.k,
            self.v,
            layout,
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            bias=self.bias,
            softcap=self.softcap,
        )

    def by_triton(self) -> Tensor:
        varlen_triton = pytest.importorskip(
            "libs.kernels.attention.varlen_triton", exc_type=ImportError
        )
        out: Tensor = varlen_triton.attend(
            self.q,
            self.k,
            self.v,
            self.layout,
            self.scale,
            self.causal,
            self.window,
            self.bias,
            self.softcap,
        )
        return out

    def defined(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Sequence by sequence, all in one type."""
        queries, keys = [own for own, _ in self.shapes], [seen for _, seen in self.shapes]
        parts = zip(
            *(
                t.cpu().to(dtype).split(n)
                for t, n in ((self.q, queries), (self.k, keys), (self.v, keys))
            ),
            strict=True,
        )
        return torch.cat([self._of_sequence(*part) for part in parts])

    def _of_sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * self.scale
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        distance = torch.arange(len(k)) - torch.arange(len(q))[:, None] - max(0, len(k) - len(q))
        if self.bias is not None:
            scores = scores + self.bias.cpu().to(q.dtype)[:, distance + self.bias.shape[1] // 2]
        unseen = (distance > 0) & self.causal
        if self.window is not None:
            unseen |= distance.abs() > self.window
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1).nan_to_num(0)
        return torch.einsum("hij,jhd->ihd", weights, v)


def error(got: Tensor, wanted: Tensor) -> float:
    return (got.cpu().double() - wanted.double()).abs().max().item()
