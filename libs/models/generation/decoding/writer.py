"""A model that writes: a packed decoder whose layers keep keys and values in pages, and the layer
that scores the next token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from libs.kernels.attention.paged import PagedLayout, Pages, attend, empty_pages, page_bytes, store
from libs.kernels.linear.packed import PackedLinear
from libs.kernels.native.layer import LayerPages
from libs.kernels.native.paged import page_table
from libs.models.generation.decoding.rules import Ids
from libs.models.generation.decoding.settings import Settings
from libs.models.layers.decoder import CrossLayer
from libs.models.layers.encoder import Layer, PackedEncoder, Shared, resident_bytes
from libs.models.packed import Packed
from libs.models.work import Between, nothing_between


class LanguageHead(nn.Module):
    """Hidden states to scores of the next token. `scale`: a factor on the states (T5). `softcap`:
    cap * tanh(scores / cap).
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """`weight`: [vocabulary, hidden], perhaps the token table; its values are copied where they
        are prepacked.
        """
        super().__init__()
        self.linear = PackedLinear(weight.shape[1], weight.shape[0], bias=bias is not None)
        self.linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            self.linear.bias = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=False)
        self.linear.prepare()
        self._scale, self._softcap = scale, softcap

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocabulary] float32"""
        scores = self.linear.forward(x if self._scale == 1.0 else x * self._scale).float()
        return scores if self._softcap is None else (scores / self._softcap).tanh() * self._softcap


@dataclass(frozen=True, slots=True)
class Places:
    """Where a forward's keys and values are. `every`: all rows are queries. `last`: only the last
    row of each sequence is, `rows`.

    `cross`: where those of the encoder's states are.
    """

    every: PagedLayout
    last: PagedLayout
    rows: Tensor | None
    cross: PagedLayout | None = None
    _tables: dict[int, ctypes.Array[ctypes.c_char]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @staticmethod
    def of(
        rows: Sequence[int],
        keys: Sequence[int],
        pages: Sequence[Sequence[int]],
        device: torch.device,
        cross: tuple[Sequence[int], Sequence[Sequence[int]]] | None = None,
    ) -> Places:
        """`rows`: of each sequence; `keys`: with them; `cross`: tokens and pages of each sequence's
        encoder states.
        """
        every = PagedLayout.of(keys, pages, device, rows=rows)
        seen = None
        if cross is not None:
            seen = PagedLayout.of(*cross, device, rows=(0,) * len(rows), queries=rows)
        if set(rows) == {1}:
            return Places(every, every, None, seen)
        last = PagedLayout.of(keys, pages, device, rows=rows, queries=(1,) * len(rows))
        return Places(every, last, every.layout.cu_queries[1:] - 1, seen)

    def native(self, where: PagedLayout, pages: Pages) -> LayerPages:
        """As native layers take it."""
        made = self._tables.get(id(where))
        if made is None:
            table = page_table(where.cu_rows, where.numbers, attends=not where.fresh)
            made = self._tables[id(where)] = ctypes.create_string_buffer(table, len(table))
        return LayerPages(*pages, ctypes.addressof(made))


class Writer:
    """`decoder`: a stack of layers whose keys and values are kept. `encoder`: of token ids, for
    `encode`; None: there is none, or something else makes the states. `tower`: of images; the
    Reader runs it."""

    def __init__(
        self,
        decoder: PackedEncoder,
        head: LanguageHead,
        settings: Settings,
        encoder: PackedEncoder | None = None,
    ) -> None:
        self.decoder, self.head, self.settings, self.encoder = decoder, head, settings, encoder
        self.tower: nn.Module | None = None
        attention = decoder.stack[0].attn
        self.kv_heads, self.head_size = attention.parts[1], attention.head_size
        self.vocabulary = head.linear.outputs
        settings.check_vocabulary(self.vocabulary)
        self.max_positions = decoder.max_positions
        self.page_bytes = page_bytes(
            len(decoder.stack), self.kv_heads, self.head_size, decoder.dtype
        )

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def has_cross(self) -> bool:
        """Whether it reads an encoder's states."""
        return isinstance(self.decoder.stack[0], CrossLayer)

    @property
    def bytes(self) -> int:
        """Memory of all weights."""
        return sum(resident_bytes(module) for module in self.modules())

    def modules(self) -> Iterator[nn.Module]:
        """The modules that hold its weights."""
        yield from (self.decoder, self.head)
        yield from (each for each in (self.encoder, self.tower) if each is not None)

    def pages(self, count: int) -> list[Pages]:
        """Memory for so many pages: `count * page_bytes`."""
        return empty_pages(
            len(self.decoder.stack),
            count,
            self.kv_heads,
            self.head_size,
            self.decoder.dtype,
            self.device,
        )

    @torch.inference_mode()
    def encode(self, inputs: Sequence[Ids], between: Between = nothing_between) -> list[Tensor]:
        """The encoder's hidden states [tokens, hidden] of each input, from one packed forward."""
        if self.encoder is None:
            raise TypeError("this model has no encoder of token ids")
        batch = Packed.of([np.asarray(ids, np.int32) for ids in inputs], device=self.device)
        return list(self.encoder.forward(batch, between=between).split_with_sizes(batch.lengths))

    @torch.inference_mode()
    def keep_states(
        self, states: Sequence[Tensor], pages: Sequence[Pages], numbers: Sequence[Sequence[int]]
    ) -> None:
        """Stores every layer's keys and values of encoder states [tokens, hidden], each sequence's
        in its pages.
        """
        lengths = [len(each) for each in states]
        where = PagedLayout.of(lengths, numbers, self.device, rows=lengths)
        together = torch.cat(list(states)).to(self.decoder.dtype)
        for layer, own in zip(self.decoder.stack, pages, strict=True):
            assert isinstance(layer, CrossLayer)  # noqa: S101 (of a decoder all layers are of one kind)
            store(*layer.keys(together), own, where)

    @torch.inference_mode()
    def forward(
        self,
        batch: Packed,
        pages: Sequence[Pages],
        places: Places,
        between: Between = nothing_between,
    ) -> Tensor:
        """Scores of the token after each sequence: [sequences, vocabulary] float32. Keys and values
        of all rows are stored.
        """
        decoder = self.decoder
        shared = decoder.shared(batch)
        x = decoder.embed.forward(batch)
        last = len(decoder.stack) - 1
        deeper = () if batch.given is None else batch.given.deeper
        for number, (layer, own) in enumerate(zip(decoder.stack, pages, strict=True)):
            x = self._layer(
                layer, x, batch, shared, own, places, chooses=number == last and len(deeper) <= last
            )
            if number < len(deeper) and batch.given is not None:
                x = x.index_add(0, batch.given.places, deeper[number].to(x.dtype))
            between()
        if places.rows is not None and len(x) != len(places.rows):
            x = x.index_select(0, places.rows)
        return self.head.forward(x if decoder.norm is None else decoder.norm.forward(x))

    def _layer(
        self,
        layer: Layer,
        x: Tensor,
        batch: Packed,
        shared: Shared,
        pages: Pages,
        places: Places,
        *,
        chooses: bool,
    ) -> Tensor:
        """One layer. `chooses`: its result is needed for the last row of each sequence only."""
        crosses = isinstance(layer, CrossLayer)
        rows = places.rows if chooses and not crosses else None
        where = places.every if rows is None else places.last
        if not crosses:
            done = layer.fused(x, batch, shared, rows, where.layout, places.native(where, pages))
            if done is not None:
                return done
        attn = layer.attn
        q, k, v = attn.project(layer.before_attention(x), shared)
        if rows is not None:
            q, x = q.index_select(0, rows), x.index_select(0, rows)
        if where.fresh:
            store(k, v, pages, where)
            mixed = attn.mix(q, k, v, batch, where.layout, shared)
        else:
            mixed = attend(
                q,
                k,
                v,
                pages,
                where,
                scale=attn.scale,
                window=attn.window,
                bias=shared.bias,
                softcap=attn.softcap,
            )
            mixed = mixed.flatten(1)
        if not isinstance(layer, CrossLayer):
            return layer.after_attention(x, mixed)
        if places.cross is None:
            raise TypeError("this model needs an encoder's states")
        x, queries = layer.after_self(x, mixed)
        seen = attend(
            queries, None, None, pages, places.cross, scale=layer.cross.scale, causal=False
        )
        return layer.after_cross(x, seen.flatten(1))
