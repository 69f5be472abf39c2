"""Chunks in the router: refusal before any work, price, and joining and streaming of answers."""

from __future__ import annotations

import numpy as np
import pytest
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, tensor_pb2, worker_pb2

from libs.errors import InternalError, InvalidInput, TaskNotSupported
from services.router.admission import control
from services.router.admission.validation import answer_bounds
from services.router.admission.validation.requests import (
    check_encode,
    check_extract,
    check_score,
)
from services.router.admission.validation.sizes import Sizes
from services.router.lanes import codec
from services.router.lanes.chunks import split
from tests.router.parts import MODEL, card

SPANS = pb.Chunking.METHOD_SPANS


def request(*items: pb.Item, **chunking: object) -> pb.EncodeRequest:
    return pb.EncodeRequest(model=MODEL, items=items, chunking=pb.Chunking(**chunking))  # type: ignore[arg-type]


def spanned(*spans: tuple[int, int], text: str = "abcdefgh", context: str = "") -> pb.Item:
    return pb.Item(
        text=text, spans=[pb.Span(start=start, end=end) for start, end in spans], context=context
    )


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (request(pb.Item(text="a"), method=9), "chunking.method"),
        (request(pb.Item(text="a"), max_tokens=32_769), "chunking.max_tokens"),
        (request(pb.Item(text="a"), max_tokens=40, overlap=21), "chunking.overlap"),
        (request(pb.Item(text="a"), overlap=257), "chunking.overlap"),
        (request(spanned((0, 3)), method=SPANS, max_tokens=5), "chunking.max_tokens"),
        (request(spanned((0, 3)), method=SPANS, overlap=0, late=True), ""),
        (request(spanned((0, 9)), method=SPANS), "items[0].spans[0]"),
        (request(spanned((0, 8), (3, 3)), method=SPANS), "items[0].spans[1]"),
        (request(spanned((0, 8)), pb.Item(text="b"), method=SPANS), "items[1].spans"),
        (request(spanned((0, 8))), "items[0].spans"),
        (request(spanned(*[(0, 8)] * 8193), method=SPANS), "items[0].spans"),
        (request(*[spanned(*[(0, 8)] * 8192)] * 9, method=SPANS), "items"),
        (request(spanned(*[(0, 4000)] * 1100, text="x" * 4000), method=SPANS), "items[0].spans"),
        (request(pb.Item(text="x" * ((1 << 20) + 1))), "items[0].text"),
        (request(pb.Item(text="x" * (1 << 20)), max_tokens=10), "items[0].text"),
        (request(pb.Item(text="a", context="c" * 4097)), "items[0].context"),
        (request(pb.Item(parts=[pb.Part(text="a"), pb.Part(text="b")])), "items[0].parts"),
        (request(pb.Item(text="a", context="c"), late=True), "items[0].context"),
        (
            request(
                pb.Item(text="a", spans=[pb.Span(end=1, context="c")]), method=SPANS, late=True
            ),
            "items[0].spans[0].context",
        ),
    ],
)
def test_invalid_chunking_is_refused(asked: pb.EncodeRequest, field: str) -> None:
    if not field:
        assert check_encode(asked, card()).chunks == [1]
        return
    with pytest.raises(InvalidInput) as caught:
        check_encode(asked, card())
    assert caught.value.field == field


def test_spans_and_contexts_are_for_chunks_alone() -> None:
    item = spanned((0, 3))
    with pytest.raises(InvalidInput, match="with chunking"):
        check_encode(pb.EncodeRequest(model=MODEL, items=[item]), card())
    with pytest.raises(InvalidInput, match="with chunking"):
        check_score(pb.ScoreRequest(model=MODEL, query=item, documents=[pb.Item(text="a")]), None)
    with pytest.raises(InvalidInput, match="with chunking"):
        check_extract(
            pb.ExtractRequest(
                model=MODEL, items=[pb.Item(text="a", context="b")], text=pb.TextTask()
            ),
            None,
        )


def test_models_that_read_images_have_no_chunks() -> None:
    reads = card()
    reads.inputs.extend([models_pb2.INPUT_KIND_TEXT, models_pb2.INPUT_KIND_IMAGE])
    with pytest.raises(TaskNotSupported):
        check_encode(request(pb.Item(text="a")), reads)


def test_long_text_costs_all_of_its_tokens_and_what_chunks_repeat() -> None:
    known = models_pb2.ModelCard(tokens_per_byte=0.25, max_tokens=512)
    plain = check_encode(request(pb.Item(text="x" * 100_000), max_tokens=100), None)
    assert plain.chunks == [251]
    assert control.price(plain, known, pb.TRUNCATION_END)[0] == [
        25_000 + 251 * control.SPECIAL_TOKENS
    ]
    repeats = check_encode(request(pb.Item(text="x" * 100_000), max_tokens=100, overlap=50), None)
    assert repeats.items == [200_000]
    titled = check_encode(
        request(pb.Item(text="x" * 100_000, context="t" * 400), max_tokens=100), None
    )
    assert titled.items == [100_000 + 251 * 400]
    spans = check_encode(request(spanned(*[(0, 1000)] * 50, text="x" * 1000), method=SPANS), None)
    assert (spans.items, spans.chunks) == ([50_000], [50])
    assert check_encode(
        request(spanned(*[(0, 1000)] * 50, text="x" * 1000), method=SPANS, late=True), None
    ).items == [1000 + 50_000 // 4]
    pooled = check_encode(
        request(pb.Item(text="x" * 100_000), max_tokens=100, overlap=50, late=True), None
    )
    assert pooled.items == [125_000], "each state is pooled twice"
    late = request(spanned(*[(0, 1000)] * 50, text="x" * 1000), method=SPANS, late=True)
    late.representations.append(pb.REPRESENTATION_MULTI_VECTOR)
    assert check_encode(late, None).items == [50_000]
    assert control.price(Sizes([100_000]), known, pb.TRUNCATION_END)[0][0] < 700


def test_context_of_too_many_chunks_is_refused() -> None:
    check_encode(request(pb.Item(text="x" * 400_000, context="é" * 2000), max_tokens=100), None)
    with pytest.raises(
        InvalidInput, match="1,251 chunks, 5,004,000 bytes together; at most 4,194,304"
    ) as caught:
        check_encode(request(pb.Item(text="x" * 500_000, context="é" * 2000), max_tokens=100), None)
    assert caught.value.field == "items[0].context"


def test_vectors_of_estimated_chunks_count() -> None:
    known = card()
    known.dimensions = 1024
    asked = request(*[pb.Item(text="x" * 40_000)] * 20, max_tokens=50)
    sizes = check_encode(asked, known)
    answer_bounds.check_encoded(
        asked, known, [1] * 20, is_streamed=True, readable=1 << 40, chunks=sum(sizes.chunks)
    )
    answer_bounds.check_encoded(
        asked, known, [1] * 20, is_streamed=False, readable=1 << 40, chunks=4096
    )
    with pytest.raises(InvalidInput, match="call EncodeStream"):
        answer_bounds.check_encoded(
            asked, known, [1] * 20, is_streamed=False, readable=1 << 40, chunks=4097
        )
    with pytest.raises(InvalidInput, match="call EncodeStream"):
        answer_bounds.check_divided(4 << 20, (4 << 20) - 1)


def answer(*counts: int, first: int = 0) -> pb.EncodeResponse:
    """Return an answer with the given number of chunks for each item and numbered vectors."""
    rows = sum(counts)
    values = np.arange(first, first + rows, dtype="<f4")[:, None].repeat(4, axis=1)
    places = list(range(rows))
    return pb.EncodeResponse(
        dense=tensor_pb2.Tensor(
            data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[rows, 4], data=values.tobytes()
        ),
        chunks=pb.Chunks(
            offsets=np.cumsum([0, *counts]),
            starts=places,
            ends=[place + 1 for place in places],
            tokens=[5] * rows,
        ),
        model_revision="r1",
    )


def test_answers_of_jobs_are_joined() -> None:
    merged = codec.merge_encode([answer(2, 1), answer(3, first=3)])
    assert list(merged.chunks.offsets) == [0, 2, 3, 6]
    assert list(merged.chunks.starts) == [0, 1, 2, 0, 1, 2]
    assert (list(merged.chunks.tokens), list(merged.dense.shape)) == ([5] * 6, [6, 4])
    assert np.frombuffer(merged.dense.data, "<f4")[::4].tolist() == [0, 1, 2, 3, 4, 5]
    whole = answer(1)
    whole.ClearField("chunks")
    with pytest.raises(InternalError):
        codec.merge_encode([answer(2), whole])


@pytest.mark.parametrize("most", [1, 60, 100, 10_000])
def test_stream_has_whole_items(most: int) -> None:
    messages = list(split(answer(2, 3, 1, 4), most_bytes=most))
    assert [message.chunks.offsets[0] for message in messages] == [0] * len(messages)
    joined = codec.merge_encode([*messages])
    assert joined.chunks == answer(2, 3, 1, 4).chunks
    assert joined.dense == answer(2, 3, 1, 4).dense
    assert len(messages) == (4 if most == 1 else 1 if most == 10_000 else len(messages))


@pytest.mark.parametrize("name", ["starts", "ends", "tokens", "offsets"])
def test_chunks_that_do_not_match_vectors_are_refused(name: str) -> None:
    wrong = answer(2, 1)
    del getattr(wrong.chunks, name)[-1]
    with pytest.raises(InternalError):
        codec.job_result(worker_pb2.JobResult(encode=wrong).SerializeToString())
    codec.job_result(worker_pb2.JobResult(encode=answer(2, 1)).SerializeToString())
