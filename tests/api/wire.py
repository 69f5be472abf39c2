"""The other side of shoal.requests.codec: numpy to messages, as the mesh does it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from shoal.v1 import tensor_pb2 as pb

Floats = npt.NDArray[np.float32]


def tensor(values: Floats, data_type: pb.DataType) -> pb.Tensor:
    """`values`, stored as `data_type`."""
    shape = values.shape
    if data_type == pb.DATA_TYPE_FLOAT16:
        return pb.Tensor(data_type=data_type, shape=shape, data=values.astype("<f2").tobytes())
    if data_type == pb.DATA_TYPE_BFLOAT16:
        return pb.Tensor(
            data_type=data_type,
            shape=shape,
            data=(values.view(np.uint32) >> 16).astype("<u2").tobytes(),
        )
    if data_type == pb.DATA_TYPE_BINARY:
        return pb.Tensor(
            data_type=data_type, shape=shape, data=np.packbits(values > 0, axis=-1).tobytes()
        )
    if data_type == pb.DATA_TYPE_INT8:
        scale = np.abs(values).max(axis=-1) / 127
        data = np.round(values / scale[:, None]).astype(np.int8)
        return pb.Tensor(
            data_type=data_type,
            shape=shape,
            data=data.tobytes(),
            scale=scale.astype("<f4").tobytes(),
        )
    if data_type == pb.DATA_TYPE_UINT8:
        offset = values.min(axis=-1)
        scale = (values.max(axis=-1) - offset) / 255
        data = np.round((values - offset[:, None]) / scale[:, None]).astype(np.uint8)
        scales, offsets = scale.astype("<f4").tobytes(), offset.astype("<f4").tobytes()
        return pb.Tensor(
            data_type=data_type, shape=shape, data=data.tobytes(), scale=scales, offset=offsets
        )
    return pb.Tensor(
        data_type=pb.DATA_TYPE_FLOAT32, shape=shape, data=values.astype("<f4").tobytes()
    )


def ragged(rows: Sequence[Floats], data_type: pb.DataType) -> pb.Ragged:
    offsets = np.cumsum([0, *(len(row) for row in rows)]).tolist()
    return pb.Ragged(values=tensor(np.concatenate(rows), data_type), offsets=offsets)


def sparse(rows: Sequence[dict[int, float]], columns: int) -> pb.SparseMatrix:
    """Rows of column -> weight."""
    indices = np.array([column for row in rows for column in sorted(row)], dtype="<u4")
    values = np.array([row[column] for row in rows for column in sorted(row)], dtype=np.float32)
    offsets = np.cumsum([0, *(len(row) for row in rows)]).tolist()
    stored = tensor(values, pb.DATA_TYPE_FLOAT32)
    return pb.SparseMatrix(
        columns=columns, offsets=offsets, indices=indices.tobytes(), values=stored
    )
