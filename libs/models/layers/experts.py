"""Mixture of experts (MoE), which replaces a layer's feed-forward: a router sends each token to its
top-k experts.

1. On the CPU, and on GPUs with grouped products (`libs/kernels/linear/grouped.py`), the tokens of
  each
   expert are gathered and only the chosen experts compute.
2. Other devices would need each expert's number of tokens on the host, which would synchronise host
  and
   device. There, all experts compute all tokens in two matrix products, and unchosen experts are
   weighted with 0. That costs experts / used times the arithmetic, but apart from the router no
   more launches than a plain feed-forward.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from libs.kernels.linear.grouped import ByExpert, has_grouped
from libs.kernels.linear.packed import PackedLinear
from libs.models.layers.activations import FUNCTIONS
from libs.models.layers.spec import EncoderSpec


class ExpertWeights(nn.Module):
    """`w1` and `w2` of all experts, stacked by rows, [experts * ffn, hidden] each; w2 is not
    transposed.
    """

    def __init__(self, experts: int, ffn: int, hidden: int) -> None:
        super().__init__()
        self.w1: Tensor = nn.Parameter(torch.empty(experts * ffn, hidden), requires_grad=False)
        self.w2: Tensor = nn.Parameter(torch.empty(experts * ffn, hidden), requires_grad=False)


class Experts(nn.Module):
    """Return the sum over the chosen experts of share * (activation(x w1') w2), plus one bias.

    Shares are the router's softmax over all experts, not renormalised over the chosen ones
    (MegaBlocks' dropless MoE, with which nomic-embed-text-v2-moe was trained).
    """

    def __init__(self, spec: EncoderSpec, experts: int) -> None:
        super().__init__()
        # Rounding in the router's products would send tokens to other experts.
        self.router = PackedLinear(spec.hidden, experts, bias=False, exact=True)
        self.weights = ExpertWeights(experts, spec.ffn, spec.hidden)
        self.bias: Tensor = nn.Parameter(torch.empty(spec.hidden), requires_grad=False)
        self.up, self.down = nn.ModuleList(), nn.ModuleList()
        self._experts, self._used, self._function = (
            experts,
            spec.experts_used,
            FUNCTIONS[spec.activation],
        )

    def prepare(self) -> None:
        """Split the weights on the CPU into one linear layer per expert, each prepacked when it is
        prepared. Call it after loading.
        """
        if self.weights.w1.device.type != "cpu" or len(self.up):
            return
        for w1 in self.weights.w1.chunk(self._experts):
            self.up.append(_linear(w1))
        for w2 in self.weights.w2.chunk(self._experts):
            self.down.append(_linear(w2.T.contiguous()))
        self.weights = ExpertWeights(0, 0, 0)

    def whole(self, x: Tensor) -> Tensor:
        """Apply the block to [rows, hidden]."""
        shares = self.router.forward(x).float().softmax(-1)
        values, chosen = shares.topk(self._used, dim=-1)
        if x.device.type == "cpu":
            return self.compute_chosen(x, values.to(x.dtype), chosen)
        if has_grouped(x, self.weights.w1.shape[0] // self._experts, x.shape[1]):
            return self.compute_grouped(x, values, chosen)
        return self.compute_all(x, torch.zeros_like(shares).scatter(-1, chosen, values).to(x.dtype))

    def add(self, x: Tensor, residual: Tensor, *, overwrite: bool = False) -> Tensor:
        """Return `whole` plus `residual`. `residual` is unchanged even with `overwrite`."""
        return self.whole(x) + residual

    def compute_chosen(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Compute each expert for its own rows only. `shares` and `chosen` are [rows, used]."""
        out = self.bias.expand_as(x).clone()
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                answer = down(self._function(up(x.index_select(0, rows))))
                out.index_add_(0, rows, answer * shares[rows, places, None])
        return out

    def compute_grouped(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Compute `compute_chosen` in grouped products. `shares` and `chosen` are [rows, used]."""
        pairs = ByExpert.from_chosen(chosen, self._experts)
        w1, w2 = (
            weight.view(self._experts, -1, x.shape[1])
            for weight in (self.weights.w1, self.weights.w2)
        )
        inner = self._function(pairs.product(x.index_select(0, pairs.rows), w1.transpose(1, 2)))
        return (pairs.weighted(pairs.product(inner, w2), shares) + self.bias).to(x.dtype)

    def compute_all(self, x: Tensor, shares: Tensor) -> Tensor:
        """Compute every expert for all rows. `shares` is [rows, experts], 0 for unchosen experts.

        Shares are applied before the second product, which then also sums over the experts.
        """
        inner = (
            self._function(x @ self.weights.w1.T).view(len(x), self._experts, -1)
            * shares[..., None]
        )
        return torch.addmm(self.bias, inner.flatten(1), self.weights.w2)


class GatedExperts(nn.Module):
    """Return the sum over the chosen experts of share * (((up + 1) * activation(gate)) down), with
    biases everywhere, and gate and up clamped.

    Shares are the router's softmax over the chosen experts only (gpt-oss). Where all experts
    compute all tokens, tokens are computed in blocks of ROWS, because the inner states of all
    experts are large.
    """

    ROWS: Final = 256

    def __init__(self, spec: EncoderSpec, experts: int) -> None:
        super().__init__()
        self.router = PackedLinear(spec.hidden, experts, bias=True, exact=True)
        self.gate_up_proj: Tensor = nn.Parameter(
            torch.empty(experts, spec.hidden, 2 * spec.ffn), requires_grad=False
        )
        self.gate_up_proj_bias: Tensor = nn.Parameter(
            torch.empty(experts, 2 * spec.ffn), requires_grad=False
        )
        self.down_proj: Tensor = nn.Parameter(
            torch.empty(experts, spec.ffn, spec.hidden), requires_grad=False
        )
        self.down_proj_bias: Tensor = nn.Parameter(
            torch.empty(experts, spec.hidden), requires_grad=False
        )
        self._used, self._limit, self._function = (
            spec.experts_used,
            spec.gate_limit,
            FUNCTIONS[spec.activation],
        )

    def whole(self, x: Tensor) -> Tensor:
        """Apply the block to [rows, hidden]."""
        values, chosen = self.router.forward(x).float().topk(self._used, dim=-1)
        shares = values.softmax(-1)
        if x.device.type == "cpu":
            return self.compute_chosen(x, shares, chosen)
        if has_grouped(x, *self.down_proj.shape[1:]):
            return self.compute_grouped(x, shares, chosen)
        spread = (
            shares.new_zeros(len(x), len(self.down_proj)).scatter(-1, chosen, shares).to(x.dtype)
        )
        parts = [min(self.ROWS, len(x) - first) for first in range(0, len(x), self.ROWS)]
        return torch.cat(
            [
                self.compute_all(*part)
                for part in zip(
                    x.split_with_sizes(parts), spread.split_with_sizes(parts), strict=True
                )
            ]
        )

    def add(self, x: Tensor, residual: Tensor, *, overwrite: bool = False) -> Tensor:
        """Return `whole` plus `residual`. `residual` is unchanged even with `overwrite`."""
        return self.whole(x) + residual

    def compute_chosen(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Compute each expert for its own rows only, and sum in float32. `shares` and `chosen` are
        [rows, used].
        """
        out = torch.zeros_like(x, dtype=torch.float32)
        for number in range(len(self.down_proj)):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                inner = self._gated(
                    x.index_select(0, rows) @ self.gate_up_proj[number]
                    + self.gate_up_proj_bias[number]
                )
                answer = inner @ self.down_proj[number] + self.down_proj_bias[number]
                out.index_add_(0, rows, answer.float() * shares[rows, places, None])
        return out.to(x.dtype)

    def compute_grouped(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Compute `compute_chosen` in grouped products. `shares` and `chosen` are [rows, used]."""
        pairs = ByExpert.from_chosen(chosen, len(self.down_proj))
        both = pairs.product(x.index_select(0, pairs.rows), self.gate_up_proj)
        inner = self._gated(both + self.gate_up_proj_bias.index_select(0, pairs.experts))
        answers = pairs.product(inner, self.down_proj) + self.down_proj_bias.index_select(
            0, pairs.experts
        )
        return pairs.weighted(answers, shares).to(x.dtype)

    def compute_all(self, x: Tensor, shares: Tensor) -> Tensor:
        """Compute every expert for all rows. `shares` is [rows, experts], 0 for unchosen
        experts."""
        inner = self._gated(torch.matmul(x, self.gate_up_proj) + self.gate_up_proj_bias[:, None])
        inner = inner.transpose(0, 1) * shares[..., None]
        return torch.addmm(
            shares @ self.down_proj_bias, inner.flatten(1), self.down_proj.flatten(0, 1)
        )

    def _gated(self, both: Tensor) -> Tensor:
        """Apply gate and activation to [..., 2 * ffn], gate first, and return [..., ffn]."""
        gate, up = both.chunk(2, dim=-1)
        return (up.clamp(-self._limit, self._limit) + 1) * self._function(
            gate.clamp(max=self._limit)
        )


def _linear(weight: Tensor) -> PackedLinear:
    """Wrap a loaded weight [outputs, inputs] in a layer without bias."""
    layer = PackedLinear(0, 0, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
