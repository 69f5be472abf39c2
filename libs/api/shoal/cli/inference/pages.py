"""`shoal extract text`: reads the text of a document's pages and writes it as Markdown. Formats
other than PDF (DOCX, XLSX, PPTX, EPUB, HTML, e-mail) are converted to Markdown.

With a model, the mesh is asked for some pages at a time. Without one, the text layer is read on
this computer by the reader that shoal-mesh brings, an entry point of the group `shoal.documents`:
Parsers belong in a process with limits, which the client has not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from shoal.cli.console import bar, counted, emit, note
from shoal.cli.failures import InputError
from shoal.cli.inference import outputs
from shoal.cli.inference.files import page_range
from shoal.cli.text import document as line_of
from shoal.cli.text import printable
from shoal.extractions import PageText
from shoal.results import ExtractResult
from shoal.tasks import Document

GROUP: Final = "shoal.documents"
_PDF: Final = b"%PDF-"
_PDF_HEAD_BYTES: Final = 1024
PAGES_PER_REQUEST: Final = 8
"""Pages of one request: the bar moves, and a large file is not sent too often."""


class PagesRun:
    """One run of the command. Raises BadParameter for options that cannot be, InputError for a file
    that cannot be read.
    """

    def __init__(self, file: Path, asked: str, dots_per_inch: int, output: Path | None) -> None:
        outputs.check(output, ".md", ".txt", ".jsonl")
        self._first, self._last = page_range(asked)
        try:
            self._data = file.read_bytes()
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}") from None
        self._file, self._dpi, self._output = file, dots_per_inch, output
        self._is_pdf = _PDF in self._data[:_PDF_HEAD_BYTES]
        self._found: list[PageText] = []
        self._tokens, self._seconds = 0, 0.0

    def read(self, ask: Callable[[Document], ExtractResult]) -> None:
        """Ask for the pages. How many there are, the first answer says."""
        started, first = time.monotonic(), self._first
        answered = self._ask(
            ask,
            first,
            min(first + PAGES_PER_REQUEST - 1, self._last or first + PAGES_PER_REQUEST - 1),
        )
        last = min(self._last or answered, answered)
        if self._last > answered:
            note(f"{self._file} has {counted(answered, 'page')}")
        with bar("reading", last - first + 1, min_items=PAGES_PER_REQUEST + 1) as on_progress:
            for begin in range(first + PAGES_PER_REQUEST, last + 1, PAGES_PER_REQUEST):
                self._ask(ask, begin, min(begin + PAGES_PER_REQUEST - 1, last))
                if on_progress is not None:
                    on_progress(len(self._found), last - first + 1)
        self._seconds = time.monotonic() - started

    def read_text_layer(self) -> None:
        """Read the text layer on this computer. Raises InputError, also where no page has a
        text.
        """
        started, read = time.monotonic(), _reader()
        try:
            count, texts = read(self._data, self._first, self._last)
        except ValueError as error:
            raise InputError(f"{self._file}: {error}") from None
        if self._last > count:
            note(f"{self._file} has {counted(count, 'page')}")
        self._found = [
            PageText(page, text, bool(text.strip()))
            for page, text in enumerate(texts, start=self._first)
        ]
        if not any(page.is_text_layer for page in self._found):
            problem = (
                "no text layer: --model names a model that reads its pages as images"
                if self._is_pdf
                else "no text"
            )
            raise InputError(f"{self._file} has {problem}")
        self._seconds = time.monotonic() - started

    def report(self, model: str, *, as_json: bool) -> None:
        """Write or print the texts. `model`: empty where the text layer was read without one."""
        without = [str(page.page) for page in self._found if not page.text.strip()]
        if without:
            advice = (
                ""
                if model or not self._is_pdf
                else "; --model names a model that reads them as images"
            )
            note(
                f"no text on {len(without):,} of {counted(len(self._found), 'page')}: "
                f"{', '.join(without[:20])}{advice}"
            )
        if self._output is not None and str(self._output) != "-":
            lines = "".join(self._lines(self._output.suffix)).encode()
            outputs.replace_file(self._output, lambda file: file.write(lines))
            by = f" and {counted(self._tokens, 'token')}" if self._tokens else ""
            text = "from the text layer" if self._is_pdf else "from the file"
            source = f"by {model}" if model else text
            note(
                f"{counted(len(self._found), 'page')}{by} in {self._seconds:.2f} s {source} -> "
                f"{self._output}"
            )
        elif as_json:
            emit({"model": model or None, "pages": [asdict(page) for page in self._found]})
        else:
            sys.stdout.writelines(
                "\n".join(map(printable, part.split("\n"))) for part in self._lines(".md")
            )

    def _ask(self, ask: Callable[[Document], ExtractResult], first: int, last: int) -> int:
        """Add the texts of some pages, and return how many the document has."""
        result = ask(Document(self._data, first, last, self._dpi))
        self._found += result[0].pages
        self._tokens += result.usage.input_tokens
        return result[0].document_pages

    def _lines(self, suffix: str) -> Iterator[str]:
        for page in self._found:
            text = page.text.replace("\r\n", "\n").replace("\r", "\n").strip()
            if suffix == ".jsonl":
                yield line_of(asdict(page)) + "\n"
            elif suffix == ".txt":
                yield f"{text}\n\f"
            elif not self._is_pdf:  # The text is Markdown with the document's own headings.
                yield f"{text}\n\n" if text else ""
            else:
                yield f"## Page {page.page}\n\n{text}\n\n" if text else f"## Page {page.page}\n\n"


def _reader() -> Callable[[bytes, int, int], tuple[int, list[str]]]:
    """Return the reader of text layers that is installed. Raises InputError that says what to
    install.
    """
    for entry in entry_points(group=GROUP, name="text_layer"):
        try:
            found: Any = entry.load()
        except ImportError as error:
            raise InputError(f"documents cannot be read here: {error}") from None
        return found  # type: ignore[no-any-return]
    advice = "pip install 'shoal-mesh[worker,documents]', or name a model of a mesh with --model"
    raise InputError(f"documents cannot be read here because shoal-mesh is not installed: {advice}")
