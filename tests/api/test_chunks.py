"""Chunks in the client: the request's parameters, joining the requests of one call, and the text of
each chunk.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import shoal
from shoal import Chunking, Document, Span
from shoal.errors import InternalError, InvalidInput
from shoal.requests import codec
from shoal.tasks import Item
from shoal.v1 import inference_pb2, tensor_pb2

from tests.api.fake_router import MODEL, FakeRouter, make_vector

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
            result.dense, np.stack([make_vector(word) for text in TEXTS for word in text.split()])
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


def test_chunks_of_documents_have_pages_and_texts(router: FakeRouter, tmp_path: Path) -> None:
    """The caller does not know the texts of documents, so the mesh returns them."""
    (tmp_path / "report.md").write_bytes(b"seven eight")
    items: list[Item] = ["one two", Document(tmp_path / "report.md"), "three"]
    for count in (1, 10):
        with shoal.Client(router.address, request_items=count) as client:
            result = client.encode(MODEL, items, chunking=Chunking())
        assert [[chunk.text for chunk in own] for own in result.chunks] == [
            ["one", "two"],
            ["seven", "eight"],
            ["three"],
        ]
        assert [[chunk.page for chunk in own] for own in result.chunks] == [[0, 0], [7, 7], [0]]
    assert all(call.method == "EncodeStream" for call in router.calls)
    with shoal.Client(router.address) as client:
        texts = client.encode(MODEL, TEXTS, chunking=Chunking())
    request = router.calls[-1].request
    assert isinstance(request, inference_pb2.EncodeRequest)
    assert not request.chunking.return_text
    assert texts.chunks.pages is None
    assert texts.chunks[0][0].page == 0


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
        inference_pb2.Chunks(offsets=[0, 1], starts=[0], ends=[1], tokens=[1], pages=[1, 2]),
        inference_pb2.Chunks(offsets=[0, 1], starts=[0], ends=[1], tokens=[1], texts=["a", "b"]),
    ):
        with pytest.raises(InternalError):
            codec.encode_result(inference_pb2.EncodeResponse(dense=dense, chunks=chunks))
