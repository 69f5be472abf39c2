"""Heads that only image models have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from libs.kernels.attention import varlen_attention
from libs.models.head import Array, row_each
from libs.models.layers.activations import FUNCTIONS
from libs.models.layers.spec import EncoderSpec
from libs.models.packed import Packed, Rows
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.work import InputSequence, Output


class AttentionPooledHead(nn.Module):
    """SigLIP's pooling: one learned query attends to all patches of an image, then a feed-forward. [images, hidden] float32."""

    rows: Rows | None = None

    def __init__(self, spec: EncoderSpec, state: Mapping[str, Tensor], file: str) -> None:
        """`state`: `probe`, and weight and bias of `in_proj` (query, key and value), `out_proj`, `norm`, `up` and `down`.

        Raises ModelBroken, naming `file`, for a tensor that is missing or has another shape.
        """
        super().__init__()
        hidden, ffn = spec.hidden, spec.ffn
        shapes = {"in_proj": (3 * hidden, hidden), "out_proj": (hidden, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
        check_shape(state, "probe", (1, 1, hidden), file)
        for stem, shape in shapes.items():
            check_shape(state, f"{stem}.weight", shape, file)
            check_shape(state, f"{stem}.bias", shape[:1], file)
        for name in ("norm.weight", "norm.bias"):
            check_shape(state, name, (hidden,), file)
        weight, bias = state["in_proj.weight"], state["in_proj.bias"]
        query = F.linear(state["probe"].view(1, hidden), weight[:hidden], bias[:hidden])
        self.query = nn.Parameter(query.view(1, spec.heads, spec.head_size), requires_grad=False)
        self.key_value = HeadLinear({"kv.weight": weight[hidden:], "kv.bias": bias[hidden:]}, "kv", "identity")
        self.out, self.up, self.down = (HeadLinear(state, stem, "identity") for stem in ("out_proj", "up", "down"))
        self.norm = nn.LayerNorm(hidden, eps=spec.norm_eps)
        self.norm.load_state_dict({"weight": state["norm.weight"], "bias": state["norm.bias"]}, assign=True)
        self.norm.requires_grad_(False)
        self._function = FUNCTIONS[spec.activation]
        self._scale = spec.head_size**-0.5

    def forward(self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]) -> tuple[Tensor, ...]:
        heads, size = self.query.shape[1:]
        keys, values = self.key_value.forward(hidden.float()).view(-1, 2, heads, size).unbind(1)
        query = self.query.expand(len(batch.lengths), -1, -1)
        x = self.out.forward(varlen_attention(query, keys, values, batch.row_layout(), scale=self._scale).flatten(1))
        return (x + self.down.forward(self._function(self.up.forward(self.norm.forward(x)))),)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        return row_each(arrays[0])
