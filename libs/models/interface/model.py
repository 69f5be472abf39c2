"""The interface between a model of any kind and the code that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from libs.catalog.card import Card
from libs.models.interface.results import EncodeResult, Result
from libs.models.interface.sequences import (
    Forwarded,
    Head,
    InputSequence,
    Output,
    Prepared,
    YieldPoint,
    never_yield,
)
from libs.models.interface.work import CancelCheck, Work, never_cancelled


@runtime_checkable
class ComputesChunks(Protocol):
    """A model of which the first chunks can be computed and sent while others are prepared."""

    def prepare_parts(self, work: Work, check_cancelled: CancelCheck) -> Iterator[Prepared]:
        """Tokenise a job, and yield its prepared part as it grows.

        Each result has the sequences of the one before, in the same order, and the last one has all
        of them. Raises as `Model.prepare`.
        """

    def finish_rows(
        self, prepared: Prepared, outputs: Mapping[int, Output], first: int, most_bytes: int
    ) -> EncodeResult | None:
        """Return the vectors of the next chunks from `first` on, as many as have `most_bytes`, of a
        job that is not complete; None if the first one is not computed.
        """


class Parked(Protocol):
    """A model in host memory, off the device."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in use."""

    def resume(self) -> Model:
        """Move the model back to the device. Blocks, but need not wait for the copy: the first
        forward waits for it on the device.
        """


class Model(Protocol):
    """A loaded model: `prepare` (threads) -> `forward` (the device thread) -> `finish` (threads).
    The three calls overlap. `PackedModel` is one.

    On an asynchronous device `forward` may be split in two (`LaunchesBatches` in `pending.py`).

    Attributes:
        bytes: Weights on the device.
    """

    card: Card
    bytes: int

    def prepare(self, work: Work, check_cancelled: CancelCheck) -> Prepared:
        """Tokenise a job. `check_cancelled` is called every few milliseconds; its exception ends
        the preparation.
        """

    def forward(
        self, head: Head, sequences: list[InputSequence], yield_point: YieldPoint = never_yield
    ) -> Sequence[Forwarded]:
        """Run a batch. `yield_point` may be called between layers, and may run a forward of this or
        another model.
        """

    def finish(
        self,
        prepared: Prepared,
        outputs: list[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        """Return the job's result, with at most `prepared.answer_bytes` per item
        (`answer_budget.py`).

        `check_cancelled` is called between two items; its exception ends the job.
        """

    def load_fp32_fallback(self) -> Model | None:
        """Load the checkpoint again in float32 on the CPU; None if the model already computes in
        float32.

        Blocks. Raises ShoalError.
        """

    @property
    def host_bytes(self) -> int:
        """Bytes of the copy in host memory that the resident model keeps; 0 for none."""

    def drop_host_copy(self) -> None:
        """Free the host copy and keep none from now on. Blocks."""

    def park(self) -> Parked:
        """Free the device memory and stay in host memory. Blocks. No call of the model may be in
        progress.
        """

    def probe(self) -> float:
        """Measure the bytes of activations per token of a batch on the device with a tiny forward.
        Blocks.
        """
