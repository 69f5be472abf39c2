"""PDF files and documents of other formats, through the processes that read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Final

from libs.documents.reader import Bounds, DocumentReader
from libs.errors import InvalidInput
from tests.fuzz import mutate
from tests.fuzz.target import Broken, Random, Target, Try
from tests.support import offices, pdfs

_FIELD: Final = "items[0].parts[0].document"
_BOUNDS: Final = Bounds(memory=512 << 20, seconds=1, pixels=1 << 20)
_GOOD: Final = pdfs.document(["a good page"])
_PAGES: Final = 3
_WORDS: Final = (
    b"%PDF-1.7", b"%%EOF", b"startxref", b"xref", b"trailer", b"obj", b"endobj", b"stream",
    b"endstream", b"<<", b">>", b"[", b"]",
    b"/Kids", b"/Count", b"/Parent", b"/MediaBox", b"/CropBox", b"/Rotate", b"/UserUnit",
    b"/Contents", b"/Resources", b"/XObject",
    b"/Font", b"/Length", b"/Filter", b"/FlateDecode", b"/JBIG2Decode", b"/JPXDecode",
    b"/DCTDecode", b"/CCITTFaxDecode",
    b"/LZWDecode", b"/ASCII85Decode", b"/Crypt", b"/Encrypt", b"/ObjStm", b"/XRef", b"/Prev",
    b"/AcroForm", b"/XFA", b"/JS",
    b"/Type3", b"/ToUnicode", b"/Annots", b"/SMask", b"/Pattern", b"/Shading", b"1 0 R", b"2 0 R",
    b"5 0 R", b"-1", b"99999999999",
    b"(", b")", b"Tj", b"Do", b"re", b"f", b"BT", b"ET", b"cm", b"q", b"Q", b"sh", b"BI", b"ID",
    b"EI",
)  # fmt: skip


@cache
def _known() -> tuple[bytes, ...]:
    small = [
        data
        for data in (*pdfs.hostile().values(), *pdfs.strange().values())
        if len(data) < 64 << 10
    ]
    return (
        _GOOD,
        pdfs.document(["first", "", "third (page)"]),
        pdfs.document(["", ""], (50, 80)),
        offices.word(),
        offices.workbook(),
        offices.slides(),
        offices.book(),
        offices.mail(),
        offices.PAGE,
        *small,
    )


def _make(random: Random, known: Sequence[bytes]) -> bytes:
    good = _known()
    data = random.choice(known) if known and random.random() < 0.2 else random.choice(good)
    return mutate.mutated(random, data, _WORDS, good)


@contextmanager
def _open() -> Iterator[Try]:
    reader = DocumentReader(2, _BOUNDS)
    good = reader.open(_GOOD, _FIELD)

    def attempt(data: bytes) -> None:
        try:
            _read(reader, data)
        except InvalidInput as refused:
            if refused.field != _FIELD or not refused.message or len(refused.message) > 1000:
                raise Broken(f"refused as {refused.field!r}: {refused.message[:100]!r}") from None
        if good.text(1) != "a good page":
            raise Broken("a good document is not read any more")

    try:
        yield attempt
    finally:
        reader.close()


def _read(reader: DocumentReader, data: bytes) -> None:
    document = reader.open(data, _FIELD)
    last = min(document.length, _PAGES)
    for number, size in enumerate(document.sizes(1, last, 72), start=1):
        if document.draw(number, 72, size).shape != (*size, 3):
            raise Broken("a page is drawn in another size than it was measured")
        document.text(number)


TARGETS: Final = (Target("documents", _make, _open, hang_seconds=60.0),)
