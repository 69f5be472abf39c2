"""The first layer of an image encoder: pixels to patches, and patches to hidden states.

The device rescales, normalises and splits uint8 images. Images of different sizes lie end to end in
one packed batch, without padding.
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
from libs.models.images.decoding import LIMITS, ImageLimits, decoding, header_size
from libs.models.images.processing import ImageProcessing
from libs.models.interface.packed import Packed
from libs.models.interface.sequences import InputRows, InputSequence
from libs.models.layers.embeddings import EmbeddingNorm, InputLayer

_MAX_PATCHES: Final = 1 << 14
_COLOURS: Final = 3
_SAMPLE: Final = 8
"""Patches per side of a sample."""


@dataclass(frozen=True, slots=True)
class PatchSpec:
    """Conversion of an image to hidden states: square patches through one projection, plus a
    learned vector for each cell of a grid.

    Attributes:
        table: Whether the learned vectors exist; otherwise the encoder rotates patches by the
            coordinates of their centres.
        patch: Pixels per side.
        grid: Rows and columns of the table of positions.
        class_token: A token before the patches, with its position.
        distilled: A second token after the class token.
        registers: Number of tokens after these, without positions.
        resampled: Resample the table for images of another grid, by `interpolation`; otherwise such
            images are refused.
        linear: The projection is stored by a patch's rows, columns and colours, in this order;
            otherwise as a convolution.
        norm_eps: Epsilon of a LayerNorm of all tokens; None without one.
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
        """Return the number of tokens before the patches."""
        return self.placed + self.registers

    @property
    def placed(self) -> int:
        """Return the number of leading tokens with positions."""
        return self.class_token + self.distilled

    def patch_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of an image's patches. Pixels beyond a multiple of the patch size
        are dropped.
        """
        return height // self.patch, width // self.patch

    @property
    def any_size(self) -> bool:
        """Return whether the encoder takes images of any size, not only those of `grid`."""
        return self.resampled or not self.table

    @property
    def most(self) -> int:
        """Return the tokens of the largest image."""
        return _MAX_PATCHES if self.any_size else self.grid[0] * self.grid[1] + self.before

    def count_tokens(self, height: int, width: int) -> int:
        """Return the tokens of an image, including the class token and registers."""
        rows, columns = self.patch_grid(height, width)
        return rows * columns + self.before

    def axes(self, height: int, width: int) -> NDArray[np.float32] | None:
        """Return the rotation coordinates of an image's tokens, [2, tokens]: row and column of each
        patch's centre, -1 to 1.

        Tokens before the patches have 0 and are not rotated. None for an encoder with a table of
        positions.
        """
        if self.table:
            return None
        found = np.zeros((2, self.count_tokens(height, width)), np.float32)
        rows, columns = (
            (2 * np.arange(count, dtype=np.float32) + 1) / count - 1
            for count in self.patch_grid(height, width)
        )
        found[:, self.before :] = np.stack(np.meshgrid(rows, columns, indexing="ij")).reshape(2, -1)
        return found


class PatchEmbedding(InputLayer):
    """The input layer of a PatchSpec. `embed` computes the rows of a batch's images, normalised by
    `processing`; `forward` places them.
    """

    def __init__(self, spec: PatchSpec, processing: ImageProcessing) -> None:
        super().__init__()
        places = spec.grid[0] * spec.grid[1] + spec.placed
        # The weight keeps the checkpoint's layout: [hidden, colours, rows, columns], or [hidden,
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
        """Move the normalisation's constants to the device after loading, always in float32."""
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
        """Return [tokens, hidden]."""
        if batch.given is None:
            raise ValueError("an image encoder takes rows, not token ids")
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
        """Compute the rows of images with their positions, [patches, hidden].

        `images`: [height, width, 3] each, uint8, or float32 of 0 to 255.
        """
        flat = torch.from_numpy(np.concatenate([image.reshape(-1) for image in images]))
        device = self.project.weight.device
        flat = flat.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else flat
        patches = torch.cat([self._patches(run) for run in _runs(flat, images)])
        # Divide, since 1 / 255 has no exact float32: the results equal those of transformers, which
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
                self.position, [self.spec.patch_grid(*image.shape[:2]) for image in images]
            )
        )

    def _before(self) -> Tensor:
        """Return the tokens before the patches, [before, hidden], with their positions added."""
        placed = [
            token[None] for token in (self.class_token, self.distilled_token) if token is not None
        ]
        if self.position is not None:
            placed = [token + self.position[place] for place, token in enumerate(placed)]
        return torch.cat([*placed, *([] if self.registers is None else [self.registers])])

    def _patches(self, images: Tensor) -> Tensor:
        """Split images of one size, [n, height, width, 3], into [n * patches, numbers of a patch]
        in the projection's order.
        """
        side = self.spec.patch
        rows, columns = self.spec.patch_grid(images.shape[1], images.shape[2])
        whole = images[:, : rows * side, : columns * side].view(
            -1, rows, side, columns, side, _COLOURS
        )
        order = (0, 1, 3, 2, 4, 5) if self.spec.linear else (0, 1, 3, 5, 2, 4)
        return whole.permute(order).reshape(-1, _COLOURS * side * side)

    def _positions(self, position: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Return positions [patches of all, hidden], resampled one time per size of a batch's
        images.
        """
        spec = self.spec
        table = position[spec.placed :]
        found = {spec.grid: table}
        if any(grid != spec.grid for grid in grids):
            # Contiguous: torch 2.13 resamples other layouts to a single column wrongly.
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
    """Yield adjacent images of one shape as one tensor each, views of all images' bytes."""
    start = 0
    for shape, run in groupby(image.shape for image in images):
        count = sum(1 for _ in run)
        size = count * shape[0] * shape[1] * shape[2]
        yield flat[start : start + size].view(count, *shape)
        start += size


@dataclass(frozen=True, slots=True)
class PatchRows:
    """The tower of an image encoder's backbone. It shares the encoder's weights."""

    embedding: PatchEmbedding

    def forward(self, inputs: Sequence[NDArray[np.generic]]) -> Tensor:
        """Compute [patches of all, hidden] as `PatchEmbedding.embed`."""
        return self.embedding.embed(inputs)

    def sample(self) -> InputSequence:
        """Return a sequence of one small image."""
        spec = self.embedding.spec
        side = _SAMPLE * spec.patch
        tokens = spec.count_tokens(side, side)
        places = np.arange(spec.before, tokens, dtype=np.int32)
        rows = InputRows(places, np.zeros((side, side, _COLOURS), np.uint8))
        return InputSequence(np.zeros(tokens, np.int32), rows=rows, axes=spec.axes(side, side))


@dataclass(frozen=True, slots=True)
class ImageInput:
    """Converts an image file to a sequence of patches. Thread-safe. `field`: the item's path, for
    errors.
    """

    processing: ImageProcessing
    patches: PatchSpec
    limits: ImageLimits = LIMITS

    def tokens(self, data: bytes, field: str) -> int:
        """Return the image's number of tokens from its header. Raises InvalidInput if it is
        unreadable or exceeds a limit.
        """
        height, width = header_size(data, field, self.limits)
        return self._tokens(height, width, field)

    def sequence(self, data: bytes, field: str) -> InputSequence:
        """Decode a file to a sequence. Raises InvalidInput for a damaged file, and beyond a limit
        before decoding.
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
        tokens = self.patches.count_tokens(*seen)
        if tokens > self.patches.most:
            raise InvalidInput(
                f"the image has {tokens:,} patches; the model takes at most {self.patches.most:,}",
                field=field,
            )
        if min(self.patches.patch_grid(*seen)) == 0:
            raise InvalidInput(
                f"the image has {width:,} x {height:,} pixels, less than one patch", field=field
            )
        return tokens
