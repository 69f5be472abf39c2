"""The linear layer of packed models, fused with the next operation (GELU, residual add) where the
device supports it.

On a CPU the weight is prepacked once after loading into oneDNN's blocked layout, which doubles
float32 throughput and speeds up small bfloat16 batches; the plain weight is then released. The
operators for that are private to torch, so they are checked against `F.linear` once per process and
data type, and any deviation leaves the plain path in use. In an int8 model the weight is quantised
instead (`int8.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels.linear.int8 import MAX_INPUTS, Int8Weight, way
from libs.kernels.linear.lora import LoraUpdates
from libs.kernels.native import panels

# The number of rows that oneDNN optimises the layout for; the result serves any other number.
_ROWS_HINT = 2048


class PackedLinear(nn.Module):
    """Computes x W' + b on [rows, inputs], then exact (erf) GELU if `activation` is set.

    Attributes:
        slots: Outputs of each of several fused projections; they add up to `outputs`.
        delta: Low-rank update of the current batch's LoRA adapters, added before the activation;
            None for none.
        exact: Not quantised in an int8 model.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        activation: Literal["none", "gelu"] = "none",
        slots: Sequence[int] = (),
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.slots = tuple(slots) or (outputs,)
        self.weight: Tensor = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias: Tensor | None = (
            nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        )
        self.activation, self.exact = activation, exact
        self.delta: LoraUpdates | None = None
        self.panels = 0  # address of the prepacked weight for kernels that read it there; 0: none
        self.packed: Tensor | None
        self.register_buffer("packed", None, persistent=False)
        self.quantised: Int8Weight | None = None

    def prepare(self) -> None:
        """Prepack the loaded weight for this device. Call it one time, when the weight has its
        final type and device.
        """
        is_plain = self.packed is None and self.quantised is None
        if is_plain and self.weight.device.type == "cpu" and prepacking_works(self.weight.dtype):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _ROWS_HINT)
            self.panels = panels.address(self.packed, self.weight)
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def quantise(self) -> None:
        """Replace the loaded weight by int8 codes instead of calling `prepare`, on a CPU. A layer
        that is too wide is prepacked.

        Raises RuntimeError if this CPU cannot compute in int8 (`int8.missing`).
        """
        if self.quantised is not None or self.packed is not None:
            return
        if self.weight.shape[1] > MAX_INPUTS:
            self.prepare()
            return
        self.quantised = Int8Weight(self.weight, self.bias, way())
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, inputs] to [rows, outputs]."""
        gelu = self.activation == "gelu"
        if self.delta is None:
            if self.packed is not None:
                return _pointwise(x, self.packed, self.bias, self.activation)
            if self.quantised is not None:
                return self.quantised.forward(x, gelu=gelu)
        y = self._product(x)
        if self.delta is not None:
            y = self.delta.add_to(y, x)
        return F.gelu(y) if gelu else y

    def _product(self, x: Tensor) -> Tensor:
        if self.quantised is not None:
            return self.quantised.forward(x)
        return (
            _linear(x, self.weight, self.bias)
            if self.packed is None
            else _pointwise(x, self.packed, self.bias, "none")
        )

    def gelu_tanh(self, x: Tensor) -> Tensor | None:
        """Return GELU by tanh of the linear's result, computed at the end of the matrix product.

        Returns None where that is not possible: on a device other than CUDA, where cuBLAS has this
        GELU, without a bias, and with adapters.
        """
        is_plain = self.delta is None and self.weight.dtype == x.dtype
        if self.bias is None or not is_plain or not _has_gelu_product(x):
            return None
        return torch._addmm_activation(self.bias, x, self.weight.T, use_gelu=True)

    def add(self, x: Tensor, residual: Tensor, *, overwrite: bool = False) -> Tensor:
        """Return the linear's result plus `residual` [rows, outputs].

        `overwrite`: the result may reuse the residual's memory, which on CUDA saves a copy.
        """
        if self.activation != "none" or (self.delta is not None and self.delta.scales):
            return self.forward(x) + residual
        if self.packed is not None:
            y = _with_residual(x, residual, self.packed, self.bias)
        elif self.quantised is not None:
            y = self.quantised.forward(x, residual=residual)
        elif self.bias is None and self.weight.dtype == x.dtype and not must_widen(x):
            is_free = overwrite and residual.device.type != "cpu" and residual.dtype == x.dtype
            y = (
                residual.addmm_(x, self.weight.T)
                if is_free
                else torch.addmm(residual, x, self.weight.T)
            )
        else:
            y = _linear(x, self.weight, self.bias) + residual
        return y if self.delta is None else self.delta.add_to(y, x)


@cache
def has_bfloat16() -> bool:
    """Return whether this CPU has instructions for bfloat16 products."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def must_widen(x: Tensor) -> bool:
    """Return whether to compute in float32: without bfloat16 instructions, half-precision products
    on a CPU take ten times as long as float32's, including casts.
    """
    return (
        x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and not has_bfloat16()
    )


def _has_gelu_product(x: Tensor) -> bool:
    return x.is_cuda


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # A weight of another type waits for quantisation, as it was stored.
    if must_widen(x) or weight.dtype != x.dtype:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).type_as(
            x
        )
    return F.linear(x, weight, bias)


@cache
def prepacking_works(dtype: torch.dtype) -> bool:
    """Return whether oneDNN's private operators exist in this torch, run on this CPU and agree with
    `F.linear`.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 48), (32, 48), (32,), (5, 32))
    x, weight, bias, residual = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in shapes
    )
    expected = F.linear(x.float(), weight.float(), bias.float())
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        results = [
            (_pointwise(x, packed, bias, "none"), expected),
            (_pointwise(x, packed, None, "none"), expected - bias.float()),
            (_pointwise(x, packed, bias, "gelu"), F.gelu(expected)),
            (_with_residual(x, residual, packed, bias), expected + residual.float()),
        ]
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    tolerance = 32 * torch.finfo(dtype).eps
    return all(
        torch.allclose(got.float(), want, rtol=tolerance, atol=tolerance) for got, want in results
    )


def _pointwise(x: Tensor, packed: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, activation, [], "none")
    return y


def _with_residual(x: Tensor, residual: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")
    return y
