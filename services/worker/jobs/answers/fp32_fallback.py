"""Recomputes outputs that are not finite in float32, on the CPU, in the background.

Not on the usual request path: `finisher.py` finds such outputs. A model in bfloat16 or float16 may
overflow where a float32 copy does not. A single thread loads and runs float32 copies, so the
device, the event loop and other jobs do not wait. A copy stays in memory while jobs of its model
are queued.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future

from libs.errors import DeadlinePassed, InternalError, ShoalError
from libs.models import Model, collect_outputs, is_finite
from libs.telemetry.logs import Value, fields
from services.worker.jobs.held import HeldJob

log = logging.getLogger(__name__)

Done = Callable[[HeldJob, ShoalError | None], None]
"""Called with a job and None if all its outputs are now finite, else with the error."""


def nonfinite_outputs(held: HeldJob) -> list[int]:
    """Return the indices of sequences with outputs that are not finite."""
    return [index for index, output in sorted(held.outputs.items()) if not is_finite(output)]


class Fp32Fallback:
    """Recomputes jobs on a float32 copy of their model.

    Args:
        thread: An executor with one thread.
        unix_time: Seconds since 1970 by Redis' clock, which deadlines use.
    """

    def __init__(self, thread: Executor, *, unix_time: Callable[[], float]) -> None:
        self._thread = thread
        self._unix_time = unix_time
        self._lock = threading.Lock()
        # Mutable state: the number of queued jobs by model (guarded by the lock), and the model and
        # float32 copy that are loaded (thread only).
        self._waiting: dict[Model, int] = {}
        self._loaded: tuple[Model, Model] | None = None

    def add(self, held: HeldJob, done: Done) -> Future[None]:
        """Queue a job. `done` is called once with it, on the thread."""
        model = held.resident.model
        with self._lock:
            self._waiting[model] = self._waiting.get(model, 0) + 1
        return self._thread.submit(self._recompute, held, done)

    def _recompute(self, held: HeldJob, done: Done) -> None:
        error: ShoalError | None = None
        try:
            self._run(held)
        except ShoalError as caught:
            error = caught
        except Exception as caught:
            log.exception(
                "a job could not be recomputed in float32",
                extra=fields({"model": held.resident.name}),
            )
            error = InternalError(
                f"{held.resident.name} failed to recompute this input in float32: "
                f"{type(caught).__name__}"
            )
        finally:
            self._drop_idle(held.resident.model)
        done(held, error)

    def _run(self, held: HeldJob) -> None:
        """Recompute the outputs that are not finite. Raise ShoalError if some still are not."""
        model, name = held.resident.model, held.resident.name
        if held.unwanted:
            raise InternalError("the job was cancelled before it was recomputed in float32")
        if held.deadline_unix <= self._unix_time():
            raise DeadlinePassed("the deadline passed before the job was recomputed in float32")
        fp32_model = self._load_fp32_model(model)
        nonfinite = nonfinite_outputs(held)
        if fp32_model is not None:
            prepared, started = held.ready, time.monotonic()
            for head, indices in prepared.groups().items():
                again = [index for index in indices if index in nonfinite]
                if again:
                    outputs = collect_outputs(
                        fp32_model.forward(head, [prepared.sequences[index] for index in again])
                    )
                    held.outputs.update(zip(again, outputs, strict=True))
            held.forward_seconds += time.monotonic() - started
            left = len(nonfinite_outputs(held))
            counts: dict[str, Value] = {
                "model": name,
                "sequences": len(nonfinite),
                "not_finite": left,
            }
            log.warning("recomputed outputs that were not finite in float32", extra=fields(counts))
        if nonfinite_outputs(held):
            raise InternalError(f"{name} computed values that are not finite for this input")

    def _load_fp32_model(self, model: Model) -> Model | None:
        if self._loaded is None or self._loaded[0] is not model:
            self._loaded = None  # drop it before loading the next: never hold two
            fp32_model = model.load_fp32_fallback()
            if fp32_model is None:
                return None
            self._loaded = (model, fp32_model)
        return self._loaded[1]

    def _drop_idle(self, model: Model) -> None:
        with self._lock:
            self._waiting[model] -= 1
            if not self._waiting[model]:
                del self._waiting[model]
                self._loaded = None
