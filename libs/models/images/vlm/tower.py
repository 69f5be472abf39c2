"""An image tower: an encoder and a connector that compute rows for the text encoder's sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.kernels.layout import to_device
from libs.models.images.patches import PatchEmbedding
from libs.models.images.vlm.blocks import BlockEmbedding, BlockSpec
from libs.models.images.vlm.connectors import Connector, Mergers
from libs.models.images.vlm.image_converter import Grid
from libs.models.interface.packed import Packed
from libs.models.interface.sequences import InputRows, InputSequence, YieldPoint, never_yield
from libs.models.layers.encoder import PackedEncoder

_MAX_CHUNK_PATCHES: Final = 1 << 14
"""Patches of one forward, which bounds the memory of activations: a batch of pages may have ten
times as many patches as tokens.
"""

_SAMPLE: Final = 16
"""Patches per side of a sample: a multiple of every connector's square."""

TowerInput = NDArray[np.generic]


class ImageTower(nn.Module):
    """Maps images to rows of a text encoder. Implements `Tower`, with the images of an item in
    turn.

    `last`: applied to these rows like to the embeddings of the text encoder's tokens; it shares the
    text encoder's weights.
    """

    def __init__(
        self,
        encoder: PackedEncoder,
        embed: PatchEmbedding | BlockEmbedding,
        connector: Connector,
        last: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.connector, self.last = encoder, connector, last
        self.chunk_tokens = _MAX_CHUNK_PATCHES
        self._spec = embed.spec
        self._embed = embed.embed

    def forward(self, inputs: Sequence[TowerInput]) -> Tensor:
        """Map uint8 images, [height, width, 3] each, to [rows of all, hidden of the text
        encoder].
        """
        return self.forward_preemptible(inputs, never_yield)

    @torch.inference_mode()
    def forward_preemptible(self, inputs: Sequence[TowerInput], yield_point: YieldPoint) -> Tensor:
        """Compute `forward` with yield points. An array that occurs several times is computed one
        time.
        """
        different = {id(image): image for image in inputs}
        rows = torch.cat(
            [self._rows(some, yield_point) for some in self._portions(list(different.values()))]
        )
        if len(different) < len(inputs):
            parts = [self._count_parts(self.patch_grid(image)) for image in different.values()]
            own = torch.split(rows, [count * len(rows) // sum(parts) for count in parts])
            by_image = dict(zip(different, own, strict=True))
            rows = torch.cat([by_image[id(image)] for image in inputs])
        return rows if self.last is None else self.last(rows)

    def sample(self) -> InputSequence:
        """Return a sequence of one image of squares that every connector can merge."""
        side = _SAMPLE * self._spec.patch
        none = np.zeros(0, np.int32)
        return InputSequence(none, rows=InputRows(none, np.zeros((side, side, 3), np.uint8)))

    def _portions(self, inputs: Sequence[TowerInput]) -> Iterator[list[TowerInput]]:
        some: list[TowerInput] = []
        patches = 0
        for image in inputs:
            own = self.count_tokens(image)
            if some and patches + own > self.chunk_tokens:
                yield some
                some, patches = [], 0
            some.append(image)
            patches += own
        yield some

    def _rows(self, images: Sequence[TowerInput], yield_point: YieldPoint) -> Tensor:
        lengths = [self.count_tokens(image) for image in images]
        batch = Packed.from_sequences(
            [np.zeros(length, np.int32) for length in lengths],
            device=self.encoder.device,
            places=[np.arange(self._first, length, dtype=np.int32) for length in lengths],
            values=self._embed(images),
        )
        return self.connector.forward(
            self.encoder.forward(batch, yield_point=yield_point),
            [self.patch_grid(image) for image in images],
        )

    def _count_parts(self, grid: Grid) -> int:
        """Return the number of equal parts that an image's rows are divided into: its patches."""
        return math.prod(grid)

    @property
    def _first(self) -> int:
        return int(self._spec.class_token)

    def count_tokens(self, image: TowerInput) -> int:
        """Return the number of encoder tokens of an image."""
        return self._spec.count_tokens(image.shape[0], image.shape[1])

    def patch_grid(self, image: TowerInput) -> Grid:
        """Return rows and columns of its patches."""
        return self._spec.patch_grid(image.shape[0], image.shape[1])


class BlockTower(ImageTower):
    """Qwen-VL's tower: patches are ordered by squares and windows, and have positions in two
    dimensions.
    """

    def __init__(
        self, encoder: PackedEncoder, embed: BlockEmbedding, connector: Mergers, block: BlockSpec
    ) -> None:
        super().__init__(encoder, embed, connector)
        self._block = block

    def _rows(self, images: Sequence[TowerInput], yield_point: YieldPoint) -> Tensor:
        grids = [self.patch_grid(image) for image in images]
        lengths, side = [math.prod(grid) for grid in grids], self._block.side
        orders = [self._block.order(grid) for grid in grids]
        batch = Packed.from_sequences(
            [np.zeros(length, np.int32) for length in lengths],
            device=self.encoder.device,
            places=[np.arange(length, dtype=np.int32) for length in lengths],
            values=self._embed(images),
            axes=[self._block.axes(grid) for grid in grids],
            windows=[size * side**2 for _, sizes in orders for size in sizes]
            if self._block.window
            else lengths,
        )
        whole = [self._count_parts(grid) * side**2 for grid in grids]
        rows = self._merged(
            batch,
            yield_point,
            None if whole == lengths else _first_rows(lengths, whole, self.encoder.device),
        )
        if not self._block.window:
            return rows
        starts = np.cumsum([0, *(len(order) for order, _ in orders)])
        back = [
            start + np.argsort(order) for start, (order, _) in zip(starts, orders, strict=False)
        ]
        return rows.index_select(0, to_device(np.concatenate(back).astype(np.int32), rows.device))

    def _count_parts(self, grid: Grid) -> int:
        """Return the number of its whole squares."""
        return (grid[0] // self._block.side) * (grid[1] // self._block.side)

    @property
    def _mergers(self) -> Mergers:
        return cast(Mergers, self.connector)

    def _merged(self, batch: Packed, yield_point: YieldPoint, whole: Tensor | None) -> Tensor:
        """Return [squares, hidden of the text encoder], with a factor on the width of one plus the
        number of taps.

        `whole`: indices of the patches in squares; None for all. Other patches are attended to but
        have no rows.
        """
        encoder, taps = self.encoder, self._mergers.taps
        shared, x = encoder.shared(batch), encoder.embed.forward(batch)
        deeper = []
        for number, layer in enumerate(encoder.stack):
            yield_point()
            x = layer.forward(x, batch, shared)
            if number in taps:
                deeper.append(
                    self._mergers.deeper[taps.index(number)](
                        x if whole is None else x.index_select(0, whole)
                    )
                )
        hidden = x if encoder.norm is None else encoder.norm.forward(x)
        rows = self._mergers.last.forward(
            hidden if whole is None else hidden.index_select(0, whole)
        )
        return torch.cat([rows, *deeper], dim=1) if deeper else rows


def _first_rows(lengths: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the indices of the first `counts[i]` rows of each run of `lengths[i]`."""
    starts = np.cumsum([0, *lengths])[:-1]
    places = [
        np.arange(start, start + count, dtype=np.int32)
        for start, count in zip(starts, counts, strict=True)
    ]
    return to_device(np.concatenate(places), device).long()
