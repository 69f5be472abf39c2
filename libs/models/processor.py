"""The interface of a model's processor: the host's part of a job, before and after the forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from libs.models.results import Result
from libs.models.work import CancelCheck, ModelWork, Output, Prepared, TokenWork


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


class Tokens(Protocol):
    """The work of a model's tokenizer without a forward. Thread-safe."""

    def prepare(self, work: TokenWork, check_cancelled: CancelCheck) -> Prepared:
        """Prepare a job without sequences. Raises as `Processor.prepare`."""

    def finish(self, prepared: Prepared) -> Result:
        """Return the result of the job."""
