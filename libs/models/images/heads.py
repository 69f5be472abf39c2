"""Heads of image models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.models.interface.head import Array, split_rows
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output
from libs.models.layers.activations import FUNCTIONS
from libs.models.layers.spec import EncoderSpec
from libs.models.text.heads.linear import HeadLinear, check_shape


class AttentionPooledHead(nn.Module):
    """SigLIP's pooling: one learned query attends to all patches of an image, followed by a
    feed-forward. [images, hidden] float32.
    """

    rows: Rows | None = None

    def __init__(self, spec: EncoderSpec, state: Mapping[str, Tensor], file: str) -> None:
        """Create the head from `state`: `probe`, and weight and bias of `in_proj` (query, key and
        value), `out_proj`, `norm`, `up` and `down`.

        Raises ModelBroken, naming `file`, for a tensor that is missing or has another shape.
        """
        super().__init__()
        hidden, ffn = spec.hidden, spec.ffn
        shapes = {
            "in_proj": (3 * hidden, hidden),
            "out_proj": (hidden, hidden),
            "up": (ffn, hidden),
            "down": (hidden, ffn),
        }
        check_shape(state, "probe", (1, 1, hidden), file)
        for stem, shape in shapes.items():
            check_shape(state, f"{stem}.weight", shape, file)
            check_shape(state, f"{stem}.bias", shape[:1], file)
        for name in ("norm.weight", "norm.bias"):
            check_shape(state, name, (hidden,), file)
        weight = state["in_proj.weight"].view(3, spec.heads, spec.head_size, hidden)
        bias = state["in_proj.bias"].view(3, spec.heads, spec.head_size)
        probe = state["probe"].view(hidden)
        query = (weight[0] @ probe + bias[0]) * spec.head_size**-0.5
        # The query is constant, so keys are folded into it. Their bias adds the same value to all
        # scores of a head.
        self.query = nn.Parameter(torch.einsum("hs,hsd->hd", query, weight[1]), requires_grad=False)
        self.value = nn.Parameter(weight[2].transpose(1, 2).contiguous(), requires_grad=False)
        self.value_bias = nn.Parameter(bias[2].flatten(), requires_grad=False)
        self.out, self.up, self.down = (
            HeadLinear(state, stem, "identity") for stem in ("out_proj", "up", "down")
        )
        self.norm = nn.LayerNorm(hidden, eps=spec.norm_eps)
        self.norm.load_state_dict(
            {"weight": state["norm.weight"], "bias": state["norm.bias"]}, assign=True
        )
        self.norm.requires_grad_(False)
        self._function = FUNCTIONS[spec.activation]

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        x = hidden.float()
        scores = F.linear(x, self.query)
        seen = []
        for run in batch.layout.runs:
            own = slice(run.query, run.query + run.count * run.queries)
            share = scores[own].view(run.count, run.queries, -1).softmax(dim=1)
            seen.append(share.transpose(1, 2) @ x[own].view(run.count, run.queries, -1))
        # Attention's weighted mean of states [images, heads, hidden]; each head's values are then
        # computed one time.
        values = (
            torch.bmm(torch.cat(seen).transpose(0, 1), self.value).transpose(0, 1).flatten(1)
            + self.value_bias
        )
        x = self.out.forward(values)
        return (x + self.down.forward(self._function(self.up.forward(self.norm.forward(x)))),)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        return split_rows(arrays[0])
