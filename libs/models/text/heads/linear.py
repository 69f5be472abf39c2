"""A linear layer in float32 with its activation and residual: the building block of every head.

Its tensors are in a module's own file (`2_Dense/model.safetensors`), or in the encoder's under the
names of the head's table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.catalog.card import Activation
from libs.errors import ModelBroken
from libs.kernels.rows.norms import layer_norm

_EPSILON: Final = 1e-5  # torch's default, which packages use


def _same(x: Tensor) -> Tensor:
    return x


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "identity": _same,
    "sigmoid": torch.sigmoid,
    "softmax": _softmax,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


class HeadLinear(nn.Module):
    """Compute activation(x W' + b), plus x for residual layers, or plus x R' if the sizes
    differ."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        stem: str,
        activation: Activation,
        *,
        residual: bool = False,
    ) -> None:
        """`state` holds `<stem>.weight` [out, in], `<stem>.bias` if the layer has a bias, and
        `residual.weight` for R.
        """
        super().__init__()
        self.weight = _frozen(state[f"{stem}.weight"])
        self.bias = _frozen(state[f"{stem}.bias"]) if f"{stem}.bias" in state else None
        self.shortcut = (
            _frozen(state["residual.weight"]) if residual and "residual.weight" in state else None
        )
        self._residual = residual
        self._function = FUNCTIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, in] float32 to [rows, out]."""
        out = self._function(F.linear(x, self.weight, self.bias))
        if self._residual:
            out = out + (x if self.shortcut is None else F.linear(x, self.shortcut))
        return out


class HeadNorm(nn.Module):
    """LayerNorm with torch's epsilon, in float32."""

    def __init__(self, state: Mapping[str, Tensor], stem: str, size: int, file: str) -> None:
        """Load the norm. Raises ModelBroken for a tensor that is missing or has another shape."""
        super().__init__()
        for ending in ("weight", "bias"):
            check_shape(state, f"{stem}.{ending}", (size,), file)
        self.weight = _frozen(state[f"{stem}.weight"])
        self.bias = _frozen(state[f"{stem}.bias"])

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [rows, size]."""
        return layer_norm(x, self.weight, self.bias, _EPSILON)


class HeadDot(nn.Module):
    """A linear layer with one output, in float32.

    It sums products instead of calling a matrix-vector product: on a CPU, the latter's rounding
    depends on the address of the weights, which changes when an evicted model is loaded again.
    """

    def __init__(self, state: Mapping[str, Tensor], stem: str, size: int, file: str) -> None:
        """Load the layer. Raises ModelBroken for a tensor that is missing or has another shape."""
        super().__init__()
        check_shape(state, f"{stem}.weight", (1, size), file)
        check_shape(state, f"{stem}.bias", (1,), file)
        self.weight = _frozen(state[f"{stem}.weight"])
        self.bias = _frozen(state[f"{stem}.bias"])

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [...]."""
        return (x * self.weight[0]).sum(-1) + self.bias


def linear_layer(
    state: Mapping[str, Tensor],
    stem: str,
    shape: tuple[int, int],
    file: str,
    function: Activation = "identity",
) -> HeadLinear:
    """Load a layer with a bias, of `shape` [out, in].

    Raises ModelBroken for a tensor that is missing or has another shape.
    """
    check_shape(state, f"{stem}.weight", shape, file)
    check_shape(state, f"{stem}.bias", shape[:1], file)
    return HeadLinear(state, stem, function)


def check_shape(state: Mapping[str, Tensor], name: str, shape: tuple[int, ...], file: str) -> None:
    """Raise ModelBroken unless the tensor exists with this shape."""
    found = state.get(name)
    if found is None:
        raise ModelBroken(f"{file}: tensor `{name}` is missing")
    if tuple(found.shape) != shape:
        raise ModelBroken(f"{file}: `{name}` has the shape {tuple(found.shape)}, not {shape}")


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.float(), requires_grad=False)
