"""Records (GLiNER2.5): one span identifies a record, and other spans fill its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.kinds.gliner2.boundary.pairs import BoundaryPairs
from libs.models.text.heads.linear import check_shape, linear_layer

State = Mapping[str, Tensor]
Floats = NDArray[np.float32]
UNLIKELY: Final = np.finfo(np.float32).eps
"""Minimum of a probability, as in the gliner2 package."""
MAX_STEPS: Final = 1 << 17
"""Maximum passes over all spans that assign the spans of one text to records: see `steps`."""


def steps(records: int, fields: int) -> int:
    """Return the maximum passes over all spans that assign them to this many records and fields of
    a structure.
    """
    return records**2 * (fields - 1)


class RecordScorer(nn.Module):
    """Score how well spans belong to the record that another span identifies, field by field.

    A record's and a field's vector are added before a span's is multiplied with the sum, so two
    products are enough.
    """

    def __init__(
        self,
        state: State,
        stem: str,
        encoder: str,
        *,
        boundary: int,
        size: int,
        inner: int,
        file: str,
    ) -> None:
        """Build the scorer. Raises ModelBroken.

        Args:
            encoder: Stem of the layer from a span's two boundaries, of size `boundary` each, to its
                state.
        """
        super().__init__()
        check_shape(state, f"{stem}.null_embed", (inner,), file)
        self.encoder = linear_layer(state, encoder, (size, boundary * 2), file)
        self.record = linear_layer(state, f"{stem}.inst_proj", (inner, size), file)
        self.field = linear_layer(state, f"{stem}.field_proj", (inner, size), file)
        self.span = linear_layer(state, f"{stem}.cand_proj", (inner, size), file)
        self.nothing = nn.Parameter(state[f"{stem}.null_embed"], requires_grad=False)

    def forward(self, boundaries: Tensor, spans: BoundaryPairs, fields: Tensor) -> Tensor:
        """Return [spans + fields, 1 + spans]: the amount that the record of each span, and each
        field, adds to the logit of no span and of every span.

        Args:
            boundaries: [boundaries, own size]
            fields: [fields, size]
        """
        states = self.encoder.forward(
            torch.cat([boundaries[spans.starts], boundaries[spans.ends]], dim=-1)
        )
        values = torch.cat([self.nothing[None], self.span.forward(states)])
        return torch.cat([self.record.forward(states), self.field.forward(fields)]) @ values.T


def likely_shares(
    records: Floats, fields: Floats, spans: NDArray[np.int64], single: Sequence[bool]
) -> Floats:
    """Return the probability that `spans` (rows among all) fill the fields of records: [fields,
    records, spans], 0 for unlikely ones.

    A field with a single value chooses among no span and all spans. Nothing fills the first field,
    which identifies the record.

    Args:
        records: [records, 1 + all spans], from `RecordScorer`.
        fields: [fields, 1 + all spans], from `RecordScorer`.
    """
    columns = np.concatenate([[0], 1 + spans])
    found = np.zeros((len(fields), len(records), len(spans)), dtype=np.float32)
    for number, is_single in enumerate(single[1:], start=1) if len(records) else ():
        logits = (records + fields[number])[:, columns]
        powers = (
            np.exp(logits - logits.max(axis=1, keepdims=True))
            if is_single
            else np.exp(-np.abs(logits[:, 1:]))
        )
        if is_single:
            found[number] = (powers / powers.sum(axis=1, keepdims=True))[:, 1:]
        else:
            found[number] = np.where(logits[:, 1:] >= 0, np.float32(1), powers) / (1 + powers)
    return np.where(found >= UNLIKELY, found, np.float32(0))
