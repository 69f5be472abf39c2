"""int8 linear layers on a CPU: weights are scaled per output, activations per row at run time
(dynamic).

A weight's row W becomes codes w of -127 ... 127 with W = scale * w, once after loading. A row x of
activations becomes bytes q of 0 ... 255 with x = low + step * q, from its smallest to its largest
number, in every product. Sums of products of codes are exact integers, so a row's result depends
only on the row.

The native library computes them (`native/source/int8/int8.h`), else torch's private integer
product. Both are tested once per process against a plain computation, as is everything that may
give other results on another CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels.native.int8 import variants

MAX_INPUTS: Final = 1 << 16
"""Maximum inputs of a layer: the sum of this many products of codes fits 32 bits."""

_STEPS: Final = 255


class Way(Protocol):
    """One implementation. `name` is for logs."""

    @property
    def name(self) -> str: ...

    def pack(self, codes: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Pack codes [outputs, inputs] int8 and factors [3, outputs] float32 for `linear`.

        The factors of an output: its scale, the scale times the sum of its codes, its bias.
        """

    def linear(
        self,
        x: Tensor,
        codes: Tensor,
        factors: Tensor,
        outputs: int,
        *,
        gelu: bool,
        residual: Tensor | None,
    ) -> Tensor:
        """Map [rows, inputs] to [rows, outputs] in the type of x, float32 or bfloat16: x W' + b,
        then GELU, then `residual` added.
        """


class TorchInt8:
    """The implementation with torch's operators, with `torch._int_mm` for the product."""

    name = "torch"

    def pack(self, codes: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        return codes.contiguous(), factors.contiguous()

    def linear(
        self,
        x: Tensor,
        codes: Tensor,
        factors: Tensor,
        outputs: int,
        *,
        gelu: bool,
        residual: Tensor | None,
    ) -> Tensor:
        wide = x.float()
        low = wide.amin(1, keepdim=True)
        step = (wide.amax(1, keepdim=True) - low) / _STEPS
        # Codes minus 128, since the product is of signed bytes; the low end is raised by as much.
        shifted = torch.where(step > 0, (wide - low) / step, 0.0).round_().sub_(128).to(torch.int8)
        scale, total, bias = factors
        y = torch._int_mm(shifted, codes.T).float() * (step * scale) + torch.addcmul(
            bias, low + 128 * step, total
        )
        y = F.gelu(y) if gelu else y
        return (y if residual is None else y + residual.float()).to(x.dtype)


class Int8Weight(nn.Module):
    """A linear layer's weight and bias in int8. In addition to the codes, `bytes` has 12 for each
    output.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, chosen: Way) -> None:
        """Quantise `weight` [outputs, inputs] of any type, with at most MAX_INPUTS inputs, and
        `bias` [outputs].
        """
        super().__init__()
        codes, scale = quantise_rows(weight)
        total = codes.sum(1, dtype=torch.int64) * scale.double()
        shift = torch.zeros(len(codes)) if bias is None else bias.detach().float()
        packed, factors = chosen.pack(codes, torch.stack((scale, total.float(), shift)))
        self.register_buffer("codes", packed, persistent=False)
        self.register_buffer("factors", factors, persistent=False)
        self.codes: Tensor
        self.factors: Tensor
        self._outputs, self._way = len(codes), chosen

    def forward(self, x: Tensor, *, gelu: bool = False, residual: Tensor | None = None) -> Tensor:
        """Compute `Way.linear`."""
        return self._way.linear(
            x, self.codes, self.factors, self._outputs, gelu=gelu, residual=residual
        )


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [rows, columns] to codes [rows, columns] int8 and scale [rows] float32, with weight
    = codes * scale.
    """
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight))
    # Work in parts, so a large table is never in float32 as a whole.
    step = max(1, (1 << 20) // max(1, weight.shape[1]))
    for first in range(0, len(weight), step):
        part = weight.detach()[first : first + step].float()
        own = part.abs().amax(1) / 127
        scale[first : first + step] = own
        inverse = torch.where(own > 0, 1 / own, 0.0)
        codes[first : first + step] = (
            (part * inverse[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        )
    return codes, scale


def way() -> Way:
    """Return the implementation to use. Raises RuntimeError with the reason if none works."""
    chosen = _choice()
    if isinstance(chosen, str):
        raise RuntimeError(chosen)
    return chosen


def missing() -> str:
    """Return the reason why this CPU cannot compute in int8; empty if it can."""
    chosen = _choice()
    return chosen if isinstance(chosen, str) else ""


@cache
def _choice() -> Way | str:
    # Use a separate thread, since dispatch modes, such as one that counts a forward's memory,
    # belong to the caller's.
    with ThreadPoolExecutor(1) as thread:
        tried = (each for each in ways() if thread.submit(agrees, each).result())
        return next(
            tried, "neither the native kernels nor torch's integer product work on this CPU"
        )


def ways() -> Iterator[Way]:
    """Yield all implementations that may work here, best first."""
    yield from reversed(variants())
    yield TorchInt8()


def agrees(tried: Way) -> bool:
    """Return whether it runs on this CPU and equals the float64 result of the same codes, also at
    their limits.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight, residual = (
        torch.randn(*shape, generator=generator) for shape in ((7, 133), (70, 133), (7, 70))
    )
    # Implementations that add products of bytes in 16 bits would saturate on these.
    x[3], weight[5] = torch.linspace(0.99, 1.0, 133), 1.0
    x[3, 0] = 0.0
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 0.03)):
        low = x.to(dtype)
        wanted = _plain(low, weight) + residual[0].double()
        try:
            layer = Int8Weight(weight, residual[0], tried)
            pairs = (
                (layer.forward(low), wanted),
                (layer.forward(low, gelu=True), F.gelu(wanted)),
                (
                    layer.forward(low, residual=residual.to(dtype)),
                    wanted + residual.to(dtype).double(),
                ),
            )
        except (AttributeError, NotImplementedError, RuntimeError):
            return False
        if any(
            not torch.allclose(got.double(), right, rtol=bound, atol=10 * bound)
            for got, right in pairs
        ):
            return False
    return True


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product of the decoded numbers, in float64."""
    codes, scale = quantise_rows(weight)
    wide = x.double()
    low = wide.amin(1, keepdim=True)
    step = (wide.amax(1, keepdim=True) - low) / _STEPS
    return (((wide - low) / step).round() * step + low) @ (
        codes.double() * scale.double()[:, None]
    ).T
