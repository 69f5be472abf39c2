"""GLiClass (arXiv 2508.07662; the gliclass package): a score for each label from the states of the
labels' markers and of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.catalog.card import Activation
from libs.kernels.attention.varlen import varlen_attention
from libs.kernels.layout import BatchLayout, cumulated, to_device
from libs.kernels.pooling.pooled import cls, last, maximum, mean
from libs.kernels.rows.norms import layer_norm
from libs.kinds.gliclass.card import Gliclass, Pooling, Scorer
from libs.kinds.gliclass.processor import LabelPlaces
from libs.models.interface.head import Array
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output
from libs.models.text.heads.linear import HeadLinear, check_shape

State = dict[str, Tensor]
"""Tensors of the checkpoint by name. A module removes those that it uses."""

_BETA = 4.0  # fixed in the package
_EPSILON = 1e-8
_NORM_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class LabelPairs:
    """The labels of a batch with the sequences they belong to."""

    of: Tensor
    """The sequence of each label, [labels]."""
    places: Tensor
    """The index of each label in [sequences, most labels], flattened."""
    shape: tuple[int, int]
    layout: BatchLayout | None = None
    """Labels as queries and the states of their text as keys, for scorers that read these."""


class GliclassHead(nn.Module):
    """Map hidden states to [labels of all sequences] float32."""

    def __init__(
        self,
        settings: Gliclass,
        state: State,
        size: int,
        function: Callable[[Tensor], Tensor],
        file: str,
    ) -> None:
        """Build the head. Raises ModelBroken for a tensor's shape.

        Args:
            size: Size of hidden states.
            function: Activation between the two layers of a projector.
        """
        super().__init__()
        hidden = settings.hidden
        self.text = LabelProjector(state, "text_projector", size, hidden, function, file)
        self.label = LabelProjector(state, "classes_projector", size, hidden, function, file)
        self.scorer = (
            CrossScorer(state, size, settings.heads, file)
            if settings.heads
            else _SCORERS[settings.scorer](state, size, file)
        )
        check_shape(state, "logit_scale", (), file)
        scale = nn.Parameter(state.pop("logit_scale"), requires_grad=False)
        self.scale = scale if settings.normalizes else None
        self._pool, self._text_only = _POOLINGS[settings.pooling], settings.text_only
        self._reads_all = settings.pooling == "pass"

    @property
    def rows(self) -> Rows | None:
        return None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        places = [cast(LabelPlaces, sequence.input) for sequence in sequences]
        bounds = list(pairwise(np.cumsum([0, *batch.lengths]).tolist()))
        labels = [
            np.arange(start + first, start + last)
            for place, (start, _) in zip(places, bounds, strict=True)
            for first, last in zip(place.starts, place.ends, strict=True)
        ]
        text, cu_seqlens, lengths = hidden, batch.cu_seqlens, batch.lengths
        if self._text_only:
            rows = [
                np.arange(start + place.text, end)
                for place, (start, end) in zip(places, bounds, strict=True)
            ]
            text, cu_seqlens = _chosen(hidden, rows)
            lengths = tuple(len(own) for own in rows)
        texts = self.text.forward(self._pool(text, cu_seqlens, batch.cu_seqlens))
        counts = [len(place.starts) for place in places]
        pairs = _pairs(
            counts,
            hidden.device,
            BatchLayout.from_lengths(counts, lengths, hidden.device) if self._reads_all else None,
        )
        return (self._scores(texts, self.label.forward(mean(*_chosen(hidden, labels))), pairs),)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        ends = np.cumsum([len(cast(LabelPlaces, sequence.input).starts) for sequence in sequences])[
            :-1
        ]
        return list(np.split(arrays[0].astype(np.float32, copy=False), ends))

    def _scores(self, texts: Tensor, labels: Tensor, pairs: LabelPairs) -> Tensor:
        if self.scale is None:
            return self.scorer.forward(texts, labels, pairs)
        return self.scorer.forward(_unit(texts), _unit(labels), pairs) * self.scale


class LabelProjector(nn.Module):
    """Two linear layers with an activation between them, over [rows, size]."""

    def __init__(
        self,
        state: State,
        stem: str,
        size: int,
        hidden: int,
        function: Callable[[Tensor], Tensor],
        file: str,
    ) -> None:
        super().__init__()
        self.first = _linear(state, f"{stem}.linear_1", (hidden, size), file)
        self.second = _linear(state, f"{stem}.linear_2", (size, hidden), file)
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second.forward(self._function(self.first.forward(x)))


class LabelScorer(nn.Module):
    """A scorer of texts and labels, chosen by config.json's `scorer_type`."""

    def __init__(self, state: State, size: int, file: str) -> None:
        super().__init__()

    def forward(self, texts: Tensor, labels: Tensor, pairs: LabelPairs) -> Tensor:
        """Score labels: [sequences, size] and [labels, size] to [labels]."""
        raise NotImplementedError


class LabelDotScorer(LabelScorer):
    """Score by the dot product of text and label."""

    def forward(self, texts: Tensor, labels: Tensor, pairs: LabelPairs) -> Tensor:
        return (texts.index_select(0, pairs.of) * labels).sum(-1)


class WeightedDotScorer(LabelScorer):
    """Concatenate the first projections of text and label and the product of their second ones, and
    apply two layers.
    """

    def __init__(self, state: State, size: int, file: str) -> None:
        super().__init__(state, size, file)
        self.text = _linear(state, "scorer.proj_text", (size * 2, size), file)
        self.label = _linear(state, "scorer.proj_label", (size * 2, size), file)
        self.out = _Tower(state, ["scorer.out_mlp.0", "scorer.out_mlp.3"], size * 3, file)

    def forward(self, texts: Tensor, labels: Tensor, pairs: LabelPairs) -> Tensor:
        text, text_factor = self.text.forward(texts).index_select(0, pairs.of).chunk(2, dim=-1)
        label, label_factor = self.label.forward(labels).chunk(2, dim=-1)
        return self.out.forward(torch.cat([text, label, text_factor * label_factor], dim=-1))


class TowerScorer(LabelScorer):
    """Concatenate text and label, and apply three layers (scorer_type mlp)."""

    def __init__(self, state: State, size: int, file: str) -> None:
        super().__init__(state, size, file)
        self.out = _Tower(state, [f"scorer.mlp.{number}" for number in (0, 2, 4)], size * 2, file)

    def forward(self, texts: Tensor, labels: Tensor, pairs: LabelPairs) -> Tensor:
        return self.out.forward(torch.cat([texts.index_select(0, pairs.of), labels], dim=-1))


class HopfieldScorer(LabelScorer):
    """Add to each label its attention-weighted value of the text, and apply three layers."""

    def __init__(self, state: State, size: int, file: str) -> None:
        super().__init__(state, size, file)
        self.query, self.key, self.value = (
            _linear(state, f"scorer.{name}_proj", (size, size), file, bias=False)
            for name in ("q", "k", "v")
        )
        self.out = _Tower(state, [f"scorer.mlp.{number}" for number in (0, 2, 4)], size, file)

    def forward(self, texts: Tensor, labels: Tensor, pairs: LabelPairs) -> Tensor:
        keys, values = (
            layer.forward(texts).index_select(0, pairs.of) for layer in (self.key, self.value)
        )
        affinity = (self.query.forward(labels) * keys).sum(-1) * _BETA
        # The softmax is over one text's labels.
        table = affinity.new_full((pairs.shape[0] * pairs.shape[1],), float("-inf")).index_copy(
            0, pairs.places, affinity
        )
        shares = table.view(pairs.shape).softmax(-1).view(-1).index_select(0, pairs.places)
        return self.out.forward(labels + shares[:, None] * values)


class CrossScorer(LabelScorer):
    """Each label attends to all states of its text. The result and the label, concatenated, pass
    three layers with GELU.
    """

    def __init__(self, state: State, size: int, heads: int, file: str) -> None:
        super().__init__(state, size, file)
        self.query, self.key, self.value, self.out = (
            _linear(state, f"scorer.{name}", (size, size), file) for name in ("q", "k", "v", "out")
        )
        self.query_norm, self.key_norm, self.norm = (
            _Norm(state, f"scorer.{name}", size, file) for name in ("q_norm", "kv_norm", "norm")
        )
        self.tower = _Tower(
            state, [f"scorer.score_mlp.{number}" for number in (0, 2, 4)], size * 2, file, "gelu"
        )
        self._heads = heads

    def forward(self, texts: Tensor, labels: Tensor, pairs: LabelPairs) -> Tensor:
        """Score labels: states of all texts [tokens, size] and [labels, size] to [labels]."""
        if pairs.layout is None:
            raise ValueError("the scorer needs the states of the texts")
        q, k = self.query.forward(self.query_norm(labels)), self.key.forward(self.key_norm(texts))
        q, k, v = (x.view(len(x), self._heads, -1) for x in (q, k, self.value.forward(texts)))
        found = varlen_attention(q, k, v, pairs.layout, scale=q.shape[2] ** -0.5).flatten(1)
        return self.tower.forward(torch.cat([self.norm(self.out.forward(found)), labels], dim=-1))


class _Norm(nn.Module):
    """LayerNorm in float32 over [rows, size]."""

    def __init__(self, state: State, stem: str, size: int, file: str) -> None:
        super().__init__()
        for ending in ("weight", "bias"):
            check_shape(state, f"{stem}.{ending}", (size,), file)
        self.weight = nn.Parameter(state.pop(f"{stem}.weight"), requires_grad=False)
        self.bias = nn.Parameter(state.pop(f"{stem}.bias"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, _NORM_EPSILON)


class _Tower(nn.Module):
    """An MLP with one output, from [rows, size] to [rows]. `function` follows each layer but the
    last."""

    def __init__(
        self,
        state: State,
        stems: Sequence[str],
        size: int,
        file: str,
        function: Activation = "relu",
    ) -> None:
        super().__init__()
        layers = []
        for stem in stems:
            name, final = f"{stem}.weight", stem == stems[-1]
            width = 1 if final or name not in state else state[name].shape[0]
            layers.append(
                _linear(
                    state, stem, (width, size), file, function="identity" if final else function
                )
            )
            size = width
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores.squeeze(-1)


_SCORERS: dict[Scorer, type[LabelScorer]] = {
    "simple": LabelDotScorer,
    "weighted-dot": WeightedDotScorer,
    "mlp": TowerScorer,
    "hopfield": HopfieldScorer,
}


def _first(x: Tensor, cu_seqlens: Tensor, whole: Tensor) -> Tensor:
    return cls(x, cu_seqlens)


def _last(x: Tensor, cu_seqlens: Tensor, whole: Tensor) -> Tensor:
    return last(x, cu_seqlens)


def _sum(x: Tensor, cu_seqlens: Tensor, whole: Tensor) -> Tensor:
    return mean(x, cu_seqlens) * cu_seqlens.diff().float()[:, None]


def _average(x: Tensor, cu_seqlens: Tensor, whole: Tensor) -> Tensor:
    """Average as the package does: divide by the tokens of the whole sequence even if only those of
    the text are added.
    """
    return _sum(x, cu_seqlens, whole) / whole.diff().float()[:, None]


def _maximum(x: Tensor, cu_seqlens: Tensor, whole: Tensor) -> Tensor:
    """Take the maximum as the package does, with zeros for excluded labels."""
    found = maximum(x, cu_seqlens)
    return found if cu_seqlens is whole else found.clamp(min=0)


_Pool = Callable[[Tensor, Tensor, Tensor], Tensor]
_POOLINGS: dict[Pooling, _Pool] = {
    "first": _first,
    "last": _last,
    "avg": _average,
    "sum": _sum,
    "max": _maximum,
    "rms": lambda x, cu_seqlens, whole: _average(x.float().square(), cu_seqlens, whole).sqrt(),
    "abs_max": lambda x, cu_seqlens, whole: _maximum(x.abs(), cu_seqlens, whole),
    "abs_avg": lambda x, cu_seqlens, whole: _average(x.abs(), cu_seqlens, whole),
    "pass": lambda x, cu_seqlens, whole: x.float(),
}
"""Poolings of the text's states [rows, size] by `cu_seqlens`, in sequences with the bounds `whole`:
[sequences, size] float32, or for "pass" the states themselves."""


def _linear(
    state: State,
    stem: str,
    shape: tuple[int, int],
    file: str,
    *,
    bias: bool = True,
    function: Activation = "identity",
) -> HeadLinear:
    check_shape(state, f"{stem}.weight", shape, file)
    if bias:
        check_shape(state, f"{stem}.bias", shape[:1], file)
    layer = HeadLinear(state, stem, function)
    for ending in ("weight", "bias") if bias else ("weight",):
        del state[f"{stem}.{ending}"]
    return layer


def _chosen(hidden: Tensor, rows: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
    """Return the states of these rows, and the `cu_seqlens` of their groups."""
    chosen = hidden.index_select(0, _index(np.concatenate(rows), hidden.device))
    return chosen, cumulated([len(group) for group in rows], hidden.device)


def _pairs(counts: Sequence[int], device: torch.device, layout: BatchLayout | None) -> LabelPairs:
    """Build the pairs. `counts` holds the number of labels of each sequence."""
    of = np.repeat(np.arange(len(counts)), counts)
    number = np.concatenate([np.arange(count) for count in counts])
    most = max(counts)
    return LabelPairs(
        _index(of, device), _index(of * most + number, device), (len(counts), most), layout
    )


def _index(rows: NDArray[np.int64], device: torch.device) -> Tensor:
    return to_device(rows.astype(np.int32), device).long()


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True).sqrt() + _EPSILON)
