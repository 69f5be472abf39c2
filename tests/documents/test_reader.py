"""Documents through the processes that read them: as pypdfium2 reads them here, and hostile ones
within bounds.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import psutil
import pypdfium2
import pytest

from libs.documents import limits
from libs.documents.reader import Bounds, DocumentReader
from libs.errors import InvalidInput
from tests.documents.processes import has_ended, reading_processes
from tests.support import pdfs
from tests.support.waiting import wait_until

FIELD = "items[2].parts[1].document"
GOOD = pdfs.document(["first page", "", "third (page)\nof two lines"])
ICONS = sorted(Path(matplotlib.get_data_path(), "images").glob("*.pdf"))[:3]


@pytest.fixture(scope="module")
def reader() -> Iterator[DocumentReader]:
    made = DocumentReader(2)
    yield made
    made.close()


def drawn(reader: DocumentReader, data: bytes) -> None:
    """The first page, and its text."""
    document = reader.open(data, FIELD)
    document.draw(1, 72, document.sizes(1, 1, 72)[0])
    document.text(1)


@pytest.mark.parametrize(
    "file", [*pdfs.REAL, *ICONS, None], ids=lambda file: file.name if file else "made"
)
def test_pages_and_texts_are_those_of_pypdfium2(reader: DocumentReader, file: Path | None) -> None:
    data = GOOD if file is None else file.read_bytes()
    theirs = pypdfium2.PdfDocument(data)
    ours = reader.open(data, FIELD)
    assert ours.length == len(theirs)
    for number in range(1, min(ours.length, 4) + 1):
        page = theirs[number - 1]
        assert ours.text(number) == page.get_textpage().get_text_bounded()
        (size,) = ours.sizes(number, number, 100)
        pixels = ours.draw(number, 100, size)
        wanted = page.render(scale=100 / 72, rev_byteorder=True).to_numpy()
        assert pixels.shape == wanted.shape
        # Fonts that the file does not bring are PDFium's own in the process, and may be the
        # system's here.
        assert file is None or (pixels == wanted).all()
    theirs.close()


def test_text_and_pixels_of_a_made_document(reader: DocumentReader) -> None:
    document = reader.open(GOOD, FIELD)
    assert [document.text(number) for number in (1, 2, 3)] == [
        "first page",
        "",
        "third (page)\r\nof two lines",
    ]
    (size,) = document.sizes(2, 2, 72)
    assert size == (842, 595)
    pixels = document.draw(2, 72, size)
    assert pixels.dtype == np.uint8
    assert (pixels[642 - 50, 150] == 0).all()
    assert (pixels[20, 20] == 255).all()


@pytest.mark.parametrize("name", pdfs.hostile())
def test_hostile_documents_are_refused_with_their_path(reader: DocumentReader, name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        drawn(reader, pdfs.hostile()[name])
    assert caught.value.field == FIELD
    assert len(caught.value.message) < 600
    assert reader.open(GOOD, FIELD).text(1) == "first page"


@pytest.mark.parametrize("name", pdfs.strange())
def test_strange_documents_are_read_or_refused_within_bounds(name: str) -> None:
    """Limits of one second of processor time and 256 MiB of memory."""
    reader = DocumentReader(1, Bounds(memory=256 << 20, seconds=1))
    with suppress(InvalidInput):
        drawn(reader, pdfs.strange()[name])
    assert reader.open(GOOD, FIELD).text(3).startswith("third")
    reader.close()


def test_process_that_is_killed_takes_one_call_with_it_at_most(reader: DocumentReader) -> None:
    document = reader.open(GOOD, FIELD)
    killed = reading_processes()
    for child in killed:
        os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: all(map(has_ended, killed)))
    assert document.text(1) == "first page", "another process reads it again"


def test_document_that_takes_too_long_is_not_read_again() -> None:
    reader = DocumentReader(1, Bounds(seconds=1))
    seconds: list[tuple[float, float]] = []
    document = reader.metered(lambda *one: seconds.append(one)).open(pdfs.slow(), FIELD)
    (size,) = document.sizes(1, 1, 144)
    seconds.clear()
    with pytest.raises(InvalidInput, match="more than 1 s of processor time"):
        document.draw(1, 144, size)
    assert len(seconds) == 1, "one process was asked, once"
    reader.close()


def test_process_is_ended_when_no_caller_waits_for_its_answer(reader: DocumentReader) -> None:
    class Cancelled(Exception):
        pass

    is_cancelled = threading.Event()

    def cancel() -> None:
        if is_cancelled.is_set():
            raise Cancelled

    document = reader.metered(lambda *_: None, cancel).open(pdfs.slow(operations=90), FIELD)
    (size,) = document.sizes(1, 1, 144)
    (own,) = (process for process in reader._pool.idle if process.key == document.key)
    others = [process for process in reader._pool.idle if process is not own]
    is_cancelled.set()
    with pytest.raises(Cancelled):
        document.draw(1, 144, size)
    assert own not in reader._pool.idle
    assert not own.is_alive
    assert [process in reader._pool.idle for process in others] == [True] * len(others)
    assert reader.open(GOOD, FIELD).text(1) == "first page"


def test_processor_time_of_a_document_is_measured(reader: DocumentReader) -> None:
    seconds: list[tuple[float, float]] = []
    data = pdfs.slow(operations=100, side=500)
    drawn_by = reader.metered(lambda *one: seconds.append(one))
    drawn(drawn_by, data)
    processor, waited = map(sum, zip(*seconds, strict=True))
    assert processor > 0.02, "a quarter of a million pixels, a hundred operations each"
    assert waited > 0
    seconds.clear()
    drawn(reader, data)
    assert not seconds, "only the reader that was metered reports"


def test_no_process_reads_two_documents_and_there_are_few(
    reader: DocumentReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.documents.reader._WAIT_SECONDS", 600.0)
    files = [pdfs.document([f"number {number}"]) for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda data: reader.open(data, FIELD).text(1), files * 3))
    assert found == [f"number {number}" for number in range(8)] * 3
    assert len(reading_processes()) <= 3, "those of two at most, and one that is being replaced"


def test_process_has_no_environment_and_tight_limits(reader: DocumentReader) -> None:
    reader.open(GOOD, FIELD)
    child = reading_processes()[-1]
    assert child.environ() == {}
    for name, most in ((psutil.RLIMIT_AS, limits.MEMORY_BYTES), (psutil.RLIMIT_FSIZE, 0)):
        wait_until(partial(lambda kind, bound: child.rlimit(kind) == (bound, bound), name, most))
    wait_until(lambda: child.rlimit(psutil.RLIMIT_NOFILE)[0] <= 8)
    assert child.num_fds() >= child.rlimit(psutil.RLIMIT_NOFILE)[0], (
        "no descriptor is left for a file or a socket"
    )


def test_document_beyond_a_limit_is_refused_before_drawing(reader: DocumentReader) -> None:
    with pytest.raises(InvalidInput, match="at most 33,554,432"):
        reader.open(bytes(limits.BYTES + 1), FIELD)
    document = reader.open(pdfs.document(["a poster"], (2384, 3370)), FIELD)
    with pytest.raises(
        InvalidInput, match=r"4,768 x 6,740 pixels at 144 dots per inch; .* at most 101 dots"
    ):
        document.sizes(1, 1, 144)
    (size,) = document.sizes(1, 1, 101)
    assert document.draw(1, 101, size).shape == (*size, 3)
