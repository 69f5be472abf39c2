"""Reports this worker's state to the routers, and executes the orders in their replies.

Not on the request path: renews the leases of held batches, and receives cancellations and
orders.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from shoal.v1 import worker_pb2

from libs.errors import ShoalError
from libs.telemetry.logs import fields
from libs.versions import WIRE_VERSION
from services.worker.jobs.answers.delivery import Delivery
from services.worker.jobs.waste import Waste
from services.worker.machine.device import Device
from services.worker.memory import report
from services.worker.memory.files import OnDisk
from services.worker.memory.residency import Residency
from services.worker.mesh.link import Link

log = logging.getLogger(__name__)

LIST_SECONDS: Final = 600.0
"""The models on disk are listed again after this time, even if routers know them: their cards may
have been merged with those of a worker that is gone.
"""

_RENEW_SHARE: Final = 0.25
"""Maximum heartbeat interval as a share of a lease's duration, so that three heartbeats may fail
before the lease expires.
"""

_PAUSE_FACTOR, _MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 4.0, 0.02, 0.25
"""Backpressure on heartbeats that routers request: the pause is 4 times the duration of the last
heartbeat, within these bounds in seconds. Cancellations can request a hundred per second, and slow
routers are called less often.
"""


class Heartbeat:
    """Sends heartbeats from `run`.

    Args:
        interval_seconds: Time between heartbeats.
        changed: Set to send a heartbeat early.
        drain: Called when a router orders it.
    """

    def __init__(
        self,
        link: Link,
        device: Device,
        residency: Residency,
        delivery: Delivery,
        waste: Waste,
        *,
        interval_seconds: float,
        changed: asyncio.Event,
        drain: Callable[[], None],
    ) -> None:
        self._link = link
        self._device = device
        self._residency = residency
        self._delivery = delivery
        self._waste = waste
        self._interval_seconds = interval_seconds
        self._changed = changed
        self._drain = drain
        self._loop = asyncio.get_running_loop()
        # Mutable state.
        self._earliest_at = 0.0
        self._directive_seq = 0
        self._plan = 0
        self._draining = False
        self._router_version = 0
        self._gone_at: float | None = None
        # The models on disk that routers know, since when, and their tag.
        self._known_on_disk: Mapping[str, OnDisk] | None = None
        self._listed_at = 0.0
        self._on_disk_tag = ""

    async def run(self) -> None:
        while True:
            self._changed.clear()
            began = self._loop.time()
            await self._send(self._message())
            ended = self._loop.time()
            self._earliest_at = ended + min(
                max(_MIN_PAUSE_SECONDS, _PAUSE_FACTOR * (ended - began)), _MAX_PAUSE_SECONDS
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(
                    min(self._interval_seconds, self._delivery.lease_seconds * _RENEW_SHARE)
                ):
                    await self._changed.wait()

    def send_soon(self) -> None:
        """Schedule an early heartbeat, because a router has orders or cancellations for this
        worker.
        """
        self._loop.call_at(self._earliest_at, self._changed.set)

    def announce_drain(self) -> None:
        """Report in heartbeats that this worker is draining and takes no more work."""
        self._draining = True
        self._changed.set()

    def announce_end(self, gone_at: float) -> None:
        """Report in heartbeats when (Unix time) the machine is preempted."""
        self._gone_at = gone_at
        self._changed.set()

    async def leave(self) -> None:
        """Send the last heartbeat."""
        await self._send(self._message(leaving=True))

    def apply(self, response: worker_pb2.HeartbeatResponse) -> None:
        """Apply a heartbeat's reply: cancel jobs, and execute each order once, in sequence."""
        for cancelled in response.cancelled:
            self._delivery.cancel(cancelled)
        self._residency.set_backlog(dict(response.queued_tokens))
        for directive in response.directives:
            if directive.seq > self._directive_seq:
                self._directive_seq = directive.seq
                if 0 < directive.plan < self._plan:
                    log.info(
                        "ignoring an order of an older plan",
                        extra=fields({"seq": directive.seq, "plan": directive.plan}),
                    )
                    continue
                self._plan = max(self._plan, directive.plan)
                self._obey(directive)

    async def _send(self, message: worker_pb2.HeartbeatRequest) -> None:
        on_disk = self._residency.on_disk
        try:
            response = await self._link.heartbeat(message)
            self._router_version = response.wire_version
            self._known_on_disk, self._on_disk_tag = on_disk, response.on_disk_tag
            if message.on_disk:
                self._listed_at = self._loop.time()
            if message.on_disk_tag and not response.on_disk_tag:
                self._changed.set()  # the list is unknown: the next heartbeat has it
            self.apply(response)
        except ShoalError as error:
            log.debug("a heartbeat failed", extra=fields({"reason": error.message}))

    def _obey(self, directive: worker_pb2.Directive) -> None:
        order = directive.WhichOneof("order")
        log.info(
            "order", extra=fields({"order": order, "seq": directive.seq, "plan": directive.plan})
        )
        match order:
            case "load_model":
                self._residency.load(directive.load_model)
            case "evict_model":
                self._residency.evict(directive.evict_model, by_plan=directive.plan > 0)
            case "pin_model":
                self._residency.pin(directive.pin_model, True)
            case "unpin_model":
                self._residency.pin(directive.unpin_model, False)
            case "drain" if directive.drain:
                self._drain()
            case None:
                versions = {
                    "seq": directive.seq,
                    "wire_version": WIRE_VERSION,
                    "router_wire_version": self._router_version,
                }
                log.warning(
                    "skipping an unknown order: upgrade the worker",
                    extra=fields(versions),
                )

    def _message(self, *, leaving: bool = False) -> worker_pb2.HeartbeatRequest:
        on_disk = self._residency.on_disk
        is_known = (
            on_disk is self._known_on_disk and self._loop.time() < self._listed_at + LIST_SECONDS
        )
        tag = self._on_disk_tag if is_known else ""
        return worker_pb2.HeartbeatRequest(
            worker_id=self._link.identity.worker_id,
            epoch=self._link.identity.epoch,
            pool=self._link.identity.pool,
            device=self._device.name,
            kernels=self._device.kernels,
            memory_bytes=self._device.memory_bytes,
            used_bytes=self._residency.used_bytes,
            models=self._residency.report(),
            on_disk=() if tag else report.on_disk(on_disk),
            on_disk_tag=tag,
            batches=self._delivery.held_batches(),
            draining=self._draining,
            batch_tokens=self._device.batch_tokens,
            leaving=leaving,
            directive_seq=self._directive_seq,
            host_memory_bytes=self._residency.host_bytes,
            host_used_bytes=self._residency.host_used_bytes,
            plan=self._plan,
            wire_version=WIRE_VERSION,
            local_models_only=not self._residency.can_fetch,
            device_seconds=self._waste.device_seconds,
            wasted_seconds=self._waste.wasted_seconds,
            preempted_in_seconds=None
            if self._gone_at is None
            else max(0.0, self._gone_at - time.time()),
        )
