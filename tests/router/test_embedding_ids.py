"""Embedding ids in the router: required ones are checked whatever a worker does, and vectors that
cannot be compared are never in one answer.
"""

from __future__ import annotations

import re
import struct

import grpc
import pytest
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import tensor_pb2, worker_pb2

from libs.errors import EmbeddingIdMismatch, InvalidInput
from services.router.admission.validation.requests import check_encode
from services.router.lanes.chunks import ChunkMessages
from services.router.lanes.codec import merge_encode
from tests.router.parts import (
    FakeWorker,
    card,
    changed,
    encode_answer,
    encode_request,
    refused,
    router,
)

ID, OTHER = "0123456789abcdef", "fedcba9876543210"


def answer(embedding_id: str, rows: int = 1) -> pb.EncodeResponse:
    dense = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_FLOAT32,
        shape=[rows, 1],
        data=struct.pack(f"<{rows}f", *range(rows)),
    )
    return pb.EncodeResponse(dense=dense, model_revision="r1", embedding_id=embedding_id)


@pytest.mark.parametrize(
    ("ids", "merged"),
    [
        ([f"{ID}.float32"], f"{ID}.float32"),
        ([f"{ID}.float32", f"{ID}.float32"], f"{ID}.float32"),
        ([f"{ID}.float32", f"{ID}.int8-1"], ID),
        ([f"{ID}.float32", ""], ""),
    ],
)
def test_answers_that_can_be_compared_are_merged(ids: list[str], merged: str) -> None:
    assert merge_encode([answer(one) for one in ids]).embedding_id == merged


def test_answers_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(EmbeddingIdMismatch, match=f"{ID}.float32 and {OTHER}.float32"):
        merge_encode([answer(f"{ID}.float32"), answer(f"{OTHER}.float32")])


def test_stream_has_the_id_in_every_message() -> None:
    parts = ChunkMessages(ID)
    large = answer(f"{ID}.float32", rows=1 << 19)
    messages = [*parts.messages(large), *parts.messages(answer(f"{ID}.int8-1"), total_seconds=1.0)]
    assert len(messages) > 2
    ids = [message.embedding_id for message in messages]
    assert ids == [*[f"{ID}.float32"] * (len(messages) - 1), f"{ID}.int8-1"]


@pytest.mark.parametrize("expected", ["", ID])
def test_stream_ends_before_vectors_that_cannot_be_compared(expected: str) -> None:
    parts = ChunkMessages(expected)
    assert list(parts.messages(answer(f"{ID}.float32")))
    with pytest.raises(EmbeddingIdMismatch):
        list(parts.messages(answer(f"{OTHER}.float32")))


def test_answer_without_an_id_does_not_hide_earlier_ones() -> None:
    parts = ChunkMessages()
    assert list(parts.messages(answer(f"{ID}.float32")))
    assert list(parts.messages(answer("")))
    with pytest.raises(EmbeddingIdMismatch, match=f"{ID}.float32 and {OTHER}.float32"):
        list(parts.messages(answer(f"{OTHER}.float32")))


@pytest.mark.parametrize("text", ["latest", ID[:-1], f"{ID}.float32 ", ID.upper()])
def test_invalid_expectations_are_refused(text: str) -> None:
    request = changed(encode_request("a"), expect_embedding_id=text)
    with pytest.raises(InvalidInput, match="16 digits before its point") as raised:
        check_encode(request, card())
    assert raised.value.field == "expect_embedding_id"


def test_long_expectations_are_refused() -> None:
    request = changed(encode_request("a"), expect_embedding_id="a" * 65)
    with pytest.raises(InvalidInput, match="has 65 characters; at most 64"):
        check_encode(request, card())


def with_id(job: worker_pb2.Job, embedding_id: str) -> worker_pb2.JobResult:
    made = encode_answer(job.encode)
    made.embedding_id = embedding_id
    return worker_pb2.JobResult(encode=made)


@pytest.mark.parametrize("found", ["", f"{OTHER}.float32", f"{ID}.int8-1"])
async def test_vectors_of_a_worker_that_does_not_check_are_refused(
    redis_url: str, found: str
) -> None:
    async with router(redis_url) as client:
        worker = FakeWorker(client.address, models=[card()])
        worker.answer = lambda job: with_id(job, found)
        request = changed(encode_request("a", "b"), expect_embedding_id=f"{ID}.float32")
        async with worker.working():
            for call in (
                client.inference.Encode(request, timeout=120),
                client.inference.EncodeStream(request, timeout=120).read(),
            ):
                refusal = await refused(call)
                assert refusal.code == grpc.StatusCode.FAILED_PRECONDITION
                assert refusal.reason == "EMBEDDING_ID_MISMATCH"
                assert f"{ID}.float32" in refusal.message
                assert found in refusal.message


async def test_expectation_reaches_the_worker_in_every_job(redis_url: str) -> None:
    async with router(redis_url) as client:
        worker = FakeWorker(client.address, models=[card()], budget_tokens=5000)
        worker.answer = lambda job: with_id(job, f"{ID}.float32")
        request = changed(encode_request(*["a" * 90] * 5_000), expect_embedding_id=ID)
        async with worker.working():
            reply = await client.inference.Encode(request, timeout=120)
        assert re.fullmatch(f"{ID}.float32", reply.embedding_id)
        assert len(worker.jobs) > 1
        assert {job.encode.expect_embedding_id for job in worker.jobs} == {ID}
