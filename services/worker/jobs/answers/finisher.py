"""Postprocessing: turns the model's outputs into answers, in threads, and hands them to the delivery.

On the request path, between `runner.py` and `delivery.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor

from libs.errors import InternalError, ShoalError
from libs.models import EncodeWork
from libs.telemetry import metrics
from libs.telemetry.logs import fields
from services.worker.jobs.answers.delivery import Delivery
from services.worker.jobs.answers.widening import Widening, nonfinite_outputs
from services.worker.jobs.answers.written import WrittenParts
from services.worker.jobs.held import HeldJob
from services.worker.mesh import codec
from services.worker.mesh.codec import Timings

log = logging.getLogger(__name__)

_SMALL_TOKENS = 512
"""Finishing so few tokens takes 0.1 ms, less than waking another thread; an idle calling thread does it itself."""


def must_succeed(future: Future[None]) -> None:
    """Logs an exception of work in a pool that handles its own failures: one that escapes is a bug and must at least be seen."""
    if not future.cancelled() and (error := future.exception()) is not None:
        log.critical("work in a thread failed unexpectedly: this is a bug of the worker", exc_info=error)


class Finisher:
    """Implements the runner's Outcomes, on any thread. `wake` is set when the device has begun a batch or has nothing left to do.

    Jobs whose outputs are not finite go through `widening` first.
    """

    def __init__(
        self, delivery: Delivery, parts: WrittenParts, threads: ThreadPoolExecutor, widening: Widening, wake: asyncio.Event
    ) -> None:
        self._delivery = delivery
        self._parts = parts
        self._threads = threads
        self._widening = widening
        self._wake = wake
        self._loop = asyncio.get_running_loop()

    def finished(self, jobs: list[HeldJob], *, is_idle: bool) -> None:
        jobs = [held for held in jobs if not held.unwanted]
        if is_idle and sum(held.ready.tokens for held in jobs) <= _SMALL_TOKENS and not any(map(_is_pooled, jobs)):
            self._finish(jobs)
        elif jobs:
            self._threads.submit(self._finish, jobs).add_done_callback(must_succeed)

    def failed(self, job: HeldJob, error: ShoalError) -> None:
        self._loop.call_soon_threadsafe(self._delivery.answer, [(job, _failed(job, error))])

    def written(self, job: HeldJob, index: int, ids: list[int]) -> None:
        self._loop.call_soon_threadsafe(self._parts.add, job, index, ids)

    def device_changed(self) -> None:
        self._loop.call_soon_threadsafe(self._wake.set)

    def _finish(self, jobs: list[HeldJob]) -> None:
        nonfinite = [held for held in jobs if nonfinite_outputs(held)]
        for held in nonfinite:
            self._widening.add(held, self._widened).add_done_callback(must_succeed)
        answers = [(held, _answer(held)) for held in jobs if held not in nonfinite]
        if answers:
            self._loop.call_soon_threadsafe(self._delivery.answer, answers)

    def _widened(self, held: HeldJob, error: ShoalError | None) -> None:
        answer = _answer(held) if error is None else _failed(held, error)
        self._loop.call_soon_threadsafe(self._delivery.answer, [(held, answer)])


def _is_pooled(held: HeldJob) -> bool:
    work = held.ready.work
    return isinstance(work, EncodeWork) and work.pooling_factor > 1


def _answer(held: HeldJob) -> bytes:
    """A serialised JobResult. An error while it is made fails this job and no other."""
    started = time.monotonic()
    model = held.resident.model
    outputs = [held.outputs[index] for index in range(len(held.ready.sequences))]
    try:
        result = model.finish(held.ready, outputs)
        ended = time.monotonic()
        metrics.FINISH_SECONDS.labels(held.resident.name).observe(ended - started)
        held.span.stage("finish", started, ended)
        timings = _timings(held, started, ended)
        return codec.result_of(
            result,
            revision=model.card.revision,
            tokens=held.ready.tokens,
            timings=timings,
            image_tokens=held.ready.image_tokens,
        )
    except ShoalError as error:
        return _failed(held, error)
    except Exception as error:
        log.exception("the answer of a job could not be made", extra=fields({"model": held.resident.name}))
        return _failed(held, InternalError(f"the answer could not be made: {type(error).__name__}"))


def _failed(held: HeldJob, error: ShoalError) -> bytes:
    held.span.failed(error)
    return codec.failed(error, first_item=held.job.first_item)


def _timings(held: HeldJob, started: float, ended: float) -> Timings:
    """The job's timings. `wait`: time between the pull and the finish that is neither preparation nor forward passes."""
    between = started - held.received_at
    return Timings(
        queue=held.queue_seconds,
        prepare=held.prepare_seconds,
        wait=max(0.0, between - held.prepare_seconds - held.forward_seconds),
        forward=held.forward_seconds,
        finish=ended - started,
    )
