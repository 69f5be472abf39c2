"""InferenceService: decode, decide, act, encode; nothing else. A request's way through the router, read top to bottom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, TypeVar

import grpc
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc, models_pb2

from libs.errors import ModelBroken, ModelNotFound
from libs.fleet import FleetSnapshot
from libs.queue import LaneGauges, LaneKey, Lanes, Priority, QueuedJob
from libs.serving import Call, Deadline, current_call
from services.router import admission, codec, validation
from services.router.admission import Load
from services.router.codec import Request, Response, Stamp
from services.router.dispatch import Dispatcher, Plan
from services.router.routes import Routes, Wanted, choose_lane, has_other_pool, refuse_pool
from services.router.validation import Sizes
from services.router.view import View

LARGE_BYTES: Final = 256 * 1024
"""From here on a request is taken apart, and its answer put together, in a thread: the event loop serves others meanwhile."""
LONGEST_DEADLINE_SECONDS: Final = 86_400.0
ANSWER_SECONDS: Final = 0.05
"""Kept back from a client's deadline, so that it hears why it was missed."""

_Request = TypeVar("_Request", pb.EncodeRequest, pb.ScoreRequest, pb.ExtractRequest)
_Result = TypeVar("_Result")
_Check: TypeAlias = Callable[[_Request, models_pb2.ModelCard | None], Sizes]


@dataclass(frozen=True, slots=True)
class _Moment:
    """What a request is decided on. now_ms: Redis' clock; seconds: until the answer is worthless."""

    snapshot: FleetSnapshot
    routes: Routes
    lane: LaneKey
    gauges: LaneGauges
    load: Load
    weight: float
    priority: Priority
    now_ms: int
    seconds: float


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The three verbs."""

    def __init__(
        self,
        lanes: Lanes,
        view: View,
        dispatcher: Dispatcher,
        *,
        routes: Routes,
        tenant_weights: Mapping[str, float],
        default_deadline_seconds: float,
    ) -> None:
        self._lanes = lanes
        self._view = view
        self._dispatcher = dispatcher
        self._routes = routes
        self._tenant_weights = tenant_weights
        self._default_deadline_seconds = default_deadline_seconds

    async def Encode(
        self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext[pb.EncodeRequest, pb.EncodeResponse]
    ) -> pb.EncodeResponse:
        begin = time.perf_counter()
        answers = await self._run(request, validation.check_encode, context.time_remaining())
        response = await _maybe_in_thread(_size(answers), partial(codec.merge_encode, answers))
        response.timings.total_seconds = time.perf_counter() - begin
        return response

    async def Score(
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[pb.ScoreRequest, pb.ScoreResponse]
    ) -> pb.ScoreResponse:
        begin = time.perf_counter()
        answers = await self._run(request, validation.check_score, context.time_remaining())
        response = codec.merge_score(answers, request.top_n)
        response.timings.total_seconds = time.perf_counter() - begin
        return response

    async def Extract(
        self, request: pb.ExtractRequest, context: grpc.aio.ServicerContext[pb.ExtractRequest, pb.ExtractResponse]
    ) -> pb.ExtractResponse:
        begin = time.perf_counter()
        answers = await self._run(request, validation.check_extract, context.time_remaining())
        response = await _maybe_in_thread(_size(answers), partial(codec.merge_extract, answers))
        response.timings.total_seconds = time.perf_counter() - begin
        return response

    async def _run(self, request: _Request, check: _Check[_Request], client_seconds: float | None) -> list[Response]:
        call = current_call()
        seconds = _patience(client_seconds, self._default_deadline_seconds)
        deadline = Deadline.after(seconds, asyncio.get_running_loop().time())
        wanted = Wanted(request.model, request.adapter, request.pool)
        failed: list[str] = []
        while True:
            moment = self._moment(wanted, request, call, deadline.remaining(asyncio.get_running_loop().time()), failed)
            plan = await _maybe_in_thread(len(call.body), partial(_plan, request, check, call, moment))
            try:
                return await self._dispatcher.run(plan, deadline)
            except (ModelBroken, ModelNotFound):
                failed.append(plan.lane.pool)
                if not has_other_pool(wanted, self._routes, self._view.snapshot, failed):
                    raise

    def _moment(self, wanted: Wanted, request: Request, call: Call, seconds: float, failed: Sequence[str]) -> _Moment:
        """What is known now; taken on the event loop, because a thread must not read what the loop changes."""
        snapshot = self._view.snapshot
        lane = choose_lane(wanted, self._routes, snapshot, self._view.backlog, seconds, failed)
        weight = self._tenant_weights.get(call.tenant, 1.0)
        priority = admission.priority_name(request.priority)
        load = self._dispatcher.load(lane, call.tenant, weight, priority)
        return _Moment(
            snapshot, self._routes, lane, self._view.gauges_of(lane), load, weight, priority, self._lanes.clock_ms(), seconds
        )


def _plan(request: _Request, check: _Check[_Request], call: Call, moment: _Moment) -> Plan:
    """Everything that is decided about a request before it is queued. Pure."""
    snapshot, lane, seconds = moment.snapshot, moment.lane, moment.seconds
    card = snapshot.card(request.model)
    sizes = check(request, card)
    refuse_pool(request.pool, moment.routes, snapshot)
    admission.refuse_broken(lane, snapshot)
    costs, repeated = admission.price(sizes, card, request.truncation)
    total = sum(costs) + repeated
    rate = admission.lane_rate(lane, snapshot)
    admission.refuse_late(seconds, rate, moment.gauges, moment.load, moment.weight)
    parts = admission.split(costs, admission.job_target(total, lane, snapshot), repeated)
    digest = admission.request_digest(call.tenant, call.request_id, call.method, call.body)
    ids = [admission.job_id(digest, part) for part in parts]
    stamp = Stamp(call.request_id, moment.now_ms + int(seconds * 1000), moment.now_ms)
    payloads = codec.job_payloads(request, parts, ids, stamp)
    jobs = [
        QueuedJob(job_id, call.tenant, moment.weight, part.tokens, stamp.deadline_ms, moment.priority, payload)
        for job_id, part, payload in zip(ids, parts, payloads, strict=True)
    ]
    return Plan(lane, jobs)


def _patience(client_seconds: float | None, default_seconds: float) -> float:
    """Seconds until the answer is worthless."""
    if client_seconds is None:
        return default_seconds
    return min(client_seconds - min(ANSWER_SECONDS, client_seconds / 10), LONGEST_DEADLINE_SECONDS)


def _size(answers: list[Response]) -> int:
    # One answer is passed on as it is.
    return sum(answer.ByteSize() for answer in answers) if len(answers) > 1 else 0


async def _maybe_in_thread(size: int, work: Callable[[], _Result]) -> _Result:
    return await asyncio.to_thread(work) if size >= LARGE_BYTES else work()
