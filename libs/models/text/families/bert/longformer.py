"""Longformer: RoBERTa with windowed attention (arXiv 2004.05150).

A sequence classifier also has global attention at its first token, as transformers sets it: every
token attends to that token, which attends to all tokens by separate projections. Encoders and
token classifiers have windows alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import BatchLayout, SequenceRun
from libs.kernels.linear.packed import PackedLinear
from libs.models.interface.packed import Packed
from libs.models.layers.encoder import Attention, PackedEncoder, Shared
from libs.models.layers.spec import Config, EncoderSpec, LayerSpec
from libs.models.text.families.bert.bert import WEIGHTS as BERT
from libs.models.text.families.bert.bert import bert_embedding, bert_spec
from libs.models.weights import AllowedExtra, Rule

MODEL_TYPES = ("longformer",)
PREFIXES = ("", "longformer.")

WEIGHTS: dict[str, Rule] = BERT | {
    # Every checkpoint contains them, although only sequence classifiers use them.
    "encoder.layer.{}.attention.self.query_global": AllowedExtra("layers.{}.attn.first_query"),
    "encoder.layer.{}.attention.self.key_global": AllowedExtra("layers.{}.attn.first_key"),
    "encoder.layer.{}.attention.self.value_global": AllowedExtra("layers.{}.attn.first_value"),
}

_WINDOW = 512  # transformers' default
_GLOBAL = "LongformerForSequenceClassification"
_MIN_BLOCK = 64  # queries
_MAX_SCORES = 1 << 26
"""Maximum scores of one head in memory at once: sequences times queries times keys."""


class GlobalFirstAttention(Attention):
    """Windowed attention in which each sequence's first token sees all tokens and is seen by
    all."""

    def __init__(self, spec: EncoderSpec, layer: LayerSpec) -> None:
        super().__init__(spec, layer)
        size = spec.heads * spec.head_size
        self.first_query = PackedLinear(spec.hidden, size)
        self.first_key = PackedLinear(spec.hidden, size)
        self.first_value = PackedLinear(spec.hidden, size)

    @property
    def is_graph_capturable(self) -> bool:
        """False: long sequences are computed in blocks."""
        return False

    def forward(self, x: Tensor, batch: Packed, shared: Shared) -> Tensor:
        """Implement `Attention.forward`."""
        mixed = super().forward(x, batch, shared)
        first = batch.rows("first")
        return mixed.index_copy(0, first.long(), self._attend_from(x, first, batch))

    def forward_rows(
        self, x: Tensor, batch: Packed, shared: Shared, rows: Tensor, layout: BatchLayout
    ) -> Tensor:
        """Implement `Attention.forward_rows` for the rows of first tokens, as
        `LongformerEncoder` asks for no others.
        """
        return self._attend_from(x, rows, batch)

    def _attend_from(self, x: Tensor, rows: Tensor, batch: Packed) -> Tensor:
        """Attend from one row of each sequence to all its tokens: [sequences, heads *
        head_size]."""
        keys = x if batch.key_rows is None else x.index_select(0, batch.key_rows)
        q, k, v = (
            linear.forward(states).view(-1, self.parts[0], self.head_size)
            for linear, states in (
                (self.first_query, x.index_select(0, rows)),
                (self.first_key, keys),
                (self.first_value, keys),
            )
        )
        return varlen_attention(q, k, v, batch.row_layout(), scale=self.scale).flatten(1)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Packed, layout: BatchLayout, shared: Shared
    ) -> Tensor:
        """Attend to the keys within the window and to the first key. The output of each sequence's
        first row is replaced by `forward`.
        """
        if batch.key_rows is not None:
            k, v = k.index_select(0, batch.key_rows), v.index_select(0, batch.key_rows)
        window = self.window
        if window is None or layout.max_positions <= window + 1:
            return varlen_attention(q, k, v, layout, scale=self.scale).flatten(1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for whole in layout.runs:
            for run in _parts(whole, window):
                queries = slice(run.query, run.query + run.count * run.queries)
                keys = slice(run.key, run.key + run.count * run.keys)
                out[queries] = self._attend_in_blocks(q[queries], k[keys], v[keys], run, window)
        return out.flatten(1)

    def _attend_in_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, run: SequenceRun, window: int
    ) -> Tensor:
        """Attend in blocks of queries, each to the keys that its windows reach.

        Returns [count * queries, heads, head_size].
        """
        q, k, v = (x.view(run.count, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        blocks = []
        for start in range(0, run.queries, _block(window)):
            stop = min(start + _block(window), run.queries)
            # The first key precedes those of the windows, unless they contain it.
            low = min(max(1, start - window), run.keys)
            high = max(low, min(run.keys, stop + window))
            is_seen = _windows(start, stop, low, high, window, q.device)
            keys, values = (torch.cat((x[:, :, :1], x[:, :, low:high]), dim=2) for x in (k, v))
            blocks.append(
                F.scaled_dot_product_attention(
                    q[:, :, start:stop], keys, values, attn_mask=is_seen, scale=self.scale
                )
            )
        return torch.cat(blocks, dim=2).transpose(1, 2).flatten(0, 1)


def _block(window: int) -> int:
    """Return the number of queries that are computed together."""
    return max(window, _MIN_BLOCK)


def _windows(
    start: int, stop: int, low: int, high: int, window: int, device: torch.device
) -> Tensor:
    """Return whether queries start ... stop - 1 see the first key and the keys low ... high - 1:
    bool [queries, keys].
    """
    places = torch.cat(
        (torch.zeros(1, dtype=torch.long, device=device), torch.arange(low, high, device=device))
    )
    distance = places - torch.arange(start, stop, device=device)[:, None]
    return (distance.abs() <= window) | (places == 0)


def _parts(run: SequenceRun, window: int) -> Iterator[SequenceRun]:
    """Split a run into parts with scores that fit in memory at once."""
    scores = min(run.queries, _block(window)) * min(run.keys, _block(window) + 2 * window + 1)
    step = max(1, _MAX_SCORES // scores)
    for done in range(0, run.count, step):
        yield replace(
            run,
            query=run.query + done * run.queries,
            key=run.key + done * run.keys,
            count=min(step, run.count - done),
        )


class LongformerEncoder(PackedEncoder):
    """An encoder of which the last layer computes no more than first tokens where a head needs no
    more.
    """

    def __init__(self, config: Config, spec: EncoderSpec) -> None:
        is_global = _GLOBAL in config.texts("architectures")
        super().__init__(
            spec,
            bert_embedding(config, spec),
            attention=GlobalFirstAttention if is_global else Attention,
        )
        if is_global:
            self._short = ("first",)


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    spec = bert_spec(config)
    layers = tuple(LayerSpec(window=window) for window in _window_sizes(config, len(spec.layers)))
    return LongformerEncoder(config, replace(spec, layers=layers))


def _window_sizes(config: Config, layers: int) -> tuple[int, ...]:
    """Return the tokens that each layer sees on each side. `attention_window` counts both."""
    key = "attention_window"
    if isinstance(config.values.get(key), list):
        sizes = config.numbers(key, (float(_WINDOW),) * layers, least=2)
    else:
        sizes = (float(config.integer(key, _WINDOW)),) * layers
    if any(size % 2 or size < 2 for size in sizes):
        raise config.unsupported(key, "even numbers of at least 2 are needed")
    return tuple(int(size) // 2 for size in sizes)
