"""int8 linear layers: every implementation against the decoded numbers, independence of rows, and
the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from libs.kernels.linear import int8
from libs.kernels.linear.int8 import Int8Weight, TorchInt8, Way, quantise_rows
from libs.kernels.linear.lora import AdapterRows, LoraUpdates, LowRank
from libs.kernels.linear.packed import PackedLinear
from libs.kernels.native import int8 as native_int8
from libs.kernels.native import library as loading

WAYS = ("avx2", "avx512_vnni", "torch")
SHAPES = ((384, 1152), (96, 64), (33, 7), (1, 5), (70, 130), (300, 65))
ROWS = (1, 2, 3, 4, 5, 6, 7, 130)
BOUNDS = {torch.float32: 2e-3, torch.bfloat16: 1e-2}
"""Bounds relative to the largest result. A number half-way between two codes may become either;
bfloat16 rounds the results too.
"""


@pytest.fixture(params=WAYS)
def chosen(request: pytest.FixtureRequest, library: Path, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Each implementation that this CPU has."""
    if request.param == "torch":
        return TorchInt8()
    monkeypatch.setattr(native_int8, "native", lambda: loading.load(library, "avx2"))
    found = {each.name: each for each in native_int8.variants.__wrapped__()}
    if request.param not in found:
        pytest.skip(f"this CPU has no {request.param}")
    return found[request.param]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def defined(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of the decoded numbers, in float64."""
    codes, scale = quantise_rows(weight)
    wide = x.double()
    low = wide.amin(1, keepdim=True)
    step = (wide.amax(1, keepdim=True) - low) / 255
    rows = torch.where(step > 0, ((wide - low) / step).round() * step, 0.0) + low
    return F.linear(
        rows, codes.double() * scale.double()[:, None], None if bias is None else bias.double()
    )


def error(got: Tensor, wanted: Tensor, among: Tensor) -> float:
    """Relative to the largest of the numbers that `wanted` was made of."""
    return ((got.double() - wanted).abs().max() / among.abs().max()).item()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_product_equals_that_of_the_decoded_weights(
    chosen: Way, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    weight, bias = numbers(outputs, inputs), numbers(outputs)
    for layer, shift in (
        (Int8Weight(weight, bias, chosen), bias),
        (Int8Weight(weight, None, chosen), None),
    ):
        for rows in ROWS:
            x, residual = numbers(rows, inputs).to(dtype), numbers(rows, outputs).to(dtype)
            wanted = defined(x, weight, shift)
            parts = torch.cat((wanted, residual.double()))
            assert error(layer.forward(x), wanted, wanted) < BOUNDS[dtype]
            assert error(layer.forward(x, gelu=True), F.gelu(wanted), wanted) < BOUNDS[dtype]
            assert (
                error(layer.forward(x, residual=residual), wanted + residual.double(), parts)
                < BOUNDS[dtype]
            )


def test_gelu_is_near_the_exact_one(chosen: Way) -> None:
    """Return the codes of a layer that passes 256 numbers through unchanged."""
    layer = Int8Weight(torch.eye(256), None, chosen)
    for width in (1.0, 6.0, 100.0):
        x = torch.linspace(-width, width, 256)[None]
        got, plain = layer.forward(x, gelu=True), layer.forward(x)
        assert (got - F.gelu(plain)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", BOUNDS)
def test_row_depends_on_nothing_but_itself(chosen: Way, dtype: torch.dtype) -> None:
    """Bit by bit: alone, among others at any place, and however many threads compute."""
    layer = Int8Weight(numbers(192, 384), numbers(192), chosen)
    x, residual = numbers(301, 384).to(dtype), numbers(301, 192).to(dtype)
    whole = layer.forward(x, gelu=True, residual=residual)
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        assert torch.equal(layer.forward(x, gelu=True, residual=residual), whole)
    torch.set_num_threads(before)
    for row in (0, 1, 5, 95, 96, 97, 300):
        assert torch.equal(
            layer.forward(x[row : row + 1], gelu=True, residual=residual[row : row + 1]),
            whole[row : row + 1],
        )
    backwards = layer.forward(x.flip(0), gelu=True, residual=residual.flip(0))
    assert torch.equal(backwards.flip(0), whole)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_rows_of_a_larger_tensor(chosen: Way, dtype: torch.dtype) -> None:
    """Memory around the tensors is NaN, and elements of rows are not adjacent."""
    layer = Int8Weight(numbers(40, 70), numbers(40), chosen)
    x = numbers(9, 70).to(dtype)
    frame = torch.full((11, 75), float("nan"), dtype=dtype)
    frame[1:-1, 3:-2] = x
    assert torch.equal(layer.forward(frame[1:-1, 3:-2]), layer.forward(x))
    assert torch.equal(layer.forward(x.T.contiguous().T), layer.forward(x))
    assert layer.forward(x[:0]).shape == (0, 40)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_nonfinite_numbers_stay_in_their_row(chosen: Way, dtype: torch.dtype, bad: float) -> None:
    layer = Int8Weight(numbers(40, 70), numbers(40), chosen)
    x = numbers(9, 70).to(dtype)
    wanted = layer.forward(x)
    for place in (0, 17, 69):
        worse = x.clone()
        worse[4, place] = bad
        got = layer.forward(worse)
        assert torch.equal(got[:4], wanted[:4])
        assert torch.equal(got[5:], wanted[5:])
        assert not got[4].isfinite().any()


def test_rows_and_outputs_without_a_range(chosen: Way) -> None:
    """Test zeros, one number everywhere, and an output with zero weights."""
    weight = numbers(8, 70)
    weight[3] = 0
    layer = Int8Weight(weight, numbers(8), chosen)
    x = torch.stack((torch.zeros(70), torch.full((70,), 2.5), torch.full((70,), -3.0)))
    assert torch.allclose(layer.forward(x).double(), defined(x, weight, numbers(8)), atol=1e-4)
    assert torch.equal(layer.forward(x)[:, 3], numbers(8)[3].expand(3))


def test_codes_at_their_limits(chosen: Way) -> None:
    """Implementations that add products of bytes in 16 bits would saturate on these."""
    weight = torch.ones(16, 1536)
    x = torch.ones(6, 1536)
    x[:, 0] = 0
    assert torch.allclose(
        Int8Weight(weight, None, chosen).forward(x), torch.full((6, 16), 1535.0), rtol=1e-5
    )


def test_range_of_each_output_is_its_own() -> None:
    weight = torch.stack((numbers(50), 1000 * numbers(50)))
    codes, scale = quantise_rows(weight)
    assert codes.abs().amax(1).tolist() == [127, 127]
    assert ((codes * scale[:, None] - weight).abs() <= scale[:, None] / 2 + 1e-6).all()


class TestPackedLinear:
    @staticmethod
    def pair(gelu: bool = False) -> tuple[PackedLinear, PackedLinear]:
        """A layer as it is and the same in int8."""
        layers = [PackedLinear(96, 64, activation="gelu" if gelu else "none") for _ in range(2)]
        for layer in layers:
            layer.load_state_dict({"weight": numbers(64, 96), "bias": numbers(64)}, assign=True)
        layers[1].quantise()
        return layers[0], layers[1]

    def test_is_near_the_layer_as_it_was(self) -> None:
        x, residual = numbers(17, 96), numbers(17, 64)
        for gelu in (False, True):
            plain, small = self.pair(gelu)
            wanted = plain.forward(x)
            assert error(small.forward(x), wanted.double(), wanted) < 0.02
            assert error(small.add(x, residual), (wanted + residual).double(), wanted) < 0.02
            assert F.cosine_similarity(small.forward(x), wanted).min() > 0.999

    def test_adapters_are_added_in_their_own_type(self) -> None:
        rows = AdapterRows.from_adapters([None, 0], [7, 10])
        delta = LoraUpdates(rows, {0: LowRank(numbers(4, 96), numbers(4, 64))})
        x, residual = numbers(17, 96), numbers(17, 64)
        for gelu in (False, True):
            plain, small = self.pair(gelu)
            without = plain.forward(x), small.forward(x)
            plain.delta = small.delta = delta
            wanted = plain.forward(x)
            assert error(small.forward(x), wanted.double(), wanted) < 0.02
            assert error(small.add(x, residual), (wanted + residual).double(), wanted) < 0.02
            # GELU is the exact one where something is added before it.
            assert torch.allclose(small.forward(x)[:7], without[1][:7], atol=1e-4)
            assert not torch.allclose(wanted[7:], without[0][7:])

    def test_weight_is_released_and_nothing_is_done_twice(self) -> None:
        _, small = self.pair()
        held = small.quantised
        small.quantise()
        small.prepare()
        assert (small.quantised is held, small.packed, small.bias, small.weight.numel()) == (
            True,
            None,
            None,
            0,
        )
        assert sum(tensor.nbytes for tensor in small.buffers()) == 96 * 64 + 12 * 64

    def test_weight_of_another_type_waits_as_it_is(self) -> None:
        """The weight is not quantised yet: it is in float32, and activations are in bfloat16."""
        layer = PackedLinear(96, 64, bias=False)
        layer.load_state_dict({"weight": numbers(64, 96)}, assign=True)
        x, residual = numbers(5, 96).bfloat16(), numbers(5, 64).bfloat16()
        wanted = F.linear(x.float(), numbers(64, 96))
        assert layer.forward(x).dtype is torch.bfloat16
        assert error(layer.forward(x), wanted.double(), wanted) < 0.01
        assert error(layer.add(x, residual), (wanted + residual).double(), wanted) < 0.01


class TestChoice:
    @pytest.fixture(autouse=True)
    def _asked_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(int8, "_choice", int8._choice.__wrapped__)

    @pytest.mark.usefixtures("library")
    def test_every_implementation_here_agrees(self) -> None:
        assert all(int8.agrees(each) for each in int8.ways())
        assert int8.missing() == ""

    def test_without_the_library_torch_computes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(int8, "variants", lambda: ())
        assert int8.way().name == "torch"

    def test_one_that_is_wrong_is_passed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
            return sound(self_of(), x, *arguments, **options) * 1.1

        def self_of() -> TorchInt8:
            return TorchInt8()

        sound = TorchInt8.linear
        monkeypatch.setattr(int8, "variants", lambda: (FakeWay(wrong),))
        assert int8.way().name == "torch"

    def test_cpu_that_has_none_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(*arguments: Any, **options: Any) -> Tensor:
            raise NotImplementedError("no kernel")

        def none() -> Iterator[Way]:
            yield FakeWay(unknown)

        monkeypatch.setattr(int8, "ways", none)
        assert "this CPU" in int8.missing()
        layer = PackedLinear(8, 8)
        with pytest.raises(RuntimeError, match="this CPU"):
            layer.quantise()


class FakeWay:
    """An implementation that computes something else."""

    name = "fake"

    def __init__(self, linear: Any) -> None:
        self.linear = linear

    def pack(self, codes: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        return codes, factors
