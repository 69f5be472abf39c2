"""A mixture of experts, in the place of a layer's feed-forward: a router sends each token to the few experts that suit it best.

On the CPU the tokens of each expert are gathered, so that only chosen experts compute. On other devices that needs the number of
each expert's tokens on the host, which would stop a forward until the device has caught up, so all experts see all tokens there: as
two matrix products for all of them, the unchosen weighted with 0. That is experts / used times the arithmetic, and no launch more
than a plain feed-forward has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from libs.kernels.linear import PackedLinear
from libs.models.layers.activations import FUNCTIONS
from libs.models.layers.spec import EncoderSpec


class ExpertWeights(nn.Module):
    """`w1` and `w2` of all experts, one below the other: [experts * ffn, hidden] each; w2 is not transposed."""

    def __init__(self, experts: int, ffn: int, hidden: int) -> None:
        super().__init__()
        self.w1: Tensor = nn.Parameter(torch.empty(experts * ffn, hidden), requires_grad=False)
        self.w2: Tensor = nn.Parameter(torch.empty(experts * ffn, hidden), requires_grad=False)


class Experts(nn.Module):
    """sum over the chosen experts of share * (activation(x w1') w2), plus one bias. Shares are the router's softmax over all
    experts, which those of the chosen need not fill (MegaBlocks' dropless mixture, as nomic-embed-text-v2-moe was trained).
    """

    def __init__(self, spec: EncoderSpec, experts: int) -> None:
        super().__init__()
        self.router = PackedLinear(spec.hidden, experts, bias=False)
        self.weights = ExpertWeights(experts, spec.ffn, spec.hidden)
        self.bias: Tensor = nn.Parameter(torch.empty(spec.hidden), requires_grad=False)
        self.up, self.down = nn.ModuleList(), nn.ModuleList()
        self._experts, self._used, self._function = experts, spec.experts_used, FUNCTIONS[spec.activation]

    def prepare(self) -> None:
        """Once loaded: on the CPU, split the weights by expert, each a layer of its own, laid out when it is prepared in turn."""
        if self.weights.w1.device.type != "cpu" or len(self.up):
            return
        for w1 in self.weights.w1.chunk(self._experts):
            self.up.append(_linear(w1))
        for w2 in self.weights.w2.chunk(self._experts):
            self.down.append(_linear(w2.T.contiguous()))
        self.weights = ExpertWeights(0, 0, 0)

    def whole(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, hidden]"""
        shares = self.router.forward(x).float().softmax(-1)
        values, chosen = shares.topk(self._used, dim=-1)
        if x.device.type == "cpu":
            return self.of_chosen(x, values.to(x.dtype), chosen)
        return self.of_all(x, torch.zeros_like(shares).scatter(-1, chosen, values).to(x.dtype))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`whole` plus `residual`."""
        return self.whole(x) + residual

    def of_chosen(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Each expert for its own rows. `shares`, `chosen`: [rows, used]."""
        out = self.bias.expand_as(x).clone()
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                answer = down(self._function(up(x.index_select(0, rows))))
                out.index_add_(0, rows, answer * shares[rows, places, None])
        return out

    def of_all(self, x: Tensor, shares: Tensor) -> Tensor:
        """Every expert for all rows. `shares`: [rows, experts], 0 for the unchosen.

        They are applied before the second product, which then sums over the experts as well.
        """
        inner = self._function(x @ self.weights.w1.T).view(len(x), self._experts, -1) * shares[..., None]
        return torch.addmm(self.bias, inner.flatten(1), self.weights.w2)


def _linear(weight: Tensor) -> PackedLinear:
    """A layer without bias around a loaded weight [outputs, inputs]."""
    layer = PackedLinear(0, 0, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
