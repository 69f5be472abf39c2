"""The interface between what a model is asked for and the decode loop: a Reader makes prompts of jobs, and answers of tokens."""

from __future__ import annotations

from typing import Protocol

from libs.models.generation.sequences import Request
from libs.models.generation.writer import Writer
from libs.models.results import ExtractResult
from libs.models.work import Between, GoOn, InputSequence, WriteWork, WrittenIds


class Reader(Protocol):
    """`prepare` (preparing threads) -> `requests` (the device thread) -> the decode loop -> `finish` (finishing threads).

    One sequence for each text that is written, in the order of items (and of an item's pages). `writer`: what the loop runs.
    """

    writer: Writer

    def prepare(self, work: WriteWork, go_on: GoOn) -> tuple[list[InputSequence], object]:
        """A job's prompts, and notes for `finish`. Raises InvalidInput with the path of the item.

        `ids` has a token for each row of the prompt, or of the encoder's input, so that costs are known by its length; images are
        in `rows` or `input`. `go_on` is called every few milliseconds.
        """

    def requests(self, sequences: list[InputSequence], between: Between) -> list[Request]:
        """What the loop is to write: runs the encoder or the vision tower of a batch. `between`: a preemption point."""

    def text(self, ids: list[int]) -> str:
        """The text of the tokens written so far, for clients that read along: ends before an incomplete character. Empty where an
        answer is no such text."""

    def finish(self, work: WriteWork, notes: object, written: list[WrittenIds]) -> ExtractResult:
        """The answer of a job."""
