"""Documents of the formats that are converted to Markdown: written by python-docx, openpyxl and
python-pptx, or by hand; and hostile ones.
"""

from __future__ import annotations

import datetime
import io
import zipfile
from collections.abc import Mapping
from email.message import EmailMessage
from functools import cache
from typing import Final

import docx
import openpyxl
import pptx
from pptx.util import Inches

_DOCX_TYPE: Final = (
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
)
_XLSX_TYPE: Final = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet.main+xml"
_W: Final = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def word() -> bytes:
    """A heading, text of two scripts, a nested list, a table and a link's worth of formatting."""
    made, out = docx.Document(), io.BytesIO()
    made.add_heading("Annual report", 0)
    made.add_heading("Sales", 1)
    paragraph = made.add_paragraph("Sales grew in ")
    paragraph.add_run("all").bold = True
    paragraph.add_run(" regions: 東京 😀.")
    made.add_paragraph("first", style="List Bullet")
    made.add_paragraph("second", style="List Bullet")
    table = made.add_table(2, 2)
    for row, texts in zip(table.rows, (("Region", "Sales"), ("North|East", "12")), strict=True):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.text = text
    made.add_heading("Costs", 2)
    made.add_paragraph("Costs fell.")
    made.save(out)
    return out.getvalue()


def workbook() -> bytes:
    """Two sheets; the first has numbers, a date, a boolean, a bar, and an empty row."""
    made, out = openpyxl.Workbook(), io.BytesIO()
    sheet = made.active
    sheet.title = "Sales 2024"
    sheet.append(["Region", "Sum", "Day", "Done"])
    sheet.append(["North|East", 12.5, datetime.date(2024, 5, 17), True])
    sheet.append([])
    sheet.append(["South", 3, None, False])
    made.create_sheet("Notes").append(["only\ntext"])
    made.save(out)
    return out.getvalue()


def sheet(rows: int) -> bytes:
    """One sheet with `rows` rows of two cells."""
    made, out = openpyxl.Workbook(write_only=True), io.BytesIO()
    page = made.create_sheet("Long")
    page.append(["Number", "Text"])
    for number in range(rows):
        page.append([number, f"row {number} " + "x" * 50])
    made.save(out)
    return out.getvalue()


def slides() -> bytes:
    """Two slides: a title, bullets of two levels and notes; a table and a text box."""
    made, out = pptx.Presentation(), io.BytesIO()
    first = made.slides.add_slide(made.slide_layouts[1])
    first.shapes.title.text = "Plans"
    frame = first.placeholders[1].text_frame
    frame.text = "Grow"
    below = frame.add_paragraph()
    below.text, below.level = "in the north", 1
    first.notes_slide.notes_text_frame.text = "Speak slowly."
    second = made.slides.add_slide(made.slide_layouts[6])
    box = second.shapes.add_textbox(Inches(1), Inches(1), Inches(3), Inches(1))
    box.text_frame.text = "A box"
    table = second.shapes.add_table(2, 2, Inches(1), Inches(3), Inches(4), Inches(1)).table
    for row, texts in enumerate((("a", "b"), ("1", "2"))):
        for column, text in enumerate(texts):
            table.cell(row, column).text = text
    made.save(out)
    return out.getvalue()


def book(chapters: Mapping[str, str] | None = None, package: str = "") -> bytes:
    """An EPUB file: its chapters by file name, in reading order."""
    texts = chapters or {
        "two.xhtml": "<h1>The end</h1><p>It ends.</p>",
        "one.xhtml": "<h1>Start</h1><p>It was &amp; is.</p>",
    }
    order = [*reversed([*texts])] if chapters is None else [*texts]
    items = "".join(f'<item id="{name}" href="{name}"/>' for name in texts)
    spine = "".join(f'<itemref idref="{name}"/>' for name in order)
    files = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": (
            '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
            '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
        ),
        "OEBPS/book.opf": package
        or (
            '<package xmlns="http://www.idpf.org/2007/opf">'
            f"<manifest>{items}</manifest><spine>{spine}</spine></package>"
        ),
        **{
            f"OEBPS/{name}": (
                '<?xml version="1.0"?><!DOCTYPE html><html xmlns="http://www.w3.org/1999/xhtml">'
                f"<head><title>t</title></head><body>{text}</body></html>"
            )
            for name, text in texts.items()
        },
    }
    return archive(files)


def mail() -> bytes:
    """A message of two alternatives, with an attachment."""
    made = EmailMessage()
    made["From"], made["To"] = "Ada <ada@example.org>", "bo@example.org"
    made["Subject"], made["Date"] = "Grüße über alles", "Fri, 17 May 2024 10:00:00 +0000"
    made.set_content("plain text")
    made.add_alternative("<h2>Hello</h2><p>See <b>this</b>.</p>", subtype="html")
    made.add_attachment(b"%PDF-", maintype="application", subtype="pdf", filename="a.pdf")
    return made.as_bytes()


PAGE: Final = (
    b"<!doctype html><html><head><title>T</title><style>p{}</style><script>evil()</script></head>"
    b"<body><h1>Title</h1><p>One &amp; <b>two</b> <a href='/x'>link</a></p>"
    b"<ol><li>a<ul><li>b</li></ul></li></ol>"
    b"<table><tr><th>k</th><th>v</th></tr><tr><td>a|b</td><td>1</td></tr></table>"
    b"<pre><code>x\n  y</code></pre></body></html>"
)


def archive(files: Mapping[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A ZIP archive of these files."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as packed:
        for name, data in files.items():
            packed.writestr(name, data)
    return out.getvalue()


def _types(part: str, content: str) -> str:
    return (
        '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
        f'<Override PartName="/{part}" ContentType="{content}"/></Types>'
    )


def docx_file(document: str | bytes, **more: str | bytes) -> bytes:
    """A DOCX file with this XML as its main part."""
    return archive(
        {
            "[Content_Types].xml": _types("word/document.xml", _DOCX_TYPE),
            "word/document.xml": document,
            **more,
        }
    )


def word_with(paragraphs: str) -> bytes:
    """Return a DOCX file of these elements."""
    return docx_file(_body(paragraphs))


def _body(inside: str) -> str:
    return f"<w:document {_W}><w:body>{inside}</w:body></w:document>"


def xlsx_file(sheet_data: str, strings: str = "") -> bytes:
    """An XLSX file of one sheet with this XML."""
    main = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    relation = (
        '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        f'<Relationship Id="r1" Type="{office}/worksheet" Target="worksheets/sheet1.xml"/>'
        f'<Relationship Id="r2" Type="{office}/sharedStrings" Target="sharedStrings.xml"/>'
        "</Relationships>"
    )
    return archive(
        {
            "[Content_Types].xml": _types("xl/workbook.xml", _XLSX_TYPE),
            "xl/workbook.xml": (
                f'<workbook {main} xmlns:r="{office}"><sheets>'
                '<sheet name="s" sheetId="1" r:id="r1"/></sheets></workbook>'
            ),
            "xl/_rels/workbook.xml.rels": relation,
            "xl/worksheets/sheet1.xml": f"<worksheet {main}>{sheet_data}</worksheet>",
            "xl/sharedStrings.xml": f"<sst {main}>{strings}</sst>",
        }
    )


_ENTITIES: Final = (
    '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">'
    '<!ENTITY c SYSTEM "file:///etc/passwd">]>'
)


def _lying() -> bytes:
    """A bomb with a directory that says that it has few bytes."""
    data = bytearray(docx_file(b"<a>" + b" " * (80 << 20) + b"</a>"))
    at = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 4)
    data[at + 24 : at + 28] = (1000).to_bytes(4, "little")
    return bytes(data)


def _encrypted() -> bytes:
    data = bytearray(word())
    for at in range(len(data) - 4):
        if data[at : at + 4] == b"PK\x01\x02":
            data[at + 8] |= 1
    return bytes(data)


@cache
def hostile() -> dict[str, tuple[bytes, str]]:
    """Files that are refused, each with a part of the message."""
    deep = 300
    bomb = docx_file(_body("<w:p/>"), **{"word/media/bomb.xml": bytes(100 << 20)})
    nested_mail = b"From: a@b.c\r\nSubject: s\r\n" + b"".join(
        b"Content-Type: multipart/mixed; boundary=b%d\r\n\r\n--b%d\r\n" % (level, level)
        for level in range(2000)
    )
    return {
        "zip bomb": (bomb, "compressed more than 200 times"),
        "many bombs": (
            archive({f"word/{n}.xml": bytes(1 << 20) for n in range(150)}),
            "157,286,400 bytes uncompressed; at most 134,217,728",
        ),
        "bomb with a false size": (_lying(), "word/document.xml"),
        "many files": (
            archive({f"{n}": b"" for n in range(10_001)}),
            "10,001 files; at most 10,000",
        ),
        "encrypted": (_encrypted(), "encrypted with a password"),
        "LZMA": (
            archive({"[Content_Types].xml": "<Types/>"}, zipfile.ZIP_LZMA),
            "another method than Deflate",
        ),
        "cut archive": (word()[:-300], "damaged"),
        "other archive": (archive({"a.txt": "a"}), "not a document of a supported format"),
        "no main part": (
            archive({"[Content_Types].xml": _types("word/document.xml", _DOCX_TYPE)}),
            "the DOCX file cannot be read",
        ),
        "DOCX with entities": (
            docx_file(_ENTITIES + _body("<w:p><w:r><w:t>&b;&c;</w:t></w:r></w:p>")),
            "document type",
        ),
        "DOCX with an external document type": (
            docx_file('<!DOCTYPE x SYSTEM "http://127.0.0.1:1/x.dtd">' + _body("<w:p/>")),
            "document type",
        ),
        "deep DOCX": (
            docx_file(_body("<w:sdt><w:sdtContent>" * deep + "</w:sdtContent></w:sdt>" * deep)),
            "more than 256 elements inside one another",
        ),
        "DOCX of broken XML": (docx_file(_body("<w:p>")), "not valid XML"),
        "XLSX with entities": (
            archive(
                {
                    "[Content_Types].xml": _types("xl/workbook.xml", _XLSX_TYPE),
                    "xl/workbook.xml": _ENTITIES + "<workbook>&c;</workbook>",
                }
            ),
            "document type",
        ),
        "XLSX of two far cells": (
            xlsx_file(
                '<sheetData><row r="1"><c r="A1"><v>1</v></c></row>'
                '<row r="1048576"><c r="XFD1048576"><v>2</v></c></row></sheetData>'
            ),
            "1,048,576 rows and 16,384 columns; at most 4,000,000 cells",
        ),
        "XLSX of a long string in many cells": (
            xlsx_file(
                "<sheetData>" + '<row><c t="s"><v>0</v></c></row>' * 2000 + "</sheetData>",
                "<si><t>" + "abcdefghij" * 3000 + "</t></si>",
            ),
            "characters",
        ),
        "XLSX that refers to no string": (
            xlsx_file('<sheetData><row><c t="s"><v>7</v></c></row></sheetData>'),
            "refers to a string",
        ),
        "EPUB with entities": (
            book(package=_ENTITIES + "<package>&c;</package>"),
            "defines entities",
        ),
        "EPUB with a deep chapter": (
            book({"a.xhtml": "<div>" * deep + "x"}),
            "OEBPS/a.xhtml has more than 256 elements inside one another",
        ),
        "deep HTML": (b"<html><body>" + b"<div>" * 100_000 + b"x", "more than 256 elements"),
        "long HTML": (b"<html>" + b"<p>a b c d</p>" * 1_300_000, "at most 16,777,216"),
        "deep e-mail": (
            nested_mail,
            "e-mail cannot be read: it has more than 256 parts",
        ),
        "binary": (b"\x00\x01\x02", "not a document of a supported format"),
        "old Word": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "save it as DOCX"),
    }
