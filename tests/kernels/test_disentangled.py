"""The Triton kernel of disentangled attention against its definition in float64; interpreted
without a GPU.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from libs.kernels.layout import BatchLayout
from libs.models.text.families.bert.deberta import Distances
from tests.support.device import no_synchronization

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = 2
# Queries and keys: one and two tokens, the edges of a tile of 32, more positions than separate
# distances, only the last row of a sequence, and queries that no token attends to.
SHAPES = (
    (1, 1),
    (2, 2),
    (31, 31),
    (32, 32),
    (33, 33),
    (64, 64),
    (65, 65),
    (1, 1),
    (1, 33),
    (1, 64),
    (9, 3),
    (5, 70),
)
FEW_SHAPES = ((1, 1), (33, 33), (2, 2), (1, 40))
DISTANCES = {
    "exact": Distances.exact(20),
    "buckets": Distances.bucketed(16, 40),
    "far": Distances.bucketed(64, 512),
}

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@dataclass(frozen=True)
class Inputs:
    """Inputs of the kernel."""

    shapes: tuple[tuple[int, int], ...]
    distances: Distances
    q: Tensor
    k: Tensor
    v: Tensor
    c2p: Tensor | None
    p2c: Tensor | None
    scale: float

    @staticmethod
    def create(
        shapes: tuple[tuple[int, int], ...],
        distances: Distances,
        *,
        size: int = 16,
        kinds: tuple[str, ...] = ("c2p", "p2c"),
        dtype: torch.dtype = torch.float32,
    ) -> Inputs:
        """Queries, keys and values are views of one projection where the numbers of both are equal,
        as in an encoder.
        """
        generator = torch.Generator().manual_seed(size)
        queries, keys = (sum(counts) for counts in zip(*shapes, strict=True))

        def random(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator).to(dtype).to(DEVICE)

        q = random(queries, 3 * HEADS, size)[:, HEADS : 2 * HEADS]
        k, v = random(keys, 3 * HEADS, size).split((HEADS, 2 * HEADS), dim=1)
        c2p = random(HEADS, queries, distances.embeddings) if "c2p" in kinds else None
        p2c = random(HEADS, keys, distances.embeddings) if "p2c" in kinds else None
        return Inputs(shapes, distances, q, k, v[:, HEADS:], c2p, p2c, 1 / math.sqrt(3 * size))

    def layout(self) -> BatchLayout:
        return BatchLayout.from_lengths(
            [own for own, _ in self.shapes], [seen for _, seen in self.shapes], DEVICE
        )

    def by_triton(self, layout: BatchLayout | None = None, first: int = 0) -> Tensor:
        """`first`: leave out the rows before it, and as many at the end."""
        module = importlib.import_module("libs.kernels.attention.disentangled_triton")
        last = self.distances.embeddings - first
        c2p, p2c = (
            None if x is None else x[..., first:last].contiguous() for x in (self.c2p, self.p2c)
        )
        table = torch.tensor(self.distances.rows, dtype=torch.int32, device=DEVICE)
        out = torch.full(
            (len(self.q), HEADS + 1, self.q.shape[2]), torch.nan, dtype=self.q.dtype, device=DEVICE
        )
        module.attend(
            self.q,
            self.k,
            self.v,
            c2p,
            p2c,
            table,
            first,
            layout or self.layout(),
            self.scale,
            out[:, :HEADS],
        )
        assert out[:, HEADS:].isnan().all()
        return out[:, :HEADS]

    def defined(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Sequence by sequence, on the CPU."""
        queries, keys = [own for own, _ in self.shapes], [seen for _, seen in self.shapes]
        q, k, v = (
            x.cpu().to(dtype).split(n)
            for x, n in ((self.q, queries), (self.k, keys), (self.v, keys))
        )
        c2p = (
            [None] * len(queries)
            if self.c2p is None
            else self.c2p.cpu().to(dtype).split(queries, dim=1)
        )
        p2c = (
            [None] * len(queries)
            if self.p2c is None
            else self.p2c.cpu().to(dtype).split(keys, dim=1)
        )
        return torch.cat(
            [self._of_sequence(*parts) for parts in zip(q, k, v, c2p, p2c, strict=True)]
        )

    def _of_sequence(
        self, q: Tensor, k: Tensor, v: Tensor, c2p: Tensor | None, p2c: Tensor | None
    ) -> Tensor:
        scores = torch.einsum("ihd,jhd->hij", q, k) * self.scale
        places, keys = range(max(0, len(k) - len(q)), max(len(k), len(q))), range(len(k))
        row = torch.tensor([[self.distances.row(place - key) for key in keys] for place in places])
        if c2p is not None:
            scores += c2p[:, torch.arange(len(q))[:, None], row]
        if p2c is not None:
            scores += p2c[:, torch.arange(len(k))[None, :], row]
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


@pytest.fixture(autouse=True)
def _needs_triton() -> None:
    pytest.importorskip("triton")


def error(got: Tensor, wanted: Tensor) -> float:
    return ((got.cpu().double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


@pytest.mark.parametrize("distances", DISTANCES.values(), ids=DISTANCES.keys())
def test_sequences_of_any_lengths_equal_the_definition(distances: Distances) -> None:
    inputs = Inputs.create(SHAPES, distances)
    assert error(inputs.by_triton(), inputs.defined()) < 1e-5


@pytest.mark.parametrize("size", [5, 24, 64])
@pytest.mark.parametrize("kinds", [("c2p",), ("p2c",), (), ("c2p", "p2c")])
def test_each_kind_of_score_and_head_size(size: int, kinds: tuple[str, ...]) -> None:
    inputs = Inputs.create(FEW_SHAPES, DISTANCES["buckets"], size=size, kinds=kinds)
    assert error(inputs.by_triton(), inputs.defined()) < 1e-5


def test_rows_that_no_sequence_needs_are_left_out() -> None:
    inputs = Inputs.create(((1, 1), (5, 5), (9, 9)), DISTANCES["far"])
    rows = inputs.distances.rows_within(9)
    assert (rows.start, rows.stop) == (48, 80)
    assert error(inputs.by_triton(first=rows.start), inputs.defined()) < 1e-5


def test_sequences_without_tokens_are_passed_over() -> None:
    """Nothing is written for them or around them."""
    inputs = Inputs.create(((2, 2), (3, 3)), DISTANCES["exact"])
    cu = torch.tensor((0, 2, 2, 5, 5), dtype=torch.int32, device=DEVICE)
    got = inputs.by_triton(BatchLayout(cu, cu, 40, 40, ()))
    assert error(got, inputs.defined()) < 1e-5


def test_large_scores_do_not_overflow() -> None:
    """Distant keys differ only in the largest one."""
    inputs = Inputs.create(FEW_SHAPES, DISTANCES["exact"])
    assert inputs.c2p is not None
    inputs.c2p.mul_(1e4)
    got, wanted = inputs.by_triton(), inputs.defined()
    assert got.isfinite().all()
    assert error(got, wanted) < 1e-2  # float32 has steps of 0.001 at 1e4


def test_float16_is_as_close_as_plain_torch() -> None:
    """Triton's interpreter multiplies no bfloat16 matrices."""
    inputs = Inputs.create(FEW_SHAPES, DISTANCES["buckets"], dtype=torch.float16)
    got, wanted = inputs.by_triton(), inputs.defined()
    assert got.dtype is torch.float16
    assert error(got, wanted) < 3 * error(inputs.defined(torch.float16), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("size", [32, 64, 80, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)]
)
def test_accelerator_equals_the_definition(size: int, dtype: torch.dtype, bound: float) -> None:
    """Every type and tile, without waiting for the device."""
    inputs = Inputs.create((*SHAPES, (90, 90)), DISTANCES["buckets"], size=size, dtype=dtype)
    layout = inputs.layout()
    inputs.by_triton(layout)  # the kernel is compiled and loaded
    module = importlib.import_module("libs.kernels.attention.disentangled_triton")
    table = torch.tensor(inputs.distances.rows, dtype=torch.int32, device=DEVICE)
    got = torch.empty_like(inputs.q, memory_format=torch.contiguous_format)
    with no_synchronization():
        module.attend(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.c2p,
            inputs.p2c,
            table,
            0,
            layout,
            inputs.scale,
            got,
        )
    assert error(got, inputs.defined()) < bound
