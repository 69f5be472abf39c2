"""Patches ordered by the squares that the connector merges, and by windows if the encoder has them
(Qwen-VL, LightOnOCR).

These models repeat a still image in time, and the weights of its patches have a part for each of
the two frames; their sum is applied one time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import BatchLayout
from libs.models.images.patches import PatchSpec
from libs.models.images.processing import ImageProcessing
from libs.models.images.vlm.image_converter import Grid
from libs.models.interface.packed import Packed
from libs.models.layers.embeddings import InputLayer
from libs.models.layers.encoder import Attention, Shared

_COLOURS = 3
_SIDE = 1 << 12  # maximum patches of a side


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Structure of the patches.

    Attributes:
        side: Patches per side of a square.
        window: Squares per side of a window; 0 for no windows.
        frames: Parts of a patch's weight; 0 for none.
        table: Side of the table of positions, resampled to each image's patches; 0 for none.
        norm_eps: Epsilon of an RMSNorm of the patches; None for none.
        corners: The table's corners lie on the image's; otherwise its edges lie on the image's
            edges.
    """

    patches: PatchSpec
    side: int
    window: int = 0
    frames: int = 2
    table: int = 0
    norm_eps: float | None = None
    corners: bool = True

    def order(self, grid: Grid) -> tuple[NDArray[np.int32], list[int]]:
        """Return an image's squares, numbered row by row, in the order of its windows, and the
        squares of each window.
        """
        rows, columns = grid[0] // self.side, grid[1] // self.side
        numbers = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
        if not self.window:
            return numbers.reshape(-1), [rows * columns]
        size = self.window
        windows = [
            numbers[top : top + size, left : left + size].reshape(-1)
            for top in range(0, rows, size)
            for left in range(0, columns, size)
        ]
        return np.concatenate(windows), [len(window) for window in windows]

    def axes(self, grid: Grid) -> NDArray[np.int32]:
        """Return row and column of each patch in its order, [2, patches]. Patches beyond the last
        whole square are last.
        """
        order, _ = self.order(grid)
        rows, columns = (count // self.side * self.side for count in grid)
        places = np.indices(grid, np.int32)
        whole = places[:, :rows, :columns].reshape(
            2, rows // self.side, self.side, columns // self.side, self.side
        )
        squares = whole.transpose(0, 1, 3, 2, 4).reshape(2, -1, self.side**2)
        beyond = places[:, (places[0] >= rows) | (places[1] >= columns)]
        return np.concatenate((squares[:, order].reshape(2, -1), beyond), axis=1)


class BlockEmbedding(InputLayer):
    """Maps patches to hidden states. `embed` computes the rows of a batch's images, as
    `PatchEmbedding.embed`.
    """

    def __init__(self, block: BlockSpec, processing: ImageProcessing) -> None:
        super().__init__()
        spec = block.patches
        size = (spec.patch, spec.patch)
        self.project = (
            nn.Conv3d(
                _COLOURS, spec.hidden, (block.frames, *size), (block.frames, *size), bias=spec.bias
            )
            if block.frames
            else nn.Conv2d(_COLOURS, spec.hidden, size, size, bias=spec.bias)
        )
        self.norm = None if block.norm_eps is None else nn.RMSNorm(spec.hidden, eps=block.norm_eps)
        table = torch.empty(block.table**2, spec.hidden)
        self.position = nn.Parameter(table, requires_grad=False) if block.table else None
        self.max_positions, self.row_size = spec.most, spec.hidden
        self.spec, self._block, self._processing = spec, block, processing
        self.weight: Tensor
        self.mean: Tensor
        self.std: Tensor
        for name in ("weight", "mean", "std"):
            self.register_buffer(name, None, persistent=False)

    def prepare(self) -> None:
        """Add up the weights of the frames after loading, and move the normalisation's constants to
        the device.
        """
        stored = self.project.weight
        if stored.numel():
            whole = stored.detach().float()
            self.weight = (
                (whole.sum(2) if self._block.frames else whole).flatten(1).to(stored.dtype)
            )
            self.project.weight = nn.Parameter(stored.new_empty(0), requires_grad=False)
        device = self.weight.device
        self.mean = torch.tensor(self._processing.mean, dtype=torch.float32, device=device)[:, None]
        self.std = torch.tensor(self._processing.std, dtype=torch.float32, device=device)[:, None]

    def forward(self, batch: Packed) -> Tensor:
        """Return [tokens, hidden]."""
        if batch.given is None:
            raise ValueError("an image encoder takes rows, not token ids")
        x = batch.given.values.to(self.weight.dtype)
        return x if self.norm is None else self.norm.forward(x)

    def embed(self, images: Sequence[NDArray[np.generic]]) -> Tensor:
        """Map uint8 images, [height, width, 3] each, to the rows of all, [patches, hidden]."""
        runs = (list(run) for _, run in groupby(images, key=lambda image: image.shape))
        return torch.cat([self._embedded(torch.from_numpy(np.stack(run))) for run in runs])

    def _embedded(self, images: Tensor) -> Tensor:
        """Map images of one size, uint8 [n, height, width, 3], to [n * patches, hidden]."""
        device = self.weight.device
        images = (
            images.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else images
        )
        count, patch = len(images), self.spec.patch
        grid = self.spec.patch_grid(images.shape[1], images.shape[2])
        whole = images.view(count, grid[0], patch, grid[1], patch, _COLOURS)
        rows, columns = torch.from_numpy(self._block.axes(grid)).to(device).long()
        own = (
            whole.permute(0, 1, 3, 5, 2, 4)
            .reshape(count, -1, _COLOURS * patch**2)
            .index_select(1, rows * grid[1] + columns)
        )
        patches = own.view(-1, _COLOURS, patch**2)
        values = ((patches.float() / (1 / self._processing.scale) - self.mean) / self.std).to(
            self.weight.dtype
        )
        x = F.linear(values.flatten(1), self.weight, self.project.bias)
        return (
            x
            if self.position is None
            else (x.view(count, -1, x.shape[1]) + self._positions(grid)).flatten(0, 1)
        )

    def _positions(self, grid: Grid) -> Tensor:
        """Return bilinear positions [patches, hidden] in the patches' order."""
        if self.position is None:
            raise ValueError("the model has no table of positions")
        side = self._block.table
        square = self.position.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        resampled = (
            F.interpolate(square, size=grid, mode="bilinear", align_corners=self._block.corners)[0]
            .flatten(1)
            .T
        )
        rows, columns = torch.from_numpy(self._block.axes(grid)).to(resampled.device).long()
        return resampled.index_select(0, rows * grid[1] + columns).to(self.position.dtype)


class WindowAttention(Attention):
    """Attention within `Packed.windows`, which form separate sequences."""

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Packed, layout: BatchLayout, shared: Shared
    ) -> Tensor:
        if batch.windows is None:
            raise ValueError("the batch has no windows")
        return varlen_attention(q, k, v, batch.windows, scale=self.scale).flatten(1)
