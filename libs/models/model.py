"""The interface of a model, whatever its input: the contract between a model and the code that runs
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from libs.catalog.card import Card
from libs.models.results import Result
from libs.models.work import (
    CancelCheck,
    Forwarded,
    Head,
    InputSequence,
    Output,
    Prepared,
    Work,
    YieldPoint,
    never_cancelled,
    never_yield,
)


class Parked(Protocol):
    """A model in host memory, off the device."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it takes."""

    def resume(self) -> Model:
        """Moves it back to the device. Blocking, but need not wait for the copy: the first forward
        does, on the device.
        """


class Model(Protocol):
    """`prepare` (threads) -> `forward` (the device thread) -> `finish` (threads), three calls that
    overlap. `PackedModel` is one.

    On an asynchronous device `forward` may be split in two (`LaunchesBatches` in `pending.py`).

    `bytes`: of weights on the device.
    """

    card: Card
    bytes: int

    def prepare(self, work: Work, check_cancelled: CancelCheck) -> Prepared:
        """Tokenises a job. `check_cancelled`, a cancellation check, is called every few milliseconds; what it
        raises ends the preparation.
        """

    def forward(
        self, head: Head, sequences: list[InputSequence], yield_point: YieldPoint = never_yield
    ) -> Sequence[Forwarded]:
        """Runs a batch. `yield_point`, a preemption point, may be called between layers and run a
        forward of this model or another.
        """

    def finish(
        self,
        prepared: Prepared,
        outputs: list[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        """The job's result. `check_cancelled`, a cancellation check, is called between two items; what it
        raises ends the job. An item's results take at most `prepared.answer_bytes`
        (`answer_budget.py`)."""

    def load_fp32_fallback(self) -> Model | None:
        """The model in float32 on the CPU, loaded anew; None if it computes in float32 already.
        Blocking; raises ShoalError.
        """

    @property
    def host_bytes(self) -> int:
        """Bytes of the copy that it keeps in host memory while it is resident; 0: it keeps none."""

    def drop_host_copy(self) -> None:
        """Frees the host copy and keeps none from now on. Blocking."""

    def park(self) -> Parked:
        """Frees its device memory and stays in host memory. No call of the model may be in
        progress. Blocking.
        """

    def probe(self) -> float:
        """Bytes of activations per token of a batch on the device, measured with a tiny forward.
        Blocking.
        """
