"""EncodeStream: the answer of Encode in parts, over real gRPC, to clients with gRPC's default limit
of 4 MiB.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from typing import TypeAlias, cast

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc, tensor_pb2, worker_pb2

from libs.errors import InternalError
from services.router import app
from services.router.in_flight import (
    COPIES,
    EMPTY_REQUEST_BYTES,
    PART_BYTES,
    SENT_COPIES,
    InFlightMemory,
)
from services.router.lanes import codec
from services.router.lanes.chunks import CHUNK_BYTES, ChunkMessages, split
from tests.router.parts import (
    Client,
    FakeWorker,
    Refusal,
    card,
    changed,
    encode_request,
    refused,
    router,
    until,
)

DIMENSIONS = 384
DEFAULT_LIMIT = 4 << 20
ALL = (pb.REPRESENTATION_DENSE, pb.REPRESENTATION_SPARSE, pb.REPRESENTATION_MULTI_VECTOR)


def tensor(
    rows: Sequence[bytes],
    *inner: int,
    data_type: tensor_pb2.DataType = tensor_pb2.DATA_TYPE_FLOAT32,
) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(data_type=data_type, shape=[len(rows), *inner], data=b"".join(rows))


def offsets(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:index]) for index in range(len(lengths) + 1)]


def wide_answer(request: pb.EncodeRequest, dimensions: int = DIMENSIONS) -> pb.EncodeResponse:
    """A row is the number that its text says, again and again; it has as many entries and tokens as
    its text has letters.
    """
    numbers = [float(int(item.text.split()[0])) for item in request.items]
    answer = pb.EncodeResponse(model_revision="r1", usage=pb.Usage(input_tokens=len(numbers)))
    answer.timings.forward_seconds = max(numbers)
    forms = request.representations or [pb.REPRESENTATION_DENSE]
    lengths = [len(item.text) for item in request.items]
    if pb.REPRESENTATION_DENSE in forms:
        answer.dense.CopyFrom(
            tensor([struct.pack("<f", number) * dimensions for number in numbers], dimensions)
        )
    if pb.REPRESENTATION_SPARSE in forms:
        weights = tensor(
            [
                struct.pack("<f", number)
                for number, length in zip(numbers, lengths, strict=True)
                for _ in range(length)
            ]
        )
        indices = b"".join(
            struct.pack("<I", index) for length in lengths for index in range(length)
        )
        sparse = tensor_pb2.SparseMatrix(
            columns=50_000, offsets=offsets(lengths), indices=indices, values=weights
        )
        answer.sparse.CopyFrom(sparse)
    if pb.REPRESENTATION_MULTI_VECTOR in forms:
        values = tensor(
            [
                struct.pack("<f", number) * 4
                for number, length in zip(numbers, lengths, strict=True)
                for _ in range(length)
            ],
            4,
        )
        answer.multi_vector.CopyFrom(tensor_pb2.Ragged(values=values, offsets=offsets(lengths)))
    return answer


def widely(job: worker_pb2.Job) -> worker_pb2.JobResult:
    return worker_pb2.JobResult(encode=wide_answer(job.encode))


def numbered(count: int, letters: int = 20) -> pb.EncodeRequest:
    return encode_request(*(f"{number} ".ljust(letters, "x") for number in range(count)))


def without_timings(answer: pb.EncodeResponse) -> pb.EncodeResponse:
    copied = pb.EncodeResponse()
    copied.CopyFrom(answer)
    copied.ClearField("timings")
    return copied


@asynccontextmanager
async def plain_stub(address: str) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    """Open a client that sets no options."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield cast(
            "inference_pb2_grpc.InferenceServiceAsyncStub",
            inference_pb2_grpc.InferenceServiceStub(channel),
        )


@asynccontextmanager
async def meshed(redis_url: str, **options: int) -> AsyncIterator[tuple[Client, FakeWorker]]:
    """One job a pull."""
    model = card()
    model.representations[:] = ALL
    async with (
        router(redis_url, **options) as client,  # type: ignore[arg-type]
        FakeWorker(client.address, models=[model], budget_tokens=1).working() as worker,
    ):
        worker.answer = widely
        await client.sees("w1")
        yield client, worker


Call: TypeAlias = "grpc.aio.UnaryStreamCall[pb.EncodeRequest, pb.EncodeResponse]"


async def read_next(call: Call) -> pb.EncodeResponse:
    chunk = await call.read()
    assert isinstance(chunk, pb.EncodeResponse)
    return chunk


async def read_all(call: Call) -> list[pb.EncodeResponse]:
    chunks = []
    while isinstance(chunk := await call.read(), pb.EncodeResponse):
        chunks.append(chunk)
    return chunks


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> list[InFlightMemory]:
    """Return the routers that the test starts."""
    made: list[InFlightMemory] = []

    def make(*, limit_bytes: int) -> InFlightMemory:
        made.append(InFlightMemory(limit_bytes=limit_bytes))
        return made[-1]

    monkeypatch.setattr(app, "InFlightMemory", make)
    return made


def held_after(worker: FakeWorker, jobs: int) -> None:
    """The worker answers this number of jobs, and holds the next one."""
    answered = 0

    def answer(job: worker_pb2.Job) -> worker_pb2.JobResult:
        nonlocal answered
        answered += 1
        if answered == jobs:
            worker.hold()
        return widely(job)

    worker.answer = answer


async def lane_is_settled(client: Client) -> None:
    async def is_settled() -> bool:
        lane = await client.lane()
        return (
            lane.queued_jobs == 0 and lane.done_jobs + lane.cancelled_jobs == lane.enqueued_jobs > 0
        )

    await until(is_settled, "all jobs to be done or cancelled")


async def test_default_client_streams_answers_too_large_for_encode(
    redis_url: str,
) -> None:
    request = numbered(3000)
    async with meshed(redis_url) as (client, _), plain_stub(client.address) as stub:
        refusal = await refused(stub.Encode(request, timeout=120))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        whole = await client.inference.Encode(request, timeout=120)
        assert len(whole.dense.data) > DEFAULT_LIMIT
        chunks = await read_all(stub.EncodeStream(request, timeout=120))
    print(f"{len(whole.dense.data):,} bytes in {len(chunks)} messages")
    assert len(chunks) >= 5
    assert all(0 < chunk.ByteSize() <= CHUNK_BYTES + 100 for chunk in chunks)
    assert [chunk.HasField("usage") for chunk in chunks] == [
        chunk.HasField("timings") for chunk in chunks
    ]
    assert [chunk.HasField("usage") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert {chunk.model_revision for chunk in chunks} == {"r1"}
    assert without_timings(codec.merge_encode(list(chunks))) == without_timings(whole)
    assert chunks[-1].timings.forward_seconds == whole.timings.forward_seconds == 2999
    assert chunks[-1].timings.total_seconds > 0


async def test_every_form_is_that_of_encode(redis_url: str) -> None:
    request = numbered(800, letters=200)
    request.representations.extend(ALL)
    async with meshed(redis_url) as (client, _), plain_stub(client.address) as stub:
        whole = await client.inference.Encode(request, timeout=120)
        chunks = await read_all(stub.EncodeStream(request, timeout=120))
    assert len(chunks) >= 4
    assert without_timings(codec.merge_encode(list(chunks))) == without_timings(whole)


async def test_first_rows_are_streamed_before_others_are_computed(redis_url: str) -> None:
    request = numbered(100, letters=5000)
    async with meshed(redis_url) as (client, worker), plain_stub(client.address) as stub:
        held_after(worker, 1)
        call = stub.EncodeStream(request, timeout=120)
        first = await read_next(call)
        await until(lambda: len(worker.jobs) == 2, "the worker to hold the second job")
        assert first.dense.shape[0] == len(worker.jobs[0].encode.items) < 100
        worker.resume()
        chunks = [first, *await read_all(call)]
        assert len(worker.jobs) == len({job.job_id for job in worker.jobs}) > 2, (
            "nothing is asked of a worker twice"
        )
    assert codec.merge_encode(list(chunks)).dense == wide_answer(request).dense


async def test_out_of_order_answers_are_sent_in_item_order(
    redis_url: str,
) -> None:
    request = numbered(40, letters=5000)
    async with meshed(redis_url) as (client, first), plain_stub(client.address) as stub:
        first.hold()
        call = stub.EncodeStream(request, timeout=120)
        await until(lambda: first.jobs, "the first worker to hold the first job")
        async with FakeWorker(
            client.address, "w2", models=[card()], budget_tokens=1
        ).working() as second:
            second.answer = widely

            async def others_are_done() -> bool:
                lane = await client.lane()
                return lane.done_jobs == lane.enqueued_jobs - 1 > 0

            await until(others_are_done, "all jobs but the first")
            first.resume()
            chunks = await read_all(call)
    assert codec.merge_encode(list(chunks)).dense == wide_answer(request).dense


async def test_stream_refuses_like_encode(redis_url: str) -> None:
    async with meshed(redis_url, max_queued_tokens=10_000) as (client, _):
        inference = client.inference
        for request in (
            encode_request(),
            encode_request("1", ""),
            encode_request("1", model="no slash"),
            changed(encode_request("1"), dimensions=5),
            numbered(100, letters=5000),
        ):
            metadata = (("x-request-id", "same"),)
            unary = await refused(inference.Encode(request, timeout=120, metadata=metadata))
            stream = await refused(
                inference.EncodeStream(request, timeout=120, metadata=metadata).read()
            )
            assert vars(stream) == vars(unary)
            assert stream.reason


@pytest.mark.parametrize(
    "reason", ["INVALID_INPUT", "INPUT_TOO_LONG", "OUT_OF_MEMORY", "MODEL_LOAD_FAILED"]
)
async def test_error_after_messages_is_that_of_encode(
    redis_url: str, flights: list[InFlightMemory], reason: str
) -> None:
    """The stream also ends with an error for which another pool would be tried before the first
    message.
    """
    request = numbered(100, letters=5000)

    def failing(job: worker_pb2.Job) -> worker_pb2.JobResult:
        if job.first_item == 0:
            return widely(job)
        return worker_pb2.JobResult(
            failure=worker_pb2.Failure(reason=reason, message="no", field="items[99]")
        )

    async with meshed(redis_url) as (client, worker):
        worker.answer = failing
        metadata = (("x-request-id", "same"),)
        unary = await refused(client.inference.Encode(request, timeout=120, metadata=metadata))
        await lane_is_settled(client)
        held_after(worker, 1)
        call = client.inference.EncodeStream(request, timeout=120, metadata=metadata)
        first = await read_next(call)
        assert not first.HasField("usage")
        worker.answer = failing
        worker.resume()
        stream = await refused(read_all(call))
        assert vars(stream) == vars(unary)
        assert stream.reason == reason
        await until(lambda: flights[0].held_bytes == 0, "nothing to be held")
        await lane_is_settled(client)


async def test_cancelled_stream_leaves_nothing_behind(
    redis_url: str, flights: list[InFlightMemory], caplog: pytest.LogCaptureFixture
) -> None:
    request = numbered(100, letters=5000)
    async with meshed(redis_url) as (client, worker):
        held_after(worker, 1)
        call = client.inference.EncodeStream(request, timeout=120)
        await call.read()
        await until(lambda: len(worker.jobs) == 2, "the worker to hold the second job")
        assert flights[0].held_bytes > request.ByteSize()
        call.cancel()
        await until(lambda: flights[0].held_bytes == 0, "nothing to be held")

        async def all_cancelled() -> bool:
            lane = await client.lane()
            return lane.queued_jobs == 0 and lane.cancelled_jobs == lane.enqueued_jobs - 1 > 0

        await until(all_cancelled, "all jobs but the first to be cancelled")
        await until(lambda: worker.jobs[1].job_id in worker.cancelled, "the worker to hear of it")
        worker.answer = widely
        worker.resume()
        await read_all(client.inference.EncodeStream(numbered(3), timeout=120))
    assert not [record for record in caplog.records if record.message == "call failed"]


async def test_slow_reader_holds_only_unread_messages(
    redis_url: str, flights: list[InFlightMemory]
) -> None:
    """It can be large: 48 MB, of which gRPC's windows take a few."""
    request = numbered(400, letters=1000)
    async with meshed(redis_url) as (client, worker), plain_stub(client.address) as stub:
        worker.answer = lambda job: worker_pb2.JobResult(encode=wide_answer(job.encode, 30_000))
        size = 400 * 30_000 * 4
        call = stub.EncodeStream(request, timeout=300)
        await call.read()

        async def all_done() -> bool:
            lane = await client.lane()
            return lane.done_jobs == lane.enqueued_jobs > 1

        await until(all_done, "all jobs to be done", 120.0)
        own = EMPTY_REQUEST_BYTES + COPIES * request.ByteSize() + PART_BYTES * 400
        held = flights[0].held_bytes - own
        print(f"held {held:,} of {size:,} bytes")
        assert size / 2 < held <= size + SENT_COPIES * (1 << 20)
        seen = [held]
        while isinstance(await call.read(), pb.EncodeResponse):
            seen.append(flights[0].held_bytes - own)
        await until(lambda: flights[0].held_bytes == 0, "nothing to be held")
    assert all(after <= before for before, after in pairwise(seen))
    assert len(set(seen)) > 4, "it is given back as it is read"


async def end_of(call: Call) -> str:
    """Read a stream to its end. Return the error that it ends with, or nothing."""
    with suppress(grpc.aio.AioRpcError):
        while isinstance(await call.read(), pb.EncodeResponse):
            pass
    return str(await call.details())


async def test_answers_that_are_not_read_end_the_streams_beyond_a_limit(
    redis_url: str, flights: list[InFlightMemory]
) -> None:
    """Two streams of 32 MB exceed a tenant's 32 MiB, whatever gRPC's windows take. Another tenant
    still is answered.
    """
    limit = 64 << 20
    async with (
        meshed(redis_url, in_flight_bytes=limit) as (client, worker),
        plain_stub(client.address) as stub,
    ):
        worker.answer = lambda job: worker_pb2.JobResult(encode=wide_answer(job.encode, 20_000))
        calls = [
            stub.EncodeStream(numbered(400, letters=1000 + number), timeout=300)
            for number in range(2)
        ]

        async def all_ended() -> bool:
            lane = await client.lane()
            return lane.done_jobs + lane.cancelled_jobs == lane.enqueued_jobs > 2

        await until(all_ended, "all jobs to be done or cancelled", 120.0)
        assert limit / 4 < flights[0].unread_bytes <= limit / 2
        await stub.Encode(numbered(1), timeout=120, metadata=(("x-shoal-tenant", "other"),))
        ends = [await end_of(call) for call in calls]
        assert any("have not read" in end for end in ends), ends
        await until(lambda: flights[0].unread_bytes == 0, "nothing to wait for clients")


async def test_disconnect_during_write_is_not_our_error(
    redis_url: str, flights: list[InFlightMemory], caplog: pytest.LogCaptureFixture
) -> None:
    """A cancellation or a deadline ends the stream; some clients have read nothing, some a
    little.
    """
    async with meshed(redis_url) as (client, worker), plain_stub(client.address) as stub:
        worker.answer = lambda job: worker_pb2.JobResult(encode=wide_answer(job.encode, 30_000))
        for number in range(12):
            call = stub.EncodeStream(
                numbered(100, letters=1000 + number), timeout=0.7 if number % 2 else 120.0
            )
            await left(call, number, flights[0])
            await until(lambda: flights[0].held_bytes == 0, "nothing to be held")
    assert not [record for record in caplog.records if record.message == "call failed"]


async def left(call: Call, number: int, flight: InFlightMemory) -> None:
    """End the call after some messages, once its answer is there (on a busy machine its deadline
    may pass before).
    """
    await until(lambda: flight.held_bytes > 3_000_000 or call.done(), "the answer to be there")
    with suppress(grpc.aio.AioRpcError):
        for _ in range(number % 4):
            await call.read()
    if number % 2:
        await until(call.done, "the deadline to pass")
    else:
        call.cancel()


async def test_drain_waits_for_the_end_of_an_answer(redis_url: str) -> None:
    request = numbered(100, letters=5000)
    async with AsyncExitStack() as stack:
        serving = AsyncExitStack()
        await stack.enter_async_context(serving)
        going = await serving.enter_async_context(router(redis_url, grace_seconds=120.0))
        client = Client(going.address)
        stack.push_async_callback(client.close)
        worker = await stack.enter_async_context(
            FakeWorker(going.address, models=[card()], budget_tokens=1).working()
        )
        held_after(worker, 1)
        call = client.inference.EncodeStream(request, timeout=120)
        first = await read_next(call)
        leaving = asyncio.create_task(serving.aclose())

        async def is_refused() -> bool:
            try:
                await client.inference.EncodeStream(encode_request("1"), timeout=5).read()
            except grpc.aio.AioRpcError as error:
                return Refusal(error).reason == "DRAINING"
            return False

        await until(is_refused, "new calls to be refused")
        assert not leaving.done()
        worker.resume()
        rest = await read_all(call)
        await leaving
    assert codec.merge_encode([first, *rest]).dense == wide_answer(request).dense


async def test_deadline_within_stream_is_reported(redis_url: str) -> None:
    async with meshed(redis_url, default_deadline_seconds=5) as (client, worker):
        held_after(worker, 1)
        call = client.inference.EncodeStream(numbered(100, letters=5000))
        await call.read()
        refusal = await refused(read_all(call))
        assert (refusal.code, refusal.reason) == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "DEADLINE_PASSED",
        )
        worker.resume()
        await lane_is_settled(client)


async def test_repeated_call_joins_the_work_of_the_first(redis_url: str) -> None:
    request, metadata = numbered(100, letters=5000), (("x-request-id", "same"),)
    async with meshed(redis_url) as (client, worker):
        held_after(worker, 1)
        first = client.inference.EncodeStream(request, timeout=120, metadata=metadata)
        await first.read()
        await until(lambda: len(worker.jobs) == 2, "the worker to hold the second job")
        again = client.inference.EncodeStream(request, timeout=120, metadata=metadata)
        first.cancel()
        worker.resume()
        chunks = await read_all(again)
    assert codec.merge_encode(list(chunks)).dense == wide_answer(request).dense


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=30),
    st.sets(st.sampled_from(ALL), min_size=1),
    st.integers(1, 2000),
    st.sampled_from(
        [tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_UINT8, tensor_pb2.DATA_TYPE_BINARY]
    ),
)
def test_parts_of_an_answer_are_whole_and_joined_it(
    lengths: list[int],
    forms: set[pb.Representation],
    most_bytes: int,
    data_type: tensor_pb2.DataType,
) -> None:
    request = encode_request(*("7 ".ljust(2 + length, "x") for length in lengths))
    request.representations.extend(forms)
    answer = wide_answer(request, 6)
    if data_type != tensor_pb2.DATA_TYPE_FLOAT32 and answer.HasField("dense"):
        rows = len(lengths)
        answer.dense.CopyFrom(
            tensor(
                [
                    bytes([index]) * (1 if data_type == tensor_pb2.DATA_TYPE_BINARY else 6)
                    for index in range(rows)
                ],
                6,
            )
        )
        answer.dense.data_type = data_type
        if data_type == tensor_pb2.DATA_TYPE_UINT8:
            answer.dense.scale = answer.dense.offset = bytes(range(4)) * rows
    totals = pb.EncodeResponse(usage=answer.usage, timings=answer.timings)
    chunks = list(split(answer, totals, most_bytes))
    for chunk in chunks:
        codec.job_result(worker_pb2.JobResult(encode=chunk).SerializeToString())  # it fits together
        items = [chunk.dense.shape[0]] if chunk.HasField("dense") else []
        items += [
            len(part.offsets) - 1 for part in (chunk.sparse, chunk.multi_vector) if part.offsets
        ]
        assert len(set(items)) == 1
        assert items[0] == 1 or numbers(chunk) <= most_bytes
    assert [chunk.HasField("usage") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert codec.merge_encode(list(chunks)) == answer


def numbers(chunk: pb.EncodeResponse) -> int:
    """Bytes of its numbers."""
    tensors = (chunk.dense, chunk.sparse.values, chunk.multi_vector.values)
    return sum(len(one.data) + len(one.scale) + len(one.offset) for one in tensors) + len(
        chunk.sparse.indices
    )


def test_answer_without_rows_or_with_forms_that_differ_is_a_workers_fault() -> None:
    answer = wide_answer(encode_request("1", "2"))
    other = pb.EncodeRequest(
        items=encode_request("1").items, representations=[pb.REPRESENTATION_SPARSE]
    )
    answer.sparse.CopyFrom(wide_answer(other).sparse)
    for wrong in (pb.EncodeResponse(), answer):
        with pytest.raises(InternalError):
            list(split(wrong))


def test_inconsistent_answers_end_stream_with_error() -> None:
    parts = ChunkMessages()
    list(parts.messages(wide_answer(encode_request("1"), 6)))
    list(parts.messages(wide_answer(encode_request("1", "2"), 6)))
    with pytest.raises(InternalError, match="different"):
        parts.messages(wide_answer(encode_request("1"), 7))
