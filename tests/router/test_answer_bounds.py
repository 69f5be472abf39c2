"""Every kind of answer has a bound that is known before any work is done."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis
from shoal.transport.channels import ANY_ANSWER
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import inference_pb2_grpc, models_pb2, tensor_pb2

from libs.errors import InvalidInput
from libs.serving.calls.call import DEFAULT_ANSWER_BYTES, parse_answer_bytes
from services.router.admission.validation import answer_bounds, limits
from services.router.admission.validation.requests import check_extract
from tests.router.parts import MODEL, FakeWorker, card, encode_request, refused, router

ANY = parse_answer_bytes("-1")
"""Maximum bytes that a client without a limit reads in one message."""


def test_every_kind_of_answer_has_a_bound_that_is_in_the_table() -> None:
    tasks = [
        f"extract.{field.name}"
        for field in pb.ExtractRequest.DESCRIPTOR.oneofs_by_name["task"].fields
    ]
    forms = [
        name.removeprefix("REPRESENTATION_").lower()
        for name, number in pb.Representation.items()
        if number
    ]
    kinds = {
        *tasks,
        *(f"encode.{form}" for form in forms),
        "encode.chunks",
        "score",
        "tokenize",
        "detokenize",
    }
    assert set(answer_bounds.BOUNDS) == kinds
    assert {limit for bounds in answer_bounds.BOUNDS.values() for limit in bounds} <= set(
        limits.ALL
    )
    assert all(answer_bounds.BOUNDS.values())


def test_every_field_of_an_encode_answer_is_of_a_kind_with_a_bound() -> None:
    forms = {field.name for field in pb.EncodeResponse.DESCRIPTOR.fields} - {
        "model_revision",
        "embedding_id",
        "usage",
        "timings",
        "alias",  # names and a revision
    }
    assert {f"encode.{form}" for form in forms} <= set(answer_bounds.BOUNDS)


def test_items_share_the_answers_limit_plus_the_bytes_of_the_request() -> None:
    request = pb.ExtractRequest(items=[pb.Item(text="a")] * 200)
    assert answer_bounds.item_share(request, 359_000, ANY) == (limits.SHARED.most + 359_000) // 200
    assert (
        answer_bounds.item_share(pb.EncodeRequest(items=[pb.Item(text="a")] * 10_000), 100, ANY)
        // 8
        == 419
    )


@pytest.mark.parametrize(("max_tokens", "allowed"), [(0, 4096), (4096, 256)])
def test_more_tokens_than_answer_holds_are_refused(max_tokens: int, allowed: int) -> None:
    writes = card(tasks=[models_pb2.TASK_TEXT])
    request = pb.ExtractRequest(
        model=MODEL,
        items=[pb.Item(text="a")] * (allowed + 1),
        text=pb.TextTask(max_tokens=max_tokens),
    )
    with pytest.raises(InvalidInput, match=f"send at most {allowed:,} at a time") as caught:
        check_extract(request, writes)
    assert caught.value.field == "items"
    del request.items[allowed:]
    check_extract(request, writes)


def test_pages_count_as_generated_texts_unless_only_text_layers_are_read() -> None:
    reads = card(tasks=[models_pb2.TASK_TEXT])
    reads.inputs.extend([models_pb2.INPUT_KIND_IMAGE, models_pb2.INPUT_KIND_DOCUMENT])
    document = pb.Document(file=0, last_page=64)
    request = pb.ExtractRequest(model=MODEL, text=pb.TextTask(max_tokens=4096), files=[b"%PDF-1.7"])
    request.items.extend([pb.Item(parts=[pb.Part(document=document)])] * 5)
    with pytest.raises(InvalidInput, match="320 texts to generate"):
        check_extract(request, reads)
    request.text.text_layer = pb.TextTask.TEXT_LAYER_ONLY
    check_extract(request, reads)


def test_labels_of_generated_regions_count_as_texts() -> None:
    writes = card(tasks=[models_pb2.TASK_TEXT, models_pb2.TASK_REGIONS])
    request = pb.ExtractRequest(
        model=MODEL,
        items=[pb.Item(image=pb.Image(data=b"p"))] * 17,
        regions=pb.RegionsTask(labels=list(map(str, range(256)))),
    )
    with pytest.raises(InvalidInput, match=r"4,352 texts .* name fewer regions\.labels") as caught:
        check_extract(request, writes)
    assert caught.value.field == "items"
    del request.items[16:]
    check_extract(request, writes)


def test_any_number_of_images_may_be_searched_for_regions() -> None:
    finds = card(tasks=[models_pb2.TASK_REGIONS])
    items = [pb.Item(image=pb.Image(data=b"p"))] * 500
    check_extract(
        pb.ExtractRequest(model=MODEL, regions=pb.RegionsTask(labels=["cat"]), items=items), finds
    )


def vectors_card() -> models_pb2.ModelCard:
    made = card()
    made.dimensions, made.multi_vector_dimensions = 4096, 1024
    made.representations[:] = [pb.REPRESENTATION_DENSE, pb.REPRESENTATION_MULTI_VECTOR]
    return made


@pytest.mark.parametrize(
    ("data_type", "dimensions", "allowed"),
    [
        (tensor_pb2.DATA_TYPE_FLOAT32, 0, 1024),
        (tensor_pb2.DATA_TYPE_BFLOAT16, 0, 2048),
        (tensor_pb2.DATA_TYPE_FLOAT32, 1024, 4096),
    ],
)
def test_dense_vectors_beyond_one_answer_are_refused_with_advice(
    data_type: tensor_pb2.DataType, dimensions: int, allowed: int
) -> None:
    request = pb.EncodeRequest(
        items=[pb.Item(text="a")] * (allowed + 1), data_type=data_type, dimensions=dimensions
    )
    with pytest.raises(InvalidInput, match="over gRPC, EncodeStream") as caught:
        answer_bounds.check_encoded(
            request, vectors_card(), [1] * (allowed + 1), is_streamed=False, readable=ANY
        )
    advice = (
        "send about [\\d,]+ items at a time, or request fewer dimensions or a smaller data type"
    )
    assert re.search(f"{advice}; over gRPC, EncodeStream", caught.value.message)
    found = re.search(r"send about ([\d,]+) items", caught.value.message)
    assert found is not None
    assert int(found[1].replace(",", "")) == allowed
    del request.items[allowed:]
    answer_bounds.check_encoded(
        request, vectors_card(), [1] * allowed, is_streamed=False, readable=ANY
    )


@pytest.mark.parametrize(("dimensions", "allowed"), [(384, 2_730), (4096, 255)])
def test_default_client_is_refused_answers_above_its_grpc_limit(
    dimensions: int, allowed: int
) -> None:
    request = pb.EncodeRequest(items=[pb.Item(text="a")] * allowed, dimensions=dimensions)
    answer_bounds.check_encoded(
        request, vectors_card(), [1] * allowed, is_streamed=False, readable=DEFAULT_ANSWER_BYTES
    )
    request.items.add(text="a")
    with pytest.raises(
        InvalidInput, match=r"over gRPC, EncodeStream.*x-shoal-max-answer-bytes \(-1: unlimited\)"
    ):
        answer_bounds.check_encoded(
            request,
            vectors_card(),
            [1] * (allowed + 1),
            is_streamed=False,
            readable=DEFAULT_ANSWER_BYTES,
        )
    answer_bounds.check_encoded(
        request, vectors_card(), [1] * (allowed + 1), is_streamed=False, readable=8 << 20
    )


def test_variable_results_fit_client_limit() -> None:
    request = pb.ExtractRequest(items=[pb.Item(text="a")] * 200)
    share = answer_bounds.item_share(request, 359_000, DEFAULT_ANSWER_BYTES)
    assert DEFAULT_ANSWER_BYTES - 2_000 < share * 200 < DEFAULT_ANSWER_BYTES


@pytest.mark.parametrize("value", ["-2", "4 MiB", "1e6", "9" * 19, "\u0663"])
def test_answer_limit_that_is_not_a_number_is_refused(value: str) -> None:
    with pytest.raises(InvalidInput, match="x-shoal-max-answer-bytes must be a number of bytes"):
        parse_answer_bytes(value)


async def test_router_refuses_unreadable_answers_before_any_work(
    redis_url: str, redis: Redis
) -> None:
    """Through gRPC with its default limit, and with the metadata that says another one."""
    request = encode_request(*["a"] * 300)
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[vectors_card()]).working() as worker,
    ):
        await client.sees("w1")
        async with grpc.aio.insecure_channel(client.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            refusal = await refused(stub.Encode(request, timeout=120))
            assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, "items")
            assert not worker.jobs
            assert (
                sum([part.dense.shape[0] async for part in stub.EncodeStream(request, timeout=120)])
                == 300
            )
        async with grpc.aio.insecure_channel(
            client.address, [("grpc.max_receive_message_length", -1)]
        ) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            answer = await stub.Encode(request, timeout=120, metadata=ANY_ANSWER)
            assert answer.dense.shape[0] == 300


def test_multi_vectors_beyond_one_answer_are_refused_unless_they_are_pooled() -> None:
    request = pb.EncodeRequest(
        items=[pb.Item(text="a")] * 20, representations=[pb.REPRESENTATION_MULTI_VECTOR]
    )
    with pytest.raises(InvalidInput, match="over gRPC, EncodeStream"):
        answer_bounds.check_encoded(
            request, vectors_card(), [400] * 20, is_streamed=False, readable=ANY
        )
    request.pooling_factor = 4
    answer_bounds.check_encoded(
        request, vectors_card(), [400] * 20, is_streamed=False, readable=ANY
    )


def test_stream_of_more_vectors_than_its_bound_is_refused() -> None:
    request = pb.EncodeRequest(
        items=[pb.Item(text="a")] * 600, representations=[pb.REPRESENTATION_MULTI_VECTOR]
    )
    answer_bounds.check_encoded(
        request, vectors_card(), [400] * 600, is_streamed=True, readable=DEFAULT_ANSWER_BYTES
    )
    with pytest.raises(InvalidInput, match=r"send about 5[0-9][0-9] items") as caught:
        answer_bounds.check_encoded(
            request, vectors_card(), [500] * 600, is_streamed=True, readable=DEFAULT_ANSWER_BYTES
        )
    assert "EncodeStream" not in caught.value.message


async def test_router_refuses_large_vectors_in_one_answer_and_streams_them(
    redis_url: str, redis: Redis
) -> None:
    request = encode_request(*["a"] * 1100)
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[vectors_card()]).working() as worker,
    ):
        await client.sees("w1")
        refusal = await refused(client.inference.Encode(request))
        assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, "items")
        assert not worker.jobs, "before any work is done"
        rows = [part.dense.shape[0] async for part in client.inference.EncodeStream(request)]
        assert sum(rows) == 1100
        assert {job.item_answer_bytes for job in worker.jobs} == {limits.SPARSE.most // 1100}
