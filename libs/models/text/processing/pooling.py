"""Hierarchical pooling of a multi-vector: similar vectors are merged (arXiv 2409.14683;
colpali-engine).

It is Ward's linkage over the rows of the matrix of cosine distances, as in colpali-engine's
HierarchicalTokenPooler: with n vectors, the rows are points in n dimensions. Distances are the same
in a space of the vectors' dimensions and computed there. Nearest-neighbour chains (Murtagh 1983)
build the tree without a matrix of distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import sleep
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
_Points = NDArray[np.float64]

MAX_VECTORS: Final = 4096
"""Maximum vectors of a pooled item: the time is quadratic in their number, 2 s for this many of 128
dimensions.
"""

_BREATH_STEPS: Final = 64
_NAP_SECONDS: Final = 1e-4
"""The thread sleeps after _BREATH_STEPS steps, some milliseconds, to release the interpreter's
lock."""


def pooled(vectors: Array, factor: int, *, normalize: bool) -> Array:
    """Pool [vectors, dimensions] to about vectors / factor vectors, at least one: the mean of each
    cluster, in the order of the clusters' first vectors.

    All vectors take part, including those of a prompt and of special tokens, as in the reference.
    This blocks for O(vectors² x dimensions).

    Args:
        normalize: The means have length 1.
    """
    count = max(len(vectors) // max(factor, 1), 1)
    if len(vectors) <= count:
        return vectors
    labels = _clusters(_points(vectors), count)
    sums = np.zeros((labels.max() + 1, vectors.shape[1]))
    np.add.at(sums, labels, vectors)
    means: Array = (sums / np.bincount(labels)[:, None]).astype(np.float32)
    if not normalize:
        return means
    means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), np.float32(1e-12))
    return means


def _points(vectors: Array) -> _Points:
    """Return points with the same distances as the rows of the matrix of cosine distances."""
    x = vectors.astype(np.float64)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    if len(x) <= x.shape[1]:
        return np.asarray(x @ x.T, np.float64)
    # Rows i and j of X Xᵀ differ by (x_i - x_j) Xᵀ, which has the length of (x_i - x_j) multiplied
    # by a root of XᵀX.
    values, axes = np.linalg.eigh(x.T @ x)
    return np.asarray(x @ (axes * np.sqrt(values.clip(0))), np.float64)


def _clusters(points: _Points, count: int) -> NDArray[np.intp]:
    """Return the cluster of each point, numbered by their first points: at most `count`, as scipy's
    `fcluster` with "maxclust".
    """
    heights, pairs = _tree(points)
    last = np.sort(heights)[len(points) - count - 1]
    parents = np.arange(len(points))

    def root(point: int) -> int:
        while parents[point] != point:
            parents[point] = parents[parents[point]]
            point = int(parents[point])
        return point

    for (first, second), height in zip(pairs, heights, strict=True):
        if height <= last:
            one, other = root(first), root(second)
            parents[max(one, other)] = min(one, other)
    # A root is the first point of its cluster.
    return np.unique([root(point) for point in range(len(points))], return_inverse=True)[1]


def _tree(points: _Points) -> tuple[_Points, Sequence[tuple[int, int]]]:
    """Return Ward's tree: the merges' heights (squared), and a point of each of the two merged
    clusters."""
    centres, sizes = points.copy(), np.ones(len(points))
    squares = np.einsum("nd,nd->n", centres, centres)  # infinite for a cluster merged into another
    heights: list[float] = []
    pairs: list[tuple[int, int]] = []
    chain: list[int] = []
    first = steps = 0
    while len(pairs) < len(points) - 1:
        steps += 1
        if not steps % _BREATH_STEPS:
            sleep(_NAP_SECONDS)
        if not chain:
            while np.isinf(squares[first]):
                first += 1
            chain.append(first)
        top = chain[-1]
        apart = squares + squares[top] - 2.0 * (centres @ centres[top])
        apart *= sizes * (sizes[top] / (sizes + sizes[top]))
        apart[top] = np.inf
        nearest = int(apart.argmin())
        if len(chain) < 2 or apart[nearest] < apart[chain[-2]]:
            chain.append(nearest)
            continue
        # Each is the other's nearest.
        other = chain[-2]
        del chain[-2:]
        heights.append(max(float(apart[other]), 0.0))
        pairs.append((top, other))
        together = sizes[top] + sizes[other]
        centres[other] = (sizes[top] * centres[top] + sizes[other] * centres[other]) / together
        sizes[other], squares[other], squares[top] = (
            together,
            centres[other] @ centres[other],
            np.inf,
        )
    return np.array(heights), pairs
