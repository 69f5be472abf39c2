"""Wires up the worker. Read from top to bottom: its object graph, serving and graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Final

import uvloop

from libs import memory
from libs.eviction import POLICIES
from libs.serving import serving
from libs.store import open_copies, open_store
from libs.telemetry.exposition import serving_metrics
from libs.telemetry.logs import fields
from services.worker.heartbeat import Heartbeat
from services.worker.jobs.answers.delivery import Delivery
from services.worker.jobs.answers.finisher import Finisher
from services.worker.jobs.answers.fp32_fallback import Fp32Fallback
from services.worker.jobs.answers.streamed import StreamedParts
from services.worker.jobs.execution.oom_recovery import OomRecovery
from services.worker.jobs.execution.runner import DeviceRunner
from services.worker.jobs.held import PreparationKind
from services.worker.jobs.pulling.intake import JobIntake
from services.worker.jobs.pulling.preparing import MAX_AWAY, MAX_SLOW_AWAY, Preparation, Preparers
from services.worker.jobs.pulling.puller import Puller
from services.worker.jobs.waste import Waste
from services.worker.machine.device import Device
from services.worker.machine.notice import NoticeSource, grace_left, noticed, parse_source, stops_at
from services.worker.memory.files import ModelFiles
from services.worker.memory.residency import Residency
from services.worker.mesh.link import Link, WorkerIdentity
from services.worker.metrics import WorkerMetrics
from services.worker.presence import PresenceStream
from services.worker.scheduling.batcher import BatchLimits, Caller
from services.worker.settings import Settings

log = logging.getLogger(__name__)

HEALTH_NAME: Final = "worker"

_HAND_BACK_SECONDS: Final = 3.0
"""Maximum time to return unfinished jobs at shutdown. After that their leases expire."""

_GOODBYE_SECONDS: Final = 2.0
"""Maximum time to send the last heartbeat at shutdown."""

_RELIEF_SECONDS: Final = 5.0
"""Time for which the device thread waits for the eviction of an idle model when memory runs out."""


def run_until_signalled(settings: Settings, device: Device) -> None:
    """Serve until SIGTERM or SIGINT, then shut down gracefully. A second signal exits
    immediately.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_signalled(settings, device))


async def _signalled(settings: Settings, device: Device) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await serve(settings, device, stop)


async def serve(settings: Settings, device: Device, stop: asyncio.Event) -> None:
    """Serve until `stop` is set and the worker has shut down. Raises the error of a lost device."""
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(_threads(settings.threads))
        health = None
        if settings.health_address:
            health = await stack.enter_async_context(
                serving(settings.health_address, [], health=[HEALTH_NAME])
            )
            await health.set_health(True)
        identity = WorkerIdentity(settings.worker_id, secrets.token_hex(8), settings.pool)
        link = await stack.enter_async_context(Link(identity, settings.routers, settings.trust))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        worker = Worker(settings, device, link, threads, tasks, stop)
        await stack.enter_async_context(
            serving_metrics(settings.metrics_address, worker.metrics.read)
        )
        await worker.serve()
        if health is not None:
            await health.set_health(False)
        await worker.wind_down()
    worker.check_device()


@dataclass(frozen=True, slots=True)
class Threads:
    """Separate pools for tokenising, for documents and large images, and for making answers, so
    that preparing a large job does not delay a small answer. One thread streams generated texts,
    and one recomputes in float32.
    """

    preparing: Mapping[PreparationKind, Preparers]
    finishing: Preparers
    streaming: ThreadPoolExecutor
    fp32: ThreadPoolExecutor


@contextmanager
def _threads(cores: int) -> Iterator[Threads]:
    count = max(1, min(4, cores // 2))
    preparing: dict[PreparationKind, Preparers] = {
        "quick": _quick(count, "prepare"),
        "images": _slow(count, "prepare-images"),
        "documents": _slow(count, "prepare-documents"),
    }
    threads = Threads(
        preparing,
        _quick(count, "finish"),
        ThreadPoolExecutor(1, "stream"),
        ThreadPoolExecutor(1, "fp32"),
    )
    try:
        yield threads
    finally:
        pools = [one.threads for one in (*preparing.values(), threads.finishing)]
        for pool in (*pools, threads.streaming, threads.fp32):
            pool.shutdown(wait=False, cancel_futures=True)


def _quick(count: int, name: str) -> Preparers:
    return Preparers(ThreadPoolExecutor(count + MAX_AWAY, name), count)


def _slow(count: int, name: str) -> Preparers:
    return Preparers(
        ThreadPoolExecutor(count + MAX_SLOW_AWAY, name), count, MAX_SLOW_AWAY, is_slow=True
    )


class Worker:
    """One worker. Call `serve`, then `wind_down`. The module's `serve` opens its link, threads and
    task group.
    """

    def __init__(
        self,
        settings: Settings,
        device: Device,
        link: Link,
        threads: Threads,
        tasks: asyncio.TaskGroup,
        stop: asyncio.Event,
    ) -> None:
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._grace_seconds = settings.grace_seconds
        self._spot = parse_source(settings.spot)
        self._gone_at: float | None = None
        self._tasks = tasks
        self._pull_again = asyncio.Event()
        self._report_again = asyncio.Event()
        wake, waste = self._pull_again, Waste()
        residency = self._residency = _residency(
            settings, device, tasks, changed=self._models_changed
        )
        delivery = self._delivery = Delivery(link, tasks, residency.release, waste=waste)
        streamed = self._streamed = StreamedParts(link, tasks, threads.streaming)
        fair = partial(
            Preparation,
            threads.finishing,
            clock=time.monotonic,
            serves_others=self._serves_others,
            size=attrgetter("finish_bytes"),
        )
        fp32 = Fp32Fallback(threads.fp32, unix_time=link.clock.now)
        finisher = Finisher(delivery, streamed, fair, fp32, wake, unix_time=link.clock.now)
        runner = self._runner = DeviceRunner(
            BatchLimits(
                device.batch_tokens,
                settings.batch_items,
                settings.max_age_seconds,
                settings.batch_seconds,
            ),
            finisher,
            clock=time.monotonic,
            unix_time=link.clock.now,
            oom_recovery=OomRecovery(device.recover, device.trim, self._relieve),
            enter=device.enter,
            waste=waste,
            launches_ahead=device.batches_in_flight > 1,
            idle_work=residency.graphs,
        )
        residency.watch_device(runner.is_computing)
        self.metrics = WorkerMetrics(settings.pool, device, residency, waste, runner.device_time)
        heartbeat = self._heartbeat = Heartbeat(
            link,
            device,
            residency,
            delivery,
            waste,
            interval_seconds=settings.heartbeat_seconds,
            changed=self._report_again,
            drain=stop.set,
        )
        self._presence = PresenceStream(link, self._report_again)
        intake = JobIntake(
            link,
            residency,
            delivery,
            runner,
            finisher,
            preparers=threads.preparing,
            wake=wake,
        )
        self._puller = Puller(
            link,
            residency,
            runner,
            intake,
            pull_wait_seconds=settings.pull_wait_seconds,
            wake=wake,
            request_heartbeat=heartbeat.send_soon,
            stop=stop,
        )

    def _serves_others(self, caller: Caller) -> bool:
        """Ask the runner, which is created after the finisher but before the first job is
        finished.
        """
        return self._runner.serves_others(caller)

    async def serve(self) -> None:
        """Serve until `stop` is set or the device is lost."""
        self._runner.start()
        self._device = asyncio.wrap_future(self._runner.ended)
        # The loss of the device also sets `stop`.
        self._device.add_done_callback(lambda _: self._stop.set())
        self._watching = self._tasks.create_task(self._watch(self._spot)) if self._spot else None
        await self._list_disk()
        self._beating = self._tasks.create_task(self._heartbeat.run())
        self._attending = self._tasks.create_task(self._presence.run())
        self._pulling = self._tasks.create_task(self._puller.run())
        self._tasks.create_task(self._residency.run())
        self._tidying = self._tasks.create_task(memory.tidy())
        await self._stop.wait()

    async def wind_down(self) -> None:
        """Shut down gracefully: stop pulling, finish held jobs, return the rest, send the last
        heartbeat.
        """
        grace_seconds = (
            self._grace_seconds
            if self._gone_at is None
            else grace_left(self._gone_at, time.time(), self._grace_seconds)
        )
        log.info("the worker is shutting down", extra=fields({"grace_seconds": grace_seconds}))
        if self._watching is not None:
            self._watching.cancel()
        self._tidying.cancel()
        self._puller.stop()
        self._residency.stop()
        self._heartbeat.announce_drain()
        await self._pulling
        await self._finish_held(0.0 if self._device.done() else grace_seconds)
        self._runner.stop()
        self._beating.cancel()
        await _within(_GOODBYE_SECONDS, self._heartbeat.leave())
        self._attending.cancel()

    def check_device(self) -> None:
        """Raise the device's error if the device was lost."""
        if not self._device.cancel():
            self._device.result()

    async def _list_disk(self) -> None:
        """List the models on disk, unless `stop` is set first.

        The first heartbeat must have the full list. Because of an empty list, the mesh could order
        this worker to load a model that only another worker has on disk, or answer that no worker
        has it.
        """
        listing = self._tasks.create_task(self._residency.list_disk())
        stopped = self._tasks.create_task(self._stop.wait())
        await asyncio.wait((listing, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    async def _watch(self, spot: NoticeSource) -> None:
        """Wait for a preemption notice of the spot machine, then stop the worker in time."""
        gone_at = self._gone_at = await noticed(spot)
        log.warning(
            "the machine will be preempted; this worker stops first",
            extra=fields({"in_seconds": gone_at - time.time()}),
        )
        self._residency.refuse_loads()
        self._heartbeat.announce_end(gone_at)
        await asyncio.sleep(max(0.0, stops_at(gone_at, self._grace_seconds) - time.time()))
        self._stop.set()

    async def _finish_held(self, grace_seconds: float) -> None:
        if not await _within(grace_seconds, self._delivery.settled()):
            self._delivery.hand_back()
            if not await _within(_HAND_BACK_SECONDS, self._delivery.settled()):
                log.warning("some leases were not returned; leaving them to expire")
                self._delivery.give_up()
                self._streamed.give_up()

    def _relieve(self, keep: str) -> bool:
        """Call `Residency.relieve` from the device thread. Return whether memory was freed.
        Blocks.
        """
        if self._loop.is_closed():
            return False
        relief = asyncio.run_coroutine_threadsafe(self._residency.relieve(keep), self._loop)
        try:
            return relief.result(_RELIEF_SECONDS)
        except (TimeoutError, CancelledError):
            relief.cancel()
            return False

    def _models_changed(self) -> None:
        self._pull_again.set()
        self._report_again.set()
        self._runner.wake()


def _residency(
    settings: Settings, device: Device, tasks: asyncio.TaskGroup, *, changed: Callable[[], None]
) -> Residency:
    store_settings = (settings.store_dir, settings.store_bytes, settings.torch_checkpoints)
    store = open_store(settings.stores, *store_settings) if settings.stores else None
    return Residency(
        ModelFiles(
            settings.models,
            store,
            settings.catalog,
            item_bytes=device.item_bytes,
            has_int8=device.has_int8,
            copies=open_copies(*store_settings),
        ),
        device,
        tasks,
        clock=time.monotonic,
        changed=changed,
        policy=POLICIES[settings.eviction],
        load_seconds=settings.load_seconds,
        adapters=settings.adapters,
        image_cache_bytes=settings.image_cache_bytes,
    )


async def _within(seconds: float, work: Awaitable[None]) -> bool:
    """Await `work`. Return whether it ended in time."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True
