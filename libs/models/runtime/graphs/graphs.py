"""The graphs of one model: replay batches, capture shapes, and check results against the eager
forward.

`packed_model.py` calls `forward` for each batch, which never captures: it counts, and worthwhile
shapes wait in a queue. `capture_one` takes the next of them on the device thread while no batch
waits (`services/worker/jobs/execution/runner.py`). Pooled heads are part of the graph; others run
eagerly on the encoder's output, so every head is supported. The model's runner grants memory
(`Owner`). Every failure falls back to the eager forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor

from libs.models.interface.head import ModelHead
from libs.models.interface.packed import Packed
from libs.models.interface.sequences import InputSequence
from libs.models.layers.encoder import PackedEncoder
from libs.models.runtime.backbone import Backbone
from libs.models.runtime.graphs.buckets import AFTER, Uses
from libs.models.runtime.graphs.buffers import fill, filled, own_batch
from libs.models.runtime.graphs.capture import Capture, Captured, PendingCopy
from libs.models.runtime.graphs.shapes import (
    GraphShape,
    batch_shape,
    distance,
    hot_shapes,
    max_encoder_tokens,
    tolerance,
)
from libs.models.runtime.graphs.store import MAX_BYTES, GraphStore

CHECK_EVERY: Final = 256
"""One of this many replays of each graph is compared with the eager forward, in addition to one
after its capture.
"""

ROUGH_BYTES: Final = 64 << 20
"""Memory that a graph may take in addition to its activations, until it is measured: torch's
allocator takes 2 and 20 MiB at a time, cuBLAS up to 32 MiB one time.
"""

Event = Literal["captured", "refused", "failed", "replayed", "checked", "differed"]
"""refused: memory was short, or the device was in use. failed, differed: the model's graphs are
switched off.
"""


@dataclass(frozen=True, slots=True)
class Owner:
    """Callbacks of the model's runner, called on the thread of the forward or `drop`.

    `reserve(bytes)`: reserve device memory for all graphs together, replacing the earlier
    reservation; False if memory is short. `report(event, detail)`: report an event.
    """

    reserve: Callable[[int], bool]
    report: Callable[[Event, str], None]
    activation_bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """A batch computed by a graph, or by the eager forward that checked it. The next call
    overwrites these tensors.

    Attributes:
        output: The encoder's hidden states, or the head's output if `is_pooled`.
        batch: The batch for heads.
        copy: Running copy of the head's output to the host, with rows of fillers after the batch's;
            None: `output` has to be copied.
    """

    output: Tensor
    batch: Packed
    is_pooled: bool
    copy: PendingCopy | None = None


@dataclass(frozen=True, slots=True)
class _Pending:
    """A shape that waits for its capture, and the batch to capture and check it with."""

    shape: GraphShape
    backbone: Backbone
    sequences: Sequence[InputSequence]


class Graphs:
    """Keeps at most `most` graphs of `max_bytes` together. Calls must not overlap (the model's lock
    is held), except reads of `is_pending`.
    """

    def __init__(
        self,
        capture: Capture,
        owner: Owner,
        *,
        most: int,
        max_bytes: int = MAX_BYTES,
        after: int = AFTER,
        check_every: int = CHECK_EVERY,
    ) -> None:
        self.capture, self.owner = capture, owner
        self._capture, self._owner, self._check_every = capture, owner, check_every
        self._max_bytes = max_bytes
        self._store: GraphStore[Captured] = GraphStore(most)
        self._uses = Uses(after)
        self._pending: dict[GraphShape, _Pending] = {}
        self._max_encoder_tokens: dict[PackedEncoder, int] = {}
        self._now = 0
        self.is_off = False

    @property
    def is_pending(self) -> bool:
        """True if `capture_one` has work to do. May be read from any thread."""
        return bool(self._pending)

    def expect(self, backbones: Iterable[Backbone]) -> None:
        """Queue the most frequent shapes after a load."""
        for backbone in backbones:
            for shape in hot_shapes(backbone):
                self._pending[shape] = _Pending(shape, backbone, shape.sample())

    def forward(
        self, backbone: Backbone, sequences: Sequence[InputSequence], heads: Sequence[ModelHead]
    ) -> Replayed | None:
        """Replay the batch, without waiting for the device unless it is checked. None if it must
        run eagerly.
        """
        shape = (
            None
            if self.is_off
            else batch_shape(backbone.encoder, heads, sequences, self._limit(backbone.encoder))
        )
        if shape is None:
            return None
        self._now += 1
        entry = self._store.use(shape, self._now)
        if entry is None:
            if self._uses.add(shape) and shape not in self._pending:
                self._pending[shape] = _Pending(shape, backbone, list(sequences))
            return None
        is_checked = entry.uses % self._check_every == 0
        try:
            replayed, _ = self._replay(
                shape, entry.graph, backbone, sequences, is_checked=is_checked
            )
        except Exception as error:
            self._switch_off("failed", f"{type(error).__name__}: {error}")
            raise
        self._owner.report("replayed", "")
        return replayed

    def capture_one(self) -> None:
        """Capture the largest waiting shape, and check its graph against the eager forward. No
        batch may be in progress on the device; takes tens of milliseconds.
        """
        if not self._pending:
            return
        shape = max(self._pending, key=lambda one: (one.bucket.tokens, one.bucket.sequences))
        pending = self._pending.pop(shape)
        if self._store.is_full and self._store.is_stale(self._now):
            self.drop()
        captured = None if self._store.is_full else self._captured(pending)
        if captured is None:
            if not self.is_off:
                self._uses.postpone(shape)
                self._owner.report("refused", "")
            return
        try:
            _, is_equal = self._replay(
                shape, captured, pending.backbone, pending.sequences, is_checked=True
            )
        except Exception as error:
            self._switch_off("failed", f"{type(error).__name__}: {error}")
            return
        if is_equal:
            self._store.add(shape, captured, self._now)
            self._uses.captured(shape)
            self._owner.report("captured", "")

    def drop(self) -> None:
        """Drop all graphs and their memory. No forward may be in progress on the device."""
        self._pending.clear()
        self._store.clear()
        if self._capture.bytes:
            self._capture.drop()
            self._owner.reserve(0)

    def _limit(self, encoder: PackedEncoder) -> int:
        if encoder not in self._max_encoder_tokens:
            self._max_encoder_tokens[encoder] = max_encoder_tokens(encoder)
        return self._max_encoder_tokens[encoder]

    def _captured(self, pending: _Pending) -> Captured | None:
        """Capture a graph if memory for it is granted. Afterwards, reserve the pool's memory or
        drop all graphs.
        """
        shape, held = pending.shape, self._capture.bytes
        size = (
            held + ROUGH_BYTES + int(shape.bucket.tokens * self._owner.activation_bytes_per_token)
        )
        if size > self._max_bytes or not self._owner.reserve(size):
            return None
        captured = None
        try:
            captured = self._capture.capture(shape.run, filled(shape.bucket, pending.sequences))
        except torch.OutOfMemoryError:
            self._store.clear()  # the pool has lost all its graphs
        except Exception as error:
            self._switch_off("failed", f"{type(error).__name__}: {error}")
            return None
        if not self._owner.reserve(self._capture.bytes):
            captured = None
            self._store.clear()
            self._capture.drop()
            self._owner.reserve(0)
        return captured

    def _replay(
        self,
        shape: GraphShape,
        graph: Captured,
        backbone: Backbone,
        sequences: Sequence[InputSequence],
        *,
        is_checked: bool,
    ) -> tuple[Replayed, bool]:
        """Replay a batch. The second value is False if a check found a difference; the first is
        then the eager forward's.
        """
        lengths = tuple(one.tokens for one in sequences)
        output = graph.replay(partial(fill, bucket=shape.bucket, sequences=sequences))[
            : shape.output_rows(sequences)
        ]
        is_pooled = shape.head is not None
        copy = graph.start_copy() if is_pooled else None
        if is_checked:
            wanted, eager = shape.run_eagerly(backbone, sequences)
            self._owner.report("checked", "")
            # Compare the host's data, so the copy is checked too.
            got = (
                output
                if copy is None
                else torch.from_numpy(copy.wait())[: len(output)].to(output.device)
            )
            if (apart := distance(got, wanted)) > tolerance(shape.encoder.dtype):
                self._switch_off(
                    "differed",
                    f"by {apart:.2g} in a batch of {len(lengths)} sequences and {sum(lengths)} "
                    "tokens",
                )
                return Replayed(wanted, eager, is_pooled), False
            copy = None
        return Replayed(
            output,
            own_batch(graph.buffer, shape.bucket, lengths, typed=shape.typed),
            is_pooled,
            copy,
        ), True

    def _switch_off(self, event: Event, detail: str) -> None:
        self.is_off = True
        self._pending.clear()
        self._store.clear()
        self._capture.drop()
        self._owner.reserve(0)
        self._owner.report(event, detail)
