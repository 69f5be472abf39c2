"""The interface of a model's processor: the host's part of a job, before and after the forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from libs.models.results import Result
from libs.models.work import GoOn, ModelWork, Output, Prepared, TokenWork


class Processor(Protocol):
    """A model's pre- and post-processing on the CPU, around the forward; thread-safe."""

    def prepare(self, work: ModelWork, go_on: GoOn) -> Prepared:
        """Raises TaskNotSupported, InputTooLong or InvalidInput with the field's path in the job,
        and what `go_on` raises.

        `go_on` is called before each `cutting.SLICE_CHARACTERS` characters.
        """

    def finish(self, prepared: Prepared, outputs: Sequence[Output], go_on: GoOn) -> Result:
        """`outputs`: one for each of `prepared.sequences`. `go_on` is called between two items, and
        what it raises is raised.
        """


class Tokens(Protocol):
    """What a model's tokenizer answers by itself, without a forward; thread-safe."""

    def prepare(self, work: TokenWork, go_on: GoOn) -> Prepared:
        """Raises as `Processor.prepare`. The result has no sequences."""

    def finish(self, prepared: Prepared) -> Result:
        """The result of the job."""
