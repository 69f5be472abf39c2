"""A generative language model: a packed decoder with paged keys and values, and the layer that
scores the next token.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from libs.errors import ModelBroken
from libs.kernels.attention.paged import PagedLayout, Pages, attend, empty_pages, page_bytes, store
from libs.kernels.linear.packed import PackedLinear
from libs.kernels.native.layer import LayerPages
from libs.kernels.native.paged import page_table
from libs.models.generation.decoding.rules import Ids
from libs.models.generation.decoding.settings import DecodeSettings
from libs.models.generation.decoding.states import StatePool
from libs.models.interface.packed import Packed
from libs.models.interface.sequences import YieldPoint, never_yield
from libs.models.layers.carried import Carried, StateShape
from libs.models.layers.decoder import CrossLayer
from libs.models.layers.encoder import Layer, PackedEncoder, Shared, resident_bytes


class LanguageHead(nn.Module):
    """Maps hidden states to scores of the next token.

    Args:
        scale: A factor on the states (T5).
        softcap: Soft cap of the scores: cap * tanh(scores / cap).
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """Create the head. `weight`: [vocabulary, hidden], possibly the token table; prepacking
        copies its values.
        """
        super().__init__()
        self.linear = PackedLinear(weight.shape[1], weight.shape[0], bias=bias is not None)
        self.linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            self.linear.bias = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=False)
        self.linear.prepare()
        self._scale, self._softcap = scale, softcap

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, hidden] to [rows, vocabulary] float32."""
        scores = self.linear.forward(x if self._scale == 1.0 else x * self._scale).float()
        return scores if self._softcap is None else (scores / self._softcap).tanh() * self._softcap


@dataclass(frozen=True, slots=True)
class KeyValuePlaces:
    """Locations of a forward's keys and values.

    Attributes:
        every: Layout in which all rows are queries.
        last: Layout in which only the last row of each sequence is, `rows`.
        cross: Layout of the encoder's states.
        carried: Locations of the states of layers without keys.
    """

    every: PagedLayout
    last: PagedLayout
    rows: Tensor | None
    cross: PagedLayout | None = None
    carried: Carried | None = None
    _tables: dict[int, ctypes.Array[ctypes.c_char]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @staticmethod
    def create(
        rows: Sequence[int],
        keys: Sequence[int],
        pages: Sequence[Sequence[int]],
        device: torch.device,
        cross: tuple[Sequence[int], Sequence[Sequence[int]]] | None = None,
        slots: Sequence[int] = (),
    ) -> KeyValuePlaces:
        """Build the locations of a batch.

        Args:
            rows: New rows of each sequence.
            keys: Keys of each sequence, including the new rows.
            cross: Tokens and pages of each sequence's encoder states.
            slots: Each sequence's slot in the memory of states; empty for a model without.
        """
        every = PagedLayout.from_lengths(keys, pages, device, rows=rows)
        seen = None
        if cross is not None:
            seen = PagedLayout.from_lengths(*cross, device, rows=(0,) * len(rows), queries=rows)
        carried = None
        if slots:
            resumed = [own < seen for own, seen in zip(rows, keys, strict=True)]
            carried = Carried.create(slots, rows, resumed, device)
        if set(rows) == {1}:
            return KeyValuePlaces(every, every, None, seen, carried)
        last = PagedLayout.from_lengths(keys, pages, device, rows=rows, queries=(1,) * len(rows))
        return KeyValuePlaces(every, last, every.layout.cu_queries[1:] - 1, seen, carried)

    def native(self, where: PagedLayout, pages: Pages) -> LayerPages:
        """Return the page table for native layers."""
        made = self._tables.get(id(where))
        if made is None:
            table = page_table(where.cu_rows, where.numbers, attends=not where.fresh)
            made = self._tables[id(where)] = ctypes.create_string_buffer(table, len(table))
        return LayerPages(*pages, ctypes.addressof(made))


class LanguageModel:
    """A language model that generates tokens.

    Attributes:
        decoder: A stack of layers with stored keys and values.
        encoder: Encoder of token ids, for `encode`; None if the model has none, or if another
            module computes the states.
        tower: Image tower; the Reader runs it.
    """

    def __init__(
        self,
        decoder: PackedEncoder,
        head: LanguageHead,
        settings: DecodeSettings,
        encoder: PackedEncoder | None = None,
    ) -> None:
        self.decoder, self.head, self.settings, self.encoder = decoder, head, settings, encoder
        self.tower: nn.Module | None = None
        attention = [layer.attn for layer in decoder.stack if not layer.attn.state_shapes]
        if not attention:
            raise ModelBroken("config.json: no layer of the model has attention")
        self.heads, self.kv_heads, _ = attention[0].parts
        self.head_size = attention[0].head_size
        self.vocabulary = head.linear.outputs
        settings.check_vocabulary(self.vocabulary)
        self.max_positions = decoder.max_positions
        self.page_bytes = page_bytes(len(attention), self.kv_heads, self.head_size, decoder.dtype)
        self.state_bytes = sum(
            math.prod(state.shape) * self._state_dtype(state).itemsize
            for layer in decoder.stack
            for state in layer.attn.state_shapes
        )
        """The memory of the states of one row, of layers without keys."""

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def has_cross(self) -> bool:
        """True if it attends to an encoder's states."""
        return isinstance(self.decoder.stack[0], CrossLayer)

    @property
    def bytes(self) -> int:
        """Return the memory of all weights."""
        return sum(resident_bytes(module) for module in self.modules())

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules that hold weights."""
        yield from (self.decoder, self.head)
        yield from (each for each in (self.encoder, self.tower) if each is not None)

    def _state_dtype(self, state: StateShape) -> torch.dtype:
        return torch.float32 if state.exact else self.decoder.dtype

    def pages(self, count: int) -> list[Pages]:
        """Allocate memory for `count` pages: `count * page_bytes`. A layer without keys has empty
        ones.
        """
        has_keys = [not layer.attn.state_shapes for layer in self.decoder.stack]
        made = iter(
            empty_pages(
                sum(has_keys),
                count,
                self.kv_heads,
                self.head_size,
                self.decoder.dtype,
                self.device,
            )
        )
        nothing = torch.empty((count, 0), dtype=self.decoder.dtype, device=self.device)
        return [next(made) if each else (nothing, nothing) for each in has_keys]

    def states(self, slots: int) -> StatePool:
        """Allocate memory for the states of `slots` rows: `slots * state_bytes`."""
        layers = [
            [
                torch.empty(
                    (slots, *state.shape), dtype=self._state_dtype(state), device=self.device
                )
                for state in layer.attn.state_shapes
            ]
            for layer in self.decoder.stack
        ]
        return StatePool(slots, layers)

    @torch.inference_mode()
    def encode(self, inputs: Sequence[Ids], yield_point: YieldPoint = never_yield) -> list[Tensor]:
        """Return the encoder's hidden states [tokens, hidden] of each input from one packed
        forward.
        """
        if self.encoder is None:
            raise TypeError("this model has no encoder of token ids")
        batch = Packed.from_sequences(
            [np.asarray(ids, np.int32) for ids in inputs], device=self.device
        )
        return list(
            self.encoder.forward(batch, yield_point=yield_point).split_with_sizes(batch.lengths)
        )

    @torch.inference_mode()
    def keep_states(
        self, states: Sequence[Tensor], pages: Sequence[Pages], numbers: Sequence[Sequence[int]]
    ) -> None:
        """Store every layer's keys and values of encoder states [tokens, hidden] in each sequence's
        pages.
        """
        lengths = [len(each) for each in states]
        where = PagedLayout.from_lengths(lengths, numbers, self.device, rows=lengths)
        together = torch.cat(list(states)).to(self.decoder.dtype)
        for layer, own in zip(self.decoder.stack, pages, strict=True):
            assert isinstance(layer, CrossLayer)  # noqa: S101 (all layers of a decoder have one type)
            store(*layer.keys(together), own, where)

    @torch.inference_mode()
    def forward(
        self,
        batch: Packed,
        pages: Sequence[Pages],
        places: KeyValuePlaces,
        yield_point: YieldPoint = never_yield,
        states: StatePool | None = None,
    ) -> Tensor:
        """Return scores of the token after each sequence, [sequences, vocabulary] float32, and
        store all keys, values and states.
        """
        decoder = self.decoder
        shared = decoder.shared(batch)
        x = decoder.embed.forward(batch)
        last = len(decoder.stack) - 1
        deeper = () if batch.given is None else batch.given.deeper
        for number, (layer, own) in enumerate(zip(decoder.stack, pages, strict=True)):
            if layer.attn.state_shapes:
                x = _resume(
                    layer, x, shared, None if states is None else states.layers[number], places
                )
            else:
                chooses = number == last and len(deeper) <= last
                x = self._layer(layer, x, batch, shared, own, places, chooses=chooses)
            if number < len(deeper) and batch.given is not None:
                x = x.index_add(0, batch.given.places, deeper[number].to(x.dtype))
            yield_point()
        if places.rows is not None and len(x) != len(places.rows):
            x = x.index_select(0, places.rows)
        scores = self.head.forward(x if decoder.norm is None else decoder.norm.forward(x))
        if places.carried is not None:
            places.carried.commit()
        return scores

    def _layer(
        self,
        layer: Layer,
        x: Tensor,
        batch: Packed,
        shared: Shared,
        pages: Pages,
        places: KeyValuePlaces,
        *,
        chooses: bool,
    ) -> Tensor:
        """Run one layer. `chooses`: only the last row of each sequence is needed."""
        crosses = isinstance(layer, CrossLayer)
        rows = places.rows if chooses and not crosses else None
        where = places.every if rows is None else places.last
        if not crosses:
            done = layer.fused(x, batch, shared, rows, where.layout, places.native(where, pages))
            if done is not None:
                return done
        attn = layer.attn
        q, k, v, gate = attn.project_gated(layer.before_attention(x), shared)
        if rows is not None:
            q, x = q.index_select(0, rows), x.index_select(0, rows)
            gate = None if gate is None else gate.index_select(0, rows)
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
        if gate is not None:
            mixed = mixed * gate
        if not isinstance(layer, CrossLayer):
            return layer.after_attention(x, mixed)
        if places.cross is None:
            raise TypeError("the model needs an encoder's states")
        x, queries = layer.after_self(x, mixed)
        seen = attend(
            queries, None, None, pages, places.cross, scale=layer.cross.scale, causal=False
        )
        return layer.after_cross(x, seen.flatten(1))


def _resume(
    layer: Layer,
    x: Tensor,
    shared: Shared,
    memory: Sequence[Tensor] | None,
    places: KeyValuePlaces,
) -> Tensor:
    """Run a layer that carries states in place of keys and values."""
    if memory is None or places.carried is None:
        raise TypeError("the model needs the memory of its states")
    mixed = layer.attn.resume(layer.before_attention(x), shared, memory, places.carried)
    return layer.after_attention(x, mixed)
