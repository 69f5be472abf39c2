"""Updates of a linear layer by adapters, per adapter and fused, against the plain formula."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from libs.kernels.linear.lora import AdapterRows, LoraUpdates, LowRank, add_masked, add_sliced
from libs.kernels.linear.packed import PackedLinear

# Sequences of adapters 0, 1 and 2, one of which has no part in the layer, and of none (None), as
# neighbours.
ADAPTERS = (None, 0, 0, 1, 2, 3)
LENGTHS = (3, 1, 4, 5, 2, 6)
RANKS = {0: 2, 2: 5, 3: 1}


def parts(generator: torch.Generator) -> dict[int, LowRank]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {number: LowRank(random(rank, 24), random(rank, 40)) for number, rank in RANKS.items()}


def expected(
    y: Tensor, x: Tensor, of_row: Sequence[int | None], adapters: dict[int, LowRank]
) -> Tensor:
    rows = []
    for row, number in enumerate(of_row):
        part = adapters.get(-1 if number is None else number)
        rows.append(
            y[row]
            if part is None
            else y[row] + (x[row].to(part.a.dtype) @ part.a.T @ part.b).to(y.dtype)
        )
    return torch.stack(rows)


@pytest.mark.parametrize("one_row_each", [False, True])
def test_both_ways_are_the_plain_formula_for_tokens_and_for_one_row_a_sequence(
    one_row_each: bool,
) -> None:
    generator = torch.Generator().manual_seed(0)
    adapters = parts(generator)
    lengths = (1,) * len(LENGTHS) if one_row_each else LENGTHS
    rows = AdapterRows.from_adapters(ADAPTERS, LENGTHS)
    x = torch.randn(sum(lengths), 24, generator=generator)
    y = torch.randn(sum(lengths), 40, generator=generator)
    of_row = [
        number for number, length in zip(ADAPTERS, lengths, strict=True) for _ in range(length)
    ]
    wanted = expected(y, x, of_row, adapters)
    segments = [segment for segment in rows.segments[len(x)] if segment.adapter in adapters]
    torch.testing.assert_close(add_sliced(y.clone(), x, segments, adapters), wanted)
    torch.testing.assert_close(add_masked(y.clone(), x, segments, adapters, rows.memo), wanted)
    untouched = [row for row, number in enumerate(of_row) if number not in RANKS]
    assert torch.equal(LoraUpdates(rows, adapters).add_to(y.clone(), x)[untouched], y[untouched])


def test_adapter_may_be_wider_than_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, adapters = AdapterRows.from_adapters((0,), (4,)), parts(generator)
    x = torch.randn(4, 24, generator=generator).bfloat16()
    y = torch.zeros(4, 40, dtype=torch.bfloat16)
    torch.testing.assert_close(
        LoraUpdates(rows, adapters).add_to(y.clone(), x), expected(y, x, [0] * 4, adapters)
    )


def test_nothing_is_asked_of_the_device() -> None:
    """Reading a value raises on the meta device: tensors have no values there."""
    rows = AdapterRows.from_adapters(ADAPTERS, LENGTHS)
    with torch.device("meta"):
        adapters = {
            number: LowRank(torch.empty(rank, 24), torch.empty(rank, 40))
            for number, rank in RANKS.items()
        }
        x, y = torch.empty(21, 24), torch.empty(21, 40)
    assert LoraUpdates(rows, adapters).add_to(y, x).shape == (21, 40)


def test_range_is_cut_where_the_adapter_changes() -> None:
    rows = AdapterRows.from_adapters(ADAPTERS, LENGTHS)
    assert list(rows.within(21, 0, 21)) == [
        (0, 3, None),
        (3, 8, 0),
        (8, 13, 1),
        (13, 15, 2),
        (15, 21, 3),
    ]
    assert list(rows.within(21, 2, 5)) == [(2, 3, None), (3, 5, 0)]
    assert list(rows.within(6, 1, 4)) == [(1, 3, 0), (3, 4, 1)]
    assert list(AdapterRows.from_adapters((None, None), (2, 3)).within(5, 1, 4)) == [(1, 4, None)]


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_adds_before_its_activation_and_next_to_the_residual(
    bias: bool, prepared: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    adapters, rows = parts(generator), AdapterRows.from_adapters((0, 2), (3, 4))
    x, residual = torch.randn(7, 24, generator=generator), torch.randn(7, 40, generator=generator)
    linears = [PackedLinear(24, 40, bias=bias), PackedLinear(24, 40, bias=bias, activation="gelu")]
    for linear in linears:
        linear.weight = torch.nn.Parameter(
            torch.randn(40, 24, generator=generator), requires_grad=False
        )
        linear.bias = (
            torch.nn.Parameter(torch.randn(40, generator=generator), requires_grad=False)
            if bias
            else None
        )
        plain = torch.nn.functional.linear(x, linear.weight, linear.bias)
        wanted = expected(plain, x, [0] * 3 + [2] * 4, adapters)
        wanted = torch.nn.functional.gelu(wanted) if linear.activation == "gelu" else wanted
        if prepared:
            linear.prepare()
        linear.delta = LoraUpdates(rows, adapters)
        torch.testing.assert_close(linear.forward(x), wanted)
        torch.testing.assert_close(linear.add(x, residual), wanted + residual)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_gain_scales_the_layers_own_result_and_neither_bias_nor_residual(
    prepared: bool, activation: str
) -> None:
    """DoRA: (W x) gain + bias, and the product; rows of other adapters and of none are not
    scaled.
    """
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(9, 24, generator=generator), torch.randn(9, 40, generator=generator)
    linear = PackedLinear(24, 40, activation="gelu" if activation == "gelu" else "none")
    weight, bias = torch.randn(40, 24, generator=generator), torch.randn(40, generator=generator)
    linear.weight, linear.bias = (
        torch.nn.Parameter(one.clone(), requires_grad=False) for one in (weight, bias)
    )
    gain = 1 + 0.3 * torch.randn(40, generator=generator)
    plain = parts(generator)
    scaled = LowRank(plain[0].a, plain[0].b, gain, (1 - gain) * bias)
    wanted = x @ weight.T + bias
    wanted[:3] = (x[:3] @ weight.T) * gain + bias + x[:3] @ plain[0].a.T @ plain[0].b
    wanted[3:7] += x[3:7] @ plain[2].a.T @ plain[2].b
    wanted = torch.nn.functional.gelu(wanted) if activation == "gelu" else wanted
    if prepared:
        linear.prepare()
    linear.delta = LoraUpdates(
        AdapterRows.from_adapters((0, 2, None), (3, 4, 2)), {0: scaled, 2: plain[2]}
    )
    torch.testing.assert_close(linear.forward(x), wanted)
    torch.testing.assert_close(linear.add(x, residual), wanted + residual)


def test_table_adds_to_the_rows_of_each_adapter() -> None:
    generator = torch.Generator().manual_seed(0)
    table, numbers = torch.randn(30, 16, generator=generator), torch.tensor([4, 4, 29, 0, 7])
    part = LowRank(torch.randn(30, 3, generator=generator), torch.randn(3, 16, generator=generator))
    wanted = table[numbers]
    wanted[1:3] += (part.a @ part.b)[numbers[1:3]]
    delta = LoraUpdates(AdapterRows.from_adapters((None, 0, 1), (1, 2, 2)), {0: part})
    torch.testing.assert_close(delta.add_rows_to(table[numbers], numbers), wanted)
