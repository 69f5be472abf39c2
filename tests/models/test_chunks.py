"""Division of texts into chunks: nothing is lost, offsets are exact, and sizes are kept, for
tokenizers of each style.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, cast, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.documents.joined_text import JoinedText, PagedText, PageStarts
from libs.errors import DeadlinePassed, InvalidInput
from libs.models import EncodeWork, PackedModel
from libs.models.interface.results import Chunks
from libs.models.interface.work import Chunking, ChunkMethod, Span
from libs.models.text.processing.chunking import dividing
from libs.models.text.processing.chunking.dividing import MAX_CHUNKS, check_contexts, divide
from libs.models.text.tokenising import whole
from libs.models.text.tokenising.text import TextProcessor
from tests.parity.tokenizers import Style, train_tokenizer
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
LARGE = " ".join(texts(500, shortest=5, longest=25, seed=5))
BLOCKS = [
    one.replace("`", "").replace("~", "") for one in texts(300, shortest=5, longest=25, seed=6)
]
MAX_GROWTH_BYTES: Final = 64 << 20
MAX_FACTOR: Final = 16
"""Memory that a request may cost, in multiples of its bytes, in addition to MAX_GROWTH_BYTES."""
TEXTS = (LONG, HARD, MARKDOWN, "   ", "a", "😀" * 50, "ﷺ" * 9, "x" * 3000, "e\u0301" * 100)


def nothing() -> None:
    """Never cancelled."""


def processor(style: Style) -> TextProcessor:
    return TextProcessor(train_tokenizer(style, 400), limit=512, segments=False)


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


def add_pages(pages: Mapping[int, str], found: JoinedText) -> Iterator[None]:
    for number, text in pages.items():
        found.add(number, text)
        yield


@pytest.mark.parametrize("late", [False, True])
def test_chunks_of_documents_have_the_page_of_their_first_character(
    embedder: PackedModel, late: bool
) -> None:
    chunking = Chunking("tokens", max_tokens=2, late=late, return_text=True)
    document = "aa bb cc\n\ndd ee\n\nff"
    paged = PagedText(partial(add_pages, {2: "aa bb cc", 3: "dd ee", 9: "ff"}))
    work = EncodeWork(["aa bb", ""], chunking=chunking, documents={1: paged})
    prepared = embedder.prepare(work)
    chunks: Chunks = cast(Any, prepared.notes).chunks
    first = chunks.offsets[1]
    assert set(chunks.pages[:first]) == {0}
    starts = PageStarts((2, 3, 9), (0, 10, 17))
    assert paged.pages == starts
    assert chunks.pages[first:] == [starts.page_at(start) for start in chunks.starts[first:]]
    assert chunks.pages[-1] == 9
    assert chunks.texts == [
        (document if row >= first else "aa bb")[start:end]
        for row, (start, end) in enumerate(zip(chunks.starts, chunks.ends, strict=True))
    ]
    plain = embedder.prepare(EncodeWork(["aa bb"], chunking=Chunking("tokens", max_tokens=2)))
    chunks = cast(Any, plain.notes).chunks
    assert (chunks.pages, chunks.texts) == ([], [])


def test_chunks_of_a_job_are_limited(
    embedder: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small archive may have much more text than a router can know."""
    monkeypatch.setattr(dividing, "MAX_JOB_CHUNKS", 5)
    for late in (False, True):
        chunking = Chunking("tokens", max_tokens=1, late=late)
        embedder.prepare(EncodeWork(["a b", "c d"], chunking=chunking))
        with pytest.raises(InvalidInput, match="more than 5 chunks") as caught:
            embedder.prepare(EncodeWork(["a b", "c d", "a b c d"], chunking=chunking))
        assert caught.value.field == "items[2]"
        share = replace(chunking, max_chunks=3)
        with pytest.raises(InvalidInput, match="more than 3 chunks, which is all") as caught:
            embedder.prepare(EncodeWork(["a b", "c d"], chunking=share))
        assert caught.value.field == "items[1]"


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


@pytest.mark.parametrize("style", ["bert", "qwen", "gemma", "xlm-roberta"])
def test_text_that_is_tokenised_in_pieces_has_the_tokens_of_the_whole(
    style: Style, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = processor(style)
    for own in (
        LARGE,
        HARD * 100,
        MARKDOWN * 100,
        "!?.," * 5000,
        "1234567890" * 2000,
        "     a" * 4000,
        "日本語の文です" * 2000,
    ):
        for prompt in ("", "query: "):
            monkeypatch.setattr(whole, "PIECE", 1 << 30)
            undivided = text.encode_whole(own, prompt)
            monkeypatch.setattr(whole, "PIECE", 6000)
            found = text.encode_whole(own, prompt)
            for field in fields(found):
                np.testing.assert_array_equal(
                    getattr(found, field.name), getattr(undivided, field.name), field.name
                )


@pytest.mark.parametrize("style", ["bert", "qwen", "xlm-roberta"])
def test_ordinary_texts_are_tokenised_in_pieces(
    style: Style, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = processor(style)
    monkeypatch.setattr(whole, "PIECE", 6000)
    monkeypatch.setattr(whole, "MAX_WHOLE_BYTES", 0)
    monkeypatch.setattr(whole, "_division", lambda own, begin: pytest.fail("pieces do not join"))
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    text.encode_whole(LARGE, check_cancelled=count)
    assert calls > len(LARGE) // 6000


@pytest.mark.parametrize("style", ["bert", "qwen", "gemma"])
@pytest.mark.parametrize(("most", "overlap"), [(60, 0), (400, 0), (120, 40)])
def test_text_that_is_divided_in_windows_has_the_chunks_of_the_whole(
    style: Style, most: int, overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = processor(style)
    blocks = "".join(
        f"# Title {number}\n\n{one}\n\n```\ncode {number}\n\n```\n\n"
        for number, one in enumerate(BLOCKS)
    )
    for method, own in (("sentences", LARGE), ("sentences", HARD * 200), ("markdown", blocks)):
        chunking = Chunking(cast(ChunkMethod, method), max_tokens=most, overlap=overlap)
        monkeypatch.setattr(dividing, "WINDOW", 1 << 30)
        undivided = divided(text, own, chunking)
        monkeypatch.setattr(dividing, "WINDOW", 4096)
        assert divided(text, own, chunking) == undivided, method


_PROGRAM: Final = """
import os, sys
from libs import memory
memory.limit_heaps(heaps=2)  # as in a worker
from libs.models import EncodeWork
from libs.models.text.processing.chunking.dividing import divide
from libs.models.interface.work import Chunking
from tests.models.test_chunks import processor
from tests.support.peak import Peak

text, own = processor("bert"), "!?.," * (1 << 18)
divide(text, EncodeWork(["A first text."], chunking=Chunking(max_tokens=500)), 0, 500, lambda: None)
peak = Peak(os.getpid())
work = EncodeWork([own], chunking=Chunking(sys.argv[1], max_tokens=500))
divide(text, work, 0, 500, lambda: None)
print(peak.grown)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("method", ["sentences", "markdown"])
def test_text_of_a_million_tokens_is_divided_within_a_bound_of_memory(method: str) -> None:
    """Tokenised in one call and divided as a whole, it took 730 MB."""
    command = [sys.executable, "-c", _PROGRAM, method]
    grown = int(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    )
    assert grown < MAX_FACTOR * (1 << 20) + MAX_GROWTH_BYTES


def test_contexts_of_all_chunks_are_limited_exactly() -> None:
    spans = [Span(place, place + 1) for place in range(1024)]
    check_contexts(spans, "c" * 4096, 3)
    with pytest.raises(
        InvalidInput, match="1,025 chunks have 4,198,400 characters together; at most 4,194,304"
    ) as caught:
        check_contexts([*spans, Span(0, 1)], "c" * 4096, 3)
    assert caught.value.field == "items[3].context"
    with pytest.raises(InvalidInput) as caught:
        check_contexts([*[Span(0, 1, "c" * 4096)] * 1024, Span(0, 1, "c")], "", 3)
    assert caught.value.field == "items[3].spans"


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


def test_two_threads_with_a_long_text_each_get_the_tokens_of_one() -> None:
    text, own = processor("bert"), "one two three. " * 10_000
    chunking = Chunking("tokens", max_tokens=400)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: divided(text, own, chunking), range(2))
    assert first == second == divided(text, own, chunking)
