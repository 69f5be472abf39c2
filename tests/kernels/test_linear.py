"""The prepacked linear against `F.linear`, in both of its states."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from libs.kernels.linear.lora import AdapterRows, LoraUpdates
from libs.kernels.linear.packed import PackedLinear, prepacking_works
from tests.support.fake_cuda import DEVICE, fake_cuda

SHAPES = ((64, 192), (96, 64), (33, 7), (1, 5))


def layer(
    inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool, gelu: bool = False
) -> tuple[PackedLinear, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(inputs)
    linear = PackedLinear(inputs, outputs, bias=bias, activation="gelu" if gelu else "none").to(
        dtype
    )
    state = {
        name: torch.randn(value.shape, generator=generator).to(dtype)
        for name, value in linear.state_dict().items()
    }
    linear.load_state_dict(state, assign=True)
    return linear, state["weight"], state.get("bias")


def error(got: Tensor, wanted: Tensor, among: Tensor | None = None) -> float:
    """Relative to the largest number, or to the largest of those that `wanted` was made of."""
    return (
        (got.double() - wanted).abs().max() / (wanted if among is None else among).abs().max()
    ).item()


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_equals_linear_gelu_and_add(
    inputs: int, outputs: int, rows: int, bias: bool, prepared: bool
) -> None:
    x, residual = torch.randn(rows, inputs), torch.randn(rows, outputs)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        plain, weight, shift = layer(inputs, outputs, dtype, bias=bias)
        curved, _, _ = layer(inputs, outputs, dtype, bias=bias, gelu=True)
        if prepared:
            plain.prepare()
            curved.prepare()
        low = x.to(dtype)
        wanted = F.linear(low.double(), weight.double(), None if shift is None else shift.double())
        more = residual.to(dtype).double()
        parts = torch.cat((wanted, more))
        assert error(plain.forward(low), wanted) < bound
        # GELU may remove all large numbers, and a sum cancel them, but not their rounding errors
        assert error(curved.forward(low), F.gelu(wanted), wanted) < bound
        assert error(plain.add(low, residual.to(dtype)), wanted + more, parts) < bound
        assert error(curved.add(low, residual.to(dtype)), F.gelu(wanted) + more, parts) < bound


def test_non_contiguous_input() -> None:
    linear, weight, bias = layer(64, 192, torch.float32, bias=True)
    linear.prepare()
    x = torch.randn(64, 9).T
    assert (
        error(
            linear.forward(x),
            F.linear(x.double(), weight.double(), None if bias is None else bias.double()),
        )
        < 1e-6
    )


def test_preparing_releases_the_plain_weight_and_can_be_repeated() -> None:
    linear, weight, _ = layer(64, 192, torch.float32, bias=True)
    linear.prepare()
    packed = linear.packed
    linear.prepare()
    assert linear.packed is packed
    assert linear.weight.numel() == (0 if prepacking_works(torch.float32) else weight.numel())


def test_types_that_onednn_does_not_take_stay_plain() -> None:
    linear, weight, _ = layer(64, 192, torch.float64, bias=False)
    linear.prepare()
    assert linear.packed is None
    x = torch.randn(3, 64, dtype=torch.float64)
    assert torch.equal(linear.forward(x), F.linear(x, weight))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gelu_by_tanh_is_part_of_a_product_on_cuda_only() -> None:
    linear, *_ = layer(64, 192, torch.bfloat16, bias=True)
    assert linear.gelu_tanh(torch.randn(5, 64).bfloat16()) is None
    pytest.importorskip("triton")
    with fake_cuda(computes=False):
        x = torch.randn(5, 64, device=DEVICE, dtype=torch.bfloat16)
        linear.to(DEVICE)
        wanted = F.gelu(linear.forward(x).float(), approximate="tanh")
        got = linear.gelu_tanh(x)
        assert got is not None
        assert error(got.cpu(), wanted.cpu().double()) < 0.02
        assert linear.gelu_tanh(x.float()) is None
        linear.delta = LoraUpdates(AdapterRows({}), {})
        assert linear.gelu_tanh(x) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float32, 1e-5)])
def test_gelu_by_tanh_on_an_accelerator(dtype: torch.dtype, bound: float) -> None:
    """It is computed by cuBLAS at the end of the product, or by torch where cuBLAS cannot."""
    for inputs, outputs in SHAPES:
        linear, weight, bias = layer(inputs, outputs, dtype, bias=True)
        assert bias is not None
        x = torch.randn(130, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
        got = linear.to("cuda").gelu_tanh(x.to("cuda"))
        assert got is not None
        wanted = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
        assert error(got.cpu(), wanted) < bound
