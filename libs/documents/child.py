"""The program of a process that reads one document: it answers requests on its standard input until
that ends, or until it is idle too long.

It is run by path, in Python's isolated mode, and imports no Shoal module but the package
`conversion`, which is in its folder: `python -I -S child.py SITES FAMILY MEMORY SECONDS IDLE`.
`SITES`: the directories of third-party modules, divided by colons. `FAMILY`: `pdf` for
PDFium, or a family of formats that are converted to Markdown (`conversion/sniffing.py`).
Before it receives a document it gives up all that it does not need: it cannot open files or sockets
(no descriptors are left) or start processes; address space and processor seconds of each request
are limited. Effects of a hostile file on a parser end here; the caller reads the answers as
untrusted bytes.

A request and an answer are a frame each: the length of a JSON object (4 bytes, little-endian), the
length of the payload (4 bytes), the object, the payload. Requests: `open` (payload: the file;
`limits` of a conversion), `pages`, `sizes`, `draw`, `text`. Answers have `error`, or the requested
values.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import select
import struct
import sys
from collections.abc import Callable
from typing import Any, Final

Answer = tuple[dict[str, Any], bytes]

_HEAD: Final = struct.Struct("<II")
_POINTS: Final = 72  # an inch
_NICE: Final = 2
"""The process gets 40 % of a core that the worker wants too, so that a document that computes for
long slows it down less. With a higher number honest documents would exceed their time by the clock
on a busy machine."""


class DocumentRefused(Exception):
    """The document cannot be read as asked. The message is for the caller."""


def main() -> None:
    sites, family = sys.argv[1:3]
    memory, seconds, idle = map(int, sys.argv[3:6])
    sys.path[:0] = sites.split(os.pathsep)
    document = _document(family)

    out = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # PDFium's own messages
    os.close(null)
    document.warm()
    _confine(memory, highest=out)
    while select.select([0], [], [], idle if document.is_open else None)[0]:
        frame = _read_frame()
        if frame is None:
            return
        _allow_seconds(seconds)
        try:
            answer, payload = document.handle(*frame)
        except document.refusals as error:
            answer, payload = {"error": str(error)}, b""
        except Exception as error:
            # The text of an OSError has the path of a file of this machine.
            text = "" if isinstance(error, OSError) else f" {str(error)[:200]}"
            answer, payload = (
                {"error": f"the document is damaged: {type(error).__name__}{text}"},
                b"",
            )
        _write_frame(out, answer, payload)


def _document(family: str) -> PdfFile | ConvertedDocument:
    if family == "pdf":
        import pypdfium2

        return PdfFile(pypdfium2)
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path.append(folder)
    try:
        return ConvertedDocument(
            importlib.import_module("conversion.formats"),
            importlib.import_module("conversion.limits"),
            family,
        )
    finally:
        sys.path.remove(folder)


def _confine(memory: int, highest: int) -> None:
    """Lower limits and priority; limits that a system does not have are left out."""
    os.nice(_NICE)
    for name, most in (
        ("RLIMIT_AS", memory),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_NOFILE", highest + 1),
        ("RLIMIT_NPROC", 0),
    ):
        try:
            resource.setrlimit(getattr(resource, name), (most, most))
        except (AttributeError, OSError, ValueError):
            continue


def _allow_seconds(seconds: int) -> None:
    """Let the process compute for this many further seconds; then SIGXCPU ends it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


class PdfFile:
    """A PDF file, the one document that this process reads. `pdfium`: the module."""

    refusals: tuple[type[Exception], ...] = (DocumentRefused,)

    def __init__(self, pdfium: Any) -> None:
        self._pdfium = pdfium
        self._pdf: Any = None

    @property
    def is_open(self) -> bool:
        return self._pdf is not None

    def warm(self) -> None:
        """Load what PDFium and codecs load at first use, while files can still be opened: codecs
        and fonts.
        """
        pdf = self._pdfium.PdfDocument.new()
        page = pdf.new_page(10, 10)
        page.render()
        page.get_textpage().get_text_bounded()
        "".encode("utf-16-le").decode("utf-16-le", "ignore")
        json.loads(json.dumps({"a": 1.5}))

    def handle(self, asked: dict[str, Any], payload: bytes) -> Answer:
        does: dict[str, Callable[[], Answer]] = {
            "open": lambda: self._open(payload),
            "pages": lambda: ({"pages": len(self._pdf)}, b""),
            "sizes": lambda: self._sizes(asked["first"], asked["last"]),
            "draw": lambda: self._draw(asked["page"], asked["dpi"], asked["pixels"]),
            "text": lambda: self._text(asked["page"], asked["bytes"]),
        }
        return does[asked["do"]]()

    def _open(self, data: bytes) -> Answer:
        try:
            self._pdf = self._pdfium.PdfDocument(data)
            if self._pdf.get_formtype():
                self._pdf.init_forms()
        except self._pdfium.PdfiumError as error:
            if "assword" in str(error):
                raise DocumentRefused(
                    "the document is encrypted with a password: send a copy without one"
                ) from None
            raise DocumentRefused(f"the bytes are not a readable PDF: {str(error)[:200]}") from None
        return {"pages": len(self._pdf)}, b""

    def _sizes(self, first: int, last: int) -> Answer:
        """Width and height of pages in points; pages count from 1."""
        return {
            "sizes": [self._pdf.get_page_size(number - 1) for number in range(first, last + 1)]
        }, b""

    def _page(self, number: int) -> Any:
        try:
            return self._pdf[number - 1]
        except self._pdfium.PdfiumError as error:
            raise DocumentRefused(f"page {number} cannot be read: {str(error)[:200]}") from None

    def _draw(self, number: int, dpi: int, most: int) -> Answer:
        page = self._page(number)
        try:
            width, height = (math.ceil(side * (dpi / _POINTS)) for side in page.get_size())
            if not 0 < width * height <= most:
                raise DocumentRefused(f"page {number} has another size than the document says")
            bitmap = page.render(scale=dpi / _POINTS, rev_byteorder=True)
            row, view = bitmap.width * 3, memoryview(bitmap.buffer).cast("B")
            lines = (
                view[start : start + row]
                for start in range(0, bitmap.height * bitmap.stride, bitmap.stride)
            )
            pixels = bytes(view[: row * bitmap.height]) if bitmap.stride == row else b"".join(lines)
            return {"width": bitmap.width, "height": bitmap.height}, pixels
        finally:
            page.close()

    def _text(self, number: int, most: int) -> Answer:
        page = self._page(number)
        try:
            text = page.get_textpage().get_text_bounded().encode("utf-8", "replace")
        finally:
            page.close()
        if len(text) > most:
            raise DocumentRefused(
                f"page {number} has {len(text):,} bytes of text; at most {most:,} are read"
            )
        return {}, text


class ConvertedDocument:
    """A document that is converted to Markdown when it is opened.

    Args:
        formats: The module conversion.formats.
        limits: The module conversion.limits.
        family: The document's family of formats.
    """

    def __init__(self, formats: Any, limits: Any, family: str) -> None:
        self._formats, self._limits, self._family = formats, limits, family
        self._kind, self._pages = "", list[bytes]()
        self.refusals: tuple[type[Exception], ...] = (DocumentRefused, limits.ConversionRefused)

    @property
    def is_open(self) -> bool:
        return bool(self._kind)

    def warm(self) -> None:
        """Load what conversions load at first use, while files can still be opened."""
        self._formats.load(self._family)
        json.loads(json.dumps({"a": 1.5}))

    def handle(self, asked: dict[str, Any], payload: bytes) -> Answer:
        if asked["do"] == "open":
            limits = self._limits.ConversionLimits(**asked["limits"])
            self._kind, self._pages = self._formats.convert(payload, self._family, limits)
            return {"pages": len(self._pages)}, b""
        if asked["do"] == "pages":
            return {"pages": len(self._pages), "bytes": list(map(len, self._pages))}, b""
        if asked["do"] == "text":
            return {}, self._pages[asked["page"] - 1]
        raise DocumentRefused(
            f"the {self._kind} has no pages that can be drawn as images: only its text is read, by "
            "the task text"
        )


def _read_frame() -> tuple[dict[str, Any], bytes] | None:
    head = _read(_HEAD.size)
    if head is None:
        return None
    about, payload = (_read(size) for size in _HEAD.unpack(head))
    return None if about is None or payload is None else (json.loads(about), payload)


def _read(size: int) -> bytes | None:
    """None at the end of the input."""
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write_frame(out: int, about: dict[str, Any], payload: bytes) -> None:
    reported = json.dumps(about).encode()
    for part in (_HEAD.pack(len(reported), len(payload)) + reported, payload):
        view = memoryview(part)
        while view:
            view = view[os.write(out, view) :]


if __name__ == "__main__":
    main()
