"""Connectors map hidden states of an image tower to rows of a text encoder, in the tower's type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from libs.kernels.linear.packed import PackedLinear
from libs.models.images.vlm.image_converter import Grid
from libs.models.text.heads.linear import check_shape

State = Mapping[str, Tensor]


class Connector(nn.Module):
    """A connector of an image encoder to a text encoder."""

    def forward(self, hidden: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return [rows, hidden of the text encoder].

        Args:
            hidden: [patches, hidden of the image encoder] of all images in turn.
            grids: Rows and columns of each image's patches.
        """
        raise NotImplementedError


class LinearConnector(Connector):
    """PaliGemma's connector: each patch becomes a row."""

    def __init__(self, linear: PackedLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: Tensor, grids: Sequence[Grid]) -> Tensor:
        return self.linear.forward(hidden)


class PixelShuffle(Connector):
    """Idefics3's connector: the states of a square of `side` x `side` patches, row by row, become
    one row.
    """

    def __init__(self, linear: PackedLinear, side: int) -> None:
        super().__init__()
        self.linear, self._side = linear, side

    def forward(self, hidden: Tensor, grids: Sequence[Grid]) -> Tensor:
        parts = torch.split(hidden, [rows * columns for rows, columns in grids])
        return self.linear.forward(
            torch.cat(
                [_squares(part, grid, self._side) for part, grid in zip(parts, grids, strict=True)]
            )
        )


class Merger(nn.Module):
    """Qwen-VL's connector: the adjacent states of a square's patches pass two layers with GELU
    between them.

    `norm`: norm of the whole square's states; None if each patch is already normalised.
    """

    def __init__(self, up: PackedLinear, down: PackedLinear, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down, self.norm = up, down, norm

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [patches, hidden] to [squares, hidden of the text encoder]."""
        x = hidden.reshape(-1, self.up.inputs)
        return self.down.forward(self.up.forward(x if self.norm is None else self.norm(x)))


class Mergers(Connector):
    """Several mergers. `deeper`: for the states after the tower's layers `taps`; their rows are
    added after the text encoder's first layers.
    """

    def __init__(
        self, last: Merger, deeper: Sequence[Merger] = (), taps: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.last, self.deeper, self.taps = last, nn.ModuleList(deeper), tuple(taps)

    def forward(self, hidden: Tensor, grids: Sequence[Grid]) -> Tensor:
        return self.last.forward(hidden)


def _squares(hidden: Tensor, grid: Grid, side: int) -> Tensor:
    """Map [rows * columns, size] to [squares, side * side * size]."""
    rows, columns = grid
    squares = hidden.view(rows // side, side, columns // side, side, -1).transpose(1, 2)
    return squares.reshape((rows // side) * (columns // side), -1)


def read_linear(
    state: State,
    stem: str,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    file: str,
    *,
    bias: bool,
    gelu: bool = False,
) -> PackedLinear:
    """Build a linear layer of loaded tensors. Raises ModelBroken, naming `file`, for a missing or
    misshapen tensor.
    """
    check_shape(state, f"{stem}.weight", (outputs, inputs), file)
    with torch.device("meta"):
        linear = PackedLinear(inputs, outputs, bias=bias, activation="gelu" if gelu else "none")
    tensors = {"weight": state[f"{stem}.weight"].to(dtype)}
    if bias:
        check_shape(state, f"{stem}.bias", (outputs,), file)
        tensors["bias"] = state[f"{stem}.bias"].to(dtype)
    linear.load_state_dict(tensors, assign=True)
    linear.requires_grad_(False)
    linear.prepare()
    return linear
