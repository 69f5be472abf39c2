"""The way back from `StoredArray`, written from tensor.proto's words alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from libs.models import StoredArray


def restore(stored: StoredArray) -> NDArray[np.float32]:
    """Convert to float32; binary becomes 0 and 1."""
    if stored.data_type == "binary":
        return np.unpackbits(stored.values.view(np.uint8), axis=-1, count=stored.shape[-1]).astype(
            np.float32
        )
    if stored.data_type == "bfloat16":
        return (stored.values.astype(np.uint32) << 16).view(np.float32)
    values = stored.values.astype(np.float32)
    if stored.scale is not None:
        values = values * stored.scale[..., None]
    return values if stored.offset is None else values + stored.offset[..., None]
