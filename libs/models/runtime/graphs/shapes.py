"""The computation of one graph: an encoder in a bucket, with a pooled head, or for one or all rows
of each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from libs.models.interface.head import CapturableHead, ModelHead
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence
from libs.models.layers.encoder import PackedEncoder, resident_bytes
from libs.models.runtime.backbone import Backbone
from libs.models.runtime.graphs.buckets import Bucket, hot_buckets, max_tokens, smallest_bucket
from libs.models.runtime.graphs.buffers import whole_batch


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The shape of one graph.

    Attributes:
        head: Part of the graph, which returns its vectors; None: the graph returns the encoder's
            hidden states.
        rows: The only row of each sequence that is computed; None for all.
        typed: The batch has token types.
    """

    encoder: PackedEncoder
    head: CapturableHead | None
    rows: Rows | None
    typed: bool
    bucket: Bucket

    def run(self, buffer: Tensor) -> Tensor:
        """Compute a filled buffer: [sequences, dimensions] with a head, [sequences, hidden] with
        `rows`, else [tokens, hidden].
        """
        batch = whole_batch(buffer, self.bucket, typed=self.typed)
        hidden = self.encoder.forward(batch, self.rows)
        if self.head is None:
            return hidden
        return self.head.pool(hidden, batch.cu_seqlens, is_one_row=self.rows is not None)

    def run_eagerly(
        self, backbone: Backbone, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, Packed]:
        """Compute the same for these sequences without a graph. Returns the output and the
        batch.
        """
        batch = backbone.pack(sequences, [None] * len(sequences))
        hidden = self.encoder.forward(batch, self.rows)
        return (
            (hidden, batch)
            if self.head is None
            else (self.head.forward(hidden, batch, sequences)[0], batch)
        )

    def output_rows(self, sequences: Sequence[InputSequence]) -> int:
        """Return the number of output rows of these sequences. Those of the fillers follow."""
        return (
            sum(one.tokens for one in sequences)
            if self.head is None and self.rows is None
            else len(sequences)
        )

    def sample(self) -> list[InputSequence]:
        """Return sequences of arbitrary tokens to capture and check a graph with: all but one of
        the bucket, of unequal lengths.
        """
        lengths = list(self.bucket.fillers(0, 0) or ())[:-1]
        for first in range(0, len(lengths) - 1, 2):
            moved = min(lengths[first] // 2, self.bucket.longest - lengths[first + 1])
            lengths[first], lengths[first + 1] = lengths[first] - moved, lengths[first + 1] + moved
        rng = np.random.default_rng(self.bucket.tokens)
        vocabulary = max(1, self.encoder.embed.vocabulary)
        return [
            InputSequence(rng.integers(0, vocabulary, length, dtype=np.int32)) for length in lengths
        ]


def batch_shape(
    encoder: PackedEncoder,
    heads: Sequence[ModelHead],
    sequences: Sequence[InputSequence],
    most: int,
) -> GraphShape | None:
    """Return the shape of a batch for these heads.

    None if no graph is possible: more than `most` tokens, adapters, shared prefixes, masked keys or
    rows of embeddings.
    """
    special = any(
        one.adapter or one.seen or one.before is not None or one.rows is not None
        for one in sequences
    )
    if special or not encoder.is_graph_capturable:
        return None
    bucket = smallest_bucket([one.tokens for one in sequences], encoder.max_positions, most)
    if bucket is None:
        return None
    head, rows = computed_part(heads, is_prompted=any(one.skip for one in sequences))
    return GraphShape(
        encoder, head, rows, any(one.type_ids is not None for one in sequences), bucket
    )


def max_encoder_tokens(encoder: PackedEncoder) -> int:
    """Return the largest token count of graphs of this encoder."""
    return max_tokens(resident_bytes(encoder) // encoder.dtype.itemsize)


def hot_shapes(backbone: Backbone) -> list[GraphShape]:
    """Return the shapes to capture after a load, the largest first: single texts without token
    types, for the first head.
    """
    if not backbone.encoder.is_graph_capturable or not backbone.encoder.embed.vocabulary:
        return []
    heads = list(backbone.heads.values())[:1]
    if not heads:
        return []
    head, rows = computed_part(heads, is_prompted=False)
    return [
        GraphShape(backbone.encoder, head, rows, False, bucket)
        for bucket in hot_buckets(backbone.encoder.max_positions)
    ]


def computed_part(
    heads: Sequence[ModelHead], *, is_prompted: bool
) -> tuple[CapturableHead | None, Rows | None]:
    """Return the head that is part of the graph, or None, and the row of each sequence to compute,
    or None for all.

    Prompts that are not pooled (`is_prompted`) differ in length from batch to batch, so their
    pooling is not in a graph.
    """
    if len(heads) != 1:
        return None, None
    head = heads[0]
    return (head if isinstance(head, CapturableHead) and not is_prompted else None), head.rows


def distance(got: Tensor, wanted: Tensor) -> float:
    """Return the largest distance of two rows [rows, size], relative to the wanted row's length.
    Waits for the device.

    Infinite if only `wanted` is finite; rows that should not be finite are left out.
    """
    got, wanted = got.float(), wanted.float()
    relative = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(
        min=torch.finfo(torch.float32).tiny
    )
    relative = relative.nan_to_num(nan=torch.inf).masked_fill(~wanted.isfinite().all(-1), 0.0)
    return float(relative.max())


def tolerance(dtype: torch.dtype) -> float:
    """Return half of the type's digits: products of other sizes round differently, but a wrong row
    differs by about 1.
    """
    return float(torch.finfo(dtype).eps ** 0.5)
