"""Recomputes outputs that are not finite in float32, on the CPU, in the background.

Not on the usual request path: `finisher.py` finds such outputs. A model in bfloat16 or float16 may
overflow where its float32 twin does not. One thread loads and runs twins, so neither the device,
nor the event loop, nor the answers of other jobs wait; a twin stays in memory while jobs of its
model wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

from libs.errors import DeadlinePassed, InternalError, ShoalError
from libs.models import Model, is_finite, outputs_of
from libs.telemetry.logs import Value, fields
from services.worker.jobs.held import HeldJob

log = logging.getLogger(__name__)

Done = Callable[[HeldJob, ShoalError | None], None]
"""Called with a job whose outputs are all finite now (None), or with the error."""


def nonfinite_outputs(held: HeldJob) -> list[int]:
    """The sequences of a complete job whose outputs are not finite."""
    return [index for index, output in sorted(held.outputs.items()) if not is_finite(output)]


class Fp32Fallback:
    """`thread` must be an executor with one thread. `unix_time`: seconds since 1970 by the clock of
    Redis, as deadlines count.
    """

    def __init__(self, thread: Executor, *, unix_time: Callable[[], float]) -> None:
        self._thread = thread
        self._unix_time = unix_time
        self._lock = threading.Lock()
        # Mutable state: how many jobs wait (guarded), and the twin in memory with what it is the
        # twin of (of the one thread).
        self._waiting: dict[Model, int] = {}
        self._twin: tuple[Model, Model] | None = None

    def add(self, held: HeldJob, done: Done) -> Future[None]:
        """Queues a job. `done` is called once with it, on the thread."""
        model = held.resident.model
        with self._lock:
            self._waiting[model] = self._waiting.get(model, 0) + 1
        return self._thread.submit(self._widen, held, done)

    def _widen(self, held: HeldJob, done: Done) -> None:
        error: ShoalError | None = None
        try:
            self._run(held)
        except ShoalError as caught:
            error = caught
        except Exception as caught:
            log.exception(
                "a job could not be computed again in float32",
                extra=fields({"model": held.resident.name}),
            )
            error = InternalError(
                f"{held.resident.name} could not compute this input again in float32: {type(caught).__name__}"
            )
        finally:
            self._drop_idle(held.resident.model)
        done(held, error)

    def _run(self, held: HeldJob) -> None:
        """Recomputes the outputs that are not finite. Raises ShoalError if some still are not."""
        model, name = held.resident.model, held.resident.name
        if held.unwanted:
            raise InternalError("the job was cancelled before it was computed again in float32")
        if held.deadline_unix <= self._unix_time():
            raise DeadlinePassed("the deadline passed before the job was computed again in float32")
        twin = self._twin_of(model)
        nonfinite = nonfinite_outputs(held)
        if twin is not None:
            prepared, started = held.ready, time.monotonic()
            for head, indices in prepared.groups().items():
                again = [index for index in indices if index in nonfinite]
                if again:
                    outputs = outputs_of(
                        twin.forward(head, [prepared.sequences[index] for index in again])
                    )
                    held.outputs.update(zip(again, outputs, strict=True))
            held.forward_seconds += time.monotonic() - started
            left = len(nonfinite_outputs(held))
            counts: dict[str, Value] = {
                "model": name,
                "sequences": len(nonfinite),
                "not_finite": left,
            }
            log.warning(
                "outputs that were not finite were computed again in float32", extra=fields(counts)
            )
        if nonfinite_outputs(held):
            raise InternalError(f"{name} computed numbers that are not finite for this input")

    def _twin_of(self, model: Model) -> Model | None:
        if self._twin is None or self._twin[0] is not model:
            self._twin = None  # before the next one is read: never two in memory
            fallback = model.load_fp32_fallback()
            if fallback is None:
                return None
            self._twin = (model, fallback)
        return self._twin[1]

    def _drop_idle(self, model: Model) -> None:
        with self._lock:
            self._waiting[model] -= 1
            if not self._waiting[model]:
                del self._waiting[model]
                self._twin = None
