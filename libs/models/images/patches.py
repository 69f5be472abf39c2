"""The first layer of an image encoder: pixels to patches, and patches to hidden states.

Rescaling, normalising and cutting into patches happen on the device, from uint8. Images of
different sizes lie end to end in one packed batch, and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.errors import InvalidInput
from libs.models.images.decoding import LIMITS, Limits, decoding, header_size
from libs.models.images.processing import ImageProcessing
from libs.models.layers.embeddings import EmbeddingNorm, InputLayer
from libs.models.packed import Packed
from libs.models.work import InputRows, InputSequence

_MAX_PATCHES: Final = 1 << 14
_COLOURS: Final = 3
_SAMPLE: Final = 8
"""Patches of a sample's side."""


@dataclass(frozen=True, slots=True)
class PatchSpec:
    """How an image becomes hidden states: square patches through one projection, plus a learned
    vector for each place of a grid.

    `table`: whether there are such vectors; else the encoder rotates patches by the coordinates of
    their centres.

    `patch`: pixels of a side. `grid`: rows and columns of the table of positions. `class_token`: a
    token before the patches, which has a position of its own. `distilled`: a second one after it.
    `registers`: tokens after these, which have none. `resampled`: for images of another grid the
    table is resampled, by `interpolation`; else they are refused. `linear`: the projection is
    stored as that of a patch's rows, columns and colours, in this order; else as a convolution.
    `norm_eps`: of a LayerNorm of all tokens; None: there is none.
    """

    hidden: int
    patch: int
    grid: tuple[int, int]
    class_token: bool = True
    bias: bool = True
    resampled: bool = False
    norm_eps: float | None = None
    registers: int = 0
    distilled: bool = False
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    antialias: bool = False
    linear: bool = False
    table: bool = True

    @property
    def before(self) -> int:
        """Tokens before the patches."""
        return self.placed + self.registers

    @property
    def placed(self) -> int:
        """Those of them that have positions, which come first."""
        return self.class_token + self.distilled

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of an image's patches; pixels beyond a multiple of the patch are left
        out.
        """
        return height // self.patch, width // self.patch

    @property
    def any_size(self) -> bool:
        """Whether images of any size are taken, not those of `grid` alone."""
        return self.resampled or not self.table

    @property
    def most(self) -> int:
        """Tokens of the largest image."""
        return _MAX_PATCHES if self.any_size else self.grid[0] * self.grid[1] + self.before

    def tokens_of(self, height: int, width: int) -> int:
        """Tokens of an image, the class token and registers included."""
        rows, columns = self.grid_of(height, width)
        return rows * columns + self.before

    def axes(self, height: int, width: int) -> NDArray[np.float32] | None:
        """What rotates an image's tokens, [2, tokens]: the row and column of a patch's centre, from
        -1 to 1 across the image.

        0 for the tokens before the patches, which are not rotated. None for an encoder with a table
        of positions.
        """
        if self.table:
            return None
        found = np.zeros((2, self.tokens_of(height, width)), np.float32)
        rows, columns = (
            (2 * np.arange(count, dtype=np.float32) + 1) / count - 1
            for count in self.grid_of(height, width)
        )
        found[:, self.before :] = np.stack(np.meshgrid(rows, columns, indexing="ij")).reshape(2, -1)
        return found


class PatchEmbedding(InputLayer):
    """As a PatchSpec says. `embed` makes the rows of a batch's images, which `processing`
    normalises; `forward` places them.
    """

    def __init__(self, spec: PatchSpec, processing: ImageProcessing) -> None:
        super().__init__()
        places = spec.grid[0] * spec.grid[1] + spec.placed
        # Its weight is kept as checkpoints have it: [hidden, colours, rows, columns], or [hidden,
        # rows * columns * colours].
        self.project = (
            nn.Linear(spec.patch**2 * _COLOURS, spec.hidden, bias=spec.bias)
            if spec.linear
            else nn.Conv2d(_COLOURS, spec.hidden, spec.patch, spec.patch, bias=spec.bias)
        )
        self.position = (
            nn.Parameter(torch.empty(places, spec.hidden), requires_grad=False)
            if spec.table
            else None
        )
        self.class_token = (
            nn.Parameter(torch.empty(spec.hidden), requires_grad=False)
            if spec.class_token
            else None
        )
        self.distilled_token = (
            nn.Parameter(torch.empty(spec.hidden), requires_grad=False) if spec.distilled else None
        )
        registers = (spec.registers, spec.hidden)
        self.registers = (
            nn.Parameter(torch.empty(registers), requires_grad=False) if spec.registers else None
        )
        self.norm = None if spec.norm_eps is None else EmbeddingNorm(spec.hidden, eps=spec.norm_eps)
        self.max_positions = spec.most
        self.row_size = spec.hidden
        self.spec, self._processing = spec, processing
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", None, persistent=False)
        self.register_buffer("std", None, persistent=False)

    def prepare(self) -> None:
        """Once loaded: put the numbers of the normalisation on the device, in float32 whatever the
        encoder's type.
        """
        device = self.project.weight.device
        side = self.spec.patch**2
        shape = (side, _COLOURS) if self.spec.linear else (_COLOURS, side)
        axis = 0 if self.spec.linear else 1
        for name in ("mean", "std"):
            numbers = torch.tensor(
                getattr(self._processing, name), dtype=torch.float32, device=device
            )
            setattr(self, name, numbers.unsqueeze(axis).expand(shape).flatten())

    def forward(self, batch: Packed) -> Tensor:
        """[tokens, hidden]"""
        if batch.given is None:
            raise ValueError("an image encoder takes rows, no token ids")
        x = batch.given.values.to(self.project.weight.dtype)
        if self.spec.before:
            before = self._before()
            places = batch.cu_seqlens[:-1, None] + torch.arange(len(before), device=x.device)
            whole = x.new_empty((sum(batch.lengths), x.shape[1])).index_copy_(
                0, batch.given.places, x
            )
            x = whole.index_copy_(0, places.flatten(), before.repeat(len(batch.lengths), 1))
        return x if self.norm is None else self.norm.forward(x)

    def embed(self, images: Sequence[NDArray[np.generic]]) -> Tensor:
        """[height, width, 3] each, uint8, or float32 of 0 to 255 -> the rows of all, [patches,
        hidden], with their positions.
        """
        flat = torch.from_numpy(np.concatenate([image.reshape(-1) for image in images]))
        device = self.project.weight.device
        flat = flat.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else flat
        patches = torch.cat([self._patches(run) for run in _runs(flat, images)])
        # Divided, as 1 / 255 has no exact float32: so the numbers are those of transformers, which
        # multiplies in float64.
        values = (
            patches.float()
            .div_(1 / self._processing.scale)
            .sub_(self.mean)
            .div_(self.std)
            .to(self.project.weight.dtype)
        )
        x = F.linear(values, self.project.weight.flatten(1), self.project.bias)
        if self.position is None:
            return x
        return x.add_(
            self._positions(
                self.position, [self.spec.grid_of(*image.shape[:2]) for image in images]
            )
        )

    def _before(self) -> Tensor:
        """The tokens before the patches, [before, hidden], those that have positions with these."""
        placed = [
            token[None] for token in (self.class_token, self.distilled_token) if token is not None
        ]
        if self.position is not None:
            placed = [token + self.position[place] for place, token in enumerate(placed)]
        return torch.cat([*placed, *([] if self.registers is None else [self.registers])])

    def _patches(self, images: Tensor) -> Tensor:
        """Images of one size: [n, height, width, 3] -> [n * patches, patch's numbers], in the order
        of the projection's.
        """
        side = self.spec.patch
        rows, columns = self.spec.grid_of(images.shape[1], images.shape[2])
        whole = images[:, : rows * side, : columns * side].view(
            -1, rows, side, columns, side, _COLOURS
        )
        order = (0, 1, 3, 2, 4, 5) if self.spec.linear else (0, 1, 3, 5, 2, 4)
        return whole.permute(order).reshape(-1, _COLOURS * side * side)

    def _positions(self, position: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """[patches of all, hidden], resampled once for each size of a batch's images."""
        spec = self.spec
        table = position[spec.placed :]
        found = {spec.grid: table}
        if any(grid != spec.grid for grid in grids):
            # Contiguous: in another order torch 2.13 resamples to a single column wrongly.
            square = table.float().view(1, *spec.grid, -1).permute(0, 3, 1, 2).contiguous()
            for size in {*grids} - {spec.grid}:
                resampled = F.interpolate(
                    square,
                    size=size,
                    mode=spec.interpolation,
                    align_corners=False,
                    antialias=spec.antialias,
                )
                found[size] = resampled.flatten(2)[0].T.to(table.dtype)
        return torch.cat([found[grid] for grid in grids])


def _runs(flat: Tensor, images: Sequence[NDArray[np.generic]]) -> Iterator[Tensor]:
    """Neighbours of one shape as one tensor each, views of all images' bytes in turn."""
    start = 0
    for shape, run in groupby(image.shape for image in images):
        count = sum(1 for _ in run)
        size = count * shape[0] * shape[1] * shape[2]
        yield flat[start : start + size].view(count, *shape)
        start += size


@dataclass(frozen=True, slots=True)
class PatchRows:
    """The tower of an image encoder's own backbone: the rows of its images. Its weights are the
    encoder's.
    """

    embedding: PatchEmbedding

    def forward(self, inputs: Sequence[NDArray[np.generic]]) -> Tensor:
        """`inputs`: as `PatchEmbedding.embed` -> [patches of all, hidden]"""
        return self.embedding.embed(inputs)

    def sample(self) -> InputSequence:
        """Of one small image."""
        spec = self.embedding.spec
        side = _SAMPLE * spec.patch
        tokens = spec.tokens_of(side, side)
        places = np.arange(spec.before, tokens, dtype=np.int32)
        rows = InputRows(places, np.zeros((side, side, _COLOURS), np.uint8))
        return InputSequence(np.zeros(tokens, np.int32), rows=rows, axes=spec.axes(side, side))


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The host's part for one image: a file to a sequence of patches. Thread-safe. `field`: the
    item's path, for errors.
    """

    processing: ImageProcessing
    patches: PatchSpec
    limits: Limits = LIMITS

    def tokens(self, data: bytes, field: str) -> int:
        """How many tokens the image is, from its header. Raises InvalidInput if that cannot be
        read, and beyond a limit.
        """
        height, width = header_size(data, field, self.limits)
        return self._tokens(height, width, field)

    def sequence(self, data: bytes, field: str) -> InputSequence:
        """Raises InvalidInput for a file that cannot be decoded, and beyond a limit, before
        anything is decoded.
        """
        self.tokens(data, field)
        with decoding(data, field, self.limits) as image:
            tokens = self._tokens(image.height, image.width, field)
            pixels = self.processing.apply(image, field)
        places = np.arange(self.patches.before, tokens, dtype=np.int32)
        axes = self.patches.axes(*pixels.shape[:2])
        return InputSequence(np.zeros(tokens, np.int32), rows=InputRows(places, pixels), axes=axes)

    def _tokens(self, height: int, width: int, field: str) -> int:
        seen = self.processing.seen(height, width, field)
        tokens = self.patches.tokens_of(*seen)
        if tokens > self.patches.most:
            raise InvalidInput(
                f"the image makes {tokens:,} patches; the model takes {self.patches.most:,}",
                field=field,
            )
        if min(self.patches.grid_of(*seen)) == 0:
            raise InvalidInput(
                f"the image has {width:,} x {height:,} pixels, less than one patch", field=field
            )
        return tokens
