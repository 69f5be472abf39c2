"""CUDA graphs of decode steps, one for each of a few numbers of sequences.

They are captured while no batch waits, and checked like the graphs of encoders. A graph includes
the choice of tokens, so a greedy step copies one number per sequence to the host. Every failure
falls back to the eager step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from libs.models.generation.decoding.steps import StepForward, StepRow, StepShape
from libs.models.runtime.graphs.buckets import AFTER, Uses
from libs.models.runtime.graphs.capture import Capture, Captured
from libs.models.runtime.graphs.graphs import CHECK_EVERY, ROUGH_BYTES, Event, Owner
from libs.models.runtime.graphs.shapes import distance, tolerance

SEQUENCES: Final = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of sequences that have a graph. Larger steps run eagerly: they take the device longer
than the host.
"""

_SCORE_BYTES: Final = 12
"""Bytes of a token's score: in the head's type, in float32, and in a copy."""


class _Step:
    """The recorded step of one graph. `scores`: result of the last replay at a fixed address,
    [sequences, vocabulary] float32.
    """

    def __init__(self, forward: StepForward, shape: StepShape) -> None:
        self.shape, self._forward = shape, forward
        self.scores: Tensor | None = None
        self.captured: Captured | None = None
        self.uses = 0

    def run(self, buffer: Tensor) -> Tensor:
        tokens, self.scores = self._forward.run(self.shape, buffer)
        return tokens


class StepGraphs:
    """The graphs of one loop's steps. Calls must not overlap, except reads of `is_pending`."""

    def __init__(
        self,
        forward: StepForward,
        capture: Capture,
        owner: Owner,
        *,
        after: int = AFTER,
        check_every: int = CHECK_EVERY,
    ) -> None:
        self._forward, self._capture, self._owner = forward, capture, owner
        self._check_every = check_every
        self._steps: dict[int, _Step] = {}
        self._pending = set(SEQUENCES)
        self._uses = Uses(after)
        self.is_off = False

    @property
    def is_pending(self) -> bool:
        """True if `capture_one` has work to do. May be read from any thread."""
        return bool(self._pending)

    def run(self, rows: Sequence[StepRow]) -> tuple[Tensor, Tensor] | None:
        """Replay `StepForward.eager`: returns views that the next step overwrites. None if no graph
        fits the number of sequences.
        """
        count = next((count for count in SEQUENCES if count >= len(rows)), 0)
        step = self._steps.get(count)
        if step is None:
            if count and not self.is_off and count not in self._pending and self._uses.add(count):
                self._pending.add(count)
            return None
        try:
            tokens, scores = self._replay(step, rows)
        except Exception as error:
            self._switch_off("failed", f"{type(error).__name__}: {error}")
            raise
        return tokens[: len(rows)], scores[: len(rows)]

    def capture_one(self) -> None:
        """Capture the largest pending step; smaller ones fit in its memory. No forward may be in
        progress on the device.
        """
        if not self._pending:
            return
        step = _Step(self._forward, StepShape(max(self._pending), self._forward.width))
        self._pending.discard(step.shape.sequences)
        size = (
            ROUGH_BYTES
            + step.shape.sequences * self._forward.language_model.vocabulary * _SCORE_BYTES
        )
        if self._owner.reserve(self._capture.bytes + size):
            try:
                step.captured = self._capture.capture(step.run, step.shape.empty())
            except torch.OutOfMemoryError:
                self._steps.clear()  # the pool has lost all its graphs
            except Exception as error:
                self._switch_off("failed", f"{type(error).__name__}: {error}")
                return
        if not self._owner.reserve(self._capture.bytes):
            self._release()
            step.captured = None
        if step.captured is None:
            self._uses.postpone(step.shape.sequences)
            self._owner.report("refused", "")
            return
        self._steps[step.shape.sequences] = step
        self._uses.captured(step.shape.sequences)
        self._owner.report("captured", "")

    def drop(self) -> None:
        """Drop all graphs and their memory. No forward may be in progress on the device."""
        self._pending.clear()
        if self._capture.bytes:
            self._release()

    def _replay(self, step: _Step, rows: Sequence[StepRow]) -> tuple[Tensor, Tensor]:
        if step.captured is None:
            raise RuntimeError("the step was not captured")
        tokens = step.captured.replay(partial(step.shape.fill, rows=rows))
        scores, is_checked = step.scores, step.uses % self._check_every == 0
        if scores is None:
            raise RuntimeError("the replayed step has no scores")
        step.uses += 1
        self._owner.report("replayed", "")
        if not is_checked:
            return tokens, scores
        # The check runs on the graph's inputs and stores the same keys and values again.
        wanted_tokens, wanted = self._forward.run(step.shape, step.captured.buffer)
        self._owner.report("checked", "")
        if (apart := distance(scores[: len(rows)], wanted[: len(rows)])) > tolerance(
            self._forward.language_model.decoder.dtype
        ):
            self._switch_off("differed", f"by {apart:.2g} in a step of {len(rows)} sequences")
        return wanted_tokens, wanted

    def _switch_off(self, event: Event, detail: str) -> None:
        self.is_off = True
        self._pending.clear()
        self._release()
        self._owner.report(event, detail)

    def _release(self) -> None:
        self._steps.clear()
        self._capture.drop()
        self._owner.reserve(0)
