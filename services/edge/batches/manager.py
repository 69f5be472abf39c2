"""Finds batches, and work of other kinds, that no edge runs, claims and runs some of it, and
deletes expired files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol, TypeVar

from shoal.bulk.failures import StorageError

from libs.telemetry import metrics
from libs.telemetry.logs import fields
from services.edge.batches.context import Context
from services.edge.batches.gate import Gate
from services.edge.batches.leases import BatchLease, LeaseLost, Observed, latest_generations
from services.edge.batches.objects import BATCH_ID, ENDED, BatchRecord, created_at
from services.edge.batches.runner import CANCEL, BatchRunner, Execute
from services.edge.batches.store import TenantStore

log = logging.getLogger(__name__)

R = TypeVar("R")

SCAN_SECONDS: Final = 3.0
MIN_SCAN_SECONDS: Final = 0.2
"""The pause after a scan, whatever clients do."""
MAX_RUNNING: Final = 4
"""The maximum number of batches that an edge runs at a time."""
TURN_SECONDS: Final = 60.0
"""Time for which a batch keeps its slot while a tenant that has no slot waits."""
CLEAN_SECONDS: Final = 600.0
RESTART_SECONDS: Final = 30.0
"""Time for which a batch waits after its storage failed."""
UNCOMMITTED_SECONDS: Final = 60
"""The age at which the name of a batch without a record is deleted: its edge died in between."""


class WorkRecord(Protocol):
    """The record of a piece of work, such as a batch."""

    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def needs_token(self) -> bool: ...

    @property
    def expires_at(self) -> float: ...

    @property
    def is_ended(self) -> bool: ...


class Work(Protocol):
    """Runs a piece of work that this edge has claimed."""

    is_preempted: bool

    @property
    def record(self) -> WorkRecord: ...

    def cancel(self, at: int) -> None: ...

    def preempt(self) -> None: ...

    async def run(self) -> None: ...


class WorkKind(Protocol):
    """A kind of work that edges claim by its name in `active`. `find` and `clean` block."""

    def is_id(self, identity: str) -> bool:
        """Return whether an id is of this kind."""

    def find(self, key: str, identity: str) -> WorkRecord | None:
        """Return a record of a tenant, by the tenant's key. Raises StorageError."""

    def work(self, key: str, record: WorkRecord, lease: BatchLease) -> Work:
        """Return what runs a piece of work."""

    def clean(self, key: str, now: float) -> None:
        """Delete what has expired. Raises StorageError."""


class _Batches:
    """The batches of OpenAI's API."""

    def __init__(
        self,
        context: Context,
        execute: Execute,
        gate: Gate,
        max_line_bytes: int,
        max_seconds: float,
    ) -> None:
        self._context, self._execute, self._gate = context, execute, gate
        self._max_line_bytes, self._max_seconds = max_line_bytes, max_seconds

    def is_id(self, identity: str) -> bool:
        return BATCH_ID.fullmatch(identity) is not None

    def find(self, key: str, identity: str) -> BatchRecord | None:
        return self._context.store.tenant(key).batch(identity)

    def work(self, key: str, record: WorkRecord, lease: BatchLease) -> BatchRunner:
        assert isinstance(record, BatchRecord)  # noqa: S101  # for the type checker
        return BatchRunner(
            self._context,
            self._context.store.tenant(key),
            record,
            lease,
            execute=self._execute,
            gate=self._gate,
            max_line_bytes=self._max_line_bytes,
            max_seconds=self._max_seconds,
        )

    def clean(self, key: str, now: float) -> None:
        seconds = self._context.settings.expiry_seconds
        self._context.store.tenant(key).delete_expired(now, seconds)


class Manager:
    """Runs the batches of an edge, and its work of other kinds.

    Args:
        max_line_bytes: The maximum size of a line of a batch.
        max_seconds: The maximum deadline of a request of a batch.
        kinds: Other kinds of work, which share the slots of batches and the turns of tenants.
    """

    def __init__(
        self,
        context: Context,
        execute: Execute,
        *,
        max_line_bytes: int,
        max_seconds: float,
        kinds: Sequence[WorkKind] = (),
    ) -> None:
        self._context = context
        self._gate = Gate(context.settings.in_flight)
        batches = _Batches(context, execute, self._gate, max_line_bytes, max_seconds)
        self._kinds: tuple[WorkKind, ...] = (batches, *kinds)
        self._wakeup = asyncio.Event()
        # The state: leases of other edges, running batches with their tasks and the times of their
        # starts, the times until which batches wait after a failure, and the time of the last start
        # of each tenant. Batches are known by their names in `active`.
        self._observed = Observed()
        self._runners: dict[str, Work] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starts: dict[str, float] = {}
        self._waits: dict[str, float] = {}
        self._turns: dict[str, float] = {}
        # Series exist before the first event, so that the rate of the first one is not lost.
        for status in ENDED:
            metrics.HTTP_BATCHES_ENDED.labels(status)
        for outcome in ("ok", "failed"):
            metrics.HTTP_BATCH_REQUESTS.labels(outcome)

    @property
    def active(self) -> int:
        """The number of batches that this edge runs."""
        return sum(1 for identity in self._runners if BATCH_ID.fullmatch(identity))

    @property
    def in_flight(self) -> int:
        """The number of requests of batches that were sent and are not answered."""
        return self._gate.in_flight

    def records(self, kind: type[R]) -> list[R]:
        """Return the records of a type of the work that this edge runs. Any thread may call it."""
        found = [runner.record for runner in list(self._runners.values())]
        return [record for record in found if isinstance(record, kind)]

    def wake(self) -> None:
        """Look for batches now: one was created, or a token has arrived."""
        self._wakeup.set()

    def running(self, identity: str) -> BatchRunner | None:
        """Return the runner of a batch that this edge runs."""
        found = self.find_work(identity)
        return found if isinstance(found, BatchRunner) else None

    def find_work(self, identity: str) -> Work | None:
        """Return what runs a piece of work, if this edge does."""
        return self._runners.get(identity)

    def cancel(self, identity: str, at: int) -> None:
        """Stop a batch if this edge runs it, or claim it to stop it."""
        runner = self._runners.get(identity)
        if runner is not None:
            runner.cancel(at)
        self.wake()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Run batches within this context; other edges may claim them at its end."""
        loops = [
            asyncio.create_task(self._scan_forever()),
            asyncio.create_task(self._clean_forever()),
        ]
        try:
            yield
        finally:
            tasks = [*loops, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def scan(self) -> None:
        """Claim batches that no edge runs, as many as this edge may run. Raises StorageError."""
        active = await self._context.io(self._context.store.active)
        names = await self._context.io(active.names)
        generations = latest_generations(names)
        markers = [name for name in names if self._kind(name) is not None]
        self._observed.forget_others(markers)
        self._waits = {name: self._waits[name] for name in markers if name in self._waits}
        tenants = {_tenant(name) for name in markers}
        self._turns = {key: at for key, at in self._turns.items() if key in tenants}
        is_full = False
        for name in self._by_turn(markers):
            if name in self._tasks or time.monotonic() < self._waits.get(name, 0.0):
                continue
            is_free = await self._context.io(
                self._observed.is_free, active, name, generations.get(name, 0), time.monotonic()
            )
            if is_free and len(self._tasks) < MAX_RUNNING:
                await self._claim(name, generations.get(name, 0))
            elif is_free and not is_full and await self._is_runnable(name):
                is_full = True
                self._preempt_for(name)

    def _by_turn(self, markers: list[str]) -> list[str]:
        """Return batches so that tenants with few running ones have the first, then those that
        started none for the longest time, and old ones of a tenant go before new ones.
        """
        turns = Counter(map(_tenant, self._tasks))
        ordered = []
        for name in sorted(markers, key=lambda name: name.partition(".")[2]):
            tenant = _tenant(name)
            last = self._turns.get(tenant, 0.0)
            ordered.append((turns[tenant], last, created_at(name), name))
            turns[tenant] += name not in self._tasks
        return [one[-1] for one in sorted(ordered)]

    def _preempt_for(self, name: str) -> None:
        """Preempt a batch of a tenant that runs more batches than the tenant of a waiting one.

        1. If it runs two more, a batch is preempted at once.
        2. If it runs one more, the batch that has run longest is preempted after its turn.
        """
        if any(runner.is_preempted for runner in self._runners.values()):
            return
        counts, now = Counter(map(_tenant, self._tasks)), time.monotonic()

        def rank(running: str) -> tuple[int, float]:
            return counts[_tenant(running)] - counts[_tenant(name)], now - self._starts[running]

        longest = max(self._tasks, key=rank)
        lead, seconds = rank(longest)
        if lead > 1 or (lead == 1 and seconds >= TURN_SECONDS):
            self._runners[longest.partition(".")[2]].preempt()

    async def _is_runnable(self, name: str) -> bool:
        """Return whether a batch would run if this edge claimed it."""
        key, _, identity = name.partition(".")
        store, kind = self._context.store.tenant(key), self._kind(name)
        record = await self._context.io(kind.find, key, identity) if kind is not None else None
        return record is not None and not record.is_ended and await self._can_run(store, record)

    def _kind(self, name: str) -> WorkKind | None:
        """Return the kind of a name in `active`; None of those that this edge does not run."""
        identity = name.partition(".")[2]
        return next((kind for kind in self._kinds if kind.is_id(identity)), None)

    async def _claim(self, name: str, generation: int) -> None:
        """Run a batch if it has a credential and no other edge claims it first."""
        key, _, identity = name.partition(".")
        store, kind = self._context.store.tenant(key), self._kind(name)
        if kind is None:
            return
        record = await self._context.io(kind.find, key, identity)
        if record is None:
            if created_at(identity) + UNCOMMITTED_SECONDS <= time.time():
                await self._context.io(store.deactivate, identity)
            return
        if not record.is_ended and not await self._can_run(store, record):
            return
        active = await self._context.io(self._context.store.active)
        lease = await self._context.io(BatchLease.acquire, active, name, generation)
        if lease is None:
            return
        # Another edge may have saved or ended the batch before this one claimed it.
        record = await self._context.io(kind.find, key, identity)
        if record is None or record.is_ended:
            await self._context.io(store.deactivate, identity)
            await self._context.io(lease.delete)
            return
        runner = kind.work(key, record, lease)
        self._runners[identity] = runner
        self._starts[name] = self._turns[key] = time.monotonic()
        self._tasks[name] = asyncio.create_task(self._run(name, runner, lease))

    async def _can_run(self, store: TenantStore, record: WorkRecord) -> bool:
        """Return whether requests of a batch can be sent, or it ends without any."""
        found = await self._context.credential(
            store.key, record.tenant, needs_token=record.needs_token
        )
        if found is not None or record.expires_at <= time.time():
            return True
        data = await self._context.io(store.data, record.id)
        return await self._context.io(data.read, CANCEL) is not None

    async def _run(self, name: str, runner: Work, lease: BatchLease) -> None:
        identity = runner.record.id
        try:
            await runner.run()
        except LeaseLost:
            log.warning("another edge runs the batch", extra=fields({"batch": identity}))
        except StorageError as error:
            log.warning("batch stopped", extra=fields({"batch": identity, "error": str(error)}))
            self._waits[name] = time.monotonic() + RESTART_SECONDS
        except Exception:
            log.exception("batch stopped", extra=fields({"batch": identity}))
            self._waits[name] = time.monotonic() + RESTART_SECONDS
        finally:
            if not runner.record.is_ended:
                with suppress(StorageError, LeaseLost):
                    await asyncio.shield(self._context.io(lease.release_if_held))
            del self._runners[identity], self._tasks[name], self._starts[name]
            self.wake()

    async def _scan_forever(self) -> None:
        while True:
            self._wakeup.clear()
            try:
                await self.scan()
            except StorageError as error:
                log.warning("batches cannot be read", extra=fields({"error": str(error)}))
            except Exception:
                log.exception("looking for batches failed")
            await asyncio.sleep(MIN_SCAN_SECONDS)
            # In Python 3.11 `wait_for` would lose a cancellation that arrives with the wakeup.
            with suppress(TimeoutError):
                async with asyncio.timeout(SCAN_SECONDS):
                    await self._wakeup.wait()

    async def _clean_forever(self) -> None:
        """Delete expired files from time to time."""
        while True:
            try:
                for store in await self._context.io(self._context.store.tenants):
                    for kind in self._kinds:
                        await self._context.io(kind.clean, store.key, time.time())
            except StorageError as error:
                log.warning("expired files are kept", extra=fields({"error": str(error)}))
            except Exception:
                log.exception("deleting expired files failed")
            await asyncio.sleep(CLEAN_SECONDS)


def _tenant(name: str) -> str:
    """Return the key of the tenant of a batch, by its name in `active`."""
    return name.partition(".")[0]
