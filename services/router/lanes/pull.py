"""WorkerService: leases jobs to workers, and receives their answers and heartbeats. On the request
path, to the worker and back.

A pull waits here until it is notified of work in one of its lanes (`wakeups.py`). Redis is read
only for lanes that may have work.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

import grpc
from shoal.v1 import models_pb2, multiplex_pb2, worker_pb2, worker_pb2_grpc

from libs.errors import NoCapacity, PermissionDenied
from libs.fleet import LOADING_STATES, Fleet, FleetSnapshot
from libs.fleet.snapshot import HELD
from libs.fleet.versions import WIRE_VERSION, check_worker
from libs.queue import Idle, LaneGauges, LaneKey, Lanes, Pulled
from libs.serving import StreamCall, current_call
from libs.serving.security.identity import ANONYMOUS
from libs.telemetry.logs import fields
from services.router.admission.validation import reports
from services.router.lanes import codec
from services.router.lanes.broken_lanes import BrokenLanes
from services.router.lanes.dispatch import Dispatcher
from services.router.lanes.pending_pulls import PendingPull
from services.router.lanes.presence import WorkerPresence
from services.router.lanes.uncertain_leases import UncertainLeases
from services.router.lanes.wakeups import Wakeups
from services.router.state.background import Background
from services.router.state.view import RouterView

log = logging.getLogger(__name__)

_Batch = tuple[LaneKey, str, str]
"""The lane, worker and id of a batch."""

MAX_PULL_WAIT_SECONDS: Final = 10.0
MAX_PULL_JOBS: Final = 256
SEEN_MS: Final = 2_500
"""A claim's remaining time once a heartbeat shows the load. By then every router has read the
registry twice, and the heartbeat keeps other workers from claiming. With a longer claim, a model
that is evicted soon could not be loaded elsewhere.
"""


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The service for workers. Any router answers any worker."""

    def __init__(
        self,
        lanes: Lanes,
        fleet: Fleet,
        view: RouterView,
        wakeups: Wakeups,
        dispatcher: Dispatcher,
        background: Background,
        presence: WorkerPresence,
        broken: BrokenLanes,
    ) -> None:
        self._lanes = lanes
        self._fleet = fleet
        self._view = view
        self._wakeups = wakeups
        self._pending_pulls = wakeups.pending_pulls
        self._dispatcher = dispatcher
        self._background = background
        self._presence = presence
        self._broken = broken
        self._uncertain = UncertainLeases(lanes, background)
        # The state: for batches of cancelled pulls that are to be released, the last such pull.
        self._returning: dict[_Batch, asyncio.Future[Pulled | Idle]] = {}

    async def pull(
        self, request: worker_pb2.PullRequest, context: object
    ) -> worker_pb2.PullResponse:
        reports.check_pull(request)
        self._authorise(request.worker_id)
        check_worker(request.wire_version, request.worker_id)
        log.debug("pull", extra=fields({"worker": request.worker_id, "epoch": request.epoch}))
        lanes = [codec.to_lane(lane) for lane in request.lanes]
        pull = PendingPull(
            request.worker_id, request.pool, lanes, request.can_load, bool(request.except_tenants)
        )
        end = asyncio.get_running_loop().time() + min(request.wait_seconds, MAX_PULL_WAIT_SECONDS)
        self._pending_pulls.add(pull)
        claimed = None
        try:
            response = await self._retry_batch(pull, request) or await self._await_batch(
                pull, request, end
            )
            claimed = response.load_model
            response.now_unix_ms = self._lanes.clock_ms()
            return response
        finally:
            self._pending_pulls.remove(pull)
            if pull.load_lane and not claimed:
                self._wakeups.abandon(pull.load_lane, pull.worker_id)

    async def complete(
        self, request: worker_pb2.CompleteRequest, context: object
    ) -> worker_pb2.CompleteResponse:
        reports.check_complete(request)
        self._authorise(request.worker_id)
        results = [(job.job_id, job.result) for job in request.jobs]
        lane = codec.to_lane(request.lane)
        completed = await self._lanes.complete(
            lane, request.worker_id, request.batch_id, results, release=request.release
        )
        for job_id, result in completed.own:
            self._dispatcher.deliver(job_id, result)
        return worker_pb2.CompleteResponse(accepted=completed.accepted)

    async def forward_deltas(
        self, request: worker_pb2.DeltasRequest, context: object
    ) -> worker_pb2.DeltasResponse:
        """Forward deltas to this router's requests, or to the routers that wait for them."""
        reports.check_deltas(request)
        self._authorise(request.worker_id)
        elsewhere: dict[str, worker_pb2.DeltasRequest] = {}
        for part in request.deltas:
            if part.router == self._lanes.router_id:
                self._dispatcher.streamed(part)
            else:
                elsewhere.setdefault(part.router, worker_pb2.DeltasRequest()).deltas.append(part)
        forwarded = 0
        for router_id, parts in elsewhere.items():
            message = parts.SerializeToString()
            forwarded += len(message)
            await self._lanes.publish_streamed(router_id, message)
        return worker_pb2.DeltasResponse(forwarded_bytes=forwarded)

    async def Heartbeat(
        self,
        request: worker_pb2.HeartbeatRequest,
        context: grpc.aio.ServicerContext[
            worker_pb2.HeartbeatRequest, worker_pb2.HeartbeatResponse
        ],
    ) -> worker_pb2.HeartbeatResponse:
        reports.check_heartbeat(request)
        request.subject = self._authorise(request.worker_id)
        check_worker(request.wire_version, request.worker_id)
        # First, so that a notification during this heartbeat requests another one.
        self._pending_pulls.heartbeat_received(request.worker_id)
        if request.draining:
            self._pending_pulls.end_pulls(request.worker_id)
        cancelled = await self._renew(request.worker_id, request.batches)
        before = self._view.snapshot
        on_disk_tag = await self._fleet.report(request)
        self._view.notify()
        for lane in _newly_loading(request, before):
            await self._fleet.renew_claim(lane, request.worker_id, SEEN_MS)
        for lane in _newly_failed(request, before, self._view.gauges):
            await self._load_failed(lane, request.worker_id)
        directives = await self._fleet.orders(
            request.worker_id, request.epoch, request.directive_seq
        )
        queued = self._view.queued
        return worker_pb2.HeartbeatResponse(
            directives=directives,
            cancelled=cancelled,
            queued_tokens={
                model.model: tokens
                for model in request.models
                if model.state in HELD and (tokens := queued.get((request.pool, model.model), 0))
            },
            wire_version=WIRE_VERSION,
            on_disk_tag=on_disk_tag,
        )

    def Multiplex(
        self, request_iterator: AsyncIterator[multiplex_pb2.MultiplexRequest], context: object
    ) -> AsyncIterator[multiplex_pb2.MultiplexResponse]:
        """Never called: the interceptor answers each of the `stream_calls` separately."""
        raise NotImplementedError("libs/serving/calls/multiplex.py serves it")

    def stream_calls(self) -> dict[str, StreamCall]:
        """Return the calls that Multiplex carries."""
        return {
            "pull": StreamCall("Pull", worker_pb2.PullRequest, self.pull),
            "complete": StreamCall("Complete", worker_pb2.CompleteRequest, self.complete),
            "deltas": StreamCall("Deltas", worker_pb2.DeltasRequest, self.forward_deltas),
        }

    async def Connect(
        self,
        request: worker_pb2.ConnectRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse],
    ) -> AsyncIterator[worker_pb2.ConnectResponse]:
        reports.check_connect(request)
        check_worker(request.wire_version, request.worker_id)
        self._authorise(request.worker_id)
        yield worker_pb2.ConnectResponse()
        await self._presence.attend(request.worker_id, request.epoch)

    def _authorise(self, worker_id: str) -> str:
        """Authorise the use of a worker id, and return the subject of the call's credential, empty
        without one.

        Raises PermissionDenied if the heartbeats of that id have another subject. Every router
        knows it from the registry while heartbeats arrive. Workers that share a credential are one
        subject.
        """
        caller = current_call().identity
        subject = "" if caller == ANONYMOUS else caller.subject
        known = self._view.snapshot.workers.get(worker_id)
        if known is not None and known.subject and known.subject != subject:
            raise PermissionDenied(
                "this worker id is in use with another credential: give each worker a unique id"
            )
        return subject

    async def _await_batch(
        self, pull: PendingPull, request: worker_pb2.PullRequest, end: float
    ) -> worker_pb2.PullResponse:
        has_pulled = True
        while True:
            while not pull.is_ended and (lane := self._pending_pulls.next_lane(pull)) is not None:
                has_pulled = True
                pulled = await self._pull_lane(pull, lane, request)
                if pulled is not None:
                    return self._batch(lane, pulled, heartbeat_now=pull.must_send_heartbeat)
            if pull.is_ended:
                return worker_pb2.PullResponse()
            if (claimed := pull.load_lane) is not None:
                log.info(
                    "lane claimed", extra=fields({"lane": claimed.name, "worker": pull.worker_id})
                )
                return worker_pb2.PullResponse(
                    load_model=claimed.model,
                    load_adapter=claimed.adapter,
                    heartbeat_now=pull.must_send_heartbeat,
                )
            if pull.must_send_heartbeat:
                return worker_pb2.PullResponse(heartbeat_now=True)
            # While it pulled, lanes that need a worker were not offered to it.
            if has_pulled and not pull.exclude_tenants:
                self._wakeups.offer_unplaced(pull)
                has_pulled = False
            pull.event.clear()
            if self._pending_pulls.is_closed or not await _wait_until(pull.event, end):
                return worker_pb2.PullResponse()

    async def _retry_batch(
        self, pull: PendingPull, request: worker_pb2.PullRequest
    ) -> worker_pb2.PullResponse | None:
        """Return the batch already leased to this pull if its response was lost (idempotent
        retry).
        """
        if not request.asked_again:
            return None
        lane = await self._lanes.leasing(pull.lanes, request.batch_id)
        if lane is None:
            return None
        found = await self._pull_or_release(pull, lane, request, request.budget_jobs, notify=False)
        if not isinstance(found, Pulled):
            return None
        log.info(
            "batch given again",
            extra=fields({"lane": lane.name, "worker": request.worker_id, "jobs": len(found.jobs)}),
        )
        return self._batch(lane, found)

    def _batch(
        self, lane: LaneKey, pulled: Pulled, *, heartbeat_now: bool = False
    ) -> worker_pb2.PullResponse:
        payloads = [job.payload for job in pulled.jobs]
        return worker_pb2.PullResponse(
            lane=codec.from_lane(lane),
            batch_id=pulled.batch_id,
            jobs=payloads,
            lease_ms=self._lanes.lease_ms,
            heartbeat_now=heartbeat_now,
        )

    async def _pull_lane(
        self, pull: PendingPull, lane: LaneKey, request: worker_pb2.PullRequest
    ) -> Pulled | None:
        share = pull.notified.pop(lane, 0)
        budget_jobs = min(request.budget_jobs, share or MAX_PULL_JOBS, MAX_PULL_JOBS)
        notifications = self._pending_pulls.notifications(lane)
        self._pending_pulls.begin_pull(pull, lane)
        try:
            notify = not (pull.exclude_tenants or self._pending_pulls.free_count(lane))
            found = await self._pull_or_release(pull, lane, request, budget_jobs, notify=notify)
        finally:
            pull.pulling_from = None
        if pull.exclude_tenants:
            return found if isinstance(found, Pulled) else None
        promised, pull.promised = pull.promised, ""
        if isinstance(found, Idle):
            self._wakeups.found_empty(lane, notifications, found.next_expiry_ms)
            return None
        if found.more or (promised and all(job.job_id != promised for job in found.jobs)):
            pull.pulling_from = lane  # this pull has its jobs: the rest are for other pulls
            self._wakeups.notify(lane, is_new=False)
        else:  # It has also seen the jobs of notifications that it caused itself.
            self._wakeups.found_empty(
                lane, notifications + (pull.own_notifications if promised else 0)
            )
        return found

    async def _pull_or_release(
        self,
        pull: PendingPull,
        lane: LaneKey,
        request: worker_pb2.PullRequest,
        budget_jobs: int,
        *,
        notify: bool,
    ) -> Pulled | Idle:
        """Lease a batch. If a master of a cluster does not answer, a batch that it may have leased
        is released later. The lane counts as empty for a minute at most, and for this pull until it
        ends: other lanes may be on a master that answers.
        """
        with self._lanes.masters.tolerate_away():
            async with self._lanes.masters.within_timeout():
                return await self._pull(lane, request, budget_jobs, notify=notify)
        pull.mark_away(lane)
        return Idle(None)

    async def _pull(
        self, lane: LaneKey, request: worker_pb2.PullRequest, budget_jobs: int, *, notify: bool
    ) -> Pulled | Idle:
        """Lease a batch. On cancellation the batch returns to the lane without an attempt
        counted.
        """
        # An earlier call with this batch id may have been cancelled or had no answer: now the batch
        # is to be given.
        batch = (lane, request.worker_id, request.batch_id)
        self._returning.pop(batch, None)
        self._uncertain.forget(*batch)
        work = self._lanes.pull(
            lane,
            worker_id=request.worker_id,
            batch_id=request.batch_id,
            budget_tokens=request.budget_tokens,
            budget_jobs=budget_jobs,
            notify=notify,
            exclude_tenants=request.except_tenants,
        )
        pulling = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(pulling)
        except asyncio.CancelledError:
            self._returning[batch] = pulling
            self._background.spawn(self._hand_back(batch, pulling))
            raise
        except NoCapacity:
            if self._lanes.masters.is_sharded:
                self._uncertain.add(*batch)
            raise

    async def _hand_back(self, batch: _Batch, pulling: asyncio.Future[Pulled | Idle]) -> None:
        """Release the batch of a cancelled pull once it has been leased, unless it is pulled
        again.
        """
        lane, worker_id, _ = batch
        try:
            found = await pulling
            if isinstance(found, Pulled) and self._is_last(batch, pulling):
                await self._lanes.complete(lane, worker_id, found.batch_id, [], release=True)
        except NoCapacity:
            if not self._lanes.masters.is_sharded:
                raise
            if self._is_last(batch, pulling):
                self._uncertain.add(*batch)
        finally:
            if self._returning.get(batch) is pulling:
                del self._returning[batch]

    def _is_last(self, batch: _Batch, pulling: asyncio.Future[Pulled | Idle]) -> bool:
        """Return False if the batch was pulled again. A pull without a batch id has another batch
        each time.
        """
        return not batch[-1] or self._returning.get(batch) is pulling

    async def _renew(
        self, worker_id: str, batches: Sequence[worker_pb2.HeldBatch]
    ) -> list[worker_pb2.CancelledJobs]:
        by_lane: dict[LaneKey, list[str]] = defaultdict(list)
        for batch in batches:
            by_lane[codec.to_lane(batch.lane)].append(batch.batch_id)
        cancelled: list[worker_pb2.CancelledJobs] = []

        async def renew(lane: LaneKey) -> None:
            cancelled.extend(
                worker_pb2.CancelledJobs(batch_id=old.batch_id, job_ids=old.gone, lost=old.lost)
                for old in await self._lanes.renew(lane, worker_id, by_lane[lane])
                if old.lost or old.gone
            )

        # The registry may be on another master, and must not take the worker for dead.
        with self._lanes.masters.tolerate_away():
            await self._lanes.masters.for_each_lane(by_lane, renew)
        return cancelled

    async def _load_failed(self, lane: LaneKey, worker_id: str) -> None:
        log.warning("failed to load", extra=fields({"lane": lane.name, "worker": worker_id}))
        if not await self._broken.fail_if_broken(lane):
            self._wakeups.abandon(lane, worker_id)


async def _wait_until(event: asyncio.Event, end: float) -> bool:
    """Return False if `end` (the loop's clock) is reached first."""
    try:
        async with asyncio.timeout_at(end):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _newly_loading(heartbeat: worker_pb2.HeartbeatRequest, before: FleetSnapshot) -> list[LaneKey]:
    """Return the lanes of models that this heartbeat is the first to report as downloading, loading
    or resident on the worker.
    """
    known = before.workers.get(heartbeat.worker_id)
    here = (*LOADING_STATES, models_pb2.MODEL_STATE_RESIDENT)
    present = [model.model for model in heartbeat.models if model.state in here]
    return [
        LaneKey(heartbeat.pool, model)
        for model in present
        if known is None or known.state(model) not in here
    ]


def _newly_failed(
    heartbeat: worker_pb2.HeartbeatRequest,
    before: FleetSnapshot,
    gauges: Mapping[LaneKey, LaneGauges],
) -> list[LaneKey]:
    """Return the lanes of models and adapters for which this heartbeat is the first to report a
    failed load.
    """
    known = before.workers.get(heartbeat.worker_id)
    lanes: list[LaneKey] = []
    for model in heartbeat.models:
        record = known.models.get(model.model) if known is not None else None
        if (
            model.state == models_pb2.MODEL_STATE_FAILED
            and heartbeat.worker_id not in before.failures.get(model.model, {})
        ):
            lanes.append(LaneKey(heartbeat.pool, model.model))
            lanes += [
                lane
                for lane in gauges
                if lane.adapter and (lane.pool, lane.model) == (heartbeat.pool, model.model)
            ]
        lanes += [
            LaneKey(heartbeat.pool, model.model, adapter)
            for adapter in model.failed_adapters
            if record is None or adapter not in record.failed_adapters
        ]
    return lanes
