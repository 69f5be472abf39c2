"""The interface of a model's processor: the host's part of a job, before and after the forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from libs.models.interface.results import EncodeResult, Result
from libs.models.interface.sequences import Output, Prepared
from libs.models.interface.work import CancelCheck, EncodeWork, ModelWork, TokenWork


class Processor(Protocol):
    """A model's pre- and post-processing on the CPU, around the forward. Thread-safe."""

    def prepare(self, work: ModelWork, check_cancelled: CancelCheck) -> Prepared:
        """Tokenise a job.

        `check_cancelled` is called before each `cutting.SLICE_CHARACTERS` characters, and its
        exceptions propagate.
        """

    def finish(
        self, prepared: Prepared, outputs: Sequence[Output], check_cancelled: CancelCheck
    ) -> Result:
        """Build the result from one output for each of `prepared.sequences`.

        `check_cancelled` is called between two items, and its exceptions propagate.
        """


@runtime_checkable
class PreparesParts(Protocol):
    """A processor that divides texts into chunks. The first of them can be computed, and their
    vectors sent, while later ones are read.
    """

    def prepare_parts(self, work: EncodeWork, check_cancelled: CancelCheck) -> Iterator[Prepared]:
        """Prepare a job, and yield its prepared part as it grows; the last result is all of it."""

    def finish_rows(
        self, prepared: Prepared, outputs: Mapping[int, Output], first: int, most_bytes: int
    ) -> EncodeResult | None:
        """Return the vectors of the next chunks from `first` on that are computed, if any are."""


def prepare_parts(
    processor: Processor, work: ModelWork, check_cancelled: CancelCheck
) -> Iterator[Prepared]:
    """Yield the prepared part of a job as it grows: all of it at a time unless the processor
    `PreparesParts`.
    """
    if isinstance(processor, PreparesParts) and isinstance(work, EncodeWork):
        yield from processor.prepare_parts(work, check_cancelled)
    else:
        yield processor.prepare(work, check_cancelled)


def finish_rows(
    processor: Processor,
    prepared: Prepared,
    outputs: Mapping[int, Output],
    first: int,
    most_bytes: int,
) -> EncodeResult | None:
    """Return the vectors of the next chunks; None unless the processor `PreparesParts`."""
    if not isinstance(processor, PreparesParts):
        return None
    return processor.finish_rows(prepared, outputs, first, most_bytes)


class TokenizerWork(Protocol):
    """The work of a model's tokenizer without a forward. Thread-safe."""

    def prepare(self, work: TokenWork, check_cancelled: CancelCheck) -> Prepared:
        """Prepare a job without sequences. Raises as `Processor.prepare`."""

    def finish(self, prepared: Prepared) -> Result:
        """Return the result of the job."""
