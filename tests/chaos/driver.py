"""A run: the mesh, traffic, faults and the observer together."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from redis.asyncio import Redis
from redis.exceptions import RedisError
from shoal.v1 import worker_pb2

from libs.queue import LaneKey, connect
from tests.chaos.faults import Fault, Faults
from tests.chaos.http import HttpClient
from tests.chaos.models import DENSE
from tests.chaos.observer import OVERDUE_SECONDS, Observer, unfairness
from tests.chaos.plan import AT_ONCE, Planned, Servers, concerns, kinds, plan
from tests.chaos.report import Report, percentile, recoveries
from tests.chaos.stage import (
    LEASE_SECONDS,
    NODE_TIMEOUT_SECONDS,
    TENANTS,
    Stage,
    new_directory,
    running,
    running_up,
)
from tests.chaos.traffic import PATIENT_SECONDS, Answers, Clients, Tally, Traffic, connected
from tests.chaos.up import REST_SECONDS
from tests.support.waiting import end_tasks

IDLE_SECONDS: Final = 90.0
"""Time within which the mesh must become idle after the last request."""
CALM_SECONDS: Final = 3.0
LONG_SECONDS: Final = 120.0
Target = Literal["processes", "up"]
BACKLOG: Final = 40
"""Requests of each tenant in the backlog that is checked for its order."""
LANE: Final = LaneKey("cpu", DENSE)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run. It lasts `seconds`, and longer until all its faults are over and
    `requests` were sent.
    """

    seed: int
    seconds: float
    per_minute: float = 15.0
    at_once: int = 64
    per_second: float = 300.0
    requests: int = 0
    patient_seconds: float = PATIENT_SECONDS
    """The deadline of all requests that are not hasty."""
    clients: int = 2
    """Number of clients of each tenant."""
    target: Target = "processes"
    """The target of faults: processes that the run starts itself, or the children of one `shoal
    up`, which only `shoal up` restarts.
    """
    servers: Servers = "single"
    """The queue's Redis. `shoal up` has a single one."""
    only: str = ""
    """Substring of the names of faults to inject."""
    away: float = 1.0
    """Maximum seconds until a killed worker or router is restarted; the minimum is one second less.
    """
    overdue: float = OVERDUE_SECONDS
    """Seconds for which an expired lease may remain."""
    keep: bool = False
    """The directory with the logs, even if the run was clean."""


@dataclass
class Progress:
    """A run as it is now, for who watches."""

    elapsed: float
    tally: Tally
    in_flight: int
    begun: int
    planned: int
    problems: int


Watcher = Callable[[Progress], None]


async def run(
    settings: Settings, checkpoints: Path | None = None, watch: Watcher = lambda _: None
) -> Report:
    """One run from start to end. Without `checkpoints` (`models.write`) it makes its own. Whatever
    happens, all processes end; the directory with their logs is kept if the run was not clean."""
    directory = new_directory()
    is_clean = False
    try:
        if checkpoints is None:
            checkpoints = await _made_checkpoints(directory)
        report = await _run(settings, directory, checkpoints, watch)
        is_clean = report.is_clean and not settings.keep
        report = report if is_clean else replace(report, directory=directory)
    except asyncio.CancelledError:
        is_clean = True  # it was interrupted, so the logs are not needed
        raise
    except BaseException:
        print(
            f"seed {settings.seed}: the logs of all processes are in {directory}", file=sys.stderr
        )
        raise
    finally:
        if is_clean:
            shutil.rmtree(directory, ignore_errors=True)
    return report


async def _made_checkpoints(directory: Path) -> Path:
    root = directory / "models"
    making = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.chaos.models", str(root)
    )
    if await making.wait() != 0:
        raise RuntimeError("the models could not be made")
    return root


async def _run(settings: Settings, directory: Path, checkpoints: Path, watch: Watcher) -> Report:
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(_stage(settings, directory, checkpoints))
        redis = await stack.enter_async_context(_redis(stage))
        clients = await stack.enter_async_context(
            connected(stage.clients_address, settings.clients)
        )
        answers = Answers()
        await answers.learn(clients["nobody"][0])
        http = HttpClient(stage.cluster.http_addresses) if stage.cluster.edges else None
        if http is not None:
            stack.callback(http.close)
        traffic = Traffic(
            settings.seed,
            answers,
            clients,
            http,
            at_once=settings.at_once,
            per_second=settings.per_second,
            patient_seconds=settings.patient_seconds,
        )
        text, expected = answers.example()
        faults = Faults(stage, redis, clients["nobody"][0], text, expected)
        harm = Harm(settings, stage, faults, traffic)
        observer = Observer(
            redis, harm.is_calm, stage.queue_slots, overdue_seconds=settings.overdue
        )
        looking = asyncio.create_task(observer.run())
        stack.push_async_callback(end_tasks, [looking])
        before = sum(lane.done() for lane in await observer.snapshots())
        begin = time.monotonic()
        async with traffic.running():
            harming = asyncio.create_task(harm.run())
            stack.push_async_callback(end_tasks, [harming])
            while not (
                harming.done()
                and time.monotonic() - begin > settings.seconds
                and traffic.tally.sent >= settings.requests
            ):
                watch(
                    Progress(
                        time.monotonic() - begin,
                        traffic.tally,
                        traffic.in_flight,
                        len(harm.done),
                        len(harm.planned),
                        len(observer.seen.problems),
                    )
                )
                await asyncio.wait(
                    [harming, looking], timeout=0.25, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in (harming, looking):
                    if task.done() and task.exception() is not None:
                        await task
        seconds = time.monotonic() - begin
        await harming
        await faults.finished()
        problems = await _until_idle(observer)
        done = sum(lane.done() for lane in await observer.snapshots()) - before
        problems += await _fairness(stage, observer, clients)
        problems += await _until_idle(observer)
        await end_tasks([looking])
        return _report(settings, seconds, traffic.tally, harm, observer, done, problems)


class Harm:
    """Does the planned faults, at most two at a time, never two to one process."""

    def __init__(self, settings: Settings, stage: Stage, faults: Faults, traffic: Traffic) -> None:
        cluster = stage.cluster
        found = kinds(
            cluster.routers,
            cluster.workers,
            cluster.schedulers,
            cluster.edges,
            lease=LEASE_SECONDS,
            away=settings.away,
            is_long=settings.seconds >= LONG_SECONDS,
            has_machines=stage.machines.can_change,
            servers=settings.servers,
            node_timeout=NODE_TIMEOUT_SECONDS,
        )
        is_up = settings.target == "up"
        found = [
            kind
            for kind in found
            if settings.only in kind.name and (not is_up or kind.name.startswith("kill"))
        ]
        rest = REST_SECONDS if is_up else 0.0
        self.planned = plan(
            found,
            seed=settings.seed,
            seconds=settings.seconds,
            per_minute=settings.per_minute,
            rest=rest,
        )
        self.done: list[Fault] = []
        self.log: list[str] = []
        self._faults = faults
        self._traffic = traffic
        self._disturbed = 0.0
        # Mutable state: the faults going on.
        self._going_on: list[Fault] = []
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for planned in self.planned:
                await asyncio.sleep(max(0.0, begin + planned.begin - time.monotonic()))
                async with self._changed:
                    await self._changed.wait_for(lambda planned=planned: self._may_begin(planned))  # type: ignore[misc]
                fault = Fault(planned)
                self._going_on.append(fault)
                self.done.append(fault)
                group.create_task(self._do(fault))

    def is_calm(self) -> bool:
        """Return True if only workers were harmed recently, so expired leases are reclaimed in
        time.
        """
        now = time.monotonic()
        if any("worker" not in fault.planned.kind for fault in self._going_on):
            self._disturbed = now
        return now - self._disturbed > CALM_SECONDS

    def failures(self) -> list[str]:
        """Return the faults that could not be injected or reverted."""
        failed = [fault for fault in self.done if fault.failure]
        return [
            f"fault {fault.planned.number} ({fault.planned.kind}, {fault.target}): {fault.failure}"
            for fault in failed
        ]

    def _may_begin(self, planned: Planned) -> bool:
        if self._going_on and (
            planned.alone or any(fault.planned.alone for fault in self._going_on)
        ):
            return False
        taken = set().union(*(concerns(fault.planned.target) for fault in self._going_on))
        return len(self._going_on) < AT_ONCE and not taken & concerns(planned.target)

    async def _do(self, fault: Fault) -> None:
        planned = fault.planned
        self._log(
            f"{planned.number}: {planned.kind}, {planned.target}, for {planned.seconds:.1f} s"
        )
        try:
            await self._faults.do(fault, self._traffic)
        except (TimeoutError, AssertionError, RedisError, OSError) as error:
            fault.failure = f"{type(error).__name__}: {error}"
            fault.ended = fault.over = time.monotonic()
        finally:
            self._log(
                f"{planned.number}: over ({fault.target}); those in flight were answered "
                f"{fault.over - fault.began:.2f} s after its beginning"
                + (f", back after {fault.back - fault.began:.2f} s" if fault.back else "")
            )
            self._going_on.remove(fault)
            async with self._changed:
                self._changed.notify_all()

    def _log(self, text: str) -> None:
        self.log.append(
            f"{time.strftime('%H:%M:%S', time.gmtime())}.{int(time.time() * 1000) % 1000:03d} "
            f"{text}"
        )


async def _until_idle(observer: Observer) -> list[str]:
    """Return the remains of the lanes after IDLE_SECONDS (I4)."""
    end = time.monotonic() + IDLE_SECONDS
    while True:
        left = ["Redis does not answer"]
        with suppress(RedisError, OSError):
            left = await observer.leftovers()
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.2)


async def _fairness(stage: Stage, observer: Observer, clients: Clients) -> list[str]:
    """I7: with all workers frozen every tenant queues up; in which order will they be served?"""
    stage.cluster.signal(stage.cluster.workers, signal.SIGSTOP)
    asking = [
        asyncio.create_task(of_tenant[0].encode(DENSE, [f"{tenant} {'x' * number}"], timeout=180))
        for number in range(BACKLOG)
        for tenant, of_tenant in clients.items()
    ]
    try:
        unfair = await _order(observer, len(asking))
    except (TimeoutError, RedisError, OSError) as error:
        unfair = [f"I7: no backlog was measured: {error!r}"]
    finally:
        stage.cluster.resume(stage.cluster.workers)
        failed = [
            one
            for one in await asyncio.gather(*asking, return_exceptions=True)
            if isinstance(one, BaseException)
        ]
    return unfair + [f"a request of the backlog: {error!r}" for error in failed]


async def _order(observer: Observer, expected: int) -> list[str]:
    """Wait for `expected` jobs, and check the order of those that wait."""
    async with asyncio.timeout(90):
        while True:
            lane = next(
                (lane for lane in await observer.snapshots() if lane.name == LANE.name), None
            )
            if lane is not None and len(lane.unfinished) == expected:
                break
            await asyncio.sleep(0.05)
    jobs = {
        job_id: worker_pb2.Job.FromString(payload)
        for job_id, payload in (await observer.payloads(LANE.name)).items()
    }
    tenant_of = {job_id: job.encode.items[0].text.partition(" ")[0] for job_id, job in jobs.items()}
    return list(unfairness(lane, tenant_of, TENANTS))


def _report(
    settings: Settings,
    seconds: float,
    tally: Tally,
    harm: Harm,
    observer: Observer,
    done: int,
    left: Sequence[str],
) -> Report:
    again = max(0, done - tally.sent)
    problems = [*observer.seen.problems, *left, *harm.failures()]
    if again > len(harm.done) * settings.at_once:
        problems.append(
            f"{again} jobs were done again, more than were ever in flight when something was lost"
        )
    milliseconds = [1000 * one for one in tally.seconds]
    return Report(
        seed=settings.seed,
        servers=settings.servers,
        seconds=seconds,
        requests=tally.sent,
        answered=tally.answered,
        faults=len(harm.done),
        lost=tally.lost,
        duplicates=tally.duplicates,
        wrong=tally.wrong,
        cancelled=tally.cancelled,
        late=tally.late,
        done_again=again,
        p50_ms=percentile(milliseconds, 50),
        p99_ms=percentile(milliseconds, 99),
        longest_ms=max(milliseconds, default=0.0),
        snapshots=observer.seen.snapshots,
        problems=problems,
        recoveries=recoveries(harm.done),
        log=harm.log,
    )


def _stage(
    settings: Settings, directory: Path, checkpoints: Path
) -> AbstractAsyncContextManager[Stage]:
    if settings.target == "up":
        return running_up(directory, checkpoints)
    return running(directory, checkpoints, settings.servers)


@asynccontextmanager
async def _redis(stage: Stage) -> AsyncIterator[Redis]:
    redis = connect(stage.redis_url, slots=stage.queue_slots)
    try:
        yield redis
    finally:
        await redis.aclose()
