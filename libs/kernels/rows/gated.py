"""The gated activation of a feed-forward layer (GLU variants, arXiv 2002.05202).

Called once a layer, between the fused gate and up projection and the down projection.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from libs.kernels import native
from libs.kernels.triton_here import has_triton

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
"""gelu: the exact one (erf); gelu_tanh: its approximation by tanh."""


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply the activation to a tensor of any shape; the result is a new tensor."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def gate_up(x: Tensor, activation: Activation, *, gate_last: bool = False) -> Tensor:
    """Compute activation(gate) * up. x: [rows, 2 * size], the gate first or, with `gate_last`,
    after up -> [rows, size].
    """
    if has_triton(x):
        from libs.kernels.rows import fused_triton

        return fused_triton.gate_up(x, activation, gate_last=gate_last)
    done = native.gate_up(x, activation, gate_last=gate_last)
    if done is not None:
        return done
    first, second = x.chunk(2, dim=-1)
    return (
        activate(second, activation).mul_(first)
        if gate_last
        else activate(first, activation).mul_(second)
    )
