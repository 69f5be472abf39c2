"""Chunks in the client: the request's parameters, joining the requests of one call, and the text of
each chunk.
"""

from __future__ import annotations

import numpy as np
import pytest
import shoal
from shoal import Chunking, Span
from shoal.errors import InternalError, InvalidInput
from shoal.requests import codec
from shoal.v1 import inference_pb2, tensor_pb2

from tests.api.fake_router import MODEL, FakeRouter, vector_of

TEXTS = ["one two", "three", "four five six"]


def test_chunks_have_their_texts_and_rows_whatever_the_number_of_requests(
    router: FakeRouter,
) -> None:
    for items in (1, 2, 10):
        with shoal.Client(router.address, request_items=items) as client:
            result = client.encode(MODEL, TEXTS, chunking=Chunking())
        assert [[chunk.text for chunk in own] for own in result.chunks] == [
            text.split() for text in TEXTS
        ]
        assert [chunk.row for own in result.chunks for chunk in own] == list(range(6))
        assert np.allclose(
            result.dense, np.stack([vector_of(word) for text in TEXTS for word in text.split()])
        )
        assert result.chunks[-1][1].start == 5
        assert repr(result.chunks) == "Chunks(3 items, 6 chunks)"
    with shoal.Client(router.address) as client, pytest.raises(ValueError, match="no chunks"):
        _ = client.encode(MODEL, TEXTS).chunks


def test_skipped_items_have_no_chunks(router: FakeRouter) -> None:
    with shoal.Client(router.address, request_items=1) as client:
        result = client.encode(MODEL, ["", *TEXTS], chunking=Chunking(), on_invalid="skip")
    assert [[chunk.text for chunk in own] for own in result.chunks] == [
        [],
        ["one", "two"],
        ["three"],
        ["four", "five", "six"],
    ]


def test_request_has_the_contexts_and_spans_of_its_own_items(router: FakeRouter) -> None:
    spans: list[list[Span | tuple[int, int]]] = [[(0, 3)], [Span(1, 2, "c")], [(0, 4), (5, 9)]]
    with shoal.Client(router.address, request_items=2) as client:
        client.encode(
            MODEL, TEXTS, chunking=Chunking("spans", contexts=["a", "b", ""], spans=spans)
        )
    requests = [
        call.request
        for call in router.calls
        if isinstance(call.request, inference_pb2.EncodeRequest)
    ]
    found = {item.text: item for request in requests for item in request.items}
    assert [found[text].context for text in TEXTS] == ["a", "b", ""]
    assert [(span.start, span.end, span.context) for span in found[TEXTS[1]].spans] == [(1, 2, "c")]
    assert len(found[TEXTS[2]].spans) == 2


@pytest.mark.parametrize(
    "asked",
    [
        Chunking("words"),  # type: ignore[arg-type]
        Chunking(max_tokens=-1),
        Chunking(contexts=["a"]),
        Chunking(contexts="abc"),
        Chunking("spans", spans=[[(0, 3)], [(0, 1)], [(0,)]]),  # type: ignore[list-item]
        Chunking("spans", spans=[[(0, 3)], [(-1, 1)], [(0, 1)]]),
    ],
)
def test_invalid_chunking_is_refused(router: FakeRouter, asked: Chunking) -> None:
    with shoal.Client(router.address) as client, pytest.raises(InvalidInput):
        client.encode(MODEL, TEXTS, chunking=asked)


def test_inconsistent_chunks_are_an_internal_error() -> None:
    dense = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1, 2], data=bytes(8))
    for chunks in (
        inference_pb2.Chunks(offsets=[0, 1], starts=[0], ends=[1]),
        inference_pb2.Chunks(offsets=[0, 2], starts=[0], ends=[1], tokens=[1]),
        inference_pb2.Chunks(offsets=[0, 1], starts=[2], ends=[1], tokens=[1]),
    ):
        with pytest.raises(InternalError):
            codec.encode_result(inference_pb2.EncodeResponse(dense=dense, chunks=chunks))
