"""Chunks in the router: refusal before any work, price, and joining and streaming of answers."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, tensor_pb2, worker_pb2

from libs.documents.text_size import PDF_PAGE_BYTES, TEXT_FACTOR, TextBudget
from libs.errors import InternalError, InvalidInput, TaskNotSupported
from services.router.admission import pricing, splitting
from services.router.admission.validation import answer_bounds
from services.router.admission.validation.requests import (
    TEXT_LAYER_TOKENS,
    check_encode,
    check_extract,
    check_score,
)
from services.router.admission.validation.sizes import Sizes
from services.router.lanes import codec, streamed_chunks
from services.router.lanes.chunks import ChunkMessages, split
from services.router.lanes.dispatch import JobAnswer
from services.router.lanes.streamed_chunks import ChunkPart, StreamedChunks
from tests.router.parts import MODEL, card

SPANS = pb.Chunking.METHOD_SPANS
PDF = b"%PDF-1.7" + bytes(2 << 20)
LARGE = b"# Titles\n\n" * 980_000


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


def test_refusal_of_a_long_text_names_the_alternatives() -> None:
    asked = request(pb.Item(text="x" * ((1 << 20) + 1)))
    with pytest.raises(InvalidInput, match=r"as a document .* 8 MiB, or its parts as items"):
        check_encode(asked, card())


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


def reads_documents() -> models_pb2.ModelCard:
    """Return the card of a text embedder that takes documents."""
    known = card()
    known.inputs.extend([models_pb2.INPUT_KIND_TEXT, models_pb2.INPUT_KIND_DOCUMENT_TEXT])
    return known


def documented(data: bytes = PDF, first: int = 0, last: int = 0, *, context: str = "") -> pb.Item:
    document = pb.Document(data=data, first_page=first, last_page=last)
    return pb.Item(parts=[pb.Part(document=document)], context=context)


def test_documents_are_refused_by_cards_that_do_not_name_them() -> None:
    asked = request(documented())
    check_encode(asked, None)
    check_encode(asked, reads_documents())
    with pytest.raises(TaskNotSupported, match="takes no documents") as caught:
        check_encode(asked, card())
    assert caught.value.field == "items[0].parts[0].document"
    asked.ClearField("chunking")
    with pytest.raises(TaskNotSupported, match="only with `chunking`"):
        check_encode(asked, reads_documents())
    reads_pages = card()
    reads_pages.inputs.extend([models_pb2.INPUT_KIND_IMAGE, models_pb2.INPUT_KIND_DOCUMENT])
    with pytest.raises(TaskNotSupported, match="reads images") as caught:
        check_encode(request(documented()), reads_pages)
    assert caught.value.field == "chunking"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (request(documented(last=1025)), "items[0].parts[0].document.last_page"),
        (request(documented(first=2, last=1)), "items[0].parts[0].document.last_page"),
        (request(*[documented(last=1000)] * 2), "items"),
        (request(documented(b"\x00\x01")), "items[0].parts[0].document.data"),
        (request(documented(), method=SPANS), "items[0].parts[0].document"),
        (
            request(pb.Item(parts=[pb.Part(text="a"), pb.Part(document=pb.Document(data=PDF))])),
            "items[0].parts",
        ),
        (request(documented(context="c"), late=True), "items[0].context"),
        (request(spanned((0, 3)), method=SPANS, return_text=True), "chunking.return_text"),
    ],
)
def test_invalid_documents_are_refused(asked: pb.EncodeRequest, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_encode(asked, reads_documents())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("data", "first", "last", "problem"),
    [
        (LARGE, 0, 0, "9,800,000 bytes; at most 8,388,608"),
        (LARGE, 0, 1024, "9,800,000 bytes; at most 8,388,608"),
        (codecs.BOM_UTF16_LE + "é".encode("utf-16-le") * 8_400_000, 0, 0, "8,400,001 bytes"),
        (LARGE, 10, 0, ""),
        (LARGE, 0, 30, ""),
        (LARGE[: 8 << 20], 0, 0, ""),
        (b"From: a@b\nSubject: c\n\n" + LARGE, 0, 0, ""),
        (b"<html>" + LARGE, 0, 0, ""),
        (b"<!-- a --><html>" + b"a" * (16 << 20), 0, 1, "16,777,232 bytes; at most 16,777,216"),
    ],
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_text_that_is_too_large_is_refused_by_its_bytes(
    data: bytes, first: int, last: int, problem: str, is_shared: bool
) -> None:
    asked = request(documented(data, first, last))
    if is_shared:
        asked.items[0].parts[0].document.file = 0
        asked.files.append(data)
    if not problem:
        check_encode(asked, reads_documents())
        return
    with pytest.raises(InvalidInput, match=problem):
        check_encode(asked, reads_documents())


def test_documents_cost_their_pages_and_estimated_text() -> None:
    known = models_pb2.ModelCard(tokens_per_byte=0.25, max_tokens=512)
    sizes = check_encode(request(documented(last=40), max_tokens=100), reads_documents())
    assert (sizes.items, sizes.chunks) == ([40 * PDF_PAGE_BYTES], [40 * PDF_PAGE_BYTES // 400 + 1])
    assert sizes.read == [40 * PDF_PAGE_BYTES + len(PDF)]
    costs, _ = pricing.price(sizes, known, pb.TRUNCATION_END)
    text = 40 * PDF_PAGE_BYTES // 4 + sizes.chunks[0] * pricing.SPECIAL_TOKENS
    assert costs == [text + 40 * TEXT_LAYER_TOKENS]
    whole = check_encode(request(documented()), reads_documents())
    assert whole.items == [1 << 20], "without a last page all of the file's bytes may be text"
    small = check_encode(request(documented(), max_tokens=8), reads_documents())
    assert small.chunks == [8192], "the worker refuses documents with more chunks, not an estimate"
    shared = request(*[pb.Item(parts=[pb.Part(document=pb.Document(file=0, last_page=2))])] * 2)
    shared.files.append(b"# Title")
    assert check_encode(shared, reads_documents()).items == [7, 7]


def test_jobs_have_their_share_of_the_pages_and_text_that_documents_may_have() -> None:
    small = b"%PDF-1.7" + bytes(2040)
    asked = request(
        documented(small, last=24), *[documented(small)] * 4, pb.Item(text="a"), max_tokens=32
    )
    sizes = check_encode(asked, reads_documents())
    pages = [budget.pages for budget in sizes.budgets]
    assert pages == [24, 250, 250, 250, 250, 0], "1,024 pages in all"
    stamp = codec.JobHeader("r", 2000, 1000, budgets=sizes.budgets, max_chunks=7)
    halves = [splitting.RequestPart(0, 2, 1), splitting.RequestPart(2, 4, 1)]
    jobs = [
        worker_pb2.Job.FromString(payload)
        for payload in codec.job_payloads(asked, halves, ["a", "b"], stamp)
    ]
    assert [job.document_pages for job in jobs] == [274, 750]
    share = -(-(1 << 20) // 5)
    assert [job.document_bytes for job in jobs] == [2 * share, 3 * share]
    assert {job.max_chunks for job in jobs} == {7}
    many = check_encode(request(*[documented(small, last=4)] * 256), reads_documents())
    assert sum(budget.bytes for budget in many.budgets) == TEXT_FACTOR * 256 * len(small)
    alone = check_encode(request(documented(small)), reads_documents())
    assert alone.budgets == [TextBudget(1024, 1 << 20)]


@pytest.mark.parametrize("last", [0, 256])
def test_estimate_of_a_documents_text_refuses_no_answer(last: int) -> None:
    """A file of 2 MiB may be 10 pages of images."""
    known = reads_documents()
    known.dimensions = 1024
    asked = request(documented(last=last), max_tokens=64, return_text=True)
    sizes = check_encode(asked, known)
    costs, _ = pricing.price(sizes, known, pb.TRUNCATION_END)
    answer_bounds.check_divided_texts(
        asked, known, costs, sizes, is_streamed=False, readable=4 << 20
    )
    most = answer_bounds.divided_bytes(asked, known, is_streamed=False, readable=4 << 20)
    assert (most, answer_bounds.max_chunks(asked, known, most)) == (4 << 20, 1023)
    text = request(pb.Item(text="x" * (1 << 20)), max_tokens=64)
    sizes = check_encode(text, known)
    costs, _ = pricing.price(sizes, known, pb.TRUNCATION_END)
    with pytest.raises(InvalidInput, match="over gRPC, EncodeStream"):
        answer_bounds.check_divided_texts(
            text, known, costs, sizes, is_streamed=False, readable=64 << 20
        )


@pytest.mark.parametrize(
    ("data_type", "forms", "most"),
    [
        (tensor_pb2.DATA_TYPE_FLOAT32, [pb.REPRESENTATION_MULTI_VECTOR], 10_000 // 516),
        (tensor_pb2.DATA_TYPE_BINARY, [pb.REPRESENTATION_MULTI_VECTOR], 10_000 // 20),
        (
            tensor_pb2.DATA_TYPE_FLOAT16,
            [pb.REPRESENTATION_DENSE, pb.REPRESENTATION_MULTI_VECTOR],
            10_000 // (4 + 2 * 384 + 2 * 128),
        ),
        (tensor_pb2.DATA_TYPE_FLOAT32, [pb.REPRESENTATION_SPARSE], 10_000 // 4),
    ],
)
def test_number_of_chunks_depends_on_all_vectors(
    data_type: tensor_pb2.DataType, forms: list[pb.Representation], most: int
) -> None:
    known = reads_documents()
    known.dimensions, known.multi_vector_dimensions = 384, 128
    asked = request(pb.Item(text="a"))
    asked.data_type = data_type
    asked.representations.extend(forms)
    assert answer_bounds.max_chunks(asked, known, 10_000) == most


def test_returned_texts_count_in_the_answer() -> None:
    known = reads_documents()
    asked = request(*[documented()] * 5, return_text=True)
    sizes = check_encode(asked, known)
    for text_bytes, is_streamed in ((0, False), (sum(sizes.items), True)):
        answer_bounds.check_encoded(
            asked,
            known,
            [1] * 5,
            is_streamed=is_streamed,
            readable=4 << 20,
            chunks=sum(sizes.chunks),
            text_bytes=text_bytes,
        )
    with pytest.raises(InvalidInput, match="over gRPC, EncodeStream"):
        answer_bounds.check_encoded(
            asked,
            known,
            [1] * 5,
            is_streamed=False,
            readable=4 << 20,
            chunks=sum(sizes.chunks),
            text_bytes=sum(sizes.items),
        )


def test_long_text_costs_all_of_its_tokens_and_the_overlap_of_chunks() -> None:
    known = models_pb2.ModelCard(tokens_per_byte=0.25, max_tokens=512)
    plain = check_encode(request(pb.Item(text="x" * 100_000), max_tokens=100), None)
    assert plain.chunks == [251]
    assert pricing.price(plain, known, pb.TRUNCATION_END)[0] == [
        25_000 + 251 * pricing.SPECIAL_TOKENS
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
    assert pricing.price(Sizes([100_000]), known, pb.TRUNCATION_END)[0][0] < 700


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
    with pytest.raises(InvalidInput, match="over gRPC, EncodeStream"):
        answer_bounds.check_encoded(
            asked, known, [1] * 20, is_streamed=False, readable=1 << 40, chunks=4097
        )
    with pytest.raises(InvalidInput, match="over gRPC, EncodeStream"):
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


def with_pages(*counts: int, first: int = 0) -> pb.EncodeResponse:
    """Return the same for documents: chunks with pages and texts."""
    found = answer(*counts, first=first)
    rows = sum(counts)
    found.chunks.pages.extend(range(1, rows + 1))
    found.chunks.texts.extend(f"text {row} " + "x" * 100 for row in range(rows))
    return found


def test_pages_of_jobs_are_joined() -> None:
    texts = answer(1, first=3)
    texts.chunks.texts.append("plain")
    merged = codec.merge_encode([with_pages(2, 1), texts, with_pages(1, first=4)])
    assert list(merged.chunks.pages) == [1, 2, 3, 0, 1]
    assert [text[:6] for text in merged.chunks.texts] == [
        "text 0",
        "text 1",
        "text 2",
        "plain",
        "text 0",
    ]
    assert not codec.merge_encode([answer(2), answer(1, first=2)]).chunks.pages


def test_texts_count_in_the_messages_of_a_stream() -> None:
    whole = with_pages(2, 3, 1, 4)
    messages = list(split(whole, most_bytes=500))
    assert [len(message.chunks.starts) for message in messages] == [3, 3, 3, 1]
    assert all(len(message.chunks.pages) == len(message.chunks.texts) for message in messages)
    assert join_chunks(messages) == join_chunks([whole])


def join_chunks(messages: Sequence[pb.EncodeResponse]) -> list[list[tuple[object, ...]]]:
    """Return each item's chunks with their vectors, as a client joins them."""
    items: list[list[tuple[object, ...]]] = []
    for message in messages:
        chunks, rows = message.chunks, np.frombuffer(message.dense.data, "<f4")
        vectors = rows.reshape(message.dense.shape).tolist()
        for item, (begin, end) in enumerate(pairwise(chunks.offsets)):
            if item or not chunks.continues:
                items.append([])
            for row in range(begin, end):
                texts = chunks.texts[row] if chunks.texts else ""
                place = (chunks.starts[row], chunks.ends[row], chunks.tokens[row], texts)
                items[-1].append((*place, *vectors[row]))
    return items


@pytest.mark.parametrize("most", [1, 60, 100, 10_000])
@pytest.mark.parametrize("first", [0, 1, 2, 3, 6, 9])
def test_stream_has_the_chunks_of_each_item_in_order(most: int, first: int) -> None:
    whole = answer(2, 3, 1, 4)
    messages = list(split(whole, most_bytes=most, first=first))
    assert all(message.chunks.offsets[0] == 0 for message in messages)
    assert len(messages) == (10 - first if most == 1 else 1 if most == 10_000 else len(messages))
    before = [*split(whole, most_bytes=1)][:first]
    assert join_chunks([*before, *messages]) == join_chunks([whole])


def make_delta(whole: pb.EncodeResponse, first: int, end: int) -> worker_pb2.JobDelta:
    """Return a part of an answer as a worker sends it."""
    messages = [*split(whole, most_bytes=1)]
    found = codec.merge_encode([*messages[first:end]])
    bounds = list(whole.chunks.offsets)
    found.chunks.offsets[:] = [
        min(max(bound, first), end) - first
        for bound in bounds[bisect_right(bounds, first) - 1 : bisect_left(bounds, end) + 1]
    ]
    found.chunks.continues = first not in bounds
    return worker_pb2.JobDelta(offset=first, chunks=found.SerializeToString())


async def stream_parts(
    whole: pb.EncodeResponse, parts: Sequence[tuple[int, int]], *, jobs: int = 1
) -> tuple[list[pb.EncodeResponse], int]:
    """Return the messages of a request with `jobs` equal answers, after parts of the first job, and
    how many of them precede the answer.
    """
    held: list[int] = []
    streamed, made = StreamedChunks(held.append, lambda size: held.append(-size)), ChunkMessages()
    for first, end in parts:
        streamed.add(0, make_delta(whole, first, end))
    for job in range(jobs):
        streamed.add_answer(JobAnswer(whole, whole.ByteSize(), job == jobs - 1))
    streamed.end()
    messages: list[pb.EncodeResponse] = []
    early = 0
    async for found in streamed.read():
        if isinstance(found, ChunkPart):
            messages.append(made.early(found.chunks))
            early += 1
        else:
            messages += made.messages(codec.encode_answer(found.response))
    assert len(held) == early
    return messages, early


@pytest.mark.parametrize(
    ("parts", "early"),
    [
        ([], 0),
        ([(0, 1), (1, 4)], 2),
        ([(0, 4), (0, 2), (3, 4)], 1),  # another worker began again
        ([(0, 4), (2, 7), (0, 9)], 3),
        ([(2, 4), (0, 1), (4, 5)], 1),  # a part was lost
    ],
)
async def test_chunks_are_sent_once_whatever_parts_arrive(
    parts: list[tuple[int, int]], early: int
) -> None:
    whole = answer(2, 3, 1, 4)
    messages, found = await stream_parts(whole, parts)
    assert found == early
    assert join_chunks(messages) == join_chunks([whole])


async def test_parts_of_a_later_job_wait_for_the_jobs_before_it() -> None:
    whole, made = answer(2, 3), ChunkMessages()
    streamed = StreamedChunks(lambda size: None, lambda size: None)
    streamed.add(1, make_delta(whole, 0, 3))
    streamed.add(0, make_delta(whole, 0, 1))
    streamed.add_answer(JobAnswer(whole, 1, is_last=False))
    streamed.add(0, make_delta(whole, 1, 2))
    streamed.add_answer(JobAnswer(whole, 1, is_last=True))
    streamed.end()
    messages: list[pb.EncodeResponse] = []
    kinds = ""
    async for found in streamed.read():
        kinds += "p" if isinstance(found, ChunkPart) else "a"
        messages += (
            [made.early(found.chunks)]
            if isinstance(found, ChunkPart)
            else made.messages(codec.encode_answer(found.response))
        )
    assert kinds == "papa"
    assert join_chunks(messages) == join_chunks([whole]) * 2


async def test_parts_beyond_their_limit_are_left_to_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = answer(2, 3, 1, 4)
    monkeypatch.setattr(streamed_chunks, "MAX_WAITING_BYTES", len(make_delta(whole, 0, 3).chunks))
    messages, found = await stream_parts(whole, [(0, 3), (3, 5), (5, 7)])
    assert found == 1
    assert join_chunks(messages) == join_chunks([whole])


async def test_repeated_request_forgets_chunks_that_were_not_sent() -> None:
    """Another pool may divide the request into other jobs."""
    whole = answer(2, 3)
    held: list[int] = []
    streamed = StreamedChunks(held.append, lambda size: held.append(-size))
    streamed.add(0, make_delta(whole, 0, 1))
    streamed.add(1, make_delta(whole, 0, 3))
    assert streamed.restart()
    assert sum(held) == 0
    streamed.add_answer(JobAnswer(whole, 1, is_last=False))
    streamed.add_answer(JobAnswer(whole, 1, is_last=True))
    streamed.end()
    assert [type(found) async for found in streamed.read()] == [JobAnswer, JobAnswer]


async def test_request_with_sent_chunks_is_not_repeated() -> None:
    whole = answer(2, 3)
    streamed = StreamedChunks(lambda size: None, lambda size: None)
    streamed.add(0, make_delta(whole, 0, 1))
    assert isinstance(await anext(streamed.read()), ChunkPart)
    assert not streamed.restart()


async def test_malformed_part_is_dropped() -> None:
    wrong = pb.EncodeResponse.FromString(make_delta(answer(2, 3), 0, 3).chunks)
    wrong.chunks.ends.append(1)
    held: list[int] = []
    streamed = StreamedChunks(held.append, lambda size: held.append(-size))
    streamed.add(0, worker_pb2.JobDelta(chunks=wrong.SerializeToString()))
    streamed.add(0, worker_pb2.JobDelta(chunks=b"\xff"))
    streamed.add(0, worker_pb2.JobDelta(text="text"))
    assert not held


def test_answer_with_other_chunks_than_were_sent_is_refused() -> None:
    made = ChunkMessages()
    made.early(codec.encode_part(make_delta(answer(2, 3), 0, 3).chunks))
    other = answer(2, 3)
    other.chunks.ends[1] += 1
    with pytest.raises(InternalError, match="into other chunks"):
        made.messages(other)


@pytest.mark.parametrize("name", ["starts", "ends", "tokens", "offsets", "pages", "texts"])
def test_chunks_that_do_not_match_vectors_are_refused(name: str) -> None:
    wrong = with_pages(2, 1)
    del getattr(wrong.chunks, name)[-1]
    with pytest.raises(InternalError):
        codec.job_result(worker_pb2.JobResult(encode=wrong).SerializeToString())
    codec.job_result(worker_pb2.JobResult(encode=answer(2, 1)).SerializeToString())
