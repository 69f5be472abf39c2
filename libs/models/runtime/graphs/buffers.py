"""The input of a graph: a batch and its fillers as one int32 array, copied to the device at once.

Token ids, positions and token types ([tokens] each) are followed by the start of each sequence and
the end of the last ([sequences + 1]). The batch's sequences are first, so heads outside the graph
read them as views of the same buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from libs.kernels.layout import BatchLayout, runs
from libs.models.interface.packed import Ids, Packed
from libs.models.interface.sequences import InputSequence
from libs.models.runtime.graphs.buckets import Bucket

_Array = TypeVar("_Array", Ids, Tensor)


def empty_inputs(bucket: Bucket) -> Ids:
    """Return an array of a buffer's size on the host."""
    return np.zeros(3 * bucket.tokens + bucket.sequences + 1, np.int32)


def fill(inputs: Ids, bucket: Bucket, sequences: Sequence[InputSequence]) -> None:
    """Write the buffer's content for these sequences to `inputs`. Fillers are token 0 at position
    0, which every encoder has.

    Raises ValueError if the sequences do not fit the bucket.
    """
    lengths = [one.tokens for one in sequences]
    total, fillers = sum(lengths), bucket.fillers(sum(lengths), len(lengths))
    if fillers is None:
        raise ValueError(f"{total} tokens of {len(lengths)} sequences do not fit {bucket}")
    inputs.fill(0)
    ids, positions, types, ends = _parts(inputs, bucket)
    ends[1:] = np.cumsum((*lengths, *fillers))
    np.concatenate([one.ids for one in sequences], out=ids[:total])
    positions[:total] = np.arange(total) - np.repeat(ends[: len(lengths)], lengths)
    for one, begin in zip(sequences, ends.tolist(), strict=False):
        if one.type_ids is not None:
            types[begin : begin + one.tokens] = one.type_ids


def filled(bucket: Bucket, sequences: Sequence[InputSequence]) -> Ids:
    """Return a new array filled by `fill`."""
    inputs = empty_inputs(bucket)
    fill(inputs, bucket, sequences)
    return inputs


def whole_batch(buffer: Tensor, bucket: Bucket, *, typed: bool) -> Packed:
    """Return the whole buffer as a batch, for the encoder. Lengths are not read from a device; its
    kernels use `layout`.
    """
    ids, positions, types, ends = _parts(buffer, bucket)
    lengths = (
        tuple(ends.diff().tolist()) if buffer.device.type == "cpu" else ()
    )  # attention on a CPU uses runs
    ones = torch.arange(bucket.sequences + 1, dtype=torch.int32, device=buffer.device)
    return Packed(
        ids=ids,
        positions=positions,
        type_ids=types if typed else None,
        lengths=lengths,
        layout=BatchLayout(ends, ends, bucket.longest, bucket.longest, runs(lengths, lengths)),
        key_rows=None,
        keys=lengths,
        one_row=BatchLayout(ones, ends, 1, bucket.longest, runs((1,) * len(lengths), lengths)),
    )


def own_batch(buffer: Tensor, bucket: Bucket, lengths: tuple[int, ...], *, typed: bool) -> Packed:
    """Return the batch's sequences without the fillers, for heads: views of the buffer."""
    total = sum(lengths)
    ids, positions, types, ends = _parts(buffer, bucket)
    ends = ends[: len(lengths) + 1]
    return Packed(
        ids=ids[:total],
        positions=positions[:total],
        type_ids=types[:total] if typed else None,
        lengths=lengths,
        layout=BatchLayout(ends, ends, max(lengths), max(lengths), runs(lengths, lengths)),
        key_rows=None,
        keys=lengths,
    )


def _parts(buffer: _Array, bucket: Bucket) -> tuple[_Array, _Array, _Array, _Array]:
    """Split into views: ids, positions, types, ends."""
    size = bucket.tokens
    return buffer[:size], buffer[size : 2 * size], buffer[2 * size : 3 * size], buffer[3 * size :]
