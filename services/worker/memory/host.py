"""Warm models, which were evicted from the device to host memory and return from there without a
read from disk.

Not on the request path: `space.py` evicts models to host memory, `loading.py` returns them to the
device. Call everything here on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from libs.eviction import Candidate, Challenger, Policy, choose_victims
from libs.models import Parked
from libs.models.embedding_recipe import EmbeddingIdentity
from libs.store import Copy
from libs.telemetry.logs import fields
from services.worker.machine.device import Device
from services.worker.machine.tasks import Tasks
from services.worker.machine.threads import in_thread
from services.worker.memory.budget import Ledger, LedgerClaim, ModelSize
from services.worker.memory.resident import Resident

log = logging.getLogger(__name__)


def _nothing(needed: int) -> None:
    return


@dataclass(slots=True, eq=False)
class Warm:
    """A model in host memory.

    Attributes:
        parked: The weights in host memory.
        copy: The files on disk.
        host: The reservation of host memory; None while the model returns to a device that shares
            the host's memory.
        load_seconds: Duration of its last load from disk.
        last_used: Seconds of the worker's monotonic clock.
        uses: As in Resident.
        floor: As in Resident.
        identity: The identity of its vectors, as in Resident.
    """

    name: str
    parked: Parked
    copy: Copy
    size: ModelSize
    host: LedgerClaim | None
    load_seconds: float
    last_used: float
    uses: int
    floor: float
    identity: EmbeddingIdentity | None


class HostMemory:
    """Host memory for warm models and for host copies of resident ones.

    Args:
        policy: Values models; those of the lowest value are dropped first.
        clock: Returns monotonic seconds.
        changed: Called when a warm model is dropped.
    """

    def __init__(
        self,
        device: Device,
        tasks: Tasks,
        *,
        policy: Policy,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self._ledger = Ledger(device.host_bytes)
        self._trim = device.trim
        self._tasks = tasks
        self._policy = policy
        self._clock = clock
        self._changed = changed
        self.give_back: Callable[[int], object] = _nothing
        """Frees up to this many bytes of this memory that models do not use."""
        # Mutable state: the warm models by name; total bytes and seconds of resumes.
        self.models: dict[str, Warm] = {}
        self._resumed_bytes = 0
        self._resumed_seconds = 0.0

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def limit_bytes(self) -> int:
        return self._ledger.limit_bytes

    @property
    def used_bytes(self) -> int:
        return self._ledger.used_bytes

    def reserve(self, model: str, needed: int, like: Resident | Warm) -> LedgerClaim | None:
        """Reserve `needed` bytes for a model, and drop warm models of lower value if necessary.
        Return None if that does not free enough.

        Args:
            like: The entry of the model, from which its value is computed.
        """
        self.give_back(self._ledger.missing(ModelSize(needed)))
        missing = self._ledger.missing(ModelSize(needed))
        if missing > 0:
            candidates = [*self._candidates(), self._candidate(model, needed, like)]
            chosen = choose_victims(candidates, missing, self._policy, Challenger("", needed))
            if chosen is None or any(one.name == model for one in chosen):
                return None
            for victim in chosen:
                self.drop(victim.name)
        return self._ledger.claim(model, ModelSize(needed))

    def release(self, claim: LedgerClaim) -> None:
        self._ledger.release(claim)

    def release_warm(self, warm: Warm) -> None:
        """Release the model's memory, if it still has any."""
        if warm.host is not None:
            self._ledger.release(warm.host)
            warm.host = None

    def take(self, warm: Warm) -> Warm:
        """Remove and return a warm model. The caller must make it resident, or pass it to
        `put_back` or `forget`.
        """
        return self.models.pop(warm.name)

    def put_back(self, warm: Warm) -> None:
        """Return a model of `take` that did not become resident to the warm ones. Forget it if its
        memory was released.
        """
        if warm.host is None:
            self.forget(warm)
        else:
            self.models[warm.name] = warm

    def forget(self, warm: Warm) -> None:
        """Free the model's memory, and let the store delete its directory."""
        self.release_warm(warm)
        warm.copy.close()
        self._tasks.start(in_thread(self._trim))

    def drop(self, model: str) -> bool:
        """Drop a model from host memory. Return whether it was warm."""
        warm = self.models.get(model)
        if warm is not None:
            self.forget(self.take(warm))
            log.info("warm model dropped", extra=fields({"model": model}))
            self._changed()
        return warm is not None

    def drop_cheapest(self) -> bool:
        """Drop the warm model of the lowest value. Return whether one existed."""
        candidates = self._candidates()
        return bool(candidates) and self.drop(min(candidates, key=self._policy).name)

    def add_resume(self, warm: Warm, seconds: float) -> None:
        """Record how many seconds a model took to return to the device."""
        self._resumed_bytes += warm.size.bytes
        self._resumed_seconds += seconds

    def resume_seconds(self, size: int) -> float | None:
        """Return the seconds that a model of `size` bytes takes to return to the device, at the
        bytes per second measured over all models.

        Return None if it does not fit in host memory, or nothing was measured yet.
        """
        if size > self.limit_bytes or not self._resumed_bytes:
            return None
        return self._resumed_seconds * size / self._resumed_bytes

    def _candidates(self) -> list[Candidate]:
        return [
            self._candidate(one.name, one.parked.host_bytes, one) for one in self.models.values()
        ]

    def _candidate(self, name: str, size: int, like: Resident | Warm) -> Candidate:
        idle = self._clock() - like.last_used
        return Candidate(
            name, size, like.load_seconds, idle, uses=max(1, like.uses), floor=like.floor
        )
