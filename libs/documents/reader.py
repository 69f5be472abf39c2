"""Read documents in separate processes: one process for each document, at most a few at a time,
ended when idle.

PDFium and the converters of other formats parse untrusted files, and PDFium is not thread-safe. A
process that crashes, hangs or grows takes one document with it: the call raises InvalidInput, and
the next one gets another process. No process reads two documents, so that one tenant's file cannot
reach another's. One process is started ahead for PDF files, since a start takes 80 ms.
Thread-safe.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np

from libs.documents import limits
from libs.documents.conversion.limits import ConversionLimits
from libs.documents.conversion.sniffing import MODULES, Family, family, refusal
from libs.documents.drawn import Pixels
from libs.errors import InternalError, InvalidInput, NoCapacity, TaskNotSupported

PROCESSES: Final = 6
IDLE_SECONDS: Final = 30
"""Idle seconds after which a process ends and frees its document."""
_CLOCK_FACTOR: Final = 6
"""Seconds of the clock for a second of processor time, on a busy machine."""
_MIN_ANSWER_SECONDS: Final = 60
"""Minimum wall-clock time for an answer: the machine may be busy with other things."""
_CANCEL_POLL_SECONDS: Final = 0.1
"""Interval at which a caller that waits for an answer is checked for cancellation."""
_EXIT_SECONDS: Final = 10.0
"""Time for a process that closed its pipes to end: on a busy machine its last steps may take
seconds.
"""
_WAIT_SECONDS: Final = 60.0
"""Maximum time to wait for a free process."""
_KINDS: Final = {
    "archive": "DOCX, XLSX, PPTX and EPUB files",
    "text": "HTML files, e-mail and texts",
}
_CHILD: Final = Path(__file__).with_name("child.py")
_HEAD: Final = struct.Struct("<II")
_MAX_TOLD: Final = 64 << 10
_POINTS: Final = 72


Meter = Callable[[float, float], None]
"""Called with the seconds of processor time that a process used, and the seconds of the clock that
the caller waited for it.
"""


def _not_metered(processor: float, waited: float) -> None:
    return


def _nothing() -> None:
    return


_CONVERSION: Final = ConversionLimits(
    entries=limits.ARCHIVE_FILES,
    archive_bytes=limits.ARCHIVE_BYTES,
    part_bytes=limits.ARCHIVE_FILE_BYTES,
    ratio=limits.ARCHIVE_RATIO,
    depth=limits.DEPTH,
    html_bytes=limits.HTML_BYTES,
    cells=limits.SHEET_CELLS,
    page_bytes=limits.TEXT_BYTES,
    bytes=limits.CONVERTED_BYTES,
    pages=limits.LENGTH,
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one process. The defaults are those of `limits.py`; tests have smaller ones."""

    memory: int = limits.MEMORY_BYTES
    seconds: int = limits.PAGE_SECONDS
    pixels: int = limits.PIXELS
    conversion: ConversionLimits = _CONVERSION


class _Lost(Exception):
    """The process ended or was ended. The message is for the caller. `from_outside`: whatever it
    was reading.
    """

    def __init__(self, message: str, *, from_outside: bool = False) -> None:
        super().__init__(message)
        self.from_outside = from_outside


class _Process:
    """One child, which reads one family of formats. Used by one thread at a time."""

    def __init__(self, bounds: Bounds, reads: Family = "pdf") -> None:
        self.key, self.family = b"", reads
        self.check: Callable[[], None] = _nothing
        self._processor_seconds, self._seconds = (
            bounds.seconds,
            max(bounds.seconds * _CLOCK_FACTOR, _MIN_ANSWER_SECONDS),
        )
        arguments = (_sites(reads), reads, bounds.memory, bounds.seconds, IDLE_SECONDS)
        self._child = subprocess.Popen(  # noqa: S603 # our program
            [sys.executable, "-I", "-S", str(_CHILD), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            close_fds=True,
        )
        if self._child.stdin is None or self._child.stdout is None:
            raise RuntimeError("a process was started without pipes")
        self._in, self._out = self._child.stdin.fileno(), self._child.stdout.fileno()
        for end in (self._in, self._out):
            os.set_blocking(end, False)

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def processor_seconds(self) -> float | None:
        """Processor time that the process has used. None: it has ended, or the system does not
        say.
        """
        # The clock of another process, as clock_getcpuclockid(3) makes its number on Linux; Python
        # has no call for it.
        try:
            return time.clock_gettime(~self._child.pid << 3 | 2) if self.is_alive else None
        except (AttributeError, OSError):
            return None

    def ask(
        self, about: dict[str, object], payload: bytes = b"", *, most: int = 0
    ) -> tuple[dict[str, object], bytearray]:
        """Send a request and return its answer. Raises _Lost.

        Args:
            most: Maximum bytes of the answer's payload.
        """
        until = time.monotonic() + self._seconds
        asked = json.dumps(about).encode()
        try:
            for part in (_HEAD.pack(len(asked), len(payload)) + asked, payload):
                self._write(part, until)
            reported, size = _HEAD.unpack(self._read(_HEAD.size, until))
            if reported > _MAX_TOLD or size > most:
                raise _Lost("its answer is none")
            answer = json.loads(self._read(reported, until))
            if not isinstance(answer, dict):
                raise _Lost("its answer is none")
            return answer, self._read(size, until)
        except (OSError, ValueError) as error:
            raise self._lost() from error

    def end(self) -> None:
        self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # The unwritten rest is of no use.
        self._child.wait()

    def _write(self, data: bytes, until: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._in, select.POLLOUT, until)
            view = view[os.write(self._in, view[: 1 << 16]) :]

    def _read(self, size: int, until: float) -> bytearray:
        found = bytearray(size)
        view = memoryview(found)
        while view:
            self._wait(self._out, select.POLLIN, until)
            count = os.readv(self._out, [view])
            if not count:
                raise self._lost()
            view = view[count:]
        return found

    def _wait(self, end: int, event: int, until: float) -> None:
        poll = select.poll()
        poll.register(end, event)
        while not poll.poll(max(0.0, min(until - time.monotonic(), _CANCEL_POLL_SECONDS)) * 1000):
            if time.monotonic() >= until:
                raise _Lost(f"it did not answer within {self._seconds} s")
            try:
                self.check()
            except BaseException:
                self.end()  # it would compute an answer that no caller waits for
                raise

    def _lost(self) -> _Lost:
        try:
            code = self._child.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return _Lost("it stopped answering")
        if code == -signal.SIGXCPU:
            return _Lost(f"it took more than {self._processor_seconds} s of processor time")
        name = signal.Signals(-code).name if code < 0 else f"status {code}"
        return _Lost(
            f"it ended the process that read it ({name})", from_outside=code in (0, -signal.SIGKILL)
        )


@dataclass(slots=True)
class _Pool:
    """Guarded by `changed`.

    Attributes:
        idle: Least recently used first; those with an empty key were started ahead.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    idle: list[_Process] = field(default_factory=list)
    busy: int = 0
    closed: bool = False


class DocumentReader:
    """Opens documents. `close` ends all processes; they are started again when they are needed."""

    def __init__(self, processes: int = PROCESSES, bounds: Bounds | None = None) -> None:
        self._most = max(1, processes)
        self.bounds = Bounds() if bounds is None else bounds
        self._pool = _Pool()
        self._meter: Meter = _not_metered
        self._check: Callable[[], None] = _nothing

    def metered(self, meter: Meter, check: Callable[[], None] = _nothing) -> DocumentReader:
        """This reader, with the same processes: `meter` is called after each question to one of
        them, on the thread that asked, and `check` several times a second while it waits for the
        answer. What `check` raises ends the process and is raised."""
        other = copy(self)
        other._meter, other._check = meter, check
        return other

    def open(self, data: bytes, path: str) -> OpenDocument:
        """Open a document. Raises InvalidInput for an unreadable document, and NoCapacity if no
        process became free.

        Args:
            path: The document's path in the request, for errors.
        """
        if len(data) > limits.BYTES:
            raise InvalidInput(
                f"the document has {len(data):,} bytes; at most {limits.BYTES:,} are read",
                field=path,
            )
        if not data:
            raise InvalidInput("the document is empty", field=path)
        document = OpenDocument(self, data, path)
        if document.length > limits.LENGTH:
            message = (
                f"the document has {document.length:,} pages; at most {limits.LENGTH:,} may be "
                "in one"
            )
            raise InvalidInput(message, field=path)
        if document.length < 1:
            raise InvalidInput("the document has no pages", field=path)
        return document

    def close(self) -> None:
        with self._pool.changed:
            idle, self._pool.idle = self._pool.idle, []
        for process in idle:
            process.end()

    def ask(
        self, document: OpenDocument, about: dict[str, object], what: str, *, most: int = 0
    ) -> tuple[dict[str, object], bytearray, float]:
        """Return the answer, its payload, and the seconds that it took.

        A process may have ended because it was idle, or was killed from outside: then another one
        is asked, once. A failure that the document itself causes is not repeated.
        """
        for is_last in (False, True):
            with self._metered(self._taken(document)) as process:
                started, was_open = time.monotonic(), process.key == document.key
                try:
                    if not was_open:
                        asked: dict[str, object] = {
                            "do": "open",
                            "limits": asdict(self.bounds.conversion),
                        }
                        answer, _ = process.ask(asked, document.data)
                        _refuse(answer, document.path)
                        process.key = document.key
                    answer, payload = process.ask(about, most=most)
                    _refuse(answer, document.path)
                    return answer, payload, time.monotonic() - started
                except _Lost as lost:
                    process.end()
                    if is_last or not lost.from_outside:
                        raise InvalidInput(
                            f"the document could not be read: {what}, {lost}", field=document.path
                        ) from None
        raise AssertionError

    @contextmanager
    def _metered(self, taking: AbstractContextManager[_Process]) -> Iterator[_Process]:
        began = time.monotonic()
        with taking as process:
            process.check = self._check
            before, started = process.processor_seconds(), time.monotonic()
            try:
                yield process
            finally:
                now, used = time.monotonic(), process.processor_seconds()
                self._meter(
                    now - started if before is None or used is None else used - before, now - began
                )

    @contextmanager
    def _taken(self, document: OpenDocument) -> Iterator[_Process]:
        key = document.key
        process = self._take(document)
        try:
            yield process
        except BaseException:
            if process.key != key:  # it has seen a file that it did not open
                process.end()
            raise
        finally:
            with self._pool.changed:
                self._pool.busy -= 1
                if process.is_alive:
                    self._pool.idle.append(process)
                self._pool.changed.notify()
                if (
                    not any(not one.key for one in self._pool.idle)
                    and self._pool.busy + len(self._pool.idle) < self._most
                ):
                    # The document was read, even if no process for the next one can start.
                    with suppress(OSError, TaskNotSupported):
                        self._pool.idle.insert(0, _Process(self.bounds))

    def _take(self, document: OpenDocument) -> _Process:
        """Return the process that has the document, else one started ahead for its family of
        formats, else a new one in place of the least recently used.
        """
        key, path, reads = document.key, document.path, document.family
        _sites(reads, path)  # before another document's process ends for it
        pool, until = self._pool, time.monotonic() + _WAIT_SECONDS
        ended: _Process | None = None
        with pool.changed:
            while pool.busy >= self._most:
                if not pool.changed.wait(until - time.monotonic()):
                    raise NoCapacity(
                        "all processes that read documents are busy", field=path, retry_after=1.0
                    )
            for process in [one for one in pool.idle if not one.is_alive]:
                pool.idle.remove(process)
                process.end()
            wanted = [process for process in pool.idle if process.key == key] or [
                one for one in pool.idle if not one.key and one.family == reads
            ]
            if wanted:
                pool.idle.remove(wanted[0])
            elif pool.busy + len(pool.idle) >= self._most:
                ended = pool.idle.pop(0)
            pool.busy += 1
        if ended is not None:
            ended.end()
        try:
            return wanted[0] if wanted else _Process(self.bounds, reads)
        except BaseException:
            with pool.changed:
                pool.busy -= 1
                pool.changed.notify()
            raise


class OpenDocument:
    """A document that a process has opened. Pages count from 1.

    Attributes:
        length: Number of pages.
        seconds: Processor time of reading it so far.
        family: Its family of formats.
    """

    def __init__(self, reader: DocumentReader, data: bytes, path: str) -> None:
        self.data, self.path = data, path
        self.key = blake2b(data, digest_size=16).digest()
        found = family(data)
        if found is None:
            raise InvalidInput(refusal(data), field=path)
        self.family = found
        self._reader = reader
        self.seconds = 0.0
        answer, _ = self._ask({"do": "pages"}, "when it was opened")
        self.length = _whole(answer, "pages")
        self._text_bytes = () if found == "pdf" else _wholes(answer, "bytes", self.length)

    def at(self, path: str) -> OpenDocument:
        """Return the same document at another place of the request."""
        other = copy(self)
        other.path, other.seconds = path, 0.0
        return other

    def text_bytes(self, first: int, last: int) -> int:
        """Return the bytes of the text of pages `first` to `last` as UTF-8; 0 of a PDF file, which
        has to be read for it.
        """
        return sum(self._text_bytes[first - 1 : last])

    def sizes(self, first: int, last: int, dpi: int) -> list[tuple[int, int]]:
        """Height and width in pixels of pages `first` to `last`, at least one. Raises InvalidInput
        for a page that is too large.
        """
        answer, _ = self._ask(
            {"do": "sizes", "first": first, "last": last},
            f"when pages {first} to {last} were measured",
        )
        reported = answer.get("sizes")
        if not isinstance(reported, list) or len(reported) != last - first + 1:
            raise InternalError(
                "the process that reads documents gave other sizes than were asked for"
            )
        return [
            self._pixels(number, size, dpi) for number, size in enumerate(reported, start=first)
        ]

    def draw(self, page: int, dpi: int, size: tuple[int, int]) -> Pixels:
        """Return uint8 [height, width, 3]: red, green and blue, on white, with annotations and
        filled forms.

        Args:
            size: As returned by `sizes`.
        """
        height, width = size
        most = self._reader.bounds.pixels
        asked = {"do": "draw", "page": page, "dpi": dpi, "pixels": most}
        answer, payload = self._ask(asked, f"when page {page} was drawn", most=3 * height * width)
        if (_whole(answer, "height"), _whole(answer, "width")) != size or len(
            payload
        ) != 3 * height * width:
            raise InvalidInput(f"the document says two sizes of page {page}", field=self.path)
        return np.frombuffer(payload, np.uint8).reshape(height, width, 3)

    def text(self, page: int) -> str:
        """Return the text layer of a page as PDFium has it, lines ended by CR LF; empty where there
        is none, as of a scan. Of other formats than PDF: the page's Markdown.
        """
        asked = {"do": "text", "page": page, "bytes": limits.TEXT_BYTES}
        return self._ask(asked, f"when the text of page {page} was read", most=limits.TEXT_BYTES)[
            1
        ].decode("utf-8", "replace")

    def _ask(
        self, about: dict[str, object], what: str, *, most: int = 0
    ) -> tuple[dict[str, object], bytearray]:
        answer, payload, seconds = self._reader.ask(self, about, what, most=most)
        self.seconds += seconds
        return answer, payload

    def _pixels(self, number: int, size: object, dpi: int) -> tuple[int, int]:
        if (
            not isinstance(size, Sequence)
            or len(size) != 2
            or not all(isinstance(side, float | int) for side in size)
        ):
            raise InternalError("the process that reads documents gave no sizes")
        most, (width, height) = self._reader.bounds.pixels, size
        if not (0 < width < 1e9 and 0 < height < 1e9):
            raise InvalidInput(
                f"page {number} has the size {width:g} x {height:g} points, which is none",
                field=self.path,
            )
        # Rounded up, as pypdfium2 does.
        pixels = tuple(int(-(-side * (dpi / _POINTS) // 1)) for side in (height, width))
        if pixels[0] * pixels[1] > most:
            fit = int(dpi * (most / (pixels[0] * pixels[1])) ** 0.5)
            advice = f"ask for at most {fit} dots per inch" if fit else "draw it smaller"
            message = (
                f"page {number} has {pixels[1]:,} x {pixels[0]:,} pixels at {dpi} dots per inch; "
                f"at most {most:,} are drawn"
            )
            raise InvalidInput(f"{message}: {advice}", field=self.path)
        return pixels[0], pixels[1]


def _refuse(answer: dict[str, object], path: str) -> None:
    if "error" in answer:
        raise InvalidInput(str(answer["error"])[:500], field=path)


def _whole(answer: dict[str, object], name: str) -> int:
    value = answer.get(name)
    if not isinstance(value, int):
        raise InternalError("the process that reads documents gave no number")
    return value


def _wholes(answer: dict[str, object], name: str, count: int) -> tuple[int, ...]:
    values = answer.get(name)
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(isinstance(one, int) for one in values)
    ):
        raise InternalError("the process that reads documents gave other numbers than asked for")
    return tuple(values)


def _sites(reads: Family, path: str = "") -> str:
    """Return the directories that the modules of a family are installed in. Raises TaskNotSupported
    if one is missing.

    Args:
        path: The document's path in the request, for the error.
    """
    found: list[str] = []
    for name in MODULES[reads]:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            what, extra = (
                ("documents", "worker") if reads == "pdf" else (_KINDS[reads], "documents")
            )
            raise TaskNotSupported(
                f"{what} are not read here: the Python module {name} is missing. Install "
                f"shoal-mesh[{extra}]",
                field=path,
            )
        found.append(str(Path(spec.origin).parents[1]))
    return os.pathsep.join(dict.fromkeys(found))


@cache
def shared_reader() -> DocumentReader:
    """Return the reader of this process, which starts nothing before the first document."""
    reader = DocumentReader()
    atexit.register(reader.close)
    return reader
