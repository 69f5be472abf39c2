"""InferenceService: the request path through the router, read top to bottom. Decode, decide, act, encode; nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, TypeVar

import grpc
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc, models_pb2

from libs.errors import ModelBroken, ModelNotFound, QueueFull, RateLimited
from libs.fleet import FleetSnapshot
from libs.queue import LaneKey, Lanes, Priority, QueuedJob
from libs.queue.rates import Rates
from libs.serving import Call, Deadline, current_call
from libs.serving.watched import Watched
from libs.telemetry import traces
from services.router.admission import control as admission
from services.router.admission import validation
from services.router.admission.appointments import Appointments
from services.router.admission.routes import Routes, Wanted, choose_lane, has_other_pool, refuse_pool
from services.router.admission.standings import Answer, LaneAsker
from services.router.admission.tenants import Tenant, Tenants
from services.router.admission.validation import Sizes
from services.router.flight import Flight, Held, Rpc
from services.router.lanes import codec
from services.router.lanes.chunks import Parts
from services.router.lanes.codec import Request, Response, Stamp
from services.router.lanes.dispatch import Answered, Dispatcher, Plan
from services.router.state.pace import Pace
from services.router.state.view import View, is_new

LARGE_BYTES: Final = 256 * 1024
"""From this size on a request is split, and its answer merged, in a thread, so that the event loop goes on serving others."""
LONGEST_DEADLINE_SECONDS: Final = 86_400.0
ANSWER_SECONDS: Final = 0.05
"""Subtracted from a client's deadline, so that the error that says why it was missed still reaches the client."""

_Request = TypeVar("_Request", pb.EncodeRequest, pb.ScoreRequest, pb.ExtractRequest)
_Result = TypeVar("_Result")
_Check: TypeAlias = Callable[[_Request, models_pb2.ModelCard | None], Sizes]


@dataclass(frozen=True, slots=True)
class _Moment:
    """The inputs of the admission decision on one request.

    answer: its lane's standing, None where that cannot make it late; waiting_tokens: those of its tenant at this router, 0 without
    a quota; lane_tokens: those of its tenant in its lane; unknown: lanes of models that no worker knows, with the tenants that wait
    there, None unless this request would open one more; now_ms: Redis' clock; seconds: until its deadline."""

    snapshot: FleetSnapshot
    routes: Routes
    lane: LaneKey
    pace: Pace
    answer: Answer | None
    tenant: Tenant
    waiting_tokens: int
    lane_tokens: int
    unknown: Mapping[LaneKey, Collection[str]] | None
    priority: Priority
    now_ms: int
    seconds: float
    most_seconds: float


@dataclass(frozen=True, slots=True)
class _Price:
    """Estimated tokens of a request: of each item, and of what every job repeats. `read`: bytes to be read for each item."""

    costs: Sequence[int]
    repeated: int
    read: Sequence[int]

    @property
    def tokens(self) -> int:
        return sum(self.costs) + self.repeated


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The three verbs."""

    def __init__(
        self,
        lanes: Lanes,
        view: View,
        dispatcher: Dispatcher,
        asker: LaneAsker,
        rates: Rates,
        flight: Flight,
        *,
        routes: Watched[Routes],
        tenants: Watched[Tenants],
        default_deadline_seconds: float,
        max_queued_seconds: float,
    ) -> None:
        self._lanes = lanes
        self._view = view
        self._dispatcher = dispatcher
        self._asker = asker
        self._rates = rates
        self._flight = flight
        self._appointments = Appointments()
        self._routes = routes
        self._tenants = tenants
        self._default_deadline_seconds = default_deadline_seconds
        self._max_queued_seconds = max_queued_seconds

    async def Encode(
        self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext[pb.EncodeRequest, pb.EncodeResponse]
    ) -> pb.EncodeResponse:
        begin = time.perf_counter()
        held = self._hold(request, context)
        answers = await self._run(request, validation.check_encode, context.time_remaining(), held)
        response = await _maybe_in_thread(_size(answers), partial(codec.merge_encode, answers))
        response.timings.total_seconds = time.perf_counter() - begin
        held.sending(response.ByteSize())
        return response

    async def EncodeStream(
        self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext[pb.EncodeRequest, pb.EncodeResponse]
    ) -> AsyncIterator[pb.EncodeResponse]:
        begin = time.perf_counter()
        held = self._hold(request, context)
        answers = self._answers(request, validation.check_encode, context.time_remaining(), held, whole=False)
        parts = Parts()
        async with aclosing(answers):
            async for answer in answers:
                total_seconds = time.perf_counter() - begin if answer.is_last else None
                messages = parts.of(codec.encode_answer(answer.response), total_seconds=total_seconds)
                size = answer.size
                del answer  # Neither it nor its messages are kept while the next one is waited for.
                while (message := await _maybe_in_thread(size, partial(next, messages, None))) is not None:
                    yield message
                del messages
                held.sent(size)

    async def Score(
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[pb.ScoreRequest, pb.ScoreResponse]
    ) -> pb.ScoreResponse:
        begin = time.perf_counter()
        held = self._hold(request, context)
        answers = await self._run(request, validation.check_score, context.time_remaining(), held)
        response = codec.merge_score(answers, request.top_n)
        response.timings.total_seconds = time.perf_counter() - begin
        held.sending(response.ByteSize())
        return response

    async def Extract(
        self, request: pb.ExtractRequest, context: grpc.aio.ServicerContext[pb.ExtractRequest, pb.ExtractResponse]
    ) -> pb.ExtractResponse:
        begin = time.perf_counter()
        held = self._hold(request, context)
        answers = await self._run(request, validation.check_extract, context.time_remaining(), held)
        response = await _maybe_in_thread(_size(answers), partial(codec.merge_extract, answers))
        response.timings.total_seconds = time.perf_counter() - begin
        held.sending(response.ByteSize())
        return response

    def _hold(self, request: Request, rpc: Rpc) -> Held:
        call = current_call()
        return self._flight.enter(len(call.body), call.tenant, rpc, codec.count_parts(request))

    async def _run(self, request: _Request, check: _Check[_Request], client_seconds: float | None, held: Held) -> list[Response]:
        """The answers to all jobs of a request, in order."""
        return [answer.response async for answer in self._answers(request, check, client_seconds, held)]

    async def _answers(
        self, request: _Request, check: _Check[_Request], client_seconds: float | None, held: Held, *, whole: bool = True
    ) -> AsyncGenerator[Answered]:
        """Yields the same answers one by one (`Dispatcher.run`). Fails over to another pool only while none has been yielded."""
        call = current_call()
        seconds = _patience(client_seconds, self._default_deadline_seconds)
        deadline = Deadline.after(seconds, asyncio.get_running_loop().time())
        wanted = Wanted(request.model, request.adapter, request.pool)
        failed: list[str] = []
        has_begun = False
        while True:
            remaining = deadline.remaining(asyncio.get_running_loop().time())
            moment = await self._moment(wanted, request, call, remaining, failed)
            price = await _maybe_in_thread(len(call.body), partial(_price, request, check, moment))
            self._refuse(moment, call.tenant, price.tokens)
            charge = None if failed else await self._charge(call.tenant, moment.tenant, price.tokens)
            try:
                async with aclosing(self._send(request, call, moment, price, deadline, held, whole)) as answers:
                    async for answer in answers:
                        has_begun = True
                        yield answer
                        del answer  # Before the next one is waited for.
                return
            except (ModelBroken, ModelNotFound):
                failed.append(moment.lane.pool)
                if has_begun or not has_other_pool(wanted, self._routes.content, self._view.snapshot, failed):
                    raise
            except QueueFull:
                if charge is not None:
                    await charge()
                raise

    async def _send(
        self, request: _Request, call: Call, moment: _Moment, price: _Price, deadline: Deadline, held: Held, whole: bool
    ) -> AsyncGenerator[Answered]:
        lane = moment.lane
        with traces.sending(traces.lane_name(lane.pool, lane.model, lane.adapter)) as span:
            traceparent = traces.traceparent_of(span)
            plan = await _maybe_in_thread(len(call.body), partial(_plan, request, call, moment, price, traceparent))
            span.set_attribute("messaging.batch.message_count", len(plan.jobs))
            on_answer = held.answered if whole else held.kept
            async with aclosing(self._dispatcher.run(plan, deadline, on_answer, whole=whole)) as answers:
                async for answer in answers:
                    yield answer
                    del answer  # Before the next one is waited for.

    def _refuse(self, moment: _Moment, tenant: str, tokens: int) -> None:
        """Admission control: raises QueueFull for a request that should not be started now."""
        if moment.unknown is not None:
            admission.refuse_unknown(moment.lane, tenant, moment.unknown)
        admission.refuse_hoard(tokens, moment.waiting_tokens, moment.tenant.queued_tokens, moment.pace)
        if moment.answer is None:
            return
        standing, since = moment.answer.standing, moment.answer.since
        try:
            admission.refuse_late(
                moment.seconds,
                moment.most_seconds,
                moment.pace,
                standing,
                moment.priority,
                own_tokens=tokens,
                since=since,
                waiting_tokens=moment.lane_tokens,
            )
        except QueueFull as refusal:
            refusal.retry_after = self._appointments.give(
                moment.lane,
                soonest=refusal.retry_after,
                remaining=moment.seconds,
                cost=moment.pace.seconds(tokens),
                now=asyncio.get_running_loop().time(),
            )
            raise
        moment.answer.let_in(tokens)

    async def _charge(self, name: str, tenant: Tenant, tokens: int) -> Callable[[], Awaitable[None]] | None:
        """Charges a request to its tenant's rate limit and returns how to refund it. Raises RateLimited, without charging."""
        if not tenant.rate.is_limited:
            return None
        wait = await self._rates.take(name, tenant.rate, tokens)
        if wait > 0:
            raise RateLimited(f"tenant {name} may ask for {tenant.rate}; this would pass in {wait:.3f} s", retry_after=wait)
        return partial(self._rates.give_back, name, tenant.rate, tokens)

    async def _moment(self, wanted: Wanted, request: Request, call: Call, seconds: float, failed: Sequence[str]) -> _Moment:
        """Gathers the inputs of admission on the event loop, because a thread must not read what the loop changes."""
        snapshot = self._view.snapshot
        routes = self._routes.content
        lane = choose_lane(wanted, routes, snapshot, self._view.backlog, seconds, failed)
        pace = self._view.pace(lane)
        gauges, here = self._view.gauges_of(lane), self._dispatcher.lanes
        tokens = max(gauges.queued_tokens + gauges.leased_tokens, sum(here.get(lane, {}).values()))
        is_near = admission.is_near(min(seconds, self._max_queued_seconds), pace, tokens)
        tenant = self._tenants.content.of(call.tenant)
        return _Moment(
            snapshot=snapshot,
            routes=routes,
            lane=lane,
            pace=pace,
            answer=await self._asker.of(lane, call.tenant) if is_near else None,
            tenant=tenant,
            waiting_tokens=self._dispatcher.tenant_tokens(call.tenant) if tenant.queued_tokens else 0,
            lane_tokens=here.get(lane, {}).get(call.tenant, 0),
            unknown=self._dispatcher.unknown() if lane not in here and is_new(lane.model, snapshot) else None,
            priority=admission.priority_name(request.priority),
            now_ms=self._lanes.clock_ms(),
            seconds=seconds,
            most_seconds=self._max_queued_seconds,
        )


def _price(request: _Request, check: _Check[_Request], moment: _Moment) -> _Price:
    """Refuses an invalid request, or one that its pool cannot serve; prices any other. Pure."""
    snapshot = moment.snapshot
    card = snapshot.card(request.model)
    sizes = check(request, card)
    refuse_pool(request.pool, moment.routes, snapshot)
    admission.refuse_broken(moment.lane, snapshot)
    return _Price(*admission.price(sizes, card, request.truncation), sizes.read)


def _plan(request: _Request, call: Call, moment: _Moment, price: _Price, traceparent: str) -> Plan:
    """The jobs of an admitted request. Pure."""
    lane = moment.lane
    target = admission.job_target(price.tokens, lane, moment.snapshot)
    parts, shared = admission.parts(price.costs, price.read, target, price.repeated), None
    if len(parts) > 1:
        shared = codec.without_items(request)
        most = admission.most_jobs(len(call.body), shared.ByteSize())
        if len(parts) > most:
            parts = admission.parts(price.costs, price.read, target, price.repeated, most)
    digest = admission.request_digest(call.tenant, call.request_id, call.method, call.body)
    ids = [admission.job_id(digest, part) for part in parts]
    weight, deadline_ms = moment.tenant.weight, moment.now_ms + int(moment.seconds * 1000)
    stamp = Stamp(call.request_id, deadline_ms, moment.now_ms, call.tenant, weight, traceparent)
    payloads = codec.job_payloads(request, parts, ids, stamp, shared)
    jobs = [
        QueuedJob(job_id, call.tenant, weight, part.tokens, stamp.deadline_ms, moment.priority, payload)
        for job_id, part, payload in zip(ids, parts, payloads, strict=True)
    ]
    return Plan(lane, jobs, moment.pace, moment.unknown is not None)


def _patience(client_seconds: float | None, default_seconds: float) -> float:
    """Seconds until the deadline that the router keeps: the client's, less ANSWER_SECONDS, or the default."""
    if client_seconds is None:
        return default_seconds
    return min(client_seconds - min(ANSWER_SECONDS, client_seconds / 10), LONGEST_DEADLINE_SECONDS)


def _size(answers: list[Response]) -> int:
    # One answer is passed on as it is.
    return sum(answer.ByteSize() for answer in answers) if len(answers) > 1 else 0


async def _maybe_in_thread(size: int, work: Callable[[], _Result]) -> _Result:
    return await asyncio.to_thread(work) if size >= LARGE_BYTES else work()
