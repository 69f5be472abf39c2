"""How an image becomes pictures for the tower and tokens for the text encoder: the interface, and
the images of one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from libs.models.images.decoding import Pixels
from libs.models.images.patches import PatchSpec
from libs.models.images.processing import ImageProcessing

Grid = tuple[int, int]
"""Rows and columns."""


@dataclass(frozen=True, slots=True)
class Laid:
    """What an image is in a sequence, known from its size alone.

    `text`: what stands for it in the prompt; in it the model's image token marks each picture.
    `rows`: how many tokens each mark stands for. `patches`: tokens of the tower, for all pictures
    together. `grid`: of the rows of its one picture, where the text encoder has positions in two
    dimensions; None: a token's position is its place.
    """

    text: str
    rows: tuple[int, ...]
    patches: int
    grid: Grid | None = None


class Pictures(Protocol):
    """The images of a model. Thread-safe. `field`: the item's path, for errors."""

    def lay(self, height: int, width: int, field: str) -> Laid:
        """For an image of this size. Raises InvalidInput for one that the model cannot take."""

    def apply(self, image: Image.Image | Pixels, field: str) -> tuple[Pixels, ...]:
        """[height, width, 3], or an image of mode RGB, which takes less time -> the tower's
        pictures, one for each of `Laid.rows`."""


@dataclass(frozen=True, slots=True)
class OneSize:
    """Each image is one picture of the size that the tower was trained on. `mark`: the image token;
    `rows`: of the connector.
    """

    processing: ImageProcessing
    patches: PatchSpec
    mark: str
    rows: int

    def lay(self, height: int, width: int, field: str) -> Laid:
        seen = self.processing.seen(height, width, field)
        return Laid(self.mark, (self.rows,), self.patches.tokens_of(*seen))

    def apply(self, image: Image.Image | Pixels, field: str) -> tuple[Pixels, ...]:
        return (cast("Pixels", self.processing.apply(image, field)),)


def places_of(
    ids: NDArray[np.int32], mark: int, rows: tuple[int, ...]
) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """Puts `rows[i]` tokens in the place of mark i: the ids, 0 for these tokens, and their places.
    None: there are other marks.
    """
    marked = ids == mark
    if int(marked.sum()) != len(rows):
        return None
    counts = np.ones(len(ids), np.int64)
    counts[marked] = rows
    places = np.flatnonzero(np.repeat(marked, counts)).astype(np.int32)
    longer = np.repeat(ids, counts)
    longer[places] = 0
    return longer, places


def axes_of(
    tokens: int, places: NDArray[np.int32], laid: Sequence[Laid]
) -> NDArray[np.int32] | None:
    """M-RoPE's positions: time, height and width of each token, [3, tokens]. `places`: of the
    images' rows. None: without grids.

    An image's rows share a time and have their own height and width; what follows comes after the
    largest of these.
    """
    if not laid or any(one.grid is None for one in laid):
        return None
    axes = np.empty((3, tokens), np.int32)
    done = first = position = 0
    for grid in (one.grid for one in laid if one.grid is not None):
        begin, count = int(places[first]), grid[0] * grid[1]
        axes[:, done:begin] = np.arange(position, position + begin - done)
        position += begin - done
        axes[0, begin : begin + count] = position
        axes[1:, begin : begin + count] = position + np.indices(grid, np.int32).reshape(2, -1)
        position += max(grid)
        done, first = begin + count, first + count
    axes[:, done:] = np.arange(position, position + tokens - done)
    return axes
