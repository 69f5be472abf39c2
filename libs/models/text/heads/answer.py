"""The logit of "yes" minus that of "no" as a language model's next token, from the last token's
state and two rows of the LM head.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from libs.models.interface.head import Array, split_rows
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output
from libs.models.text.heads.linear import HeadLinear


class AnswerHead(nn.Module):
    """Map last tokens' states to [sequences, 1] float32: the logit of yes, minus that of no if the
    model has one.
    """

    def __init__(self, rows: Tensor, softcap: float | None = None) -> None:
        """Build the head from rows of the LM head.

        Args:
            rows: [1 or 2, hidden] float32, yes first.
            softcap: Replace logits by softcap * tanh(logits / softcap).
        """
        super().__init__()
        self._softcap, self._subtracts = softcap, softcap is not None and len(rows) == 2
        # One row for the difference: subtracting two nearly equal logits would lose the precision
        # that ranks documents. Capped logits must be subtracted.
        weight = rows if len(rows) == 1 or self._subtracts else rows[:1] - rows[1:]
        self.layer = HeadLinear({"answer.weight": weight}, "answer", "identity")

    @property
    def rows(self) -> Rows | None:
        return "last"

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        logits = self.layer.forward(hidden.float())
        if self._softcap is not None:
            logits = (logits / self._softcap).tanh() * self._softcap
        return (logits[:, :1] - logits[:, 1:] if self._subtracts else logits,)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        return split_rows(arrays[0])
