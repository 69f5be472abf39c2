"""Row functions of the native library against float64: every instruction set, sizes with and
without tails, and nonfinite numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from libs.kernels.layout import cumulated
from libs.kernels.native import rows
from libs.kernels.native.library import SETS
from tests.kernels.ways import use_native

FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "quick_gelu": lambda t: t * (1.702 * t).sigmoid(),
}

SIZES = [1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 384, 1000]
# Of float32, a few roundings; of bfloat16, half a unit of the last place.
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 2**-8}
TYPES = pytest.mark.parametrize("dtype", BOUNDS)
ENDED = [float("nan"), float("inf")]


@pytest.fixture(params=SETS, autouse=True)
def instructions(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, library: Path
) -> str:
    """Each instruction set that this CPU has."""
    use_native(monkeypatch, library, request.param)
    return str(request.param)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(got: Tensor | None, wanted: Tensor, bound: float) -> None:
    assert got is not None
    assert got.shape == wanted.shape
    assert ((got.double() - wanted).abs() <= bound * wanted.abs().clamp(min=1)).all()


def in_a_frame(t: Tensor) -> Tensor:
    """The same as a view of a larger tensor, in which all around it is NaN."""
    frame = torch.full((t.shape[0] + 2, t.shape[1] + 9), float("nan"), dtype=t.dtype)
    frame[1:-1, 4:-5] = t
    return frame[1:-1, 4:-5]


@TYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("rms", "shift"), [(False, 0.0), (True, 0.0), (True, 1.0)])
def test_norms(size: int, rms: bool, shift: float, dtype: torch.dtype) -> None:
    x, weight, bias = (
        3 * random(5, size).to(dtype) + 1,
        random(size, dtype=dtype),
        random(1, size, dtype=dtype)[0],
    )
    own = x.double() if rms else x.double() - x.double().mean(1, keepdim=True)
    wanted = own / (own.square().mean(1, keepdim=True) + 1e-5).sqrt() * (weight.double() + shift)
    wanted = wanted if rms else wanted + bias.double()
    for given in (x, in_a_frame(x)):
        got = rows.norm(given, weight, None if rms else bias, 1e-5, rms=rms, shift=shift)
        assert_near(got, wanted, BOUNDS[dtype])


@TYPES
def test_norms_of_heads_in_a_fused_projection(dtype: torch.dtype) -> None:
    x, weight = random(6, 5, 48, dtype=dtype)[:, 1:4], random(48, dtype=dtype)
    own = x.double()
    wanted = own / (own.square().mean(2, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_near(rows.norm(x, weight, None, 1e-6, rms=True), wanted, BOUNDS[dtype])


def test_mean_far_from_zero_costs_no_digits() -> None:
    x, one = random(4, 384) + 1000, torch.ones(384)
    wanted = F.layer_norm(x.double(), (384,), one.double(), None, 1e-5)
    got = rows.norm(x, one, None, 1e-5)
    assert got is not None
    assert (got - wanted).abs().max() <= 2 * (
        F.layer_norm(x, (384,), one, None, 1e-5) - wanted
    ).abs().max()


@TYPES
@pytest.mark.parametrize("bad", ENDED)
def test_nonfinite_numbers_stay_in_their_row(bad: float, dtype: torch.dtype) -> None:
    x, weight = random(3, 70, dtype=dtype), torch.ones(70, dtype=dtype)
    x[1, 69] = bad
    for rms in (False, True):
        got = rows.norm(x, weight, None, 1e-5, rms=rms)
        assert got is not None
        assert got[[0, 2]].isfinite().all()
        assert got[1].isnan().any()


@TYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", list(FUNCTIONS))
def test_gates(size: int, activation: str, dtype: torch.dtype) -> None:
    x = 4 * random(3, 2 * size, dtype=dtype)
    first, second = x.double().chunk(2, dim=1)
    function = FUNCTIONS[activation]
    for given in (x, in_a_frame(x)):
        assert_near(
            rows.gate_up(given, activation, gate_last=False),
            function(first) * second,
            BOUNDS[dtype],
        )
        assert_near(
            rows.gate_up(given, activation, gate_last=True), function(second) * first, BOUNDS[dtype]
        )


@TYPES
@pytest.mark.parametrize("activation", list(FUNCTIONS))
def test_activations_of_all_magnitudes(activation: str, dtype: torch.dtype) -> None:
    """Far from zero, and where nothing is finite: as torch has it."""
    x = torch.tensor(
        [
            0.0,
            -0.0,
            1e-20,
            -1e-20,
            5,
            -5,
            12,
            -12,
            88,
            -88,
            200,
            -200,
            1e4,
            -1e4,
            3e38,
            -3e38,
            float("inf"),
            float("nan"),
        ]
    )
    own = x.to(dtype)[None]
    got = rows.gate_up(torch.cat((own, torch.ones_like(own)), dim=1), activation, gate_last=False)
    wanted = FUNCTIONS[activation](own.double())
    assert got is not None
    torch.testing.assert_close(got.double(), wanted, rtol=BOUNDS[dtype], atol=1e-6, equal_nan=True)


@TYPES
@pytest.mark.parametrize("pairs", [1, 5, 8, 16, 20, 24, 32, 48, 64])
def test_rotations(pairs: int, dtype: torch.dtype) -> None:
    """The first heads of a fused projection, in place; the rest of each head and the other heads
    stay.
    """
    whole, cos, sin = (
        random(7, 5, 2 * pairs + 3, dtype=dtype),
        random(7, pairs),
        random(1, 7, pairs)[0],
    )
    before = whole.clone()
    low, high = before[:, :3, :pairs].double(), before[:, :3, pairs : 2 * pairs].double()
    c, s = cos.double()[:, None], sin.double()[:, None]
    got = rows.rotate(whole[:, :3], cos, sin)
    assert got is not None
    assert got.data_ptr() == whole.data_ptr()
    wanted = torch.cat(
        (low * c - high * s, high * c + low * s, before[:, :3, 2 * pairs :].double()), dim=2
    )
    assert_near(got, wanted, 2 * BOUNDS[dtype])
    assert torch.equal(whole[:, 3:], before[:, 3:])


@TYPES
@pytest.mark.parametrize("size", SIZES)
def test_sums_means_and_maxima(size: int, dtype: torch.dtype) -> None:
    lengths = (1, 4, 1, 33, 100, 2)
    x = random(sum(lengths), size, dtype=dtype)
    functions = {"sum": lambda t: t.sum(0), "mean": lambda t: t.mean(0), "max": lambda t: t.amax(0)}
    for given in (x, in_a_frame(x)):
        for how, function in functions.items():
            got = rows.reduce(given, how, cumulated(lengths, "cpu"))
            assert_near(
                got, torch.stack([function(part) for part in x.double().split(lengths)]), 1e-5
            )
            assert got is not None
            assert got.dtype is torch.float32


@TYPES
@pytest.mark.parametrize("bad", [*ENDED, float("-inf")])
@pytest.mark.parametrize("how", ["sum", "mean", "max"])
def test_nonfinite_numbers_stay_in_their_sequence(how: str, bad: float, dtype: torch.dtype) -> None:
    x = random(30, 40, dtype=dtype)
    for row in (10, 15, 19):
        x[row, 7] = bad
    got = rows.reduce(x, how, cumulated((10, 10, 10), "cpu"))
    assert got is not None
    middle = x[10:20].float()
    wanted = {"sum": middle.sum(0), "mean": middle.mean(0), "max": middle.amax(0)}[how]
    torch.testing.assert_close(got[1], wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert got[[0, 2]].isfinite().all()


def test_long_sum_is_as_exact_as_torchs() -> None:
    x = random(20_000, 16) + 1
    wanted = x.double().sum(0)
    got = rows.reduce(x, "sum", cumulated((20_000,), "cpu"))
    assert got is not None
    assert (got[0] - wanted).abs().max() / wanted.abs().max() < 1e-6


@TYPES
def test_embeddings(dtype: torch.dtype) -> None:
    for size in SIZES:
        table, places = random(11, size, dtype=dtype), random(5, size, dtype=dtype)
        numbers, positions = (
            torch.tensor((10, 0, 3, 3), dtype=torch.int32),
            torch.tensor((0, 4, 1, 2), dtype=torch.int32),
        )
        got = rows.embed(table, numbers, places, positions)
        assert got is not None
        assert torch.equal(got, table[numbers.long()] + places[positions.long()])


def test_number_outside_its_table_is_left_to_torch() -> None:
    table, places = random(11, 8), random(5, 8)
    inside = torch.tensor((1, 2), dtype=torch.int32)
    for wrong in (-1, 11, 2**31 - 1):
        assert (
            rows.embed(table, torch.tensor((1, wrong), dtype=torch.int32), places, inside) is None
        )
        assert (
            rows.embed(table, inside, places, torch.tensor((1, wrong), dtype=torch.int32)) is None
        )


@TYPES
def test_threads_compute_the_same(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    x, weight = random(700, 384, dtype=dtype), random(384, dtype=dtype)
    cos, sin, cu_seqlens = random(700, 32), random(1, 700, 32)[0], cumulated((5,) * 140, "cpu")
    numbers = torch.arange(700, dtype=torch.int32)
    try:
        found: list[list[Tensor | None]] = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            gated, pooled = (
                rows.gate_up(x, "silu", gate_last=False),
                rows.reduce(x, "mean", cu_seqlens),
            )
            turned, embedded = (
                rows.rotate(x.clone().view(700, 6, 64), cos, sin),
                rows.embed(x, numbers, x, numbers),
            )
            found.append([rows.norm(x, weight, None, 1e-5), gated, pooled, turned, embedded])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def test_unsupported_inputs_are_left_to_torch() -> None:
    x, weight, ends = random(6, 32), random(32), cumulated((2, 4), "cpu")
    assert rows.norm(x.half(), weight.half(), None, 1e-5) is None
    assert rows.norm(x.bfloat16(), weight, None, 1e-5) is None, "weights of another type"
    assert rows.norm(x.T, torch.ones(6), None, 1e-5) is None, (
        "numbers of a row that are not adjacent"
    )
    assert rows.norm(x.clone().requires_grad_(), weight, None, 1e-5) is None
    assert rows.gate_up(x.T, "gelu", gate_last=False) is None
    assert rows.reduce(x.T, "mean", ends) is None
    assert rows.reduce(x, "mean", ends.long()) is None
    assert rows.reduce(x.double(), "mean", ends) is None
    heads, cos = random(6, 2, 16), random(6, 8)
    assert rows.rotate(heads.transpose(1, 2), cos, cos) is None
    assert rows.rotate(heads, cos.T.contiguous().T, cos) is None
    numbers = torch.tensor((1, 2), dtype=torch.int32)
    assert rows.embed(x, numbers.long(), x, numbers) is None
    assert rows.embed(x, numbers, x.bfloat16(), numbers) is None
