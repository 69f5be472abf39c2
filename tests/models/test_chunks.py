"""Where texts are divided into chunks: nothing is lost, offsets are exact, and sizes are kept, for
tokenizers of each style.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.errors import DeadlinePassed, InvalidInput
from libs.models import EncodeWork
from libs.models.text.processing.chunking.dividing import MAX_CHUNKS, divide
from libs.models.text.tokenising.text import LONG_CHARACTERS, TextProcessor
from libs.models.work import Chunking, ChunkMethod, Span
from tests.parity.tokenizers import Style, tokenizer_of
from tests.support.texts import texts

METHODS: tuple[ChunkMethod, ...] = ("sentences", "tokens", "markdown")
LONG = " ".join(texts(30, shortest=5, longest=25, seed=3))
HARD = (
    "日本語の文。次の文です。😀👩\u200d👩\u200d👧 emoji! e\u0301te\u0301 naïve.\r\nNew "
    "line.\r\n\r\n"
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd. The end\u200b of it."
)
MARKDOWN = (
    "# One\r\n\r\nA first text. It is short.\r\n\r\n## Two\r\n\r\n- an item\r\n- another\r\n\r\n"
    "| a | b |\r\n| - | - |\r\n| 1 | 2 |\r\n"
)
TEXTS = (LONG, HARD, MARKDOWN, "   ", "a", "😀" * 50, "ﷺ" * 9, "x" * 3000, "e\u0301" * 100)


def nothing() -> None:
    """Never cancelled."""


def processor(style: Style) -> TextProcessor:
    return TextProcessor(tokenizer_of(style, 400), limit=512, segments=False)


def divided(text: TextProcessor, own: str, chunking: Chunking) -> list[Span]:
    return divide(text, EncodeWork([own], chunking=chunking), 0, 500, nothing)


def check(text: TextProcessor, own: str, chunking: Chunking) -> None:
    spans = divided(text, own, chunking)
    assert all(0 <= span.start < span.end <= len(own) for span in spans)
    assert all(one.start < other.start and one.end < other.end for one, other in pairwise(spans))
    if not own.strip():
        assert spans == [Span(0, len(own))]
        return
    covered = {index for span in spans for index in range(span.start, span.end)}
    assert all(index in covered for index, character in enumerate(own) if not character.isspace())
    if not chunking.overlap:
        assert all(one.end <= other.start for one, other in pairwise(spans))
    for span in spans:
        piece = own[span.start : span.end]
        assert piece == piece.strip()
        if chunking.method != "tokens":  # chunks may have other tokens alone than in their text
            assert text.count_tokens(piece, 1 << 20) <= chunking.max_tokens or len(piece) == 1


@pytest.mark.parametrize("style", get_args(Style))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("most", "overlap"), [(1, 0), (2, 0), (7, 0), (40, 0), (16, 8)])
def test_chunks_cover_their_text_and_are_no_larger_than_asked_for(
    style: Style, method: ChunkMethod, most: int, overlap: int
) -> None:
    text = processor(style)
    for own in TEXTS:
        check(text, own, Chunking(method, max_tokens=most, overlap=overlap))


@settings(max_examples=60, deadline=None)
@given(
    st.text(min_size=1, max_size=300),
    st.integers(1, 30),
    st.sampled_from(METHODS),
    st.sampled_from(("bert", "qwen", "gemma")),
)
def test_any_text_is_divided(own: str, most: int, method: ChunkMethod, style: Style) -> None:
    check(processor(style), own, Chunking(method, max_tokens=most))


def test_sentences_stay_whole_and_chunks_hold_as_many_as_fit() -> None:
    text = processor("bert")
    own = "One two three. Four five six! Seven? Eight nine ten eleven twelve."
    pieces = [own[span.start : span.end] for span in divided(text, own, Chunking(max_tokens=24))]
    assert pieces == ["One two three. Four five six! Seven?", "Eight nine ten eleven twelve."]


def test_markdown_is_divided_at_headings() -> None:
    text = processor("bert")
    pieces = [
        MARKDOWN[span.start : span.end]
        for span in divided(text, MARKDOWN, Chunking("markdown", max_tokens=40))
    ]
    assert [piece.splitlines()[0] for piece in pieces] == ["# One", "## Two"]


def test_chunks_of_tokens_begin_with_words() -> None:
    text, own = (
        processor("qwen"),
        "You may copy and distribute the programs of this section, and charge a fee for it. " * 9,
    )
    spans = divided(text, own, Chunking("tokens", max_tokens=30))
    assert len(spans) > 9
    assert all(own[span.start - 1].isspace() for span in spans[1:])


def test_too_many_chunks_are_refused_before_they_are_made() -> None:
    calls = 0

    def check_cancelled() -> None:
        nonlocal calls
        calls += 1

    work = EncodeWork(["word " * 4 * MAX_CHUNKS], chunking=Chunking(max_tokens=1))
    with pytest.raises(InvalidInput, match="more than 8,192 chunks") as caught:
        divide(processor("bert"), work, 0, 500, check_cancelled)
    assert caught.value.field == "items[0].text"
    assert calls < 1000


@pytest.mark.parametrize("method", METHODS)
def test_job_that_is_cancelled_is_divided_no_further(method: ChunkMethod) -> None:
    def check_cancelled() -> None:
        raise DeadlinePassed("the deadline passed")

    work = EncodeWork([LONG * 20], chunking=Chunking(method, max_tokens=20))
    with pytest.raises(DeadlinePassed):
        divide(processor("bert"), work, 0, 500, check_cancelled)


def test_long_texts_are_tokenised_at_once_by_no_more_than_one_thread() -> None:
    """Two threads with one long text each get what one gets."""
    text, own = processor("bert"), "one two three. " * (LONG_CHARACTERS // 12)
    chunking = Chunking("tokens", max_tokens=400)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: divided(text, own, chunking), range(2))
    assert first == second == divided(text, own, chunking)
