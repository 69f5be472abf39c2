"""StreamedTexts: whatever becomes of the parts of a text, its deltas add up to its text in the
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import worker_pb2

from services.router.lanes.streamed import StreamedTexts

ANSWERS = ("the first text", "", "zwölf Boxkämpfer 🥊")


def response(texts: Sequence[str]) -> pb.ExtractResponse:
    return pb.ExtractResponse(results=[pb.Extraction(text=text) for text in texts])


def part(item: int, offset: int, text: str, lease: str = "first") -> worker_pb2.JobDelta:
    return worker_pb2.JobDelta(item=item, offset=offset, text=text, batch_id=lease)


def joined(deltas: Sequence[pb.ExtractDelta], item: int, page: int = 0) -> str:
    text = ""
    for delta in deltas:
        if (delta.item, delta.page) == (item, page):
            text = delta.text if delta.restarted else text + delta.text
    return text


async def streamed(
    texts: StreamedTexts, parts: Sequence[worker_pb2.JobDelta]
) -> list[pb.ExtractDelta]:
    """Deliver the parts one by one, each read by the client before the next one arrives."""
    reader = texts.deltas()
    found: list[pb.ExtractDelta] = []
    for each in parts:
        texts.add(0, each)
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        if waiting.done():
            found += waiting.result()
        else:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            reader = texts.deltas()
    texts.end()
    return found


async def test_texts_without_any_part_are_completed_by_the_answer() -> None:
    texts = StreamedTexts()
    texts.first_items = [0]
    found = await streamed(texts, [])
    found += texts.rest(response(ANSWERS))
    assert [joined(found, item) for item in range(3)] == list(ANSWERS)
    assert [delta.item for delta in found] == [0, 2], "an empty text needs no delta"


async def test_pages_without_any_part_are_completed_by_the_answer() -> None:
    texts = StreamedTexts()
    texts.first_items = [0]
    pages = [pb.PageText(page=2, text="second"), pb.PageText(page=5, text="fifth")]
    found = texts.rest(pb.ExtractResponse(results=[pb.Extraction(pages=pages)]))
    assert [(delta.item, delta.page, delta.text) for delta in found] == [
        (0, 2, "second"),
        (0, 5, "fifth"),
    ]


@st.composite
def parts_of_answers(draw: st.DrawFn) -> list[worker_pb2.JobDelta]:
    """Parts of the answers' texts in any order: lost, repeated, and of a second lease that may
    write another beginning.
    """
    parts = []
    for lease in ("first", "second"):
        for item, text in enumerate(ANSWERS):
            for _ in range(draw(st.integers(0, 4))):
                begin = draw(st.integers(0, len(text)))
                end = draw(st.integers(begin, len(text)))
                shown = text if lease == "second" or draw(st.booleans()) else text[::-1]
                parts.append(part(item, begin, shown[begin:end], lease))
    return draw(st.permutations(parts)) if draw(st.booleans()) else parts


@given(parts_of_answers())
def test_deltas_add_up_to_the_answer_whatever_happens_to_parts(
    parts: list[worker_pb2.JobDelta],
) -> None:
    async def run() -> list[pb.ExtractDelta]:
        texts = StreamedTexts()
        texts.first_items = [0]
        return await streamed(texts, parts) + texts.rest(response(ANSWERS))

    found = asyncio.run(run())
    assert [joined(found, item) for item in range(3)] == list(ANSWERS)
