"""PDF files made by hand: honest ones, and ones that lie."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

A4: Final = (595, 842)


def written(objects: Mapping[int, bytes], trailer: bytes = b"") -> bytes:
    """A file of these objects, of which 1 is the catalog, with a table that says where each is."""
    out, places = bytearray(b"%PDF-1.7\n"), {}
    for number, body in objects.items():
        places[number] = len(out)
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    size, start = max(objects) + 1, len(out)
    rows = (
        b"%010d 00000 n \n" % places[n] if n in places else b"0000000000 65535 f \n"
        for n in range(size)
    )
    out += b"xref\n0 %d\n%s" % (size, b"".join(rows))
    return bytes(
        out
        + b"trailer\n<< /Size %d /Root 1 0 R %s >>\nstartxref\n%d\n%%%%EOF\n"
        % (size, trailer, start)
    )


def stream(data: bytes, more: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), more, data)


def document(texts: Sequence[str], size: tuple[float, float] = A4) -> bytes:
    """A page for each text of ASCII, in Helvetica; an empty text is a page without a text layer,
    with a black square.
    """
    kids = b" ".join(b"%d 0 R" % (4 + 2 * index) for index in range(len(texts)))
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(texts)),
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    }
    for index, text in enumerate(texts):
        box = f"/MediaBox [0 0 {size[0]} {size[1]}]".encode()
        objects[4 + 2 * index] = (
            b"<< /Type /Page /Parent 2 0 R %s /Resources << /Font << /F 3 0 R >> >> "
            b"/Contents %d "
            b"0 R >>"
        ) % (
            box,
            5 + 2 * index,
        )
        lines = text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)").splitlines()
        shown = b"".join(b"(%s) Tj 0 -30 Td " % line.encode("ascii") for line in lines)
        drawn = b"BT /F 24 Tf 60 700 Td %sET" % shown if text else b"100 100 200 200 re f"
        objects[5 + 2 * index] = stream(drawn)
    return written(objects)


def _encrypted() -> bytes:
    made = document(["secret"])
    key = b"<< /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >>" % (b"00" * 32, b"11" * 32)
    return made.replace(b"trailer\n<<", b"trailer\n<< /Encrypt %s /ID [<00> <00>]" % key)


def _many(count: int) -> bytes:
    """Pages that are one object, as often as the tree says."""
    kids = b"4 0 R " * count
    return written(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R >>",
            2: b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, count),
            4: b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 100 100] >>",
        }
    )


def _page(
    content: bytes,
    more: Mapping[int, bytes] = {},
    box: bytes = b"[0 0 200 200]",
    resources: bytes = b"<< >>",
) -> bytes:
    return written(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R >>",
            2: b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            3: b"<< /Type /Page /Parent 2 0 R /MediaBox %s /Resources %s /Contents 4 0 R >>"
            % (box, resources),
            4: content,
            **more,
        }
    )


def _recursive_form() -> bytes:
    form = stream(
        b"/X Do /X Do",
        b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 5 0 R >> >>",
    )
    return _page(stream(b"/X Do"), {5: form}, resources=b"<< /XObject << /X 5 0 R >> >>")


def _laughs(depth: int, width: int) -> bytes:
    """Forms of forms: width ** depth drawings."""
    forms = {}
    for level in range(depth):
        inner = b"/X Do " * width if level < depth - 1 else b"0 0 9 9 re f"
        named = b"/Resources << /XObject << /X %d 0 R >> >>" % (6 + level)
        forms[5 + level] = stream(
            inner, b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] %s" % named
        )
    return _page(stream(b"/X Do"), forms, resources=b"<< /XObject << /X 5 0 R >> >>")


def _tree_of_itself() -> bytes:
    return written(
        {
            1: b"<< /Type /Catalog /Pages 2 0 R >>",
            2: b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 2 /Parent 2 0 R >>",
        }
    )


def _image(side: int) -> bytes:
    """Its pixels are deflated zeros, as many as they are said to be."""
    data = zlib.compress(bytes(1 << 20), 9)
    about = (
        b"/Type /XObject /Subtype /Image /Width %d /Height %d /BitsPerComponent 8 /ColorSpace "
        b"/DeviceRGB /Filter /FlateDecode"
    )
    image = stream(data, about % (side, side))
    return _page(
        stream(b"200 0 0 200 0 0 cm /X Do"), {5: image}, resources=b"<< /XObject << /X 5 0 R >> >>"
    )


def bomb(size: int) -> bytes:
    """Return a content stream that inflates to about `size` bytes of drawing."""
    return _page(stream(zlib.compress(b"0 0 9 9 re f " * (size // 13), 9), b"/Filter /FlateDecode"))


def slow(operations: int = 100, side: int = 1990) -> bytes:
    """A page with a shading that computes `operations` for each of its 4 × side × side pixels at
    144 dots per inch.

    The defaults take about as much processor time as a page may take, or more.
    """
    function = stream(
        b"{" + b"dup sin " * (operations // 2) + b"pop pop 0}",
        b"/FunctionType 4 /Domain [0 1 0 1] /Range [0 1]",
    )
    form = b"/ShadingType 1 /ColorSpace /DeviceGray /Matrix [%d 0 0 %d 0 0] /Function 5 0 R" % (
        side,
        side,
    )
    resources = b"<< /Shading << /S << %s >> >> >>" % form
    return _page(
        stream(b"/S sh"), {5: function}, box=b"[0 0 %d %d]" % (side, side), resources=resources
    )


def hostile() -> dict[str, bytes]:
    """Files that must be refused."""
    good = document(["a page"])
    return {
        "empty pages": written(
            {1: b"<< /Type /Catalog /Pages 2 0 R >>", 2: b"<< /Type /Pages /Kids [] /Count 0 >>"}
        ),
        "encrypted": _encrypted(),
        "100,000 pages": _many(100_000),
        "a page of 10 million by 10 million points": document(["a"], (10_000_000, 10_000_000)),
        "a long page": document(["a"], (10_000_000, 100)),
        "a page tree of itself": _tree_of_itself(),
        "truncated": good[: len(good) // 3],
        "a mark alone": b"%PDF-1.7\n",
        "no catalog": written({2: b"<< /Type /Pages /Kids [] /Count 0 >>"}),
    }


def strange() -> dict[str, bytes]:
    """Files that may be read or refused, but within bounds."""
    return {
        "a form of itself": _recursive_form(),
        "forms of forms": _laughs(12, 9),
        "an image of 40,000 by 40,000": _image(40_000),
        "a bomb of content": bomb(1 << 28),
        "a page without a size": document(["a"], (0, 0)),
        "a huge number": document(["a"]).replace(b"595", b"9" * 200),
        "deep arrays": _page(b"[" * 100_000),
    }


REAL: Final = tuple(
    path
    for path in (
        Path("/usr/share/doc/libtasn1-doc/libtasn1.pdf"),
        Path("/usr/share/doc/shared-mime-info/shared-mime-info-spec.pdf"),
    )
    if path.exists()
)
"""Typeset documents of Debian, where they are installed."""
