"""Logits of a text or a pair: the first token's state through the classifier of the checkpoint's architecture.

Each architecture has one layer before the classifier (transformers' *ForSequenceClassification); only its name and function differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from torch import Tensor, nn

from libs.catalog.card import Activation
from libs.errors import ModelBroken
from services.worker.models.heads.head import Array, row_each
from services.worker.models.heads.linear import HeadLinear, check_shape
from services.worker.models.packed import Packed, Rows
from services.worker.models.work import Output, Sequence


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the two layers lie in the checkpoint (stems after the family's prefix) and the function between them."""

    first: str
    activation: Activation
    second: str


_ROBERTA = Layout("classifier.dense", "tanh", "classifier.out_proj")
LAYOUTS: dict[str, Layout] = {
    "bert": Layout("pooler.dense", "tanh", "classifier"),
    "distilbert": Layout("pre_classifier", "relu", "classifier"),
    "electra": Layout("classifier.dense", "gelu", "classifier.out_proj"),
    "roberta": _ROBERTA,
    "roberta-prelayernorm": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": _ROBERTA,
}


class LabelsHead(nn.Module):
    """First tokens' states -> [sequences, labels] float32."""

    def __init__(self, first: HeadLinear, second: HeadLinear) -> None:
        super().__init__()
        self.first, self.second = first, second

    @property
    def rows(self) -> Rows | None:
        return "first"

    def forward(self, hidden: Tensor, batch: Packed, sequences: Many[Sequence]) -> tuple[Tensor, ...]:
        return (self.second.forward(self.first.forward(hidden.float())),)

    def split(self, arrays: tuple[Array, ...], sequences: Many[Sequence]) -> list[Output]:
        return row_each(arrays[0])


def layout_of(family: str) -> Layout:
    if family not in LAYOUTS:
        raise ModelBroken(f"config.json: `architectures`: sequence classification is not served for the model_type {family!r}")
    return LAYOUTS[family]


def labels_head(family: str, state: Mapping[str, Tensor], hidden: int, labels: int, file: str) -> LabelsHead:
    layout = layout_of(family)
    check_shape(state, "first.weight", (hidden, hidden), file)
    check_shape(state, "second.weight", (labels, hidden), file)
    return LabelsHead(HeadLinear(state, "first", layout.activation), HeadLinear(state, "second", "identity"))
