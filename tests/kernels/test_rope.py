"""Norm and rotation of queries and keys, and the angles: the Triton kernels against their
definitions in float64.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from libs.kernels.rows import rope
from libs.kernels.rows.rope import HeadNorms
from tests.kernels.test_fused import DEVICE, TYPES, assert_close, normed, random
from tests.support.device import no_synchronization

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

# Query heads, key heads, head size and pairs: of less than a program's heads; several programs, the
# last not full, with queries and keys in one of them; a part of each head not rotated; sizes that
# are not powers of two.
HEADS = ((2, 1, 16, 8), (300, 5, 16, 8), (3, 3, 16, 3), (7, 2, 24, 12))
POSITIONS = (0, 1, 2, 3, 0, 1, 500)


@pytest.fixture
def fused() -> ModuleType:
    pytest.importorskip("triton")
    return importlib.import_module("libs.kernels.rows.rope_triton")


def turned(x: Tensor, angle: Tensor, factor: float) -> Tensor:
    """Rotate in float64; angle: [tokens, pairs]."""
    pairs = angle.shape[1]
    angle = angle.double()[:, None]
    pair = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * torch.polar(
        torch.full_like(angle, factor), angle
    )
    return torch.cat((pair.real, pair.imag, x[..., 2 * pairs :]), dim=-1)


def head_norms(queries: int, size: int, dtype: torch.dtype, shift: float) -> HeadNorms:
    weights = random(2, size, dtype=dtype)
    return HeadNorms(weights[0].to(DEVICE), weights[1].to(DEVICE), queries, 1e-6, shift)


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_heads_are_normed_and_rotated_in_place(
    heads: tuple[int, int, int, int],
    is_normed: bool,
    is_rotated: bool,
    dtype: torch.dtype,
    bound: float,
    fused: ModuleType,
) -> None:
    """Values, which lie after queries and keys in the fused projection, stay as they are."""
    queries, keys, size, pairs = heads
    whole = random(len(POSITIONS), queries + 2 * keys, size, dtype=dtype)
    positions = torch.tensor(POSITIONS, dtype=torch.int32)
    frequencies = torch.rand(pairs, generator=torch.Generator().manual_seed(1))
    wanted = whole[:, : queries + keys].double()
    norms = head_norms(queries, size, dtype, 1.0) if is_normed else None
    if norms is not None:
        parts = zip(
            wanted.split((queries, keys), dim=1),
            (norms.query_weight, norms.key_weight),
            strict=True,
        )
        parts_normed = [
            normed(part, weight.cpu().double(), None, 1e-6, rms=True, shift=1.0)
            for part, weight in parts
        ]
        wanted = torch.cat(parts_normed, dim=1)
    if is_rotated:
        wanted = turned(wanted, positions.float()[:, None] * frequencies, 1.5)
    cos, sin = rope.angles(positions, frequencies, 1.5)
    # As of one of several rotations that were computed together: rows are wider than its pairs.
    wide = [
        torch.cat((t, t.new_full((len(t), 5), float("nan"))), dim=1).to(DEVICE)[:, :pairs]
        for t in (cos, sin)
    ]
    changed = whole.to(DEVICE, copy=True)
    got = fused.norm_rotate_(
        changed[:, : queries + keys], (wide[0], wide[1]) if is_rotated else None, norms
    )
    assert got.data_ptr() == changed.data_ptr()
    assert_close(got, wanted, 2 * bound if is_normed else bound)
    assert torch.equal(changed[:, queries + keys :].cpu(), whole[:, queries + keys :])
    if is_normed:
        return
    assert is_rotated or torch.equal(changed.cpu(), whole)


@pytest.mark.parametrize("is_rotated", [False, True])
def test_plain_path_norms_and_rotates_alike(is_rotated: bool) -> None:
    queries, keys, size, pairs = 4, 2, 16, 8
    x, frequencies = random(len(POSITIONS), queries + 2 * keys, size), torch.rand(pairs)
    weights = random(2, size)
    norms = HeadNorms(weights[0], weights[1], queries, 1e-6, 0.0)
    angle = torch.tensor(POSITIONS, dtype=torch.float32)[:, None] * frequencies
    both = x[:, : queries + keys]
    wanted = [
        normed(part.double(), weight.double(), None, 1e-6, rms=True, shift=0.0)
        for part, weight in zip(both.split((queries, keys), dim=1), weights, strict=True)
    ]
    got = rope.norm_rotate(both.clone(), norms, (angle.cos(), angle.sin()) if is_rotated else None)
    for part, exact in zip(got, wanted, strict=True):
        assert_close(part, turned(exact, angle, 1.0) if is_rotated else exact, 2e-6)


def test_rows_with_gaps_are_refused(fused: ModuleType) -> None:
    x, cos = random(3, 4, 16).to(DEVICE), random(3, 8).to(DEVICE)
    for heads, rotation in ((x.transpose(1, 2), (cos, cos)), (x, (cos.T.contiguous().T, cos))):
        with pytest.raises(ValueError, match="without gaps"):
            fused.norm_rotate_(heads, rotation, None)


@pytest.mark.parametrize("by_pair", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_angles_equal_their_definition(
    by_pair: bool, by_token: bool, dtype: torch.dtype, fused: ModuleType
) -> None:
    """Positions at the end of a long text need exact sines, which a fast approximation lacks."""
    tokens, pairs = 6, 5
    positions = torch.tensor((0, 1, 7, 500, 8191, 131_071)).to(dtype)
    positions = positions[:, None] + torch.arange(pairs).to(dtype) if by_pair else positions
    frequencies = torch.rand(
        (tokens, pairs) if by_token else (pairs,), generator=torch.Generator().manual_seed(2)
    )
    # The product is rounded to float32 by definition, as in transformers.
    angle = ((positions.float() if by_pair else positions.float()[:, None]) * frequencies).double()
    cos, sin = fused.angles(positions.to(DEVICE), frequencies.to(DEVICE), 1.5)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert_close(cos, 1.5 * angle.cos(), 5e-7)
    assert_close(sin, 1.5 * angle.sin(), 5e-7)
    for own, plain in zip((cos, sin), rope.angles(positions, frequencies, 1.5), strict=True):
        assert_close(own, plain.double(), 1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize(
    "heads",
    [(12, 12, 64, 32), (16, 8, 128, 64), (3, 1, 256, 128), (14, 2, 64, 32), (64, 8, 128, 32)],
)
def test_accelerator_norms_and_rotates_as_plain_torch(heads: tuple[int, int, int, int]) -> None:
    """Sizes of published models work without waiting for the device."""
    queries, keys, size, pairs = heads
    positions = torch.arange(1000, dtype=torch.int32) * 7
    frequencies = 1e4 ** -(torch.arange(pairs) / pairs)
    for dtype, bound in TYPES:
        whole, norms = (
            random(1000, queries + 2 * keys, size, dtype=dtype),
            head_norms(queries, size, dtype, 0.0),
        )
        wanted = torch.cat(
            rope.norm_rotate(
                whole[:, : queries + keys].float(),
                HeadNorms(
                    norms.query_weight.cpu().float(),
                    norms.key_weight.cpu().float(),
                    queries,
                    1e-6,
                    0.0,
                ),
                rope.angles(positions, frequencies),
            ),
            dim=1,
        )
        on_device, places, turns = whole.cuda(), positions.cuda(), frequencies.cuda()
        rope.norm_rotate(
            on_device.clone()[:, : queries + keys], norms, rope.angles(places, turns)
        )  # compiled
        with no_synchronization():
            got = torch.cat(
                rope.norm_rotate(on_device[:, : queries + keys], norms, rope.angles(places, turns)),
                dim=1,
            )
        assert_close(got, wanted.double(), 4e-6 if dtype is torch.float32 else 2 * bound)
        assert torch.equal(on_device[:, queries + keys :].cpu(), whole[:, queries + keys :])
