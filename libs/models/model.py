"""What every model offers, whatever it reads: the contract between a model and whoever runs it."""

from __future__ import annotations

from typing import Protocol

from libs.catalog.card import Card
from libs.models.results import Result
from libs.models.work import Between, GoOn, Head, Output, Prepared, Sequence, Work, nothing_between


class Parked(Protocol):
    """A model in host memory, off the device."""

    @property
    def host_bytes(self) -> int:
        """What it takes there."""

    def resume(self) -> Model:
        """Back to the device. Blocking, but need not wait for the copy: the first forward does, on the device."""


class Model(Protocol):
    """`prepare` (threads) -> `forward` (the device thread) -> `finish` (threads), three calls that overlap. `TextModel` is one.

    `bytes`: of weights on the device.
    """

    card: Card
    bytes: int

    def prepare(self, work: Work, go_on: GoOn) -> Prepared:
        """`go_on` is called every few milliseconds; what it raises ends the preparation."""

    def forward(self, head: Head, sequences: list[Sequence], between: Between = nothing_between) -> list[Output]:
        """`between` may be called between two layers; a forward of this model or of another may run within."""

    def finish(self, prepared: Prepared, outputs: list[Output]) -> Result: ...

    def widened(self) -> Model | None:
        """The same in float32 on the CPU, read anew; None if it computes in float32 already. Blocking; raises ShoalError."""

    @property
    def host_bytes(self) -> int:
        """Of a copy that it keeps in host memory while it is on the device; 0: it keeps none."""

    def drop_host_copy(self) -> None:
        """Keep none from now on. Blocking."""

    def park(self) -> Parked:
        """Give its device memory back, and stay in host memory. No call of it may be under way. Blocking."""

    def probe(self) -> float:
        """Bytes of activations that a token of a batch takes on the device, measured with a tiny forward. Blocking."""
