"""Large answers, which the client asks for in parts: the same results, with their rows once in
memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
import shoal
from shoal import errors
from shoal.requests.encode import (
    ASSUMED_DIMENSIONS,
    STREAMED_BYTES,
    DenseRows,
    EncodeSink,
    is_large,
)
from shoal.requests.merging import merge_encode
from shoal.results import DataType, Form
from shoal.v1 import inference_pb2, tensor_pb2

from tests.api import wire
from tests.api.conftest import Connect
from tests.api.fake_router import DIMENSIONS, MODEL, FakeRouter, Refusal, make_vector
from tests.support.waiting import wait_until

COUNT = 1200
TEXTS = [f"text {number} of some" for number in range(COUNT)]
"""Texts for one request of which the client expects a large answer; the router's vectors are short,
so its messages are small.
"""
ALL = ["dense", "sparse", "multi_vector"]
QUICK = shoal.RetryPolicy(first_delay=0.01, longest_delay=0.05)
DATA_TYPES: list[DataType] = ["float32", "float16", "bfloat16", "int8", "uint8", "binary"]


@pytest.fixture
def router(router: FakeRouter) -> FakeRouter:
    router.chunk_bytes = 4096
    return router


def methods(router: FakeRouter) -> list[str]:
    return [call.method for call in router.calls]


def assert_equal(one: shoal.EncodeResult, other: shoal.EncodeResult) -> None:
    assert one.representations == other.representations
    assert (one.usage, one.revision, one.skipped) == (other.usage, other.revision, other.skipped)
    for form in one.representations:
        name = "vectors" if form == "dense" else form
        for mine, theirs in zip(
            arrays(getattr(one, name)), arrays(getattr(other, name)), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
            assert mine.dtype == theirs.dtype
            assert not mine.flags.writeable


def arrays(value: Any) -> list[np.ndarray[Any, Any]]:
    found = (
        getattr(value, name, None)
        for name in ("array", "scale", "offset", "values", "offsets", "data", "indices", "indptr")
    )
    return [array for array in found if isinstance(array, np.ndarray)]


@pytest.mark.parametrize("data_type", DATA_TYPES)
async def test_large_response_is_streamed_and_equal(
    connect: Connect, router: FakeRouter, data_type: DataType
) -> None:
    forms = ALL if data_type in ("float32", "float16", "bfloat16") else ["dense"]
    texts = TEXTS * {"binary": 32, "int8": 4, "uint8": 4}.get(data_type, 3)
    client = connect(router.address, request_items=100_000)
    whole = await connect(router.address).do(
        "encode", MODEL, texts, data_type=data_type, representations=forms
    )
    router.calls.clear()
    result = await client.do("encode", MODEL, texts, data_type=data_type, representations=forms)
    assert set(methods(router)) == {"EncodeStream"}
    assert_equal(result, whole)
    assert result.timings.forward_seconds == 0.01


async def test_parts_of_a_long_list_share_one_array(connect: Connect, router: FakeRouter) -> None:
    seen: list[tuple[int, int]] = []
    client = connect(router.address, request_items=2000)
    texts = [f"{number}" for number in range(7000)]
    result = await client.do(
        "encode",
        MODEL,
        texts,
        on_progress=lambda done, total: seen.append((done, total)),
        writable=True,
    )
    np.testing.assert_array_equal(result.dense, [make_vector(text) for text in texts])
    assert methods(router) == ["EncodeStream"] * 4
    assert seen == [(1750, 7000), (3500, 7000), (5250, 7000), (7000, 7000)]
    assert result.dense.flags.owndata
    assert result.dense.flags.writeable


async def test_small_response_is_one_message(connect: Connect, router: FakeRouter) -> None:
    await connect(router.address).do("encode", MODEL, TEXTS)
    assert methods(router) == ["Encode"] * 3


async def test_stream_that_breaks_is_asked_for_again_as_a_whole(
    connect: Connect, router: FakeRouter
) -> None:
    """The stream is repeated before its first message and after it, as Encode is: the router is
    gone, or allows a retry.
    """
    lost = Refusal(grpc.StatusCode.UNAVAILABLE)
    router.refusals = [lost, Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING", retry_after=0.01)]
    router.breaks = [lost, Refusal(grpc.StatusCode.UNAVAILABLE, "NO_CAPACITY", retry_after=0.01)]
    result = await connect(router.address, request_items=10_000, retry=QUICK).do(
        "encode", MODEL, TEXTS
    )
    np.testing.assert_array_equal(result.dense, [make_vector(text) for text in TEXTS])
    assert methods(router) == ["EncodeStream"] * 5
    assert len({call.request_id for call in router.calls}) == 1
    assert result.usage.input_tokens == sum(len(text.split()) for text in TEXTS), (
        "nothing is counted twice"
    )


async def test_unmarked_break_is_not_retried(connect: Connect, router: FakeRouter) -> None:
    router.breaks = [Refusal(grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")]
    with pytest.raises(errors.WorkerLost):
        await connect(router.address, request_items=10_000).do("encode", MODEL, TEXTS)
    assert methods(router) == ["EncodeStream"]


async def test_error_after_messages_has_its_place_in_the_callers_list(
    connect: Connect, router: FakeRouter
) -> None:
    router.breaks = [
        None,
        Refusal(
            grpc.StatusCode.INVALID_ARGUMENT,
            "INPUT_TOO_LONG",
            "items[7].text is too long",
            "items[7].text",
        ),
    ]
    with pytest.raises(errors.InputTooLong) as caught:
        await connect(router.address, request_items=COUNT, concurrency=1).do(
            "encode", MODEL, TEXTS * 2
        )
    assert caught.value.field == f"items[{COUNT + 7}].text"


async def test_first_failure_ends_the_other_streams(connect: Connect, router: FakeRouter) -> None:
    router.middle.clear()
    work = asyncio.create_task(
        connect(router.address, request_items=COUNT).do("encode", MODEL, TEXTS * 4)
    )
    await asyncio.to_thread(
        wait_until, lambda: router.halves == 4, what="four streams to have begun"
    )
    router.breaks = [
        Refusal(
            grpc.StatusCode.INVALID_ARGUMENT,
            "INPUT_TOO_LONG",
            "items[7].text is too long",
            "items[7].text",
        )
    ]
    with pytest.raises(errors.InputTooLong):
        await asyncio.wait_for(work, 60)
    await asyncio.to_thread(wait_until, lambda: router.halves == 0, what="the others to be ended")
    assert methods(router) == ["EncodeStream"] * 4, "and not asked for again"


async def test_items_are_skipped_in_parts_too(connect: Connect, router: FakeRouter) -> None:
    texts = [*TEXTS, "", "y" * 60, *TEXTS]
    client = connect(router.address, request_items=10_000)
    result = await client.do(
        "encode",
        MODEL,
        texts,
        truncation="none",
        on_invalid="skip",
        representations=ALL,
        dimensions=DIMENSIONS,
    )
    whole = await connect(router.address).do(
        "encode",
        MODEL,
        texts,
        truncation="none",
        on_invalid="skip",
        representations=ALL,
        dimensions=DIMENSIONS,
    )
    assert [one.index for one in result.skipped] == [COUNT, COUNT + 1]
    np.testing.assert_array_equal(result.dense, whole.dense)
    assert np.isnan(result.dense[COUNT : COUNT + 2]).all()
    np.testing.assert_array_equal(result.dense[:COUNT], [make_vector(text) for text in TEXTS])


async def test_timeout_ends_a_stream(connect: Connect, router: FakeRouter) -> None:
    router.gate.clear()
    with pytest.raises(errors.DeadlinePassed):
        await connect(router.address, request_items=10_000).do("encode", MODEL, TEXTS, timeout=0.3)
    router.gate.set()


def test_large_response_is_predicted_from_the_request() -> None:
    def large(
        count: int,
        *forms: Form,
        characters: int = 100,
        data_type: DataType = "float32",
        dimensions: int = 0,
    ) -> bool:
        return is_large([characters] * count, forms, data_type, dimensions)

    assert not large(STREAMED_BYTES // (4 * ASSUMED_DIMENSIONS))
    assert large(STREAMED_BYTES // (4 * ASSUMED_DIMENSIONS) + 1)
    assert not large(512), "a request of the default size stays one message"
    assert large(512, dimensions=4096)
    assert not large(512, dimensions=4096, data_type="int8")
    assert not large(2730, dimensions=384)
    assert large(2731, dimensions=384)
    assert large(512, "multi_vector")
    assert not large(20, "multi_vector")
    assert large(2, "multi_vector", characters=100_000)
    assert not large(2000, "sparse")
    assert not large(0)


def test_rows_are_written_in_place_without_a_copy() -> None:
    rows = DenseRows(5)
    sinks = EncodeSink(rows, 3, 2), EncodeSink(rows, 0, 3)
    for sink, numbers in zip(sinks, ([[3, 4]], [[0, 1, 2]]), strict=True):
        for number in numbers[0]:
            sink.take(encode_response(number))
    last, first = (sink.finish() for sink in sinks)
    assert np.shares_memory(last.dense, first.dense.base)
    merged = merge_encode([first, last])
    np.testing.assert_array_equal(merged.dense, [[number, 1] for number in range(5)])
    assert merged.dense is first.dense.base
    alone = EncodeSink(DenseRows(1), 0, 1)
    message = encode_response(7)
    alone.take(message)
    assert not alone.finish().dense.flags.owndata, "a single answer is a view of what was received"


def encode_response(*numbers: int, width: int = 2) -> inference_pb2.EncodeResponse:
    dense = np.array([[number, *[1] * (width - 1)] for number in numbers], np.float32)
    return inference_pb2.EncodeResponse(
        dense=wire.tensor(dense, tensor_pb2.DATA_TYPE_FLOAT32), model_revision="r1"
    )


def test_answers_that_do_not_fit_are_errors_of_the_mesh() -> None:
    def taken(items: int, *messages: inference_pb2.EncodeResponse) -> object:
        sink = EncodeSink(DenseRows(items), 0, items)
        for message in messages:
            sink.take(message)
        return sink.finish()

    for items, messages in (
        (3, [encode_response(1), encode_response(2)]),
        (2, [encode_response(1), encode_response(2), encode_response(3)]),
        (3, [encode_response(1), encode_response(2), encode_response(3, width=3)]),
        (1, [inference_pb2.EncodeResponse()]),
        (1, []),
        (1 << 62, [encode_response(1)]),
    ):
        with pytest.raises(errors.InternalError):
            taken(items, *messages)
    other = encode_response(2)
    other.model_revision = "r2"
    with pytest.raises(errors.ModelChanged):
        taken(2, encode_response(1), other)


async def test_text_has_the_time_of_its_client(router: FakeRouter) -> None:
    task = shoal.ReadText()
    async with shoal.AsyncClient(router.address, timeout=500) as client:
        assert [part async for part in client.extract_stream(MODEL, "some text", task)]
        assert [part async for part in client.extract_stream(MODEL, "a", task, timeout=2000)]
    with shoal.Client(router.address, timeout=500) as client:
        assert list(client.extract_stream(MODEL, "some text", task))
        assert list(client.extract_stream(MODEL, "a", task, timeout=2000))
        with pytest.raises(ValueError, match="above 0"):
            list(client.extract_stream(MODEL, "some text", task, timeout=0))
    left = [call.seconds_left for call in router.calls]
    assert [100 < seconds < 600 for seconds in left] == [True, False] * 2
    assert [1000 < seconds < 2100 for seconds in left] == [False, True] * 2
