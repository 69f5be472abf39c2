"""Postprocessing: turns the model's outputs into answers, in threads, and passes them to the
delivery.

On the request path, between `runner.py` and `delivery.py`. Threads are shared between callers by
the same fair queueing as preparation: between two items, a large answer yields to callers that have
had less thread time, and it stops if its job was cancelled or its deadline has passed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import Final, Protocol

from libs.errors import InternalError, ShoalError
from libs.models import EncodeWork, GeneratedIds, Output, SparseRow
from libs.models.interface.work import CancelCheck
from libs.telemetry import metrics
from libs.telemetry.logs import fields
from services.worker.jobs.answers.delivery import Delivery
from services.worker.jobs.answers.fp32_fallback import Fp32Fallback, nonfinite_outputs
from services.worker.jobs.answers.streamed import StreamedParts, within_share
from services.worker.jobs.held import HeldJob, Unwanted
from services.worker.mesh import codec
from services.worker.mesh.codec import Timings

log = logging.getLogger(__name__)

_SMALL_TOKENS = 512
"""Finishing this many tokens takes 0.1 ms, less than waking another thread, so an idle calling
thread does it itself.
"""

SMALL_OUTPUT_BYTES: Final = 512 << 10
"""Maximum bytes of outputs that an idle calling thread finishes itself. All pairs of 120 entities
have 0.8 million scores.
"""

RELIEF_INTERVAL_SECONDS: Final = 0.05
"""Interval at which finishing threads are checked for one that has not yielded, while large answers
are made.
"""

GiveWay = Callable[[], None]


class FinishQueue(Protocol):
    """A fair queue of jobs to finish (`Preparation`). Any thread."""

    def add(self, jobs: Collection[HeldJob]) -> None:
        """Queue jobs to be finished on a thread, least-served callers first."""

    def relieve(self) -> bool:
        """Replace threads that have not yielded if other callers wait. Return whether any wait."""


FairQueue = Callable[[Callable[[list[HeldJob], GiveWay], None]], FinishQueue]
"""Makes the queue for a function that finishes jobs."""


def must_succeed(future: Future[None]) -> None:
    """Log an exception of work in a pool. Such work handles its own failures, so this is a bug."""
    if not future.cancelled() and (error := future.exception()) is not None:
        log.critical(
            "work in a thread failed unexpectedly: this is a bug of the worker", exc_info=error
        )


class Finisher:
    """Implements the runner's Outcomes, on any thread.

    Jobs with outputs that are not finite go through `fp32_fallback` first.

    Args:
        wake: Set when the device has begun a batch or has nothing left to do.
        unix_time: Seconds since 1970 by Redis' clock, which deadlines use.
    """

    def __init__(
        self,
        delivery: Delivery,
        parts: StreamedParts,
        fair: FairQueue,
        fp32_fallback: Fp32Fallback,
        wake: asyncio.Event,
        *,
        unix_time: Callable[[], float],
    ) -> None:
        self._delivery = delivery
        self._parts = parts
        self._queue = fair(self._finish)
        self._fp32_fallback = fp32_fallback
        self._wake = wake
        self._unix_time = unix_time
        self._loop = asyncio.get_running_loop()
        # Mutable state, of the event loop.
        self._relieving: asyncio.TimerHandle | None = None

    def finished(self, jobs: list[HeldJob], *, is_idle: bool) -> None:
        jobs = [held for held in jobs if not held.unwanted]
        if not jobs:
            return
        for held in jobs:
            held.finish_bytes = sum(map(_output_bytes, held.outputs.values()))
        size = sum(held.finish_bytes for held in jobs)
        is_small = (
            size <= SMALL_OUTPUT_BYTES and sum(held.ready.tokens for held in jobs) <= _SMALL_TOKENS
        )
        if is_idle and is_small and not any(map(_is_pooled, jobs)):
            self._finish(jobs, _never_yield)
            return
        self._queue.add(jobs)
        self._loop.call_soon_threadsafe(self._relieve_in_time)

    def failed(self, job: HeldJob, error: ShoalError) -> None:
        self._loop.call_soon_threadsafe(self._delivery.deliver, [(job, _failed(job, error))])

    def stream(self, job: HeldJob, index: int, ids: list[int]) -> None:
        self._loop.call_soon_threadsafe(self._parts.add, job, index, ids)

    def computed(self, job: HeldJob) -> None:
        self._loop.call_soon_threadsafe(self._parts.add_chunks, job)

    def device_changed(self) -> None:
        self._loop.call_soon_threadsafe(self._wake.set)

    def _finish(self, jobs: list[HeldJob], give_way: GiveWay) -> None:
        nonfinite = [held for held in jobs if nonfinite_outputs(held)]
        for held in nonfinite:
            self._fp32_fallback.add(held, self._recomputed).add_done_callback(must_succeed)
        made = ((held, self._make_answer(held, give_way)) for held in jobs if held not in nonfinite)
        answers = [(held, answer) for held, answer in made if answer is not None]
        if answers:
            self._loop.call_soon_threadsafe(self._delivery.deliver, answers)

    def _recomputed(self, held: HeldJob, error: ShoalError | None) -> None:
        answer = self._make_answer(held, _never_yield) if error is None else _failed(held, error)
        if answer is not None:
            self._loop.call_soon_threadsafe(self._delivery.deliver, [(held, answer)])

    def _make_answer(self, held: HeldJob, give_way: GiveWay) -> bytes | None:
        """Return a serialised JobResult, or None if the job was cancelled. An error fails only this
        job.
        """
        try:
            return _serialised_answer(held, partial(self._check_cancelled, held, give_way))
        except Unwanted:
            return None
        except ShoalError as error:
            return _failed(held, error)
        except Exception as error:
            log.exception(
                "the answer of a job could not be made", extra=fields({"model": held.resident.name})
            )
            return _failed(
                held, InternalError(f"the answer could not be made: {type(error).__name__}")
            )

    def _check_cancelled(self, held: HeldJob, give_way: GiveWay) -> None:
        """Yield to other callers. Raise if the job was cancelled or is past its deadline."""
        give_way()
        held.check_wanted(self._unix_time(), "finished")

    def _relieve_in_time(self) -> None:
        if self._relieving is None:
            self._relieving = self._loop.call_later(RELIEF_INTERVAL_SECONDS, self._relieve)

    def _relieve(self) -> None:
        self._relieving = None
        if self._queue.relieve():
            self._relieve_in_time()


def _never_yield() -> None:
    """Return the GiveWay of a thread with no waiting callers."""


def _output_bytes(output: Output) -> int:
    match output:
        case tuple():
            return sum(map(_output_bytes, output))
        case SparseRow():
            return output.values.nbytes + output.indices.nbytes
        case GeneratedIds():
            return output.ids.nbytes
    return output.nbytes


def _is_pooled(held: HeldJob) -> bool:
    work = held.ready.work
    return isinstance(work, EncodeWork) and work.pooling_factor > 1


def _serialised_answer(held: HeldJob, check_cancelled: CancelCheck) -> bytes:
    """Return a serialised JobResult. `check_cancelled` is called between two items."""
    started = time.monotonic()
    model = held.resident.model
    outputs = [held.outputs[index] for index in range(len(held.ready.sequences))]
    result = model.finish(
        within_share(held.ready, held.job.item_answer_bytes), outputs, check_cancelled
    )
    made = time.monotonic()
    metrics.FINISH_SECONDS.labels(held.resident.name).observe(made - started)
    held.span.stage("finish", started, made)
    return codec.encode_result(
        result,
        revision=model.card.revision,
        tokens=held.ready.tokens,
        timings=_timings(held, started, made),
        image_tokens=held.ready.image_tokens,
        embedding_id=held.embedding_id,
        cut=held.ready.cut_texts,
        check_cancelled=check_cancelled,
    )


def _failed(held: HeldJob, error: ShoalError) -> bytes:
    held.span.failed(error)
    return codec.failed(error, first_item=held.job.first_item)


def _timings(held: HeldJob, started: float, ended: float) -> Timings:
    """Return the job's timings. `wait` is the time between pull and finish that is neither
    preparation nor forward passes.
    """
    elapsed = started - held.received_at
    return Timings(
        queue=held.queue_seconds,
        prepare=held.prepare_seconds,
        wait=max(0.0, elapsed - held.prepare_seconds - held.forward_seconds),
        forward=held.forward_seconds,
        finish=ended - started,
    )
