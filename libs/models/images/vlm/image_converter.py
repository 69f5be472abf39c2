"""Convert an image to tower inputs and text encoder tokens: the interface, and images of one
size.
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
class ImageTokens:
    """Tokens of an image in a sequence, known from its size.

    Attributes:
        text: Text for the prompt, in which the image token marks each tower input.
        rows: Number of tokens for each mark.
        patches: Tower tokens of all inputs together.
        grid: Rows and columns of its single input, if the text encoder has positions in two
            dimensions; None if a token's position is its index.
    """

    text: str
    rows: tuple[int, ...]
    patches: int
    grid: Grid | None = None


class ImageConverter(Protocol):
    """Converts the images of a model. Thread-safe. `field`: the item's path, for errors."""

    def tokens_of_size(self, height: int, width: int, field: str) -> ImageTokens:
        """Return the tokens of an image of this size. Raises InvalidInput if the model cannot
        process it.
        """

    def apply(self, image: Image.Image | Pixels, field: str) -> tuple[Pixels, ...]:
        """Convert an array [height, width, 3] or, faster, an RGB image to tower inputs, one for
        each of `ImageTokens.rows`.
        """


@dataclass(frozen=True, slots=True)
class OneSize:
    """Each image becomes one tower input of the training size.

    Attributes:
        mark: The image token.
        rows: Rows of the connector.
    """

    processing: ImageProcessing
    patches: PatchSpec
    mark: str
    rows: int

    def tokens_of_size(self, height: int, width: int, field: str) -> ImageTokens:
        seen = self.processing.seen(height, width, field)
        return ImageTokens(self.mark, (self.rows,), self.patches.count_tokens(*seen))

    def apply(self, image: Image.Image | Pixels, field: str) -> tuple[Pixels, ...]:
        return (cast("Pixels", self.processing.apply(image, field)),)


def expand_marks(
    ids: NDArray[np.int32], mark: int, rows: tuple[int, ...]
) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """Replace mark i by `rows[i]` tokens: returns the ids, 0 for these tokens, and their indices.
    None if the number of marks differs.
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


def mrope_positions(
    tokens: int, places: NDArray[np.int32], images: Sequence[ImageTokens]
) -> NDArray[np.int32] | None:
    """Return M-RoPE's positions: time, height and width of each token, [3, tokens]; None without
    grids.

    An image's rows share a time and have separate heights and widths; later tokens follow the
    largest of these. `places`: indices of the images' rows.
    """
    if not images or any(one.grid is None for one in images):
        return None
    axes = np.empty((3, tokens), np.int32)
    done = first = position = 0
    for grid in (one.grid for one in images if one.grid is not None):
        begin, count = int(places[first]), grid[0] * grid[1]
        axes[:, done:begin] = np.arange(position, position + begin - done)
        position += begin - done
        axes[0, begin : begin + count] = position
        axes[1:, begin : begin + count] = position + np.indices(grid, np.int32).reshape(2, -1)
        position += max(grid)
        done, first = begin + count, first + count
    axes[:, done:] = np.arange(position, position + tokens - done)
    return axes
