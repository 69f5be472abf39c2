"""InferenceService: the request path through the router, read top to bottom: decode, decide, act,
encode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, TypeVar

import grpc
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc, models_pb2, multiplex_pb2

from libs.aliases import AliasStore
from libs.documents.text_size import TextBudget
from libs.embedding_id import check_expected
from libs.errors import ModelBroken, ModelNotFound, ModelUnreachable, QueueFull
from libs.queue import Priority, QueuedJob
from libs.serving import Call, Deadline, StreamCall, current_call
from libs.telemetry import traces
from libs.telemetry.logs import MODEL
from services.router.admission import pricing, rules, splitting
from services.router.admission.controller import AdmissionContext, AdmissionController
from services.router.admission.routing.routes import Target, refuse_pool
from services.router.admission.tenants import Charge
from services.router.admission.validation import answer_bounds
from services.router.admission.validation.requests import (
    check_encode,
    check_extract,
    check_score,
)
from services.router.admission.validation.sizes import Sizes
from services.router.admission.validation.tokens import check_detokenize, check_tokenize
from services.router.in_flight import (
    AnswersUnread,
    DividedAnswers,
    InFlightMemory,
    Reservation,
    Rpc,
)
from services.router.lanes import codec
from services.router.lanes.chunks import ChunkMessages
from services.router.lanes.codec import JobHeader, Request, Response
from services.router.lanes.dispatch import (
    Dispatcher,
    DispatchPlan,
    JobAnswer,
    PendingRequest,
    Streamed,
)
from services.router.lanes.streamed import StreamedTexts
from services.router.lanes.streamed_chunks import ChunkPart, StreamedChunks
from services.router.state.aliases import resolve
from services.router.state.background import Background

SPLIT_IN_THREAD_BYTES: Final = 256 * 1024
"""Requests of at least this size are split, and their answers merged, in a thread, so that the
event loop goes on serving others.
"""
MAX_DEADLINE_SECONDS: Final = 86_400.0
DEADLINE_MARGIN_SECONDS: Final = 0.05
"""Subtracted from a client's deadline, so that the error for a missed deadline still reaches the
client.
"""

_Request = TypeVar(
    "_Request",
    pb.EncodeRequest,
    pb.ScoreRequest,
    pb.ExtractRequest,
    pb.TokenizeRequest,
    pb.DetokenizeRequest,
)
_Response = TypeVar("_Response", bound=Response)
_Result = TypeVar("_Result")
_Check: TypeAlias = Callable[[_Request, models_pb2.ModelCard | None], Sizes]


@dataclass(slots=True)
class _OpenCall:
    """A call that is being answered."""

    begin: float
    """The time of its arrival, of `time.perf_counter`."""
    client_seconds: float | None
    """Seconds until the client's deadline; None without one."""
    reservation: Reservation
    alias: pb.ResolvedAlias | None
    """The models of the alias that the request named; None for a model."""
    background: Background
    charge: Charge | None = None
    """The charge to its tenant's rate limit; None without one."""
    generated: int = 0
    """Tokens of the longest answers, which the charge includes."""

    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def set_alias(self, response: Response) -> None:
        """Write the models of the request's alias into a response, over any value of a worker."""
        if self.alias is not None:
            response.alias.CopyFrom(self.alias)
        else:
            response.ClearField("alias")

    def complete(self, response: Response) -> None:
        """Add the alias and the total time to a merged response, and refund the tokens that were
        charged and not generated.
        """
        self.set_alias(response)
        response.timings.total_seconds = self.seconds()
        unused = self.generated - response.usage.output_tokens
        if self.charge is not None and unused > 0:
            self.background.spawn(self.charge.refund_unused(unused))


@dataclass(frozen=True, slots=True)
class _Price:
    """Estimated tokens of a request."""

    costs: Sequence[int]
    """Tokens of each item."""
    repeated: int
    """Tokens of the fields that every job repeats."""
    read: Sequence[int]
    """Bytes that a worker reads for each item."""
    answer_bytes: int = 0
    """Maximum bytes of all answers to jobs with chunks; 0: the request is not divided."""
    budgets: Sequence[TextBudget] = ()
    """Pages and text that the document of each item may have."""
    max_chunks: int = 0
    """Maximum chunks of a job; 0: the worker's own."""
    generated: int = 0
    """Tokens of the longest answers to generate, which `costs` include."""

    @property
    def tokens(self) -> int:
        return sum(self.costs) + self.repeated


def stream_calls(
    servicer: inference_pb2_grpc.InferenceServiceServicer,
) -> dict[str, StreamCall]:
    """Return the calls that Multiplex carries."""
    return {
        "encode": StreamCall("Encode", pb.EncodeRequest, servicer.Encode),
        "score": StreamCall("Score", pb.ScoreRequest, servicer.Score),
        "extract": StreamCall("Extract", pb.ExtractRequest, servicer.Extract),
    }


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The three verbs, and the calls that a model's tokenizer answers."""

    def __init__(
        self,
        admission: AdmissionController,
        aliases: AliasStore,
        dispatcher: Dispatcher,
        in_flight: InFlightMemory,
        background: Background,
        *,
        router_id: str,
        default_deadline_seconds: float,
    ) -> None:
        self._router_id = router_id
        self._admission = admission
        self._aliases = aliases
        self._dispatcher = dispatcher
        self._in_flight = in_flight
        self._background = background
        self._default_deadline_seconds = default_deadline_seconds

    async def Encode(
        self,
        request: pb.EncodeRequest,
        context: grpc.aio.ServicerContext[pb.EncodeRequest, pb.EncodeResponse],
    ) -> pb.EncodeResponse:
        return await self._respond(request, check_encode, context, partial(_merge_encode, request))

    async def EncodeStream(
        self,
        request: pb.EncodeRequest,
        context: grpc.aio.ServicerContext[pb.EncodeRequest, pb.EncodeResponse],
    ) -> AsyncIterator[pb.EncodeResponse]:
        opened = await self._open(request, context)
        parts = ChunkMessages(request.expect_embedding_id)
        reservation = opened.reservation
        streamed = StreamedChunks(reservation.hold_streamed, reservation.release_streamed)
        answering = asyncio.create_task(self._stream_answers(request, opened, streamed))
        answering.add_done_callback(lambda _: streamed.end())
        try:
            async for found in streamed.read():
                size, messages = found.size, _messages(parts, found, opened)
                del found  # Free it and its messages while waiting for the next one.
                with reservation.sending(size):
                    while (
                        message := await _maybe_in_thread(size, partial(next, messages, None))
                    ) is not None:
                        opened.set_alias(message)
                        yield message
                    del messages
            await answering
        finally:
            answering.cancel()

    async def Score(
        self,
        request: pb.ScoreRequest,
        context: grpc.aio.ServicerContext[pb.ScoreRequest, pb.ScoreResponse],
    ) -> pb.ScoreResponse:
        return await self._respond(
            request, check_score, context, partial(codec.merge_score, top_n=request.top_n)
        )

    async def Extract(
        self,
        request: pb.ExtractRequest,
        context: grpc.aio.ServicerContext[pb.ExtractRequest, pb.ExtractResponse],
    ) -> pb.ExtractResponse:
        return await self._respond(request, check_extract, context, codec.merge_extract)

    async def ExtractStream(
        self,
        request: pb.ExtractRequest,
        context: grpc.aio.ServicerContext[pb.ExtractRequest, pb.ExtractStreamResponse],
    ) -> AsyncIterator[pb.ExtractStreamResponse]:
        opened = await self._open(request, context)
        streamed = StreamedTexts()
        answering = asyncio.create_task(self._run(request, check_extract, opened, streamed))
        answering.add_done_callback(lambda _: streamed.end())
        try:
            async for deltas in streamed.deltas():
                yield pb.ExtractStreamResponse(deltas=deltas)
            answers = await answering
        finally:
            answering.cancel()
        response = await _maybe_in_thread(_size(answers), partial(codec.merge_extract, answers))
        del answers
        opened.complete(response)
        last = pb.ExtractStreamResponse(deltas=streamed.rest(response), response=response)
        del response
        opened.reservation.hold_response(last.ByteSize())
        yield last

    async def Tokenize(
        self,
        request: pb.TokenizeRequest,
        context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse],
    ) -> pb.TokenizeResponse:
        return await self._respond(request, check_tokenize, context, codec.merge_tokenize)

    async def Detokenize(
        self,
        request: pb.DetokenizeRequest,
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        return await self._respond(request, check_detokenize, context, codec.merge_detokenize)

    def Multiplex(
        self, request_iterator: AsyncIterator[multiplex_pb2.MultiplexRequest], context: Rpc
    ) -> AsyncIterator[multiplex_pb2.MultiplexResponse]:
        """Never called: the interceptor answers each of the `stream_calls` separately."""
        raise NotImplementedError("libs/serving/calls/multiplex.py serves it")

    async def _respond(
        self,
        request: _Request,
        check: _Check[_Request],
        rpc: Rpc,
        merge: Callable[[list[Response]], _Response],
    ) -> _Response:
        """Answer a request with one message, merged from the answers to its jobs."""
        opened = await self._open(request, rpc)
        answers = await self._run(request, check, opened)
        response = await _maybe_in_thread(_size(answers), partial(merge, answers))
        opened.complete(response)
        opened.reservation.hold_response(response.ByteSize())
        return response

    async def _open(self, request: Request, rpc: Rpc) -> _OpenCall:
        """Reserve memory for a request, and replace an alias in it by its model."""
        begin, call = time.perf_counter(), current_call()
        parts = codec.count_parts(request)
        reservation = self._in_flight.reserve(len(call.body), call.tenant, rpc, parts)
        alias = await resolve(self._aliases, request.model)
        if alias is not None:
            request.model = alias.model
            MODEL.set(alias.model)
        return _OpenCall(begin, rpc.time_remaining(), reservation, alias, self._background)

    async def _stream_answers(
        self,
        request: pb.EncodeRequest,
        opened: _OpenCall,
        streamed: StreamedChunks,
    ) -> None:
        """Pass on the answers to all jobs of a request, in order, and the chunks before them."""
        early = streamed if request.HasField("chunking") else None
        with await self._begin(
            request, check_encode, opened, whole=False, streamed=early
        ) as pending:
            for index in range(pending.jobs):
                streamed.add_answer(await pending.take_answer(index))

    async def _run(
        self,
        request: _Request,
        check: _Check[_Request],
        opened: _OpenCall,
        streamed: StreamedTexts | None = None,
    ) -> list[Response]:
        """Return the answers to all jobs of a request, in order. `streamed` receives generated text
        before they arrive.
        """
        with await self._begin(request, check, opened, whole=True, streamed=streamed) as pending:
            return [(await pending.take_answer(index)).response for index in range(pending.jobs)]

    async def _begin(
        self,
        request: _Request,
        check: _Check[_Request],
        opened: _OpenCall,
        *,
        whole: bool,
        streamed: Streamed | None = None,
    ) -> PendingRequest:
        """Admit and enqueue a request, and return when all its jobs are answered, or the first one
        if not `whole`.

        Until then a failed request is retried in another of its model's pools.
        """
        call, loop = current_call(), asyncio.get_running_loop()
        deadline = Deadline.after(
            _deadline_seconds(opened.client_seconds, self._default_deadline_seconds), loop.time()
        )
        target = Target(request.model, _adapter(request), request.pool)
        failed: list[str] = []
        while True:
            remaining = deadline.remaining(loop.time())
            context = await self._admission.gather(
                target, _priority_name(request.priority), call.tenant, remaining, failed
            )
            price = await _maybe_in_thread(
                len(call.body), partial(_price, request, check, context, call, whole=whole)
            )
            self._admission.refuse(context, price.tokens)
            charge = None if failed else await self._admission.charge(context, price.tokens)
            if charge is not None:
                opened.charge, opened.generated = charge, price.generated
            try:
                return await self._send(
                    request, call, context, price, deadline, opened.reservation, whole, streamed
                )
            except (ModelBroken, ModelNotFound, ModelUnreachable):
                failed.append(context.lane.pool)
                if not self._admission.has_other_pool(target, failed):
                    raise
                if isinstance(streamed, StreamedChunks) and not streamed.restart():
                    raise
            except QueueFull as error:
                if charge is not None and not isinstance(error, AnswersUnread):
                    await charge.refund()
                raise

    async def _send(
        self,
        request: _Request,
        call: Call,
        context: AdmissionContext,
        price: _Price,
        deadline: Deadline,
        reservation: Reservation,
        whole: bool,
        streamed: Streamed | None,
    ) -> PendingRequest:
        lane = context.lane
        with traces.sending(traces.lane_name(lane.pool, lane.model, lane.adapter)) as span:
            traceparent, stream_to = (
                traces.format_traceparent(span),
                "" if streamed is None else self._router_id,
            )
            plan = await _maybe_in_thread(
                len(call.body),
                partial(_plan, request, call, context, price, traceparent, stream_to),
            )
            span.set_attribute("messaging.batch.message_count", len(plan.jobs))
            on_answer: Callable[[int], None] = (
                reservation.hold_answer if whole else reservation.hold_streamed
            )
            awaited = len(plan.jobs) if whole else 1
            if price.answer_bytes:
                most = price.answer_bytes + answer_bounds.FRAME_BYTES * len(plan.jobs)
                on_answer = DividedAnswers(on_answer, most, is_streamed=not whole).add
            if isinstance(streamed, StreamedTexts):
                streamed.first_items = plan.first_items
            return await self._dispatcher.begin(
                plan, deadline, on_answer, awaited=awaited, streamed=streamed
            )


def _price(
    request: _Request,
    check: _Check[_Request],
    context: AdmissionContext,
    call: Call,
    *,
    whole: bool,
) -> _Price:
    """Price a request. Refuses one that is invalid or that its pool cannot serve. Pure.

    Args:
        whole: One message answers it.
    """
    snapshot = context.snapshot
    card = snapshot.card(request.model)
    sizes = check(request, card)
    refuse_pool(request.pool, context.routes, snapshot)
    rules.refuse_broken(context.lane, snapshot)
    if isinstance(request, pb.TokenizeRequest | pb.DetokenizeRequest):
        answer_bounds.check_tokens(request, card, readable=call.answer_bytes)
        return _Price(pricing.price_reading(sizes), 0, sizes.read)
    costs, repeated = pricing.price(sizes, card, request.truncation)
    answer_bytes = max_chunks = 0
    if isinstance(request, pb.EncodeRequest):
        is_streamed, readable = not whole, call.answer_bytes
        if request.HasField("chunking"):
            answer_bounds.check_divided_texts(
                request, card, costs, sizes, is_streamed=is_streamed, readable=readable
            )
            answer_bytes = answer_bounds.divided_bytes(
                request, card, is_streamed=is_streamed, readable=readable
            )
            max_chunks = answer_bounds.max_chunks(request, card, answer_bytes)
        else:
            answer_bounds.check_encoded(
                request, card, costs, is_streamed=is_streamed, readable=readable
            )
    return _Price(
        costs,
        repeated,
        sizes.read,
        answer_bytes,
        sizes.budgets,
        max_chunks,
        sum(sizes.generated),
    )


def _plan(
    request: _Request,
    call: Call,
    context: AdmissionContext,
    price: _Price,
    traceparent: str,
    stream_to: str,
) -> DispatchPlan:
    """Split an admitted request into jobs. Pure."""
    lane = context.lane
    target = splitting.job_target(price.tokens, lane, context.snapshot)
    parts, shared = splitting.parts(price.costs, price.read, target, price.repeated), None
    if len(parts) > 1:
        shared = codec.without_items(request)
        most = splitting.max_jobs(len(call.body), shared.ByteSize())
        if len(parts) > most:
            parts = splitting.parts(price.costs, price.read, target, price.repeated, most)
    digest = splitting.request_digest(
        call.tenant, call.request_id, call.method, request.model, call.body
    )
    ids = [splitting.job_id(digest, part) for part in parts]
    weight, deadline_ms = context.tenant.weight, context.now_ms + int(context.seconds * 1000)
    share = answer_bounds.item_share(request, len(call.body), call.answer_bytes)
    stamp = JobHeader(
        call.request_id,
        deadline_ms,
        context.now_ms,
        call.tenant,
        weight,
        traceparent,
        stream_to,
        share,
        price.budgets,
        price.max_chunks,
    )
    payloads = codec.job_payloads(request, parts, ids, stamp, shared)
    jobs = [
        QueuedJob(
            job_id, call.tenant, weight, part.tokens, stamp.deadline_ms, context.priority, payload
        )
        for job_id, part, payload in zip(ids, parts, payloads, strict=True)
    ]
    return DispatchPlan(
        lane, jobs, context.throughput, context.unknown is not None, [part.first for part in parts]
    )


def _merge_encode(request: pb.EncodeRequest, answers: list[Response]) -> pb.EncodeResponse:
    """Return the response to a request. Raises EmbeddingIdMismatch, or InvalidInput for chunks that
    are larger than the client accepts.
    """
    response = codec.merge_encode(answers)
    check_expected(request.expect_embedding_id, response.embedding_id)
    if response.HasField("chunks"):
        answer_bounds.check_divided(response.ByteSize(), current_call().answer_bytes)
    return response


def _messages(
    parts: ChunkMessages, found: ChunkPart | JobAnswer, opened: _OpenCall
) -> Iterator[pb.EncodeResponse]:
    """Return the messages of EncodeStream for chunks, or for the answer to a job."""
    if isinstance(found, ChunkPart):
        return iter((parts.early(found.chunks),))
    total_seconds = opened.seconds() if found.is_last else None
    return parts.messages(codec.encode_answer(found.response), total_seconds=total_seconds)


def _adapter(request: Request) -> str:
    """Return the LoRA adapter that a request names. Adapters have no tokenizers, so token requests
    name none.
    """
    return "" if isinstance(request, pb.TokenizeRequest | pb.DetokenizeRequest) else request.adapter


def _priority_name(priority: pb.Priority) -> Priority:
    return "bulk" if priority == pb.PRIORITY_BULK else "interactive"


def _deadline_seconds(client_seconds: float | None, default_seconds: float) -> float:
    """Return the seconds until the router's deadline: the client's less
    DEADLINE_MARGIN_SECONDS, or the default.
    """
    if client_seconds is None:
        return default_seconds
    return min(
        client_seconds - min(DEADLINE_MARGIN_SECONDS, client_seconds / 10), MAX_DEADLINE_SECONDS
    )


def _size(answers: list[Response]) -> int:
    # A single answer is passed on unmerged.
    return sum(answer.ByteSize() for answer in answers) if len(answers) > 1 else 0


async def _maybe_in_thread(size: int, work: Callable[[], _Result]) -> _Result:
    return await asyncio.to_thread(work) if size >= SPLIT_IN_THREAD_BYTES else work()
