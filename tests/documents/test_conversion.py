"""Documents of other formats than PDF, converted to Markdown by the processes that read them."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from libs.documents import limits
from libs.documents.conversion import sniffing
from libs.documents.conversion.paging import divide
from libs.documents.layer import read_text_layer
from libs.documents.reader import Bounds, DocumentReader
from libs.errors import InvalidInput, TaskNotSupported
from tests.support import offices, pdfs

FIELD = "items[2].parts[1].document"


@pytest.fixture(scope="module")
def reader() -> Iterator[DocumentReader]:
    made = DocumentReader(2)
    yield made
    made.close()


def pages(reader: DocumentReader, data: bytes) -> list[str]:
    document = reader.open(data, FIELD)
    return [document.text(number) for number in range(1, document.length + 1)]


def test_docx_keeps_headings_lists_tables_and_formatting(reader: DocumentReader) -> None:
    (text,) = pages(reader, offices.word())
    assert text == (
        "# Annual report\n\n# Sales\n\nSales grew in **all** regions: 東京 😀.\n\n"
        "- first\n- second\n\n"
        "| Region | Sales |\n| --- | --- |\n| North\\|East | 12 |\n\n"
        "## Costs\n\nCosts fell."
    )


def test_xlsx_has_a_table_for_each_sheet(reader: DocumentReader) -> None:
    assert pages(reader, offices.workbook()) == [
        "## Sales 2024\n\n"
        "| Region | Sum | Day | Done |\n| --- | --- | --- | --- |\n"
        "| North\\|East | 12.5 | 2024-05-17 | TRUE |\n| South | 3 |  | FALSE |",
        "## Notes\n\n| only text |\n| --- |",
    ]


def test_long_sheet_repeats_its_header_on_each_page(reader: DocumentReader) -> None:
    found = pages(reader, offices.sheet(5000))
    assert len(found) == 2
    top = "## Long\n\n| Number | Text |\n| --- | --- |\n"
    assert all(page.startswith(top) for page in found)
    assert all(len(page.encode()) <= limits.TEXT_BYTES for page in found)
    rows = [line for page in found for line in page.removeprefix(top).split("\n")]
    assert [int(row.split("|")[1]) for row in rows] == [*range(5000)]


def test_pptx_has_a_page_for_each_slide_with_its_notes(reader: DocumentReader) -> None:
    assert pages(reader, offices.slides()) == [
        "# Plans\n\n- Grow\n  - in the north\n\n### Notes\n\nSpeak slowly.",
        "A box\n\n| a | b |\n| --- | --- |\n| 1 | 2 |",
    ]


def test_epub_has_a_page_for_each_chapter_in_reading_order(reader: DocumentReader) -> None:
    assert pages(reader, offices.book()) == ["# Start\n\nIt was & is.", "# The end\n\nIt ends."]


def test_html_keeps_structure_and_drops_scripts(reader: DocumentReader) -> None:
    (text,) = pages(reader, offices.PAGE)
    assert text == (
        "# Title\n\nOne & **two** [link](/x)\n\n1. a\n   - b\n\n"
        "| k | v |\n| --- | --- |\n| a\\|b | 1 |\n\n```\nx\n  y\n```"
    )


def test_mail_has_headers_the_best_body_and_names_of_attachments(reader: DocumentReader) -> None:
    (text,) = pages(reader, offices.mail())
    assert text == (
        "# Grüße über alles\n\n"
        "From: Ada <ada@example.org>  \nTo: bo@example.org  \n"
        "Date: Fri, 17 May 2024 10:00:00 +0000\n\n"
        "## Hello\n\nSee **this**.\n\nAttachments:\n\n- a.pdf (application/pdf)"
    )


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"# A\r\n\r\n- *b*\r\n", "# A\n\n- *b*"),
        (
            '\ufeff<div align="center">logo</div>\n\n# A'.encode(),
            '<div align="center">logo</div>\n\n# A',
        ),
        ("日本語".encode("utf-16"), "日本語"),
        ("<html><meta charset=shift_jis><p>日本語".encode("shift_jis"), "日本語"),
        ("<html><p>na\u00efve \u20ac".encode("cp1252"), "na\u00efve \u20ac"),
    ],
    ids=["CRLF", "Markdown with HTML", "UTF-16", "Shift JIS", "Windows-1252"],
)
def test_texts_and_encodings(reader: DocumentReader, data: bytes, wanted: str) -> None:
    assert pages(reader, data) == [wanted]


@pytest.mark.parametrize("name", offices.hostile())
def test_hostile_documents_are_refused_with_a_clear_message(
    reader: DocumentReader, name: str
) -> None:
    data, problem = offices.hostile()[name]
    with pytest.raises(InvalidInput) as caught:
        reader.open(data, FIELD)
    assert problem in caught.value.message
    assert "ended the process" not in caught.value.message
    assert (caught.value.field, len(caught.value.message) < 600) == (FIELD, True)
    assert reader.open(pdfs.document(["good"]), FIELD).text(1) == "good"


def test_html_of_5_mb_is_read_in_bounded_memory_and_pages() -> None:
    block = "<h2>Head</h2><p>" + "plain words of a paragraph " * 40 + "</p><ul><li>one</ul>"
    data = b"<!doctype html>" + (block * (5_000_000 // len(block) + 1)).encode()
    reader = DocumentReader(1, Bounds(memory=512 << 20))
    document = reader.open(data, FIELD)
    texts = [document.text(number) for number in range(1, document.length + 1)]
    (process,) = (one for one in reader._pool.idle if one.key == document.key)
    peak = psutil.Process(process._child.pid).memory_info().rss
    reader.close()
    assert peak < 400 << 20
    assert all(len(text.encode()) <= limits.TEXT_BYTES for text in texts)
    assert sum(text.count("## Head") for text in texts) == data.count(b"<h2>")


def test_document_that_needs_too_much_memory_is_refused() -> None:
    reader = DocumentReader(1, Bounds(memory=160 << 20))
    with pytest.raises(InvalidInput):
        reader.open(b"<html>" + b"<p>a b c d</p>" * 1_100_000, FIELD)
    assert pages(reader, offices.PAGE)
    reader.close()


def test_process_that_converts_is_confined_before_it_gets_a_document(
    reader: DocumentReader,
) -> None:
    reader.open(offices.word(), FIELD)
    (child,) = [one for one in psutil.Process().children() if "archive" in one.cmdline()[-5:]][-1:]
    assert child.environ() == {}
    assert child.rlimit(psutil.RLIMIT_AS) == (limits.MEMORY_BYTES, limits.MEMORY_BYTES)
    assert child.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert child.num_fds() >= child.rlimit(psutil.RLIMIT_NOFILE)[0]


def test_converted_document_has_no_pages_to_draw(reader: DocumentReader) -> None:
    document = reader.open(offices.word(), FIELD)
    with pytest.raises(InvalidInput, match="the DOCX file has no pages that can be drawn"):
        document.sizes(1, 1, 72)


def test_missing_converter_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.documents.reader.find_spec", lambda name: None)
    reader = DocumentReader(1)
    with pytest.raises(TaskNotSupported, match=r"EPUB files .* Install shoal-mesh\[documents\]"):
        reader.open(offices.word(), FIELD)
    with pytest.raises(ValueError, match=r"html_to_markdown is missing"):
        read_text_layer(b"# a", 1, 0)


def test_declared_formats_are_compared_with_the_bytes() -> None:
    files = {
        "docx": offices.word(),
        "xlsx": offices.workbook(),
        "pptx": offices.slides(),
        "epub": offices.book(),
        "html": offices.PAGE,
        "eml": offices.mail(),
        "pdf": pdfs.document(["a"]),
    }
    for name in files:
        right = [one for one, data in files.items() if sniffing.has_format(data, name)]
        assert right == [name]
    assert sniffing.has_format(b"# a", "text/markdown")
    assert not sniffing.has_format(b"# a", "text/html")


@pytest.mark.parametrize("most", [4, 7, 64])
def test_division_keeps_all_text_within_the_limit(most: int) -> None:
    text = "para one\n\npara 日本語😀 two\nline\n\n" + "x" * 50 + "é" * 20
    parts = divide(text.encode(), most)
    assert all(0 < len(part) <= most for part in parts)
    assert "".join(part.decode() for part in parts).replace("\n", "") == text.replace("\n", "")
    assert divide(b"", most) == [b""]
