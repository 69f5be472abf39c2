"""The graphs of one model: which batches are replayed, when a shape is captured, and the checks against the eager forward.

Only the encoder is in a graph; heads run eagerly on its output, so all of them work. Called by `packed_model.py` in each forward;
memory is granted by whoever runs the model (`Owner`). Everything that goes wrong ends in the eager forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from libs.models.graphs.buckets import AFTER, Bucket, Uses, bucket_of
from libs.models.graphs.buffers import filled, own_batch, whole_batch
from libs.models.graphs.capture import Capture, Captured
from libs.models.graphs.store import MOST_BYTES, Entry, GraphStore
from libs.models.layers.encoder import PackedEncoder
from libs.models.packed import Packed, Rows
from libs.models.trunk import Trunk
from libs.models.work import InputSequence

CHECK_EVERY: Final = 256
"""The first of so many replays of each graph is compared with the eager forward."""

ROUGH_BYTES: Final = 64 << 20
"""What a graph may take beside the activations of its tokens, until it is measured: torch's allocator takes 2 and 20 MiB at a time,
cuBLAS up to 32 MiB once."""

Event = Literal["captured", "refused", "failed", "replayed", "checked", "differed"]
"""refused: no memory, or the device was in use. failed, differed: the model has no graphs from now on."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who runs the model. `reserve(bytes)`: reserves so much device memory for all its graphs together, in place of what was
    reserved before; False: there is not so much. `tell(event, detail)`. Both are called on the thread of the forward or `drop`."""

    reserve: Callable[[int], bool]
    tell: Callable[[Event, str], None]
    activation_bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class _Shape:
    """What one graph is for. `typed`: the batch has token types."""

    encoder: PackedEncoder
    rows: Rows | None
    typed: bool
    bucket: Bucket

    def run(self, buffer: Tensor) -> Tensor:
        return self.encoder.forward(whole_batch(buffer, self.bucket, typed=self.typed), self.rows)


class Graphs:
    """At most `most` graphs of `most_bytes` together. Calls must not overlap: the model's lock is held."""

    def __init__(
        self,
        capture: Capture,
        owner: Owner,
        *,
        most: int,
        most_bytes: int = MOST_BYTES,
        after: int = AFTER,
        check_every: int = CHECK_EVERY,
    ) -> None:
        self._capture, self._owner, self._check_every = capture, owner, check_every
        self._store: GraphStore[Captured] = GraphStore(most, most_bytes)
        self._uses = Uses(after)
        self._now = 0
        self.is_off = False

    def forward(self, trunk: Trunk, sequences: Sequence[InputSequence], rows: Rows | None) -> tuple[Tensor, Packed] | None:
        """The encoder's hidden states, as its `forward` returns them, and the batch for heads. Both are views that the next call
        overwrites. None: this batch has no graph, and is to be run eagerly."""
        shape = None if self.is_off else _shape_of(trunk.encoder, sequences, rows)
        if shape is None:
            return None
        self._now += 1
        entry = self._store.use(shape, self._now)
        if entry is None and self._uses.add(shape) and self._add(shape, sequences):
            entry = self._store.use(shape, self._now)
        return None if entry is None else self._replayed(shape, entry, trunk, sequences)

    def drop(self) -> None:
        """Drops all graphs and their memory. No forward may be in progress on the device."""
        if len(self._store):
            self._store.clear()
            self._owner.reserve(0)

    def _add(self, shape: _Shape, sequences: Sequence[InputSequence]) -> bool:
        """Captures a graph if memory for it is granted, and says whether it did."""
        size = ROUGH_BYTES + int(shape.bucket.tokens * self._owner.activation_bytes_per_token)
        if not self._store.make_room(size, self._now):
            self._uses.put_off(shape)
            return False
        captured = None
        if self._owner.reserve(self._store.bytes + size):
            try:
                captured = self._capture.capture(shape.run, filled(shape.bucket, sequences))
            except torch.OutOfMemoryError:
                pass
            except Exception as error:
                self._switch_off("failed", f"{type(error).__name__}: {error}")
                return False
        if captured is not None and self._owner.reserve(self._store.bytes + captured.bytes):
            self._store.add(shape, captured, self._now)
            self._uses.captured(shape)
            self._owner.tell("captured", "")
            return True
        del captured
        self._owner.reserve(self._store.bytes)
        self._uses.put_off(shape)
        self._owner.tell("refused", "")
        return False

    def _replayed(
        self, shape: _Shape, entry: Entry[Captured], trunk: Trunk, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, Packed]:
        lengths = tuple(one.tokens for one in sequences)
        try:
            output = entry.graph.replay(filled(shape.bucket, sequences))
        except Exception as error:
            self._switch_off("failed", f"{type(error).__name__}: {error}")
            raise
        self._owner.tell("replayed", "")
        hidden = output[: sum(lengths) if shape.rows is None else len(lengths)]
        if entry.uses % self._check_every == 1 % self._check_every:
            eager = trunk.pack(sequences, [None] * len(sequences))
            wanted = shape.encoder.forward(eager, shape.rows)
            self._owner.tell("checked", "")
            if (apart := distance(hidden, wanted)) > tolerance(wanted.dtype):
                self._switch_off("differed", f"by {apart:.2g} in a batch of {len(lengths)} sequences and {sum(lengths)} tokens")
                return wanted, eager
        return hidden, own_batch(entry.graph.buffer, shape.bucket, lengths, typed=shape.typed)

    def _switch_off(self, why: Event, detail: str) -> None:
        self.is_off = True
        self._store.clear()
        self._owner.reserve(0)
        self._owner.tell(why, detail)


def _shape_of(encoder: PackedEncoder, sequences: Sequence[InputSequence], rows: Rows | None) -> _Shape | None:
    """None for a batch that no graph is for: too large, or with adapters, shared prefixes, masked keys or rows of embeddings."""
    special = any(one.adapter or one.seen or one.before is not None or one.rows is not None for one in sequences)
    if special or encoder.goes_by_runs:
        return None
    bucket = bucket_of([one.tokens for one in sequences], encoder.max_positions)
    if bucket is None:
        return None
    return _Shape(encoder, rows, any(one.type_ids is not None for one in sequences), bucket)


def distance(got: Tensor, wanted: Tensor) -> float:
    """The largest distance of two rows, relative to the wanted row's length; infinite where only `wanted` is finite. Waits for the
    device. [rows, size] each; rows that should not be finite are left out."""
    got, wanted = got.float(), wanted.float()
    relative = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    relative = relative.nan_to_num(nan=torch.inf).masked_fill(~wanted.isfinite().all(-1), 0.0)
    return float(relative.max())


def tolerance(dtype: torch.dtype) -> float:
    """Half of the type's digits: products of other sizes round differently, a wrong row differs by about 1."""
    return float(torch.finfo(dtype).eps ** 0.5)
