"""An image tower: an encoder of its own and a connector, whose rows stand in the text encoder's sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.models.images.patches import PatchEmbedding
from libs.models.images.vlm.connectors import Connector
from libs.models.images.vlm.pictures import Grid
from libs.models.layers.encoder import PackedEncoder
from libs.models.packed import Packed

_AT_ONCE: Final = 1 << 14
"""Patches of one forward, which bounds the memory of activations: pages of a batch may have ten times as many patches as tokens."""

Picture = NDArray[np.generic]


class ImageTower(nn.Module):
    """Pictures to rows of a text encoder. As `Tower`: one picture of an item after the other.

    `last`: what the text encoder does to its tokens' embeddings, and to these rows alike; its weights are the text encoder's.
    """

    def __init__(
        self,
        encoder: PackedEncoder,
        embed: PatchEmbedding,
        connector: Connector,
        last: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.connector, self._embed, self._last = encoder, connector, embed, last

    @torch.inference_mode()
    def forward(self, inputs: Sequence[Picture]) -> Tensor:
        """uint8 [height, width, 3] each -> [rows of all, hidden of the text encoder]"""
        rows = torch.cat([self._rows(some) for some in self._portions(inputs)])
        return rows if self._last is None else self._last(rows)

    def _portions(self, inputs: Sequence[Picture]) -> Iterator[list[Picture]]:
        some: list[Picture] = []
        patches = 0
        for picture in inputs:
            own = self.tokens_of(picture)
            if some and patches + own > _AT_ONCE:
                yield some
                some, patches = [], 0
            some.append(picture)
            patches += own
        yield some

    def _rows(self, pictures: Sequence[Picture]) -> Tensor:
        lengths = [self.tokens_of(picture) for picture in pictures]
        batch = Packed.of(
            [np.zeros(length, np.int32) for length in lengths],
            device=self.encoder.device,
            places=[np.arange(self._first, length, dtype=np.int32) for length in lengths],
            values=self._embed.embed(pictures),
        )
        return self.connector.forward(self.encoder.forward(batch), [self._grid(picture) for picture in pictures])

    @property
    def _first(self) -> int:
        return int(self._embed.spec.class_token)

    def tokens_of(self, picture: Picture) -> int:
        """How many tokens of the encoder a picture is."""
        return self._embed.spec.tokens_of(picture.shape[0], picture.shape[1])

    def _grid(self, picture: Picture) -> Grid:
        return self._embed.spec.grid_of(picture.shape[0], picture.shape[1])
