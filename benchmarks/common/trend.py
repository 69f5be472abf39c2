"""Does a series grow? A line through it with a confidence interval that autocorrelation does not
make too narrow. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

BATCHES = 10
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Trend:
    """`slope` in units a second, and the bounds of its 95 % confidence interval."""

    slope: float
    low: float
    high: float

    @property
    def contains_zero(self) -> bool:
        return self.low <= 0.0 <= self.high


def trend(seconds: Sequence[float], values: Sequence[float], batches: int = BATCHES) -> Trend:
    """Ordinary least squares through the means of `batches` equal stretches of the series, with
    Student's t of batches - 2.

    Samples a second apart are nearly the same sample: their residuals would promise far too narrow
    an interval. Means over a tenth of the run are nearly independent (the method of batch means).
    At least two samples a batch, or ValueError.
    """
    if len(seconds) != len(values) or len(seconds) < 2 * batches:
        raise ValueError(
            f"{len(seconds)} times and {len(values)} values are too few for {batches} batches"
        )
    at = _means(seconds, batches)
    height = _means(values, batches)
    spread = at - at.mean()
    slope = float(spread @ height / (spread @ spread))
    residuals = height - height.mean() - slope * spread
    error = float(np.sqrt(residuals @ residuals / (batches - 2) / (spread @ spread)))
    reach = float(student.ppf(0.5 + CONFIDENCE / 2, batches - 2)) * error
    return Trend(slope, slope - reach, slope + reach)


def _means(values: Sequence[float], batches: int) -> NDArray[np.float64]:
    return np.array(
        [part.mean() for part in np.array_split(np.asarray(values, np.float64), batches)]
    )
