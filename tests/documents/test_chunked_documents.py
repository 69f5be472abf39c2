"""The text of documents that is divided into chunks: how pages are joined, which page a position
is on, and which documents are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from libs.documents import limits
from libs.documents.joined_text import JoinedText, PageStarts
from libs.documents.reader import DocumentReader
from libs.documents.text_size import (
    ARCHIVE_EXPANSION,
    PDF_PAGE_BYTES,
    TEXT_FACTOR,
    TextBudget,
    estimated_text_bytes,
    text_budget,
)
from libs.errors import InvalidInput
from libs.models.interface.work import Chunking, EncodeWork, Part, never_cancelled
from libs.models.runtime.documents import DocumentFile, with_pages
from tests.support import offices, pdfs

FIELD = "items[1].parts[0].document"
THREE = pdfs.document(["first page\nof two lines", "", "third page"])
BOOK = pdfs.document([f"page {number}" for number in range(1, 31)])


@pytest.fixture(scope="module")
def reader() -> Iterator[DocumentReader]:
    made = DocumentReader(2)
    yield made
    made.close()


def joined(*texts: str) -> JoinedText:
    found = JoinedText()
    for number, text in enumerate(texts, start=1):
        found.add(number, text)
    return found


@pytest.mark.parametrize(
    ("pages", "text", "starts"),
    [
        (("one page",), "one page", PageStarts((1,), (0,))),
        (("hyphen\x02ated",), "hyphenated", PageStarts((1,), (0,))),
        (("a\r\nb\r\n", "c"), "a\nb\n\nc", PageStarts((1, 2), (0, 5))),
        (
            ("", "日本語の文。\r", " \r\n", "次の文。😀"),
            "日本語の文。\n\n次の文。😀",
            PageStarts((2, 4), (0, 8)),
        ),
        (("\u3000 a \x0c", "e\u0301"), "a\n\ne\u0301", PageStarts((1, 2), (0, 3))),
        (("", " \r\n"), "", PageStarts((), ())),
        ((), "", PageStarts((), ())),
    ],
)
def test_pages_are_joined_by_a_blank_line(
    pages: Sequence[str], text: str, starts: PageStarts
) -> None:
    found = joined(*pages)
    assert (found.text, found.pages, found.size) == (text, starts, len(text.encode()))


def test_position_is_on_the_page_that_has_it() -> None:
    found = joined("ab", "", "日本", "c")
    assert found.text == "ab\n\n日本\n\nc"
    pages = [found.pages.page_at(position) for position in range(len(found.text))]
    assert pages == [1, 1, 1, 1, 3, 3, 3, 3, 4]


def read(
    reader: DocumentReader,
    data: bytes,
    first: int = 0,
    last: int = 0,
    *,
    others: Sequence[Part] = (),
    chunking: Chunking | None = None,
    files: Sequence[bytes] = (),
) -> EncodeWork:
    """Return a work of a text and a document, after the document was read whole."""
    file = DocumentFile.create(data, 0 if files else None, first, last, 0)
    parts = {1: (Part(file, FIELD), *others)}
    work = EncodeWork(["text", ""], parts=parts, chunking=chunking or Chunking())
    found = with_pages(work, files, reader, never_cancelled)
    assert isinstance(found, EncodeWork)
    found.read_text(1)
    return found


def text_of(work: EncodeWork) -> str:
    return work.read_text(1)[0]


def pages_of(work: EncodeWork) -> PageStarts:
    return work.documents[1].pages


def test_document_is_replaced_by_its_text(reader: DocumentReader) -> None:
    work = read(reader, THREE)
    assert [work.read_text(index) for index in range(2)] == [
        ("text", True),
        ("first page\nof two lines\n\nthird page", True),
    ]
    assert not work.parts
    assert pages_of(work) == PageStarts((1, 3), (0, 25))


def test_pages_are_read_as_they_are_needed(reader: DocumentReader) -> None:
    file = DocumentFile.create(BOOK, None, 0, 0, 0)
    parts = {0: (Part(file, FIELD),)}
    work = with_pages(
        EncodeWork([""], parts=parts, chunking=Chunking()), (), reader, never_cancelled
    )
    assert isinstance(work, EncodeWork)
    assert work.read_text(0, 0) == ("", False)
    beginning = "page 1\n\npage 2"
    assert work.read_text(0, len(beginning)) == (beginning, False)
    assert work.documents[0].pages == PageStarts((1, 2), (0, 8))
    assert work.read_text(0, 1) == (beginning, False)
    text, is_whole = work.read_text(0)
    assert (text[: len(beginning)], text[-7:], is_whole) == (beginning, "page 30", True)


def test_hyphenated_words_of_a_pdf_file_are_whole(reader: DocumentReader) -> None:
    assert text_of(read(reader, pdfs.document(["a hyphen-\nated word"]))) == "a hyphenated word"


def test_range_of_a_shared_file_has_the_pages_of_the_file(reader: DocumentReader) -> None:
    work = read(reader, b"", 7, 8, files=[BOOK])
    assert text_of(work) == "page 7\n\npage 8"
    assert pages_of(work).numbers == (7, 8)
    assert pages_of(read(reader, BOOK)).numbers == tuple(range(1, 31)), "no last page needed"
    assert pages_of(read(reader, BOOK, 29, 400)).numbers == (29, 30)


def test_other_formats_are_markdown(reader: DocumentReader) -> None:
    assert text_of(read(reader, offices.word())).startswith("# Annual report\n\n# Sales\n")
    book = read(reader, offices.workbook())
    assert pages_of(book).numbers == (1, 2)
    assert text_of(book)[pages_of(book).starts[1] :].startswith("## Notes")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (pdfs.document(["", ""]), "no text to divide"),
        (b"<!doctype html><script>var a = 1</script>", "no text to divide"),
        (offices.hostile()["zip bomb"][0], offices.hostile()["zip bomb"][1]),
        (offices.hostile()["deep HTML"][0], offices.hostile()["deep HTML"][1]),
        (offices.hostile()["DOCX with entities"][0], offices.hostile()["DOCX with entities"][1]),
    ],
)
def test_document_without_text_or_beyond_limits_is_refused(
    reader: DocumentReader, data: bytes, problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        read(reader, data)
    assert caught.value.field == FIELD


def test_document_among_other_parts_or_with_spans_is_refused(reader: DocumentReader) -> None:
    for others, chunking in (
        ((Part("a", "items[1].parts[1].text"),), Chunking()),
        ((), Chunking("spans")),
    ):
        with pytest.raises(InvalidInput) as caught:
            read(reader, THREE, others=others, chunking=chunking)
        assert caught.value.field == FIELD


def test_pages_and_bytes_are_limited(
    reader: DocumentReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHUNKED_PAGES", 29)
    with pytest.raises(InvalidInput, match="more than 29 pages"):
        read(reader, BOOK)
    monkeypatch.setattr(limits, "DIVIDED_BYTES", len("page 1\n\npage 2"))
    assert text_of(read(reader, BOOK, 1, 2)) == "page 1\n\npage 2"
    with pytest.raises(InvalidInput, match="up to page 3 have more than 14 bytes"):
        read(reader, BOOK, 1, 3)
    monkeypatch.setattr(limits, "JOB_TEXT_BYTES", 13)
    with pytest.raises(InvalidInput, match="send fewer documents at a time"):
        read(reader, BOOK, 1, 2)


@pytest.mark.parametrize(
    "data",
    [b"a line\n\n" * (9 << 17), b"<html><p>" + b"one word" * (9 << 17)],
    ids=["Markdown", "HTML"],
)
def test_converted_text_that_is_too_large_is_refused_before_it_is_divided(
    reader: DocumentReader, data: bytes
) -> None:
    file = DocumentFile.create(data, None, 0, 0, 0)
    work = EncodeWork([""], parts={0: (Part(file, FIELD),)}, chunking=Chunking())
    found = with_pages(work, [], reader, never_cancelled)
    assert isinstance(found, EncodeWork)
    with pytest.raises(InvalidInput, match=r"9,4\d\d,\d{3} bytes of text; at most 8,388,608"):
        found.documents[0].read(1)
    assert not found.documents[0].pages.numbers, "no page was read"


def test_pages_and_text_of_all_documents_of_a_job_are_limited(reader: DocumentReader) -> None:
    parts = {
        index: (Part(DocumentFile.create(b"", 0, 1, 2, 0), f"items[{index}].parts[0].document"),)
        for index in range(3)
    }
    work, size = EncodeWork([""] * 3, parts=parts, chunking=Chunking()), len("page 1\n\npage 2")

    def read_all(budget: TextBudget) -> None:
        found = with_pages(work, [BOOK], reader, never_cancelled, budget)
        assert isinstance(found, EncodeWork)
        for index in range(3):
            found.read_text(index)

    read_all(TextBudget(6, 3 * size))
    for budget, problem in (
        (
            TextBudget(5, 3 * size),
            "and 1 of the pages that the documents of this job may have are left: set last_page",
        ),
        (TextBudget(6, 3 * size - 1), "request fewer pages, or send fewer documents"),
    ):
        with pytest.raises(InvalidInput, match=problem) as caught:
            read_all(budget)
        assert caught.value.field == "items[2].parts[0].document"


def test_budget_admits_any_single_document_and_not_many_with_far_more_text_than_estimated() -> None:
    small = b"%PDF-1.7" + bytes(2040)
    assert text_budget(small, 4, 1) == TextBudget(4, limits.CHUNKED_BYTES)
    assert text_budget(small, 4, 256) == TextBudget(4, TEXT_FACTOR * 2048)
    assert text_budget(small * 1000, 4, 256).bytes == TEXT_FACTOR * 4 * PDF_PAGE_BYTES
    page = b"<html>" + b"a" * (5 << 20)
    assert text_budget(page, limits.CHUNKED_PAGES, 1).bytes == limits.DIVIDED_BYTES > len(page)


def test_estimated_text_grows_with_bytes_and_pages() -> None:
    pdf, archive = b"%PDF-1.7" + bytes(1 << 21), b"PK\x03\x04" + bytes(10_000)
    assert estimated_text_bytes(pdf, 3) == 3 * PDF_PAGE_BYTES
    assert estimated_text_bytes(pdf, limits.CHUNKED_PAGES) == limits.CHUNKED_BYTES
    assert estimated_text_bytes(b"%PDF-1.7", 16) == 8
    assert estimated_text_bytes(archive, 1) == ARCHIVE_EXPANSION * len(archive)
    assert estimated_text_bytes(b"# Title", 1) == 7
    assert estimated_text_bytes(b"a" * (1 << 19), 1) == limits.TEXT_BYTES
    assert estimated_text_bytes(b"a" * (5 << 20), 1024) == 5 << 20, "all of it may be text"
    assert estimated_text_bytes(b"a" * (9 << 20), 1024) == limits.DIVIDED_BYTES
    assert estimated_text_bytes(b"", 1) == 1
