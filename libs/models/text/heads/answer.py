"""The logit of "yes" less that of "no" as a language model's next token: the last token's state and two rows of the LM head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from libs.models.head import Array, row_each
from libs.models.packed import Packed, Rows
from libs.models.text.heads.linear import HeadLinear
from libs.models.work import InputSequence, Output


class AnswerHead(nn.Module):
    """Last tokens' states -> [sequences, 1] float32: the logit for yes, less that for no where a model has one."""

    def __init__(self, rows: Tensor) -> None:
        """`rows` [1 or 2, hidden] float32: of the LM head, yes first."""
        super().__init__()
        # One row for the difference: subtracting two nearly equal logits would lose the precision that ranks documents.
        weight = rows if len(rows) == 1 else rows[:1] - rows[1:]
        self.layer = HeadLinear({"answer.weight": weight}, "answer", "identity")

    @property
    def rows(self) -> Rows | None:
        return "last"

    def forward(self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]) -> tuple[Tensor, ...]:
        return (self.layer.forward(hidden.float()),)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        return row_each(arrays[0])
