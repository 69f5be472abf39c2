"""Norms, rotation, gated activation and reductions against their definitions in float64: the plain
path and the Triton kernel.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from libs.kernels.rows import gated, norms, rope, segments
from libs.kernels.rows.gated import Activation
from libs.kernels.rows.segments import Reduction
from tests.kernels.ways import use_dense
from tests.support.device import no_synchronization

# Triton's interpreter runs on CPU tensors; where there is a GPU the kernels are compiled, and the
# plain path is for the CPU alone.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]

NORMS = [(False, True, 0.0), (False, False, 0.0), (True, False, 0.0), (True, False, 1.0)]

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture
def fused() -> ModuleType:
    pytest.importorskip("triton")
    return importlib.import_module("libs.kernels.rows.fused_triton")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_close(got: Tensor, wanted: Tensor, bound: float) -> None:
    assert ((got.cpu().double() - wanted).abs() <= bound * wanted.abs().clamp(min=1)).all()


def normed(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, rms: bool, shift: float
) -> Tensor:
    """Compute the operation in float64."""
    x = x if rms else x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + shift)
    return y if bias is None else y + bias


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize(("rms", "biased", "shift"), NORMS)
def test_norms_after_a_residual_add(
    rms: bool, biased: bool, shift: float, dtype: torch.dtype, bound: float, fused: ModuleType
) -> None:
    x, residual = random(5, 40, dtype=dtype), random(5, 41, dtype=dtype)[:, :40]
    weight, bias = random(40, dtype=dtype), random(1, 40, dtype=dtype)[0] if biased else None
    total = (x.double() + residual.double()).to(dtype)
    wanted = normed(
        total.double(),
        weight.double(),
        None if bias is None else bias.double(),
        1e-5,
        rms=rms,
        shift=shift,
    )
    if rms:
        plain = norms.add_rms_norm(x, residual, weight, 1e-5, shift=shift)
    else:
        plain = norms.add_layer_norm(x, residual, weight, bias, 1e-5)
    rows = x, residual, weight
    given = (
        x.to(DEVICE),
        residual.to(DEVICE),
        weight.to(DEVICE),
        None if bias is None else bias.to(DEVICE),
        1e-5,
    )
    triton = fused.add_norm(*given, rms=rms, shift=shift)
    for got_total, got in (plain, triton):
        assert got.dtype is got_total.dtype is dtype
        assert_close(got_total, total.double(), bound)
        assert_close(got, wanted, 2 * bound)
    alone = (
        norms.rms_norm_of_sum(*rows, 1e-5, shift=shift)
        if rms
        else norms.layer_norm_of_sum(*rows, bias, 1e-5)
    )
    exact = normed(
        x.double() + residual.double(),
        weight.double(),
        None if bias is None else bias.double(),
        1e-5,
        rms=rms,
        shift=shift,
    )
    assert_close(fused.norm_of_sum(*given, rms=rms, shift=shift), exact, 2 * bound)
    assert_close(alone, wanted, 2 * bound)  # of the rounded sum


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize(("rms", "biased", "shift"), NORMS)
@pytest.mark.parametrize("size", [40, 600])
def test_norms_before_a_residual_add(
    size: int,
    rms: bool,
    biased: bool,
    shift: float,
    dtype: torch.dtype,
    bound: float,
    fused: ModuleType,
) -> None:
    """Several rows a program, of which the last has fewer; and one row a program."""
    x, residual = random(29, size, dtype=dtype), random(29, size + 1, dtype=dtype)[:, :size]
    weight, bias = random(size, dtype=dtype), random(1, size, dtype=dtype)[0] if biased else None
    wanted = residual.double() + normed(
        x.double(),
        weight.double(),
        None if bias is None else bias.double(),
        1e-5,
        rms=rms,
        shift=shift,
    )
    if rms:
        plain = norms.rms_norm_plus(x, residual, weight, 1e-5, shift=shift)
    else:
        plain = norms.layer_norm_plus(x, residual, weight, bias, 1e-5)
    given = (
        x.to(DEVICE),
        residual.to(DEVICE),
        weight.to(DEVICE),
        None if bias is None else bias.to(DEVICE),
        1e-5,
    )
    triton = fused.norm_plus(*given, rms=rms, shift=shift)
    for got in (plain, triton):
        assert got.dtype is dtype
        assert_close(got, wanted, 2 * bound)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_rms_norm_of_each_head(shift: float, fused: ModuleType) -> None:
    """Norms work on a slice of a fused projection, as for queries and keys."""
    x, weight = random(6, 5, 16)[:, 1:4], random(16)
    wanted = normed(x.double(), weight.double(), None, 1e-6, rms=True, shift=shift)
    assert_close(norms.rms_norm(x, weight, 1e-6, shift=shift), wanted, 2e-6)
    got = fused.norm(x.to(DEVICE), weight.to(DEVICE), None, 1e-6, rms=True, shift=shift)
    assert got.shape == x.shape
    assert_close(got, wanted, 2e-6)


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize("pairs", [3, 8])
def test_rotation_turns_pairs_by_position(pairs: int, dtype: torch.dtype, bound: float) -> None:
    """The first heads of a fused projection; with 3 pairs a part of each head is left as it is. In
    Triton: `test_rope.py`.
    """
    whole = random(7, 5, 16, dtype=dtype)
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 500], dtype=torch.int32)
    frequencies = torch.rand(pairs, generator=torch.Generator().manual_seed(1))
    x = whole.double()[:, :3]
    angle = positions.float()[:, None].mul(frequencies).double()[:, None]
    pair = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * torch.polar(
        torch.full_like(angle, 1.5), angle
    )
    wanted = torch.cat((pair.real, pair.imag, x[..., 2 * pairs :]), dim=-1)
    cos, sin = rope.angles(positions, frequencies, 1.5)
    got = rope.rotate(whole.clone()[:, :3], cos, sin)
    assert got.dtype is dtype
    assert_close(got, wanted, bound)


ACTIVATIONS: list[Activation] = ["gelu", "gelu_tanh", "relu", "silu"]


def activated(x: Tensor, activation: Activation) -> Tensor:
    if activation == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if activation == "gelu_tanh":
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x.clamp(min=0) if activation == "relu" else x / (1 + torch.exp(-x))


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate_last", [False, True])
def test_gated_activation(
    activation: Activation, gate_last: bool, dtype: torch.dtype, bound: float, fused: ModuleType
) -> None:
    x = random(6, 34, dtype=dtype) * 3
    first, second = x.double().chunk(2, dim=1)
    wanted = (
        activated(second, activation) * first
        if gate_last
        else activated(first, activation) * second
    )
    assert_close(gated.gate_up(x, activation, gate_last=gate_last), wanted, bound)
    assert_close(fused.gate_up(x.to(DEVICE), activation, gate_last=gate_last), wanted, bound)


REDUCTIONS: list[Reduction] = ["sum", "mean", "max"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", REDUCTIONS)
def test_reductions_of_each_sequence(how: Reduction, dtype: torch.dtype, fused: ModuleType) -> None:
    lengths = (1, 4, 1, 70, 2)
    values, cu_seqlens = (
        random(sum(lengths), 67, dtype=dtype),
        torch.tensor((0, 1, 5, 6, 76, 78), dtype=torch.int32),
    )
    parts = values.double().split(lengths)
    if how == "max":
        wanted = torch.stack([part.amax(0) for part in parts])
    else:
        wanted = torch.stack([part.sum(0) / (len(part) if how == "mean" else 1) for part in parts])
    got = fused.reduce(values.to(DEVICE), cu_seqlens.to(DEVICE), how)
    assert got.dtype is torch.float32
    assert_close(got, wanted, 1e-5)
    for row in (
        segments.reduce(values, how, cu_seqlens),
        segments.reduce(values.to("meta"), how, cu_seqlens.to("meta")),
    ):
        assert row.shape == wanted.shape
        assert row.dtype is torch.float32
    assert_close(segments.reduce(values, how, cu_seqlens), wanted, 1e-5)


def test_plain_paths_agree_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    use_dense(monkeypatch)
    x, weight = random(4, 12), random(12)
    assert torch.equal(
        norms.layer_norm(x, weight, None, 1e-5), F.layer_norm(x, (12,), weight, None, 1e-5)
    )
    assert torch.equal(norms.rms_norm(x, weight, 1e-5), F.rms_norm(x, (12,), weight, 1e-5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_seams_take_the_kernels_on_an_accelerator() -> None:
    """And none of them waits for the device."""
    x, weight = random(5, 64).cuda(), random(64).cuda()
    cu_seqlens = torch.tensor((0, 2, 5), dtype=torch.int32, device="cuda")
    cos, sin = rope.angles(torch.arange(5, device="cuda"), torch.rand(8, device="cuda"))

    def run() -> tuple[Tensor, ...]:
        return (
            norms.add_layer_norm(x, x, weight, None, 1e-5)[1],
            norms.add_rms_norm(x, x, weight, 1e-5)[1],
            rope.rotate(x.clone().view(5, 4, 16), cos, sin),
            gated.gate_up(x, "silu"),
            segments.reduce(x, "mean", cu_seqlens),
        )

    run()
    with no_synchronization():
        got = run()
    plain = (
        norms.add_layer_norm(x.cpu(), x.cpu(), weight.cpu(), None, 1e-5)[1],
        norms.add_rms_norm(x.cpu(), x.cpu(), weight.cpu(), 1e-5)[1],
        rope.rotate(x.cpu().view(5, 4, 16), cos.cpu(), sin.cpu()),
        gated.gate_up(x.cpu(), "silu"),
        segments.reduce(x.cpu(), "mean", cu_seqlens.cpu()),
    )
    for a, b in zip(got, plain, strict=True):
        assert_close(a, b.double(), 1e-5)
