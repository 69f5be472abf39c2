"""OWLv2's pixels: an image is padded to a square at the bottom and right, blurred and resized, all
after rescaling.

transformers' `pil` image processor uses scipy's `gaussian_filter` and `zoom`. This module has the
same operations in numpy, in scipy's order in float64, so the float32 results are identical. The
padding is never materialised: the cost grows with the image's pixels, not with the square's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from libs.errors import InvalidInput
from libs.models.images.decoding import Pixels
from libs.models.images.processing import ImageProcessing

_MAX_SIDE: Final = 1 << 14
_REACH: Final = 4.0  # of the blur, in standard deviations
_ROWS: Final = 32  # rows of the result computed at a time

Floats = NDArray[np.float32]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PaddedProcessing(ImageProcessing):
    """Processing: `apply` returns float32 rescaled by `rescale`; `scale` is therefore 1.
    `size` has two sides.
    """

    rescale: float = 1 / 255

    def _resized(self, height: int, width: int, field: str) -> tuple[int, int]:
        if max(height, width) > _MAX_SIDE:
            most = f"{_MAX_SIDE:,} on a side are taken. Send a smaller copy"
            raise InvalidInput(
                f"the image has {width:,} x {height:,} pixels; at most {most}", field=field
            )
        if not isinstance(self.size, tuple):
            return height, width
        return self.size

    def apply(self, given: Pixels | Image.Image, field: str) -> NDArray[np.generic]:
        """Map [height, width, 3] or an RGB image to float32 of the size `seen`."""
        pixels: Pixels = np.asarray(given)
        height, width = self._resized(pixels.shape[0], pixels.shape[1], field)
        values = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        return padded_and_resized(pixels, values, height, width)


def padded_and_resized(pixels: Pixels, values: Floats, height: int, width: int) -> Floats:
    """Map pixels [rows, columns, 3], indices into `values` [256], to [height, width, 3]."""
    rows, columns = pixels.shape[:2]
    side = max(rows, columns)
    across = _Axis.span(side, width, 0, width)
    out = np.empty((height, width, 3), np.float32)
    for start in range(0, height, _ROWS):
        down = _Axis.span(side, height, start, min(start + _ROWS, height))
        own = down.sources[down.sources < rows]
        if not len(own):
            out[start : start + _ROWS] = 0.0
            continue
        first = int(own.min())
        block = _with_zeros(values[pixels[first : int(own.max()) + 1]], 0)
        block = down.blurred(block, first, rows, 0)
        block = across.blurred(_with_zeros(block, 1), 0, columns, 1)
        out[start : start + _ROWS] = _mixed(block.astype(np.float64), down, across)
    least, most = values[pixels.min()], values[pixels.max()]
    if rows != columns:
        least, most = min(least, np.float32(0)), max(most, np.float32(0))
    return out.clip(least, most)


@dataclass(frozen=True, slots=True)
class _Axis:
    """A range of the result on one axis, each number between two neighbours of the blurred square.

    Attributes:
        weights: Weights of the blur, from -n to n.
        sources: [used, 2n + 1]: indices that each used blurred number is computed from.
        lower: [range]: index of the lower neighbour among the used numbers.
        upper: [range]: index of the upper neighbour.
        low: Share of the lower neighbour.
        high: Share of the upper neighbour.
    """

    weights: Numbers
    sources: NDArray[np.int64]
    lower: NDArray[np.int64]
    upper: NDArray[np.int64]
    low: Numbers
    high: Numbers

    @staticmethod
    def span(side: int, size: int, start: int, stop: int) -> _Axis:
        """Return the range `start` to `stop` of an axis that is resized from `side` to `size`."""
        factor = side / size
        place = _reflected((np.arange(start, stop) + 0.5) * factor - 0.5, side)
        below = np.floor(place)
        low = 1.0 - (place - below)
        neighbours = _mirrored(np.stack([below, below + 1]).astype(np.int64), side)
        used, numbers = np.unique(neighbours, return_inverse=True)
        lower, upper = numbers.reshape(neighbours.shape)
        weights = _gaussian(max(0.0, (factor - 1) / 2))
        reach = len(weights) // 2
        return _Axis(
            weights,
            _mirrored(used[:, None] + np.arange(-reach, reach + 1), side),
            lower,
            upper,
            low,
            1.0 - low,
        )

    def blurred(self, block: Floats, first: int, end: int, axis: int) -> Floats:
        """Blur along an axis, and return the used numbers.

        `block`: the numbers from `first` on; its last entry holds zeros for all from `end` on.
        """
        places = np.where(self.sources < end, self.sources - first, block.shape[axis] - 1)
        middle = places.shape[1] // 2
        if middle == 0:
            return block.take(places[:, 0], axis=axis)
        wide = block.astype(np.float64)
        total = wide.take(places[:, middle], axis=axis) * self.weights[middle]
        for number in range(middle):
            pair = wide.take(places[:, number], axis=axis)
            pair += wide.take(places[:, -1 - number], axis=axis)
            pair *= self.weights[number]
            total += pair
        rounded: Floats = total.astype(np.float32)
        return rounded


def _mixed(block: Numbers, down: _Axis, across: _Axis) -> Floats:
    """Interpolate [used rows, used columns, 3] to [rows, columns, 3] from four neighbours each."""
    total: Numbers | None = None
    for row, share in ((down.lower, down.low), (down.upper, down.high)):
        weighed = block[row] * share[:, None, None]
        for column, part in ((across.lower, across.low), (across.upper, across.high)):
            one = weighed[:, column] * part[:, None]
            total = one if total is None else total + one
    return np.asarray(total, np.float32)


def _gaussian(deviation: float) -> Numbers:
    """Return the blur's weights [2n + 1] with sum 1; [1] for no blur."""
    if deviation <= 1e-15:
        return np.ones(1)
    reach = int(_REACH * deviation + 0.5)
    weights = np.exp(-0.5 / (deviation * deviation) * np.arange(-reach, reach + 1) ** 2)
    found: Numbers = weights / weights.sum()
    return found


def _mirrored(places: NDArray[np.int64], side: int) -> NDArray[np.int64]:
    """Mirror indices beyond an edge at the middle of the outermost pixel."""
    if side == 1:
        return np.zeros_like(places)
    around = places % (2 * side - 2)
    return np.where(around >= side, 2 * side - 2 - around, around)


def _reflected(places: NDArray[np.floating], side: int) -> NDArray[np.floating]:
    """Mirror between -0.5 and side - 0.5. Beyond the middle of the last pixel, the upper neighbour
    is the mirrored one.
    """
    return np.zeros_like(places) if side == 1 else np.where(places < 0, -places, places)


def _with_zeros(block: Floats, axis: int) -> Floats:
    """Append one zero at the end of an axis."""
    return np.concatenate([block, np.zeros_like(block.take([0], axis=axis))], axis=axis)
