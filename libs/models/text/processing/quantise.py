"""Quantise float32 rows to the number formats of tensor.proto. All can be dequantised (binary
without lengths).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from libs.models.interface.results import StoredArray
from libs.models.interface.work import DataType


def store(values: NDArray[np.float32], data_type: DataType) -> StoredArray:
    """Quantise `values` [..., dimensions]. Each row of the last axis has its own scale and
    offset."""
    if data_type == "int8":
        return _int8(values)
    if data_type == "uint8":
        return _uint8(values)
    return StoredArray(data_type, values.shape, _plain(values, data_type))


def _plain(values: NDArray[np.float32], data_type: DataType) -> NDArray[np.generic]:
    if data_type == "float16":
        return values.astype("<f2")
    if data_type == "bfloat16":
        return _bfloat16(values)
    if data_type == "binary":
        return np.packbits(values > 0, axis=-1)
    return np.ascontiguousarray(values, dtype="<f4")


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper halves, rounded to nearest, ties to even. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype="<f4").view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2")


def _int8(values: NDArray[np.float32]) -> StoredArray:
    """Quantise to value = byte x scale, with -127..127: zero is exact and the sign symmetric."""
    scale = (np.abs(values).max(axis=-1) / 127).astype("<f4")
    stored = (
        np.rint(values / np.where(scale > 0, scale, 1)[..., None]).clip(-127, 127).astype(np.int8)
    )
    return StoredArray("int8", values.shape, stored, scale=scale)


def _uint8(values: NDArray[np.float32]) -> StoredArray:
    """Quantise to value = byte x scale + offset, from the row's minimum to its maximum."""
    offset = values.min(axis=-1).astype("<f4")
    scale = ((values.max(axis=-1) - offset) / 255).astype("<f4")
    steps = (values - offset[..., None]) / np.where(scale > 0, scale, 1)[..., None]
    return StoredArray(
        "uint8",
        values.shape,
        np.rint(steps).clip(0, 255).astype(np.uint8),
        scale=scale,
        offset=offset,
    )
