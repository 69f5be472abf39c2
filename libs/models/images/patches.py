"""The first layer of an image encoder: pixels to patches, and patches to hidden states.

Rescaling, normalising and cutting into patches happen on the device, from uint8. Images of different sizes lie end to end in one
packed batch, and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.errors import InvalidInput
from libs.models.images.decoding import LIMITS, Limits, decode, header_size
from libs.models.images.processing import ImageProcessing
from libs.models.layers.embeddings import EmbeddingNorm, InputLayer
from libs.models.packed import Packed
from libs.models.work import InputRows, InputSequence

_MOST_PATCHES: Final = 1 << 14
_COLOURS: Final = 3


@dataclass(frozen=True, slots=True)
class PatchSpec:
    """How an image becomes hidden states: square patches through one projection, plus a learned vector for each place of a grid.

    `patch`: pixels of a side. `grid`: rows and columns of the table of positions. `class_token`: a token before the patches, which
    has a position of its own. `resampled`: for images of another grid the table is resampled (bicubic); else they are refused.
    `norm_eps`: of a LayerNorm of all tokens; None: there is none.
    """

    hidden: int
    patch: int
    grid: tuple[int, int]
    class_token: bool = True
    bias: bool = True
    resampled: bool = False
    norm_eps: float | None = None

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of an image's patches; pixels beyond a multiple of the patch are left out."""
        return height // self.patch, width // self.patch

    @property
    def most(self) -> int:
        """Tokens of the largest image."""
        return _MOST_PATCHES if self.resampled else self.grid[0] * self.grid[1] + self.class_token

    def tokens_of(self, height: int, width: int) -> int:
        """Tokens of an image, the class token included."""
        rows, columns = self.grid_of(height, width)
        return rows * columns + self.class_token


class PatchEmbedding(InputLayer):
    """As a PatchSpec says. `embed` makes the rows of a batch's images, which `processing` normalises; `forward` places them."""

    def __init__(self, spec: PatchSpec, processing: ImageProcessing) -> None:
        super().__init__()
        places = spec.grid[0] * spec.grid[1] + spec.class_token
        # Its weight is kept as checkpoints have it: [hidden, colours, rows, columns].
        self.project = nn.Conv2d(_COLOURS, spec.hidden, spec.patch, spec.patch, bias=spec.bias)
        self.position = nn.Parameter(torch.empty(places, spec.hidden), requires_grad=False)
        self.class_token = nn.Parameter(torch.empty(spec.hidden), requires_grad=False) if spec.class_token else None
        self.norm = None if spec.norm_eps is None else EmbeddingNorm(spec.hidden, eps=spec.norm_eps)
        self.max_positions = spec.most
        self.row_size = spec.hidden
        self.spec, self._processing = spec, processing
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", None, persistent=False)
        self.register_buffer("std", None, persistent=False)

    def prepare(self) -> None:
        """Once loaded: put the numbers of the normalisation on the device, in float32 whatever the encoder's type."""
        device = self.position.device
        self.mean = torch.tensor(self._processing.mean, dtype=torch.float32, device=device)[:, None]
        self.std = torch.tensor(self._processing.std, dtype=torch.float32, device=device)[:, None]

    def forward(self, batch: Packed) -> Tensor:
        """[tokens, hidden]"""
        if batch.given is None:
            raise ValueError("an image encoder takes rows, no token ids")
        x = batch.given.values.to(self.position.dtype)
        if self.class_token is not None:
            first = self.class_token + self.position[0]
            x = first.expand(sum(batch.lengths), -1).index_copy(0, batch.given.places, x)
        return x if self.norm is None else self.norm.forward(x)

    def embed(self, images: Sequence[NDArray[np.generic]]) -> Tensor:
        """uint8 [height, width, 3] each -> the rows of all, [patches, hidden], with their positions."""
        flat = torch.from_numpy(np.concatenate([image.reshape(-1) for image in images]))
        device = self.position.device
        flat = flat.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else flat
        return torch.cat([self._embedded(run) for run in _runs(flat, images)])

    def _embedded(self, images: Tensor) -> Tensor:
        """Images of one size: uint8 [n, height, width, 3] -> [n * patches, hidden]"""
        side = self.spec.patch
        rows, columns = self.spec.grid_of(images.shape[1], images.shape[2])
        whole = images[:, : rows * side, : columns * side].view(-1, rows, side, columns, side, _COLOURS)
        patches = whole.permute(0, 1, 3, 5, 2, 4).reshape(-1, _COLOURS, side * side)
        # Divided, as 1 / 255 has no exact float32: so the numbers are those of transformers, which multiplies in float64.
        values = ((patches.float() / (1 / self._processing.scale) - self.mean) / self.std).to(self.position.dtype)
        x = F.linear(values.flatten(1), self.project.weight.flatten(1), self.project.bias)
        return (x.view(len(images), rows * columns, -1) + self._positions(rows, columns)).flatten(0, 1)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """[patches, hidden]"""
        table = self.position[1:] if self.spec.class_token else self.position
        if (rows, columns) == self.spec.grid:
            return table
        square = table.float().view(1, *self.spec.grid, -1).permute(0, 3, 1, 2)
        resampled = F.interpolate(square, size=(rows, columns), mode="bicubic", align_corners=False)
        return resampled.flatten(2)[0].T.to(table.dtype)


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
    """The tower of an image encoder's own trunk: the rows of its images. Its weights are the encoder's."""

    embedding: PatchEmbedding

    def forward(self, inputs: Sequence[NDArray[np.generic]]) -> Tensor:
        """`inputs`: uint8 [height, width, 3] each -> [patches of all, hidden]"""
        return self.embedding.embed(inputs)


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The host's part for one image: a file to a sequence of patches. Thread-safe. `field`: the item's path, for errors."""

    processing: ImageProcessing
    patches: PatchSpec
    limits: Limits = LIMITS

    def tokens(self, data: bytes, field: str) -> int:
        """How many tokens the image is, from its header. Raises InvalidInput if that cannot be read, and beyond a limit."""
        height, width = header_size(data, field, self.limits)
        return self._tokens(height, width, field)

    def sequence(self, data: bytes, field: str) -> InputSequence:
        """Raises InvalidInput for a file that cannot be decoded, and beyond a limit, before anything is decoded."""
        self.tokens(data, field)
        pixels = decode(data, field, self.limits)
        tokens = self._tokens(pixels.shape[0], pixels.shape[1], field)
        places = np.arange(self.patches.class_token, tokens, dtype=np.int32)
        return InputSequence(np.zeros(tokens, np.int32), rows=InputRows(places, self.processing.apply(pixels, field)))

    def _tokens(self, height: int, width: int, field: str) -> int:
        seen = self.processing.seen(height, width, field)
        tokens = self.patches.tokens_of(*seen)
        if tokens > self.patches.most:
            raise InvalidInput(f"the image makes {tokens:,} patches; the model takes {self.patches.most:,}", field=field)
        if min(self.patches.grid_of(*seen)) == 0:
            raise InvalidInput(f"the image has {width:,} x {height:,} pixels, less than one patch", field=field)
        return tokens
