"""Queries for several instances of a label (GLiNER2's counting layers): one for each instance and
field of a task.

A recurrent network starts from a field's state and reads a learnt vector for each instance. The
layers after it differ by model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.errors import ModelBroken
from libs.kernels.layout import to_device
from libs.kinds.gliner2.card import Counting
from libs.models.text.heads.extraction.words import prefix_sums
from libs.models.text.heads.linear import HeadLinear, check_shape

MAX_INSTANCES: Final = 20
"""The package's fixed `max_count`. The count head returns at most 19."""
_STEM: Final = "count_embed"
_WIDTH: Final = 128  # of the transformer in count_lstm_v2
_EXPERTS: Final = 4
_CHUNK_ELEMENTS: Final = 1 << 22  # attention scores of a head in memory at a time

State = Mapping[str, Tensor]


class InstanceQueries(nn.Module):
    """Map states of fields to a query for each instance and field."""

    def __init__(self, state: State, kind: Counting, *, size: int, file: str) -> None:
        """Build the layers. Raises ModelBroken for tensors that are missing or have another
        shape."""
        super().__init__()
        self.recurrent = _Recurrent(state, size, file)
        self.after = _QUERY_LAYERS[kind](state, size, file)

    def forward(self, fields: Tensor, counts: Sequence[int], steps: Sequence[int]) -> Tensor:
        """Return queries [queries, size], ordered by task, then instance, then field.

        Args:
            fields: [all fields, size]
            counts: Number of fields of each task.
            steps: Number of instances of each task.
        """
        size = fields.shape[1]
        of_field = np.repeat(np.array(steps, dtype=np.int64), counts)
        order = np.argsort(-of_field, kind="stable")[: int((of_field > 0).sum())]
        if not len(order):
            return fields.new_empty(0, size)
        chosen = fields.index_select(0, _index(order, fields.device))
        active = [int((of_field > step).sum()) for step in range(int(of_field.max()))]
        states = self.recurrent.forward(chosen, active)
        # Row of (field, step) among the states, which are in order of steps and then of `order`.
        rank = np.zeros(len(of_field), dtype=np.int64)
        rank[order] = np.arange(len(order))
        begins, firsts = prefix_sums(active), prefix_sums(counts)
        rows = [
            begins[step] + rank[firsts[task] : firsts[task + 1]]
            for task, most in enumerate(steps)
            for step in range(most)
        ]
        owners = [
            np.arange(firsts[task], firsts[task + 1])
            for task, most in enumerate(steps)
            for _ in range(most)
        ]
        states = states.index_select(0, _index(np.concatenate(rows), fields.device))
        labels = fields.index_select(0, _index(np.concatenate(owners), fields.device))
        return self.after.forward(states, labels, [len(group) for group in rows])


class _Recurrent(nn.Module):
    """A gated recurrent unit over the vectors of instances."""

    def __init__(self, state: State, size: int, file: str) -> None:
        super().__init__()
        shapes = {
            "pos_embedding.weight": (MAX_INSTANCES, size),
            "gru.weight_ih_l0": (size * 3, size),
            "gru.weight_hh_l0": (size * 3, size),
            "gru.bias_ih_l0": (size * 3,),
            "gru.bias_hh_l0": (size * 3,),
        }
        for name, shape in shapes.items():
            check_shape(state, f"{_STEM}.{name}", shape, file)
        self.places, self.inputs, self.hidden, self.input_bias, self.hidden_bias = (
            nn.Parameter(state[f"{_STEM}.{name}"], requires_grad=False) for name in shapes
        )

    def forward(self, fields: Tensor, active: Sequence[int]) -> Tensor:
        """Return states [sum(active), size]. The first `active[step]` fields have this step."""
        read = F.linear(self.places[: len(active)], self.inputs, self.input_bias)
        outputs, last = [], fields
        for step, rows in enumerate(active):
            last = last[:rows]
            reset, update, new = read[step].chunk(3, dim=-1)
            own_reset, own_update, own_new = F.linear(last, self.hidden, self.hidden_bias).chunk(
                3, dim=-1
            )
            update = torch.sigmoid(update + own_update)
            new = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
            last = (1 - update) * new + update * last
            outputs.append(last)
        return torch.cat(outputs)


class _QueryLayers(nn.Module):
    """The part of a counting layer after its recurrent network."""

    def __init__(self, state: State, size: int, file: str) -> None:
        super().__init__()

    def forward(self, states: Tensor, fields: Tensor, groups: Sequence[int]) -> Tensor:
        """Return queries [queries, size].

        Args:
            states: [queries, size]
            fields: The states of the queries' fields, [queries, size].
            groups: Number of fields of each instance.
        """
        raise NotImplementedError


class _Projector(_QueryLayers):
    """Two layers over a state and its field (count_lstm)."""

    def __init__(self, state: State, size: int, file: str) -> None:
        super().__init__(state, size, file)
        self.inner = layer(state, f"{_STEM}.projector.0", (size * 4, size * 2), file, relu=True)
        self.outer = layer(state, f"{_STEM}.projector.2", (size, size * 4), file)

    def forward(self, states: Tensor, fields: Tensor, groups: Sequence[int]) -> Tensor:
        return self.outer.forward(self.inner.forward(torch.cat([states, fields], dim=-1)))


class _Transformer(_QueryLayers):
    """A small transformer over the fields of an instance (count_lstm_v2)."""

    def __init__(self, state: State, size: int, file: str) -> None:
        super().__init__(state, size, file)
        stem = f"{_STEM}.transformer"
        self.narrow = layer(state, f"{stem}.in_projector", (_WIDTH, size), file)
        self.layers = nn.ModuleList(
            _transformer_layer(state, f"{stem}.transformer.layers.{number}", file)
            for number in (0, 1)
        )
        self.out = nn.Sequential(
            layer(state, f"{stem}.out_projector.0", (size, _WIDTH + size), file, relu=True),
            layer(state, f"{stem}.out_projector.2", (size, size), file, relu=True),
            layer(state, f"{stem}.out_projector.4", (size, size), file),
        )

    def forward(self, states: Tensor, fields: Tensor, groups: Sequence[int]) -> Tensor:
        whole = states + fields
        narrow = self.narrow.forward(whole)
        mixed = torch.empty_like(narrow)
        begins = np.array(prefix_sums(groups)[:-1], dtype=np.int64)
        # Instances with the same number of fields are one batch, so none is padded.
        for size in sorted(set(groups)):
            of_size = begins[np.array(groups) == size]
            at_once = max(1, _CHUNK_ELEMENTS // (size * size))
            for first in range(0, len(of_size), at_once):
                rows = _index(
                    (of_size[first : first + at_once, None] + np.arange(size)).ravel(),
                    narrow.device,
                )
                some = narrow.index_select(0, rows).view(-1, size, _WIDTH)
                for each in self.layers:
                    some = each(some)
                mixed.index_copy_(0, rows, some.reshape(-1, _WIDTH))
        result: Tensor = self.out(torch.cat([mixed, whole], dim=-1))
        return result


class _Experts(_QueryLayers):
    """All experts, weighted by a router (count_lstm_moe)."""

    def __init__(self, state: State, size: int, file: str) -> None:
        super().__init__(state, size, file)
        inner = size * 2
        shapes = {
            "w1": (_EXPERTS, size, inner),
            "b1": (_EXPERTS, inner),
            "w2": (_EXPERTS, inner, size),
            "b2": (_EXPERTS, size),
        }
        for name, shape in shapes.items():
            check_shape(state, f"{_STEM}.{name}", shape, file)
        self.w1, self.b1, self.w2, self.b2 = (
            nn.Parameter(state[f"{_STEM}.{name}"], requires_grad=False) for name in shapes
        )
        self.first = layer(state, f"{_STEM}.router.0", (size, size), file)
        self.second = layer(state, f"{_STEM}.router.2", (_EXPERTS, size), file)

    def forward(self, states: Tensor, fields: Tensor, groups: Sequence[int]) -> Tensor:
        gates = self.second.forward(F.gelu(self.first.forward(states))).softmax(-1)
        found = torch.zeros_like(states)
        for number in range(_EXPERTS):
            inner = F.gelu(states @ self.w1[number] + self.b1[number])
            found += gates[:, number, None] * (inner @ self.w2[number] + self.b2[number])
        return found


_QUERY_LAYERS: Final[Mapping[Counting, type[_QueryLayers]]] = {
    "count_lstm": _Projector,
    "count_lstm_v2": _Transformer,
    "count_lstm_moe": _Experts,
}


def layer(
    state: State, stem: str, shape: tuple[int, int], file: str, *, relu: bool = False
) -> HeadLinear:
    """Load a linear layer with a bias. Raises ModelBroken."""
    check_shape(state, f"{stem}.weight", shape, file)
    check_shape(state, f"{stem}.bias", shape[:1], file)
    return HeadLinear(state, stem, "relu" if relu else "identity")


def _transformer_layer(state: State, stem: str, file: str) -> nn.TransformerEncoderLayer:
    made = nn.TransformerEncoderLayer(
        _WIDTH,
        nhead=4,
        dim_feedforward=_WIDTH * 2,
        dropout=0.0,
        batch_first=True,
        device=state[f"{_STEM}.gru.bias_ih_l0"].device,
    )
    for name, parameter in made.named_parameters():
        found = state.get(f"{stem}.{name}")
        if found is None or found.shape != parameter.shape:
            raise ModelBroken(
                f"{file}: `{stem}.{name}` is missing or has another shape than "
                f"{tuple(parameter.shape)}"
            )
        parameter.data = found
    made.requires_grad_(False).eval()
    return made


def _index(rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]], device: torch.device) -> Tensor:
    return to_device(rows.astype(np.int32), device).long()
