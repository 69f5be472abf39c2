"""Failed loads: which workers failed to load which models, and when they may try again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, cast

from redis.asyncio import Redis
from shoal.v1 import worker_pb2

from libs.errors import ModelNotFound, ModelUnreachable, NoCapacity
from libs.fleet import scripts
from libs.queue.connection.client import translated

FAILURE_MS: Final = 15 * 60_000
PASSING_MS: Final = 60_000
"""The backoff before a worker tries a model again: after a failed load, and after it could not find
or reach the model.
"""
FAILURE_DOUBLINGS: Final = 5
"""FAILURE_MS doubles with each further failure, at most this often: up to 8 hours."""

_PASSING: Final = (ModelNotFound.reason, ModelUnreachable.reason, NoCapacity.reason)

ByModel = Mapping[str, Mapping[str, worker_pb2.Failure]]
"""Failures by model and worker."""


class Failures:
    """The failures of the last read, with this process' own changes since. Raises NoCapacity while
    Redis is unavailable.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        # The state: the failures, and own changes since the last read began, which may be older.
        self.by_model: ByModel = {}
        self._own_changes: list[Callable[[ByModel], ByModel]] = []

    def failed_models(self, worker_id: str) -> set[str]:
        """Return the models that the worker has failed to load."""
        return {model for model, failed in self.by_model.items() if worker_id in failed}

    def begin_read(self) -> None:
        """Note that failures are being read."""
        self._own_changes.clear()

    async def end_read(self, failures: Iterable[tuple[bytes, bytes]], now_ms: int) -> None:
        """Replace all failures by those read, with their times, and delete expired ones."""
        live: dict[str, dict[str, worker_pb2.Failure]] = defaultdict(dict)
        gone = []
        for field, value in failures:
            expiry_ms, _, failure = value.partition(b" ")
            model, _, worker_id = field.decode().partition(" ")
            if int(expiry_ms) > now_ms:
                live[model][worker_id] = _until(
                    worker_pb2.Failure.FromString(failure), int(expiry_ms) - now_ms
                )
            else:
                gone.append(field)
        self.by_model = dict(live)
        for change in self._own_changes:
            self.by_model = change(self.by_model)
        if gone:
            with translated():
                await self._redis.hdel(scripts.FAILURES, *gone)

    async def record(self, model: str, worker_id: str, failure: worker_pb2.Failure) -> None:
        """Record that the worker cannot load the model: for 15 minutes, doubled with each further
        failure, or for one minute if it could not find or reach the model.
        """
        is_passing = failure.reason in _PASSING
        await scripts.record_failure(
            self._redis,
            (scripts.FAILURES, scripts.STRIKES),
            field=f"{model} {worker_id}",
            failure=failure.SerializeToString(),
            last_ms=PASSING_MS if is_passing else FAILURE_MS,
            doublings=0 if is_passing else FAILURE_DOUBLINGS,
        )
        shown = _until(failure, PASSING_MS)

        def change(failures: ByModel) -> ByModel:
            return {**failures, model: {**failures.get(model, {}), worker_id: shown}}

        self._apply(change)

    async def forget(self, worker_id: str, models: set[str]) -> None:
        """Forget the worker's failures to load these models."""
        with translated():
            for name in (scripts.FAILURES, scripts.STRIKES):
                await self._redis.hdel(name, *(f"{model} {worker_id}" for model in models))

        def change(failures: ByModel) -> ByModel:
            return {
                model: {
                    worker: failure
                    for worker, failure in failed.items()
                    if worker != worker_id or model not in models
                }
                for model, failed in failures.items()
            }

        self._apply(change)

    async def forgive(self, models: Collection[str]) -> int:
        """Halve the backoff after failed loads of these models, because they have work: workers
        after half of it may try again.

        Returns the number of failures forgotten; the next read shows it.
        """
        known = {model: self.by_model.get(model, {}) for model in models}
        fields = [
            f"{model} {worker_id}"
            for model, failed in known.items()
            for worker_id, failure in failed.items()
            if failure.reason not in _PASSING
        ]
        if not fields:
            return 0
        keys = (scripts.FAILURES, scripts.STRIKES)
        return cast(
            int,
            await scripts.forgive(
                self._redis, keys, last_ms=FAILURE_MS, doublings=FAILURE_DOUBLINGS, fields=fields
            ),
        )

    def _apply(self, change: Callable[[ByModel], ByModel]) -> None:
        self._own_changes.append(change)
        self.by_model = change(self.by_model)


def _until(failure: worker_pb2.Failure, left_ms: int) -> worker_pb2.Failure:
    """Copy the failure; if memory was short, with a retry time: the worker tries again in
    `left_ms`.
    """
    copy = worker_pb2.Failure()
    copy.CopyFrom(failure)
    if failure.reason == NoCapacity.reason:
        copy.retry_after_seconds = left_ms / 1000
    return copy
