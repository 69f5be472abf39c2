"""The results of a detector: boxes in pixels of the original image, each with its label and
score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Region

from libs.models.text.heads.extraction.words import Label

MAX_REGIONS: Final = 4096
"""Maximum regions of an item."""


@dataclass(frozen=True, slots=True)
class RegionOptions:
    """The options of a detector's head for one sequence (`InputSequence.input`): labels, and the
    upright image's size in pixels.
    """

    labels: tuple[Label, ...]
    height: int
    width: int


def select_regions(
    scores: NDArray[np.float32],
    boxes: NDArray[np.float32],
    scale: tuple[float, float],
    asked: RegionOptions,
    thresholds: Sequence[float],
) -> tuple[Region, ...]:
    """Return the boxes with scores above their label's threshold, best first: at most MAX_REGIONS,
    plus one if more exist.

    Labels do not compete for a box: each label's regions are independent of the others. Boxes are
    clipped to the image, and dropped if they lie outside.

    Args:
        scores: [boxes, labels], 0..1.
        boxes: [boxes, 4], centre and size in units of `scale` pixels (down, across).
        thresholds: One for each label.
    """
    down, across = np.float32(scale[0]), np.float32(scale[1])
    x, y, half_width, half_height = (
        boxes[:, 0],
        boxes[:, 1],
        boxes[:, 2] * np.float32(0.5),
        boxes[:, 3] * np.float32(0.5),
    )
    edges = np.stack(
        [
            ((x - half_width) * across).clip(0, asked.width),
            ((y - half_height) * down).clip(0, asked.height),
            ((x + half_width) * across).clip(0, asked.width),
            ((y + half_height) * down).clip(0, asked.height),
        ],
        axis=1,
    )
    inside = (edges[:, 2] > edges[:, 0]) & (edges[:, 3] > edges[:, 1])
    rows, columns = np.nonzero((scores > np.asarray(thresholds, np.float32)) & inside[:, None])
    best = np.argsort(-scores[rows, columns], kind="stable")[: MAX_REGIONS + 1]
    return tuple(
        Region(left, top, right, bottom, asked.labels[column].name, float(scores[row, column]))
        for row, column in zip(rows[best].tolist(), columns[best].tolist(), strict=True)
        for left, top, right, bottom in [edges[row].tolist()]
    )
