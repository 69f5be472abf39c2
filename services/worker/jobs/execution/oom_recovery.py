"""Recovery from failed forward passes: the worker survives running out of memory, and a bad input
fails only its own job.

`runner.py` calls it on the device thread, while no other batch is on the device. Out of memory is
handled in steps, each taken only if the previous one did not help:

1. Free the caches and retry.
2. Evict an idle model and retry.
3. Halve the batch, at most MAX_HALVINGS times.
4. Run the sequences one by one, so that only those fail that do not fit alone.

Any other error halves the batch down to the single sequences that fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from libs.errors import InternalError, OutOfMemory, ShoalError
from libs.models import Forwarded, InputSequence
from libs.telemetry.logs import Value, fields
from services.worker.machine.shortage import is_out_of_memory

log = logging.getLogger(__name__)

Forward = Callable[[list[InputSequence]], Sequence[Forwarded]]
Outcome = Forwarded | ShoalError

_Value = TypeVar("_Value")

MAX_HALVINGS: Final = 4
"""Maximum times a batch is halved (to a sixteenth) before its sequences run one by one."""

MAX_RELIEFS_PER_BATCH: Final = 4
"""Idle models that may be evicted for a batch. A single sequence, which cannot be halved, may evict
any number.
"""

CAPPED_BATCHES: Final = 32
"""Batches within a cap after which the cap is doubled."""


@dataclass(frozen=True, slots=True)
class RecoveryResult:
    """The outcome of each sequence of a batch."""

    outcomes: list[Outcome]
    fitted_tokens: int = 0
    """Size of the largest part that ran after the whole batch did not fit; 0 if the batch was not
    halved for memory, or no part fitted.
    """
    is_clean: bool = True
    """Nothing failed, so the duration is a valid measurement of the model's speed."""


class OomRecovery:
    """Runs forward passes and recovers from their failures.

    Args:
        recover: Called after each failure. Raises if the device is lost.
        trim: Returns all unused memory to the system.
        relieve: Drops all CUDA graphs or, if none exist, evicts one idle model other than the named
            one. Returns whether it freed anything. May block.
    """

    def __init__(
        self, recover: Callable[[], None], trim: Callable[[], None], relieve: Callable[[str], bool]
    ) -> None:
        self.recover = recover
        self.trim = trim
        self.relieve = relieve

    def run(self, model: str, forward: Forward, sequences: list[InputSequence]) -> RecoveryResult:
        """Run a batch. Raises only what `recover` raises."""
        outputs = attempt(partial(forward, sequences), sequences, model)
        return (
            self.recover_from(model, forward, sequences, outputs)
            if isinstance(outputs, Failure)
            else RecoveryResult([*outputs])
        )

    def recover_from(
        self, model: str, forward: Forward, sequences: list[InputSequence], failure: Failure
    ) -> RecoveryResult:
        """Recover from a batch that has failed. Raises only what `recover` raises."""
        recover_from = _BatchRecovery(model, forward, self)
        outcomes = recover_from.after(failure, sequences, depth=0)
        return RecoveryResult(
            outcomes, recover_from.fitted_tokens if recover_from.is_halved else 0, is_clean=False
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """The part of an exception that is kept. The exception itself would keep the failed pass's
    frames, and so its activations, alive.
    """

    is_memory: bool
    kind: str


def attempt(
    step: Callable[[], _Value], sequences: list[InputSequence], model: str
) -> _Value | Failure:
    """Run one step of a batch, such as its forward pass, and return its value or its failure."""
    try:
        return step()
    except Exception as error:
        if is_out_of_memory(error):
            return Failure(True, type(error).__name__)
        log.exception("a forward pass failed", extra=fields({"model": model, **_size(sequences)}))
        return Failure(False, type(error).__name__)


class _BatchRecovery:
    """The recovery of one batch."""

    def __init__(self, model: str, forward: Forward, oom_recovery: OomRecovery) -> None:
        self._model = model
        self._forward = forward
        self._oom_recovery = oom_recovery
        # Mutable state.
        self._is_freed = False
        self._reliefs = 0
        self._has_nothing_idle = False
        self.is_halved = False
        self.fitted_tokens = 0

    def after(self, failure: Failure, sequences: list[InputSequence], depth: int) -> list[Outcome]:
        """Return the outcomes of sequences that have just failed together. `depth` counts halvings
        for memory.
        """
        self._oom_recovery.recover()
        if failure.is_memory:
            again = self._with_more_room(failure, sequences)
            if not isinstance(again, Failure):
                return [*again]
            failure = again
        if len(sequences) == 1:
            return [self._verdict(failure, sequences)]
        if not failure.is_memory:
            return self._parts(_halves(sequences), depth)
        self.is_halved = True
        if depth >= MAX_HALVINGS:
            self._log_step("run the sequences one by one", sequences)
            return self._parts([[one] for one in sequences], depth)
        self._log_step("halve the batch", sequences, depth=depth + 1)
        return self._parts(_halves(sequences), depth + 1)

    def _parts(self, parts: list[list[InputSequence]], depth: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for part in parts:
            outputs = self._try(part)
            outcomes += (
                self.after(outputs, part, depth) if isinstance(outputs, Failure) else outputs
            )
        return outcomes

    def _with_more_room(
        self, failure: Failure, sequences: list[InputSequence]
    ) -> Sequence[Forwarded] | Failure:
        """Take the first two steps: free the caches (once a batch), then evict idle models."""
        outcome: Sequence[Forwarded] | Failure = failure
        if not self._is_freed:
            self._is_freed = True
            self._oom_recovery.trim()
            self._log_step("free the caches", sequences)
            outcome = self._try_recovered(sequences)
        while isinstance(outcome, Failure) and outcome.is_memory and self._relieved(sequences):
            outcome = self._try_recovered(sequences)
        return outcome

    def _relieved(self, sequences: list[InputSequence]) -> bool:
        if self._has_nothing_idle or (
            len(sequences) > 1 and self._reliefs >= MAX_RELIEFS_PER_BATCH
        ):
            return False
        self._has_nothing_idle = not self._oom_recovery.relieve(self._model)
        if not self._has_nothing_idle:
            self._reliefs += 1
            self._log_step("evict CUDA graphs or an idle model", sequences)
        return not self._has_nothing_idle

    def _try_recovered(self, sequences: list[InputSequence]) -> Sequence[Forwarded] | Failure:
        outcome = self._try(sequences)
        if isinstance(outcome, Failure):
            self._oom_recovery.recover()
        return outcome

    def _try(self, sequences: list[InputSequence]) -> Sequence[Forwarded] | Failure:
        outcome = attempt(partial(self._forward, sequences), sequences, self._model)
        if not isinstance(outcome, Failure):
            self.fitted_tokens = max(self.fitted_tokens, _tokens(sequences))
        return outcome

    def _verdict(self, failure: Failure, sequences: list[InputSequence]) -> ShoalError:
        if not failure.is_memory:
            return InternalError(f"the model failed on this input: {failure.kind}")
        self._log_step("fail a sequence that does not fit alone", sequences)
        return OutOfMemory(
            f"an input of {_tokens(sequences):,} tokens does not fit the worker's memory "
            f"with {self._model}, even alone: "
            "shorten it, allow truncation, or use a pool with more memory"
        )

    def _log_step(self, step: str, sequences: list[InputSequence], **more: int) -> None:
        values: dict[str, Value] = {"step": step, "model": self._model, **_size(sequences), **more}
        log.warning("a forward pass ran out of memory", extra=fields(values))


def _halves(sequences: list[InputSequence]) -> list[list[InputSequence]]:
    middle = len(sequences) // 2
    return [sequences[:middle], sequences[middle:]]


def _tokens(sequences: list[InputSequence]) -> int:
    return sum(sequence.tokens for sequence in sequences)


def _size(sequences: list[InputSequence]) -> dict[str, int]:
    return {"sequences": len(sequences), "tokens": _tokens(sequences)}


@dataclass(slots=True)
class _Cap:
    tokens: int
    batches: int = 0


class Caps:
    """Token caps of groups that ran out of memory, so that not every batch has to be halved again.

    A cap doubles after CAPPED_BATCHES batches and ends when it reaches `tokens`, the budget. Not
    thread-safe.
    """

    def __init__(self, tokens: int) -> None:
        self._budget = tokens
        self._caps: dict[Hashable, _Cap] = {}

    def token_budget(self, group: Hashable) -> int:
        """Return the token budget of the group's next batch."""
        cap = self._caps.get(group)
        return self._budget if cap is None else cap.tokens

    def ran(self, group: Hashable, fitted_tokens: int = 0) -> None:
        """Adjust the group's cap after a batch. `fitted_tokens` is as in `RecoveryResult`."""
        if fitted_tokens:
            self._caps[group] = _Cap(fitted_tokens)
        elif cap := self._caps.get(group):
            cap.batches += 1
            if cap.batches >= CAPPED_BATCHES:
                self._caps[group] = _Cap(cap.tokens * 2)
                if cap.tokens * 2 >= self._budget:
                    del self._caps[group]
