"""Documents as other programs write them, and files that only look like another format."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator

import pytest

from libs.documents.conversion import formats, markup, sniffing
from libs.documents.conversion.limits import ConversionLimits, ConversionRefused
from libs.documents.reader import _CONVERSION, DocumentReader
from libs.errors import InvalidInput, TaskNotSupported
from tests.support import offices, pdfs

FIELD = "items[0].document"
_RELATIONS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
    '<Relationship Id="r" Type="http://schemas.openxmlformats.org/officeDocument/2006/'
    'relationships/officeDocument" Target="/word/document.xml"/></Relationships>'
)
_TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.'
    'relationships+xml"/><Default Extension="xml" ContentType="application/vnd.'
    'openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>'
)
_DOCUMENT = (
    '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
    "<w:body><w:p><w:r><w:t>read</w:t></w:r></w:p></w:body></w:document>"
)
_FAR = (
    '<sheetData><row r="1"><c r="A1"><v>1</v></c></row>'
    '<row r="1048576"><c r="XFD1048576"><v>2</v></c></row></sheetData>'
)


@pytest.fixture(scope="module")
def reader() -> Iterator[DocumentReader]:
    made = DocumentReader(1)
    yield made
    made.close()


def converted(data: bytes, limits: ConversionLimits = _CONVERSION) -> list[str]:
    family = sniffing.family(data)
    assert family is not None
    return [page.decode() for page in formats.convert(data, family, limits)[1]]


def renamed(data: bytes, names: dict[str, str]) -> bytes:
    """An archive with other names of files."""
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        files = {names.get(one, one): packed.read(one) for one in packed.namelist()}
    return offices.archive(
        {
            name: data.replace(b"sheet1.xml", b"Sheet1.xml") if name.endswith(".rels") else data
            for name, data in files.items()
        }
    )


def test_head_of_many_comments_is_searched_in_linear_time() -> None:
    assert not sniffing.is_html("<!---->" * 500 + "x")
    assert sniffing.is_html("<?xml version='1.0'?>\n" + "<!-- a -->\n" * 50 + "<!DOCTYPE html>")
    assert not sniffing.is_html("<!-- <html>")


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [("gb2312", "gb18030"), ("iso-8859-6", "iso-8859-6"), ("cp866", "cp866"), ("x-none", "utf-8")],
)
def test_mail_is_read_in_the_encoding_that_it_declares(
    reader: DocumentReader, declared: str, encoding: str
) -> None:
    text = {"gb2312": "镕基", "iso-8859-6": "سلام", "cp866": "Привет"}.get(declared, "Grüße")
    data = (
        f"From: a@b.c\nSubject: s\nContent-Type: text/plain; charset={declared}\n"
        "Content-Transfer-Encoding: 8bit\n\n"
    ).encode() + text.encode(encoding)
    assert text in reader.open(data, FIELD).text(1)


def test_document_with_the_default_type_of_its_main_part_is_read() -> None:
    files = {
        "[Content_Types].xml": _TYPES,
        "_rels/.rels": _RELATIONS,
        "word/document.xml": _DOCUMENT,
    }
    assert converted(offices.archive(files)) == ["read"]
    backslashes = {name.replace("/", "\\"): text for name, text in files.items()}
    assert converted(offices.archive(backslashes)) == ["read"]


@pytest.mark.parametrize("name", ["customXml/item1.xml", "word/drawing.vml", "docProps/app.xml"])
def test_parts_that_no_reader_reads_may_be_invalid(name: str) -> None:
    assert converted(offices.docx_file(_DOCUMENT, **{name: "<!DOCTYPE a><br>"})) == ["read"]


@pytest.mark.parametrize("empty", ["title", "iframe", "textarea", "script", "noscript"])
def test_text_after_an_empty_element_of_xhtml_is_read(empty: str) -> None:
    assert "after" in converted(offices.book({"a.xhtml": f"<{empty} id='a'/><p>after</p>"}))[0]
    page = f"<?xml version='1.0'?><html><body><{empty}/><p>after</p></body></html>"
    assert "after" in converted(page.encode())[0]


def test_end_tags_are_added_in_linear_time() -> None:
    assert markup.xhtml("<title/><titles/><p/>") == "<title></title><titles/><p/>"
    for text in ("<title " * 100_000, "<title " + "\"' " * 200_000 + ">", "<title/" * 100_000):
        assert markup.xhtml(text) == text


@pytest.mark.parametrize(
    "name", ["XL/Worksheets/Sheet1.xml", "xl\\worksheets\\Sheet1.xml", "xl/other/Sheet1.xml"]
)
def test_area_of_a_sheet_is_checked_whatever_its_name(name: str) -> None:
    data = renamed(offices.xlsx_file(_FAR), {"xl/worksheets/sheet1.xml": name})
    with pytest.raises(ConversionRefused, match="at most 4,000,000 cells"):
        converted(data)


def test_archive_with_names_that_differ_in_case_is_refused() -> None:
    data = offices.docx_file(_DOCUMENT, **{"word/Document.xml": _DOCUMENT})
    with pytest.raises(ConversionRefused, match="two files with the same name"):
        converted(data)


def test_signature_of_pdf_decides_only_where_a_file_is_one() -> None:
    pdf = pdfs.document(["a"])
    assert sniffing.family(pdf) == sniffing.family(b"\n" + pdf) == "pdf"
    assert sniffing.family(b"\x00\x01 header\n" + pdf) == "pdf"
    assert sniffing.family(b"PK\x03\x04 %PDF-" + pdf) == "archive"
    assert sniffing.family(b"A file of this format begins with\n%PDF-1.7\n") == "text"


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"{\\rtf1 a}", "an RTF file"),
        (b"%!PS-Adobe", "a PostScript file"),
        (b"<svg xmlns='a'>", "an SVG image"),
        (b"JVBERi0xLjc", "a PDF file that is encoded in base64 twice"),
        (b"UEsDBBQ", "a ZIP archive that is encoded in base64 twice"),
        (b"data:application/pdf;base64,AA", "a data URL"),
    ],
)
def test_texts_of_other_formats_are_refused_by_name(
    reader: DocumentReader, head: bytes, what: str
) -> None:
    with pytest.raises(InvalidInput, match=f"the file is {what}, not a document"):
        reader.open(head, FIELD)


def test_plain_text_that_begins_with_a_word_like_a_format_is_read() -> None:
    assert converted(b"data: 1") == ["data: 1"]


@pytest.mark.parametrize("data", [b"\xff\xfea", b"\xff\xfea\x00\x00\x00", b"\xff\xfe\x00\xd8"])
def test_bytes_that_are_not_utf_16_are_refused(data: bytes) -> None:
    with pytest.raises(ConversionRefused, match="not UTF-16 text"):
        converted(data)


def test_web_page_in_iso_2022_jp_is_read_as_declared() -> None:
    page = "<html><meta charset=iso-2022-jp><p>日本語".encode("iso2022_jp")
    assert converted(page) == ["日本語"]


def test_declared_mail_may_have_headers_in_utf_8() -> None:
    mail = "From: a@b.c\r\nSubject: Å…\r\nTo: b@b.c\r\n\r\nx".encode()
    assert b"\x85" in mail
    assert sniffing.has_format(mail, "eml")


def test_inline_texts_of_a_mail_are_joined() -> None:
    part = "--x\nContent-Type: text/plain\n\n{}\n"
    mail = (
        "From: a@b.c\nTo: b@b.c\nContent-Type: multipart/mixed; boundary=x\n\n"
        + part.format("first")
        + "--x\nContent-Type: image/png\nContent-Disposition: attachment; filename=a.png\n\nx\n"
        + part.format("second")
        + "--x--\n"
    )
    (text,) = converted(mail.encode())
    assert text.endswith("first\n\nsecond\n\nAttachments:\n\n- a.png (image/png)")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("META-INF/license.lcpl", "{}"),
        ("META-INF/encryption.xml", '<e><CipherReference URI="OEBPS/one.xhtml"/></e>'),
    ],
)
def test_protected_books_are_refused(name: str, text: str) -> None:
    data = io.BytesIO(offices.book())
    with zipfile.ZipFile(data, "a") as packed:
        packed.writestr(name, text)
    with pytest.raises(ConversionRefused, match="digital rights management"):
        converted(data.getvalue())


def test_book_with_encrypted_fonts_is_read() -> None:
    data = io.BytesIO(offices.book())
    with zipfile.ZipFile(data, "a") as packed:
        packed.writestr("META-INF/encryption.xml", '<e><CipherReference URI="OEBPS/a.otf"/></e>')
    assert len(converted(data.getvalue())) == 2


def test_missing_converter_ends_no_process_of_another_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = DocumentReader(1)
    kept = reader.open(pdfs.document(["kept"]), FIELD)
    (process,) = reader._pool.idle
    with monkeypatch.context() as patched:
        patched.setattr("libs.documents.reader.find_spec", lambda name: None)
        with pytest.raises(TaskNotSupported, match=r"shoal-mesh\[documents\]") as caught:
            reader.open(offices.word(), FIELD)
    assert caught.value.field == FIELD
    assert process.is_alive
    assert kept.text(1) == "kept"
    reader.close()
