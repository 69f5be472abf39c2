"""Records: which spans fill the fields of a thing that one span stands for (GLiNER2.5)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from libs.models.text.heads.boundary.pairs import Pairs
from libs.models.text.heads.linear import check_shape, linear_layer

State = Mapping[str, Tensor]


class RecordScorer(nn.Module):
    """How well spans belong to the record that another span stands for, field by field .

    A record's and a field's vector are added before a span's is multiplied with the sum, so that the two products are enough.
    """

    def __init__(self, state: State, stem: str, encoder: str, *, boundary: int, size: int, inner: int, file: str) -> None:
        """`encoder`: the stem of the layer from a span's boundaries, two of the size `boundary`, to its state.

        Raises ModelBroken."""
        super().__init__()
        check_shape(state, f"{stem}.null_embed", (inner,), file)
        self.encoder = linear_layer(state, encoder, (size, boundary * 2), file)
        self.record = linear_layer(state, f"{stem}.inst_proj", (inner, size), file)
        self.field = linear_layer(state, f"{stem}.field_proj", (inner, size), file)
        self.span = linear_layer(state, f"{stem}.cand_proj", (inner, size), file)
        self.nothing = nn.Parameter(state[f"{stem}.null_embed"], requires_grad=False)

    def forward(self, boundaries: Tensor, spans: Pairs, fields: Tensor) -> Tensor:
        """boundaries [boundaries, own size], fields [fields, size] -> [spans + fields, 1 + spans]: what the record of each span,
        and what each field, adds to the logit of nothing and of every span."""
        states = self.encoder.forward(torch.cat([boundaries[spans.starts], boundaries[spans.ends]], dim=-1))
        values = torch.cat([self.nothing[None], self.span.forward(states)])
        return torch.cat([self.record.forward(states), self.field.forward(fields)]) @ values.T
