"""What a detector finds: boxes in pixels of the image as it was sent, each with its label and
score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.models.results import Region
from libs.models.text.heads.extraction.words import Label

MAX_REGIONS: Final = 4096
"""The most regions of an item."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a detector's head needs of a sequence (`InputSequence.input`): the labels, and the
    upright image's size in pixels.
    """

    labels: tuple[Label, ...]
    height: int
    width: int


def regions_of(
    scores: NDArray[np.float32],
    boxes: NDArray[np.float32],
    scale: tuple[float, float],
    asked: Asked,
    thresholds: Sequence[float],
) -> tuple[Region, ...]:
    """Every box whose score for a label exceeds that label's threshold, best first: at most
    MAX_REGIONS, and one more if there are more.

    Labels do not compete for a box: the regions of one are what they would be if it had been asked
    for alone. `scores`: [boxes, labels], 0..1. `boxes`: [boxes, 4], centre and size, of which 1 is
    `scale` pixels (down, across). Boxes are clipped to the image; one that lies outside it wholly
    is left out. `thresholds`: one for each label.
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
        Region(asked.labels[column].name, float(scores[row, column]), *edges[row].tolist())
        for row, column in zip(rows[best].tolist(), columns[best].tolist(), strict=True)
    )
