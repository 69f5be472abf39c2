"""DeBERTa v2 and v3: BERT with disentangled attention over content and relative positions (arXiv
2006.03654, 2111.09543).


The score of a query and a key is content-to-content, plus content of the query · distance (c2p),
plus content of the key · distance (p2c). Each near distance has its own embedding, farther ones
share buckets. All layers share the embeddings. Each layer has its own projections of them, computed
once after loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels.layout import BatchLayout, SequenceRun
from libs.kernels.linear.lora import LowRank
from libs.kernels.linear.packed import PackedLinear
from libs.kernels.triton_here import has_triton
from libs.models.interface.packed import Packed
from libs.models.layers.embeddings import EmbeddingTable, TokenEmbedding
from libs.models.layers.encoder import (
    Attention,
    AttentionType,
    Norm,
    PackedEncoder,
    PositionBias,
    PostNormLayer,
    Shared,
)
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.runtime.loaded.lora import BoundConstants
from libs.models.runtime.loaded.peft import LayerShape
from libs.models.weights import AllowedExtra, Rule

MODEL_TYPES = ("deberta-v2",)
PREFIXES = ("", "deberta.")

WEIGHTS: dict[str, Rule] = {
    "embeddings.position_ids": None,
    "embeddings.word_embeddings": "embed.token",
    # Microsoft's checkpoints contain it although their config.json says position_biased_input:
    # false.
    "embeddings.position_embeddings": AllowedExtra("embed.position"),
    "embeddings.token_type_embeddings": "embed.segment",
    "embeddings.embed_proj": "embed.project",
    "embeddings.LayerNorm": "embed.norm",
    "encoder.rel_embeddings": "relative.positions",
    "encoder.LayerNorm": AllowedExtra("relative.norm"),
    "encoder.conv.conv": "layers.{}.conv",
    "encoder.conv.LayerNorm": "layers.{}.conv_norm",
    "encoder.layer.{}.attention.self.query_proj": ("layers.{}.attn.qkv", 0),
    "encoder.layer.{}.attention.self.key_proj": ("layers.{}.attn.qkv", 1),
    "encoder.layer.{}.attention.self.value_proj": ("layers.{}.attn.qkv", 2),
    "encoder.layer.{}.attention.self.pos_key_proj": "layers.{}.attn.distance_key",
    "encoder.layer.{}.attention.self.pos_query_proj": "layers.{}.attn.distance_query",
    "encoder.layer.{}.attention.output.dense": "layers.{}.attn.out",
    "encoder.layer.{}.attention.output.LayerNorm": "layers.{}.attn_norm",
    "encoder.layer.{}.intermediate.dense": "layers.{}.ffn.up",
    "encoder.layer.{}.output.dense": "layers.{}.ffn.down",
    "encoder.layer.{}.output.LayerNorm": "layers.{}.ffn_norm",
    "pooler.dense": None,
    "classifier": None,
    "qa_outputs": None,
    "cls.predictions.bias": None,
    "cls.predictions.decoder": None,
    "cls.predictions.transform.dense": None,
    "cls.predictions.transform.LayerNorm": None,
    "lm_predictions.lm_head.bias": None,
    "lm_predictions.lm_head.dense": None,
    "lm_predictions.lm_head.LayerNorm": None,
    "mask_predictions.classifier": None,
    "mask_predictions.dense": None,
    "mask_predictions.LayerNorm": None,
}

_EPS = 1e-7
_POSITIONS = 512  # transformers' default
# Tokens; without a position table any length works, as all far distances share a bucket
_ANY_LENGTH = 1 << 20
_KINDS = ("c2p", "p2c")
# Maximum scores by distance of one kind in memory at once. A CPU's cache should hold them; on a
# GPU products should be large.
_SCORES_ON_CPU = 1 << 22
_SCORES = 1 << 27
_CONVOLUTIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu}


@dataclass(frozen=True, slots=True)
class Distances:
    """The row of the distance embeddings for each distance (query minus key)."""

    rows: tuple[int, ...]
    """Rows of the distances -reach ... reach; farther ones use the first or the last row.

    Rows never decrease with the distance, so that a sequence needs contiguous rows."""

    @property
    def reach(self) -> int:
        return len(self.rows) // 2

    @property
    def embeddings(self) -> int:
        """Number of rows."""
        return self.rows[-1] + 1

    def row(self, distance: int) -> int:
        return self.rows[max(-self.reach, min(self.reach, distance)) + self.reach]

    def rows_within(self, positions: int) -> slice:
        """Return the rows of the distances in a sequence of this length, with a few more: they
        begin and end at multiples of 16 where possible, which aligns products and loads."""
        first, last = self.row(1 - positions), self.row(positions - 1)
        return slice(first // 16 * 16, min(-(-(last + 1) // 16) * 16, self.embeddings))

    @staticmethod
    def exact(farthest: int) -> Distances:
        """Give each distance below `farthest` its own row."""
        return Distances((*range(2 * farthest), 2 * farthest - 1))

    @staticmethod
    def bucketed(buckets: int, farthest: int) -> Distances:
        """Give each distance up to half the buckets its own row; the other half of the buckets is
        logarithmic (make_log_bucket_position).
        """
        middle = buckets // 2
        far = torch.arange(farthest + 1, device="cpu")
        # float32 and exactly the reference's operations: rounding must not move the edge of a
        # bucket.
        ratio = torch.log(far.clamp(min=1) / middle) / torch.log(
            torch.tensor((farthest - 1) / middle, device="cpu")
        )
        wide = (torch.ceil(ratio * (middle - 1)) + middle).long()
        near = torch.where(far <= middle, far, wide)
        both = torch.cat([-near[1:].flip(0), near])
        return Distances(tuple((both + buckets).clamp(0, 2 * buckets - 1).tolist()))


class DistanceEmbedding(PositionBias):
    """The distance embeddings before a layer projects them. `table` holds the row of each distance
    -reach ... reach.
    """

    def __init__(self, spec: EncoderSpec, distances: Distances, *, normed: bool) -> None:
        super().__init__()
        self.positions = EmbeddingTable(distances.embeddings, spec.hidden)
        self.norm = Norm(spec) if normed else None
        self._distances = distances
        self.register_buffer("table", None, persistent=False)

    def prepare(self) -> None:
        """Put the rows on the device. Call it after loading."""
        self.table = torch.tensor(self._distances.rows, device=self.positions.weight.device)

    def vectors(self) -> Tensor:
        """Return the distance embeddings, [rows, hidden]."""
        weight = self.positions.weight
        return weight if self.norm is None else self.norm.forward(weight)


@dataclass(frozen=True, slots=True)
class DistanceParts:
    """An adapter's update to a layer's projected distances: for each row, (a' b) by head. `a` is
    [rank, rows], scaled.
    """

    keys: LowRank | None
    queries: LowRank | None

    @property
    def bytes(self) -> int:
        return sum(part.a.nbytes for part in (self.keys, self.queries) if part is not None)


class DisentangledAttention(Attention):
    """Disentangled attention.

    `delta` holds the updates of the current batch's adapters to the projected distances.

    Args:
        kinds: c2p and p2c.
        own: Distances have their own projections, not those of the content.
        key_bias: The projection of distances for queries has a bias.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        layer: LayerSpec,
        *,
        distances: Distances,
        kinds: tuple[str, ...],
        own: bool,
        key_bias: bool = True,
    ) -> None:
        super().__init__(spec, layer)
        size = spec.heads * spec.head_size
        self.distance_key = (
            PackedLinear(spec.hidden, size, bias=key_bias) if own and "c2p" in kinds else None
        )
        self.distance_query = PackedLinear(spec.hidden, size) if own and "p2c" in kinds else None
        self._distances, self._kinds, self._own = distances, kinds, own
        self.delta: BoundConstants[DistanceParts] | None = None
        self.keys: Tensor | None  # of distances, for queries: [heads, rows, head_size], scaled
        self.queries: Tensor | None  # of distances, for keys
        self.register_buffer("keys", None, persistent=False)
        self.register_buffer("queries", None, persistent=False)

    @property
    def is_graph_capturable(self) -> bool:
        """True where Triton's kernel, which computes all sequences at once, can run."""
        return has_triton(self.out.weight)

    def learn(self, vectors: Tensor) -> None:
        """Project the distance embeddings [rows, hidden]. Call it after loading."""
        queries, keys = self._projected_distances(vectors)
        self.distance_query = self.distance_key = None
        self.keys = self._by_head(keys) if keys is not None else None
        self.queries = self._by_head(queries) if queries is not None else None

    def _projected_distances(self, vectors: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the distances as queries and as keys, each [rows, heads * head_size]; None for
        those that the model does not have.
        """
        if self._own:
            linears = self.distance_query, self.distance_key
            queries, keys = (one if one is None else one.forward(vectors) for one in linears)
        else:
            queries, keys, _ = self.qkv.forward(vectors).chunk(3, dim=1)
        return queries if "p2c" in self._kinds else None, keys if "c2p" in self._kinds else None

    def spent(self) -> dict[str, LayerShape]:
        """Return the linear layers that only `learn` needed. They are freed."""
        kinds = {"distance_key": "c2p", "distance_query": "p2c"} if self._own else {}
        return {
            name: LayerShape(self.qkv.inputs, self.qkv.slots[:1])
            for name, kind in kinds.items()
            if kind in self._kinds
        }

    def relearn(self, vectors: Tensor, parts: Mapping[str, LowRank]) -> DistanceParts:
        """Return the adapter's update to the result of `learn`. `parts` holds updates of this
        layer's linear layers, by name.
        """
        keys = self._projected(vectors, parts, "distance_key", 1) if "c2p" in self._kinds else None
        queries = (
            self._projected(vectors, parts, "distance_query", 0) if "p2c" in self._kinds else None
        )
        return DistanceParts(keys, queries)

    def _projected(
        self, vectors: Tensor, parts: Mapping[str, LowRank], name: str, slot: int
    ) -> LowRank | None:
        part = parts.get(name if self._own else "qkv")
        if part is None:
            return None
        size = self.qkv.slots[slot]
        b = part.b if self._own else part.b[:, slot * size : (slot + 1) * size]
        return LowRank((part.a @ vectors.to(part.a.dtype).T) * self.scale, b) if b.any() else None

    def _by_head(self, projected: Tensor) -> Tensor:
        return (
            (projected * self.scale)
            .view(len(projected), -1, self.head_size)
            .transpose(0, 1)
            .contiguous()
        )

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Packed, layout: BatchLayout, shared: Shared
    ) -> Tensor:
        """Attend from queries [queries, heads, head_size] to keys and values, [tokens, heads,
        head_size] each, and return [queries, heads * head_size].
        """
        if has_triton(q):
            return self._by_kernel(q, k, v, batch, layout, shared)
        if batch.key_rows is not None:
            k, v = k.index_select(0, batch.key_rows), v.index_select(0, batch.key_rows)
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
        for whole in layout.runs:
            for of_adapter, learned in self._by_adapter(whole, q.shape[1]):
                for run in _parts(of_adapter, q):
                    queries = slice(run.query, run.query + run.count * run.queries)
                    keys = slice(run.key, run.key + run.count * run.keys)
                    out[queries] = self._dense(
                        q[:, queries], k[:, keys], v[:, keys], run, shared, learned
                    )
        return out.flatten(1)

    def _by_kernel(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Packed, layout: BatchLayout, shared: Shared
    ) -> Tensor:
        """Compute `mix` in one launch for all sequences. Of their lengths, only the longest affects
        the launch: it decides the number of distance rows."""
        from libs.kernels.attention import disentangled_triton

        rows = self._distances.rows_within(layout.max_positions)
        table = _rows_on_device(layout, shared)
        chosen = batch.key_rows
        keys, values = (
            (k, v) if chosen is None else (k.index_select(0, chosen), v.index_select(0, chosen))
        )
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        at_once = max(1, _SCORES // (max(len(q), len(k), len(keys)) * (rows.stop - rows.start)))
        for first in range(0, q.shape[1], at_once):
            heads = slice(first, first + at_once)
            c2p = self._by_row(q, "c2p", heads, rows)
            p2c = self._by_row(k, "p2c", heads, rows)
            if p2c is not None and chosen is not None:
                p2c = p2c.index_select(1, chosen)
            own = q[:, heads], keys[:, heads], values[:, heads], c2p, p2c
            disentangled_triton.attend(*own, table, rows.start, layout, self.scale, out[:, heads])
        return out.flatten(1)

    def _by_row(self, x: Tensor, kind: str, heads: slice, rows: slice) -> Tensor | None:
        """Return the scores of queries (c2p) or keys (p2c) with rows of the distances, each token's
        with the rows of its adapter: [heads, tokens, rows], or None if the model has no such
        scores.

        Args:
            x: The queries or keys of all heads, [tokens, heads, head_size].
            kind: c2p or p2c.
            heads: The heads to compute.
            rows: The rows of the distances to compute.
        """
        projected = self.keys if kind == "c2p" else self.queries
        if projected is None:
            return None
        own = x[:, heads].transpose(0, 1)
        if self.delta is None:
            return torch.bmm(own, projected[heads, rows].transpose(1, 2))
        scores = own.new_empty(own.shape[0], len(x), rows.stop - rows.start)
        for start, stop, adapter in self.delta.rows.within(len(x), 0, len(x)):
            learned = None if adapter is None else self.delta.parts.get(adapter)
            part = None if learned is None else learned.keys if kind == "c2p" else learned.queries
            torch.bmm(
                own[:, start:stop],
                _adapted(projected, rows, part)[heads].transpose(1, 2),
                out=scores[:, start:stop],
            )
        return scores

    def _by_adapter(
        self, run: SequenceRun, rows: int
    ) -> Iterator[tuple[SequenceRun, DistanceParts | None]]:
        """Split a run into parts of one adapter each. `rows` is the number of all queries."""
        if self.delta is None:
            yield run, None
            return
        for start, stop, adapter in self.delta.rows.within(
            rows, run.query, run.query + run.count * run.queries
        ):
            done, count = (start - run.query) // run.queries, (stop - start) // run.queries
            part = replace(run, query=start, key=run.key + done * run.keys, count=count)
            yield part, None if adapter is None else self.delta.parts.get(adapter)

    def _dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        run: SequenceRun,
        shared: Shared,
        learned: DistanceParts | None,
    ) -> Tensor:
        """Attend within a run of equally long sequences: [heads, count * length, head_size] each to
        [count * queries, heads, head_size].
        """
        # Heads are the batch dimension, so that each head multiplies its distances once for all
        # sequences.
        added = self._scores_by_distance(q, k, run, shared, learned)
        q, k, v = (_by_text(x, run.count) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=self.scale)
        return mixed.flatten(1, 2).transpose(0, 1)

    def _scores_by_distance(
        self, q: Tensor, k: Tensor, run: SequenceRun, shared: Shared, learned: DistanceParts | None
    ) -> Tensor | None:
        """Return the c2p and p2c scores, [heads, count, queries, keys]."""
        first = self._distances.row(run.offset + 1 - run.keys)
        last = self._distances.row(run.offset + run.queries - 1)
        rows = slice(first, last + 1)  # the rows that a sequence of this length needs
        row = _rows_between(run, shared) - first
        added = None
        if self.keys is not None:
            of_keys = _adapted(self.keys, rows, None if learned is None else learned.keys)
            scores = _by_text(torch.bmm(q, of_keys.transpose(1, 2)), run.count)
            added = scores.gather(-1, row.expand(*scores.shape[:2], -1, -1))
        if self.queries is not None:
            of_queries = _adapted(self.queries, rows, None if learned is None else learned.queries)
            scores = _by_text(torch.bmm(k, of_queries.transpose(1, 2)), run.count)
            turned = scores.gather(-1, row.T.expand(*scores.shape[:2], -1, -1)).transpose(-1, -2)
            added = turned if added is None else added.add_(turned)
        return added


def _adapted(projected: Tensor, rows: slice, part: LowRank | None) -> Tensor:
    """Select these rows of the projected distances [heads, rows, head_size] and add an adapter's
    update."""
    base = projected[:, rows]
    if part is None:
        return base
    return base + (part.a[:, rows].T @ part.b).view(-1, base.shape[0], base.shape[2]).transpose(
        0, 1
    ).type_as(base)


def _parts(run: SequenceRun, q: Tensor) -> Iterator[SequenceRun]:
    """Split a run into parts with scores by distance that fit in memory at once."""
    limit = _SCORES_ON_CPU if q.device.type == "cpu" else _SCORES
    step = max(1, limit // (q.shape[0] * run.queries * run.keys))
    for done in range(0, run.count, step):
        count = min(step, run.count - done)
        yield replace(
            run, query=run.query + done * run.queries, key=run.key + done * run.keys, count=count
        )


def _by_text(x: Tensor, count: int) -> Tensor:
    """Reshape [heads, count * length, size] to [heads, count, length, size]."""
    return x.view(x.shape[0], count, -1, x.shape[2])


def _table(shared: Shared) -> Tensor:
    """Return the row of each distance -reach ... reach."""
    if shared.bias is None:
        raise ValueError("an encoder with disentangled attention needs its distance embeddings")
    return shared.bias


def _rows_on_device(layout: BatchLayout, shared: Shared) -> Tensor:
    """Return the kernel's int32 table, built once for all layers of a batch."""
    table = layout.memo.get(_rows_on_device)
    if not isinstance(table, Tensor):
        table = layout.memo[_rows_on_device] = _table(shared).int()
    return table


def _rows_between(run: SequenceRun, shared: Shared) -> Tensor:
    """Return the distance embedding's row for each query and key: [queries, keys]."""
    table = _table(shared)
    reach, device = len(table) // 2, table.device
    query = torch.arange(run.offset, run.offset + run.queries, device=device)
    distance = query[:, None] - torch.arange(run.keys, device=device)
    return table[distance.clamp_(-reach, reach) + reach]


@dataclass(frozen=True, slots=True)
class DebertaConvolution:
    """A convolution over `width` tokens, an odd number, in `groups` groups of channels."""

    width: int
    groups: int
    function: Callable[[Tensor], Tensor]


class ConvolvedLayer(PostNormLayer):
    """The first layer of larger v2 models: adds a convolution of its input to its output."""

    is_graph_capturable = False

    def __init__(
        self,
        spec: EncoderSpec,
        layer: LayerSpec,
        attention: AttentionType,
        convolution: DebertaConvolution,
    ) -> None:
        super().__init__(spec, layer, attention)
        width = convolution.width
        self.conv = nn.Conv1d(
            spec.hidden, spec.hidden, width, padding=width // 2, groups=convolution.groups
        )
        self.conv_norm = Norm(spec)
        self._function = convolution.function

    def forward(self, x: Tensor, batch: Packed, shared: Shared) -> Tensor:
        out = super().forward(x, batch, shared)
        mixed = torch.empty_like(x)
        for run in batch.layout.runs:
            rows = slice(run.query, run.query + run.count * run.queries)
            texts = x[rows].view(run.count, -1, x.shape[1]).transpose(1, 2)
            mixed[rows] = self.conv(texts).transpose(1, 2).flatten(0, 1)
        return self.conv_norm.forward(out + self._function(mixed))

    def forward_rows(
        self, x: Tensor, batch: Packed, shared: Shared, rows: Tensor, layout: BatchLayout
    ) -> Tensor:
        return self.forward(x, batch, shared).index_select(0, rows)


class DebertaEncoder(PackedEncoder):
    """An encoder with distances projected for each layer and, in some models, a convolution at the
    first layer.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        embed: TokenEmbedding,
        distances: DistanceEmbedding | None,
        attention: AttentionType,
        convolution: DebertaConvolution | None,
    ) -> None:
        super().__init__(spec, embed, relative=distances, attention=attention)
        if convolution is not None:
            first = ConvolvedLayer(spec, spec.layers[0], attention, convolution)
            self.stack = (first, *self.stack[1:])
            self.layers[0] = first

    def prepare(self) -> None:
        super().prepare()
        if isinstance(self.relative, DistanceEmbedding):
            vectors = self.relative.vectors()
            for layer in self.stack:
                if isinstance(layer.attn, DisentangledAttention):
                    layer.attn.learn(vectors)

    def spent(self) -> dict[str, LayerShape]:
        """Implement `PrecomputesConstants`."""
        return {
            f"{at}.{name}": shape
            for at, attention in self._disentangled()
            for name, shape in attention.spent().items()
        }

    def relearn(self, parts: Mapping[str, LowRank]) -> dict[str, DistanceParts]:
        """Implement `PrecomputesConstants`."""
        if not isinstance(self.relative, DistanceEmbedding):
            return {}
        vectors = self.relative.vectors()
        return {
            at: attention.relearn(
                vectors, {name.removeprefix(f"{at}."): part for name, part in parts.items()}
            )
            for at, attention in self._disentangled()
        }

    def _disentangled(self) -> list[tuple[str, DisentangledAttention]]:
        """Return the layers' attention modules with their names in the encoder."""
        attentions = [
            (f"layers.{number}.attn", layer.attn) for number, layer in enumerate(self.stack)
        ]
        return [
            (at, attention)
            for at, attention in attentions
            if isinstance(attention, DisentangledAttention)
        ]


def build(config: Config) -> PackedEncoder:
    """Build the encoder that config.json describes, without weights."""
    kinds = distance_kinds(config)
    spec = deberta_spec(config, kinds)
    relative: DistanceEmbedding | None = None
    attention: AttentionType = Attention
    if config.flag("relative_attention", False):
        distances = _distances(config)
        relative = DistanceEmbedding(
            spec, distances, normed="layer_norm" in config.words("norm_rel_ebd")
        )
        own = not config.flag("share_att_key", False)
        attention = partial(DisentangledAttention, distances=distances, kinds=kinds, own=own)
    convolution = _convolution(config, spec.hidden)
    return DebertaEncoder(spec, deberta_embedding(config, spec), relative, attention, convolution)


def distance_kinds(config: Config) -> tuple[str, ...]:
    """Return which of c2p and p2c the model has."""
    kinds = config.words("pos_att_type")
    if not set(kinds) <= set(_KINDS):
        raise config.unsupported("pos_att_type", f"supported are {' and '.join(_KINDS)}")
    return kinds


def deberta_spec(config: Config, kinds: tuple[str, ...], *, qkv_bias: bool = True) -> EncoderSpec:
    """Read the layers. `kinds`: c2p and p2c."""
    hidden = config.size("hidden_size")
    heads = config.head_count("num_attention_heads", hidden)
    head_size = hidden // heads
    config.require("attention_head_size", head_size)
    config.require("is_decoder", False)
    return EncoderSpec(
        hidden=hidden,
        heads=heads,
        head_size=head_size,
        ffn=config.size("intermediate_size"),
        layers=(LayerSpec(),) * config.layers("num_hidden_layers"),
        norm="post",
        norm_eps=config.number("layer_norm_eps", _EPS),
        activation=config.activation("hidden_act"),
        scale=(head_size * (1 + len(set(kinds)))) ** -0.5,
        qkv_bias=qkv_bias,
    )


def deberta_embedding(config: Config, spec: EncoderSpec) -> TokenEmbedding:
    """Build the embedding. Without absolute positions, sequences of any length are supported."""
    table = config.flag("position_biased_input", True)
    return TokenEmbedding(
        EmbeddingSpec(
            config.size("vocab_size"),
            config.size("embedding_size", spec.hidden),
            positions=config.size("max_position_embeddings", _POSITIONS) if table else _ANY_LENGTH,
            norm_eps=spec.norm_eps,
            table=table,
            segments=config.integer("type_vocab_size", 0),
            hidden=spec.hidden,
            norm_last=True,
        )
    )


def farthest_distance(config: Config) -> int:
    """Return the distance from which on all distances share a row."""
    farthest = config.integer("max_relative_positions", -1)
    if farthest < 1:
        farthest = config.size("max_position_embeddings", _POSITIONS)
    if farthest > _ANY_LENGTH:
        raise config.unsupported(
            "max_relative_positions",
            f"distances of at most {_ANY_LENGTH:,} are served, not {farthest:,}",
        )
    return farthest


def _distances(config: Config) -> Distances:
    farthest = farthest_distance(config)
    buckets = config.integer("position_buckets", -1)
    if buckets < 1:
        return Distances.exact(farthest)
    if buckets % 2 or not 2 <= buckets // 2 < farthest - 1:
        raise config.unsupported(
            "position_buckets",
            f"an even number from 4 is needed, less than twice the distance {farthest}",
        )
    return Distances.bucketed(buckets, farthest)


def _convolution(config: Config, hidden: int) -> DebertaConvolution | None:
    width = config.integer("conv_kernel_size", 0)
    if width < 1:
        return None
    if width % 2 == 0:
        raise config.unsupported("conv_kernel_size", "an odd number is needed")
    groups, name = config.size("conv_groups", 1), config.text("conv_act", "tanh")
    if hidden % groups:
        raise config.unsupported("conv_groups", f"it does not divide the hidden size {hidden}")
    if name not in _CONVOLUTIONS:
        raise config.unsupported("conv_act", f"supported are {', '.join(_CONVOLUTIONS)}")
    return DebertaConvolution(width, groups, _CONVOLUTIONS[name])
