"""Replace documents by their pages as images or by their text, and answer from a document's text
layer.

The worker's `codec.py` puts a `DocumentFile` where an item has a document; `with_pages` replaces it
by the document's pages, or by their joined text if the work divides texts into chunks. A page is
rendered when a processor decodes it, one at a time on each thread, and its pixels are not kept. The
text of a page is read when a processor needs it, so that the first chunks are ready before the last
pages are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from shoal.extractions import Extraction, PageText

from libs.documents import limits
from libs.documents.drawn import Drawn, Pixels
from libs.documents.joined_text import JoinedText, PagedText
from libs.documents.reader import DocumentReader, OpenDocument
from libs.documents.text_size import NO_TEXT, TextBudget
from libs.errors import InvalidInput, TaskNotSupported
from libs.models.interface.results import ExtractResult
from libs.models.interface.sequences import Prepared
from libs.models.interface.work import (
    CancelCheck,
    EncodeWork,
    EntitiesWork,
    Part,
    Parts,
    RelationsWork,
    ScoreWork,
    StructureWork,
    TextWork,
    TokenWork,
    Work,
    all_parts,
)


class DocumentFile(bytes):
    """A document as received.

    Attributes:
        file: Index of one of the request's files; None if this object holds the bytes.
        first: First page, from 1.
        last: Last page; 0 for the document's last page.
        dpi: Dots per inch; 0 for the default.
    """

    file: int | None
    first: int
    last: int
    dpi: int

    @classmethod
    def create(cls, data: bytes, file: int | None, first: int, last: int, dpi: int) -> DocumentFile:
        made = cls(data)
        made.file, made.first, made.last, made.dpi = file, first, last, dpi
        return made


@dataclass(slots=True)
class _Spent:
    """Pages, pixels and seconds that one item has used."""

    pages: int = 0
    pixels: int = 0
    seconds: float = 0.0

    def add_pixels(self, pixels: int, field: str) -> None:
        self.pixels += pixels
        if self.pixels > limits.ITEM_PIXELS:
            message = f"the item's pages have more than {limits.ITEM_PIXELS:,} pixels"
            raise InvalidInput(f"{message}: request fewer pages or a lower dpi", field=field)

    def add_seconds(self, seconds: float, field: str) -> None:
        self.seconds += seconds
        if self.seconds > limits.ITEM_SECONDS:
            message = f"reading the item's pages took more than {limits.ITEM_SECONDS:.0f} s"
            raise InvalidInput(f"{message}: request fewer pages or a lower dpi", field=field)


class Page(Drawn):
    """A page of an open document."""

    document: OpenDocument
    number: int
    dpi: int
    spent: _Spent
    measured: tuple[int, int]

    @classmethod
    def create(
        cls, document: OpenDocument, number: int, dpi: int, spent: _Spent, measured: tuple[int, int]
    ) -> Page:
        """Create a page. `measured` is its height and width; (0, 0) defers measuring until it is
        rendered.
        """
        made = cls(b"%s page %d at %d" % (document.key, number, dpi))
        made.document, made.number, made.dpi, made.spent, made.measured = (
            document,
            number,
            dpi,
            spent,
            measured,
        )
        return made

    def size(self, field: str) -> tuple[int, int]:
        if self.measured == (0, 0):
            (size,) = self.document.sizes(self.number, self.number, self.dpi)
            self.spent.add_pixels(size[0] * size[1], field)
            self.measured = size
        return self.measured

    def pixels(self, field: str) -> Pixels:
        before = self.document.seconds
        pixels = self.document.draw(self.number, self.dpi, self.size(field))
        self.spent.add_seconds(self.document.seconds - before, field)
        return pixels

    def text(self, field: str) -> str:
        before = self.document.seconds
        text = self.document.text(self.number)
        self.spent.add_seconds(self.document.seconds - before, field)
        return text


def has_documents(work: Work) -> bool:
    """Return whether any item of the work has a document."""
    if isinstance(work, EntitiesWork | RelationsWork | StructureWork | TokenWork):
        return False
    return any(isinstance(one.content, DocumentFile) for one in all_parts(work))


def with_pages(
    work: Work,
    files: Sequence[bytes],
    reader: DocumentReader,
    check_cancelled: CancelCheck,
    budget: TextBudget = NO_TEXT,
) -> Work:
    """Replace each document of a work by its pages, or by their text if the work divides texts into
    chunks.

    Args:
        files: The files of the job.
        budget: Pages and text that documents which are divided into chunks may have together; 0:
            the limits of a job.

    Raises InvalidInput with the document's path if it cannot be read or exceeds a limit, and the
    exceptions of `check_cancelled`. So does reading a text, for which documents are opened.
    """
    if isinstance(
        work, EntitiesWork | RelationsWork | StructureWork | TokenWork
    ) or not has_documents(work):
        return work
    is_divided = isinstance(work, EncodeWork) and work.chunking is not None
    is_drawn = not is_divided and not isinstance(work, TextWork)
    opening = _Opening(files, reader, check_cancelled, is_drawn=is_drawn, is_divided=is_divided)
    if isinstance(work, EncodeWork) and is_divided:
        return _with_texts(work, opening, budget)
    parts = {index: opening.item(item) for index, item in work.parts.items()}
    if isinstance(work, ScoreWork):
        return replace(work, parts=parts, query_parts=opening.item(work.query_parts))
    return replace(work, parts=parts)


def _with_texts(work: EncodeWork, opening: _Opening, budget: TextBudget) -> EncodeWork:
    """Replace each item that is a document by its text, which is read later.

    Raises InvalidInput for a document among other parts, or with spans. Reading a text raises it
    without text, or with too much.
    """
    parts, texts = dict(work.parts), dict[int, PagedText]()
    left = _Left(
        budget.pages or limits.CHUNKED_PAGES * len(work.parts),
        min(budget.bytes or limits.JOB_TEXT_BYTES, limits.JOB_TEXT_BYTES),
    )
    for index, own in work.parts.items():
        document = next((part for part in own if isinstance(part.content, DocumentFile)), None)
        if document is None:
            continue
        if len(own) > 1:
            raise InvalidInput(
                "with chunking an item has one part: send the document alone",
                field=document.field,
            )
        if work.chunking is not None and work.chunking.method == "spans":
            raise InvalidInput(
                "chunking.method SPANS divides only texts, and this item is a document",
                field=document.field,
            )
        texts[index] = PagedText(partial(opening.add_pages, document, left))
        del parts[index]
    return replace(work, parts=parts, documents=texts)


@dataclass(slots=True)
class _Left:
    """The pages and bytes of text that further documents of a job may have."""

    pages: int
    bytes: int


class _Opening:
    """Opens the documents of one job, each file once.

    Args:
        is_drawn: The pages are needed as images.
        is_divided: The text of all pages is needed, as one text.
    """

    def __init__(
        self,
        files: Sequence[bytes],
        reader: DocumentReader,
        check_cancelled: CancelCheck,
        *,
        is_drawn: bool,
        is_divided: bool = False,
    ) -> None:
        self._files, self._reader, self._go_on = files, reader, check_cancelled
        self._is_drawn, self._is_divided = is_drawn, is_divided
        self._open: dict[int, OpenDocument] = {}

    def item(self, parts: Parts) -> Parts:
        found: list[Part] = []
        spent = _Spent()
        for part in parts:
            if isinstance(part.content, DocumentFile):
                self._go_on()
                found += [
                    replace(part, content=page)
                    for page in self._pages(part.content, part.field, spent)
                ]
            else:
                found.append(part)
        return tuple(found)

    def add_pages(self, part: Part, left: _Left, found: JoinedText) -> Iterator[None]:
        """Add the text of all requested pages of a part that is a document, and yield after each.

        Raises InvalidInput, also if they exceed `left`.
        """
        spent = _Spent()
        if not isinstance(part.content, DocumentFile):
            raise TypeError("the part is not a document")
        self._go_on()
        pages = self._pages(part.content, part.field, spent)
        if len(pages) > left.pages:
            raise InvalidInput(
                f"{len(pages):,} pages of the document would be read, and {left.pages:,} of the "
                "pages that the documents of this job may have are left: set last_page of each "
                "document, request fewer pages, or send fewer documents at a time",
                field=part.field,
            )
        size = pages[0].document.text_bytes(pages[0].number, pages[-1].number)
        if size > limits.DIVIDED_BYTES:  # before the first page is divided
            raise InvalidInput(
                f"the requested pages have {size:,} bytes of text; at most "
                f"{limits.DIVIDED_BYTES:,} are divided: request fewer pages, or send ranges of "
                "pages as items",
                field=part.field,
            )
        for page in pages:
            self._go_on()
            found.add(page.number, page.text(part.field))
            if found.size > limits.DIVIDED_BYTES:
                raise InvalidInput(
                    f"the pages up to page {page.number:,} have more than "
                    f"{limits.DIVIDED_BYTES:,} bytes of text: request fewer pages, or send ranges "
                    "of pages as items",
                    field=part.field,
                )
            if found.size > left.bytes:
                raise InvalidInput(
                    f"the pages up to page {page.number:,} have more than the {left.bytes:,} "
                    "bytes of text that are left for the documents of this job, by their sizes: "
                    "request fewer pages, or send fewer documents at a time",
                    field=part.field,
                )
            yield
        if not found.size:
            raise InvalidInput(
                "the document has no text to divide: a model that reads images can encode its "
                "pages, or read their text by Extract",
                field=part.field,
            )
        left.pages, left.bytes = left.pages - len(pages), left.bytes - found.size

    def _pages(self, asked: DocumentFile, field: str, spent: _Spent) -> list[Page]:
        document = self._document(asked, field)
        first, last = max(1, asked.first), min(asked.last or document.length, document.length)
        if first > document.length:
            raise InvalidInput(
                f"the first page requested is {first:,}, but the document has "
                f"{document.length:,} pages",
                field=field,
            )
        count, dpi = last - first + 1, asked.dpi or limits.DPI
        if count < 1 or dpi > limits.MAX_DPI:
            raise InvalidInput(
                f"pages {first} to {last} at {dpi} dots per inch cannot be read", field=field
            )
        if not asked.last and count > limits.UNKNOWN_PAGES and not self._is_divided:
            message = f"the document has {document.length:,} pages; without a last page"
            raise InvalidInput(
                f"{message}, at most {limits.UNKNOWN_PAGES} are read: request a range of pages",
                field=field,
            )
        spent.pages += count
        most = limits.CHUNKED_PAGES if self._is_divided else limits.PAGES
        if spent.pages > most:
            raise InvalidInput(
                f"the item has more than {most:,} pages: request fewer at a time", field=field
            )
        sizes = document.sizes(first, last, dpi) if self._is_drawn else [(0, 0)] * count
        spent.add_pixels(sum(height * width for height, width in sizes), field)
        spent.add_seconds(document.seconds, field)
        return [
            Page.create(document, number, dpi, spent, size)
            for number, size in enumerate(sizes, start=first)
        ]

    def _document(self, asked: DocumentFile, field: str) -> OpenDocument:
        if asked.file is None:
            return self._reader.open(bytes(asked), field)
        if asked.file >= len(self._files):
            raise InvalidInput(f"the request has no file {asked.file}", field=field)
        if asked.file not in self._open:
            self._open[asked.file] = self._reader.open(self._files[asked.file], field)
        return self._open[asked.file].at(field)


NO_HEAD: Final = ""


def read_text_layers(work: TextWork, model: str, check_cancelled: CancelCheck) -> Prepared:
    """Answer a TextWork from the text layers of its pages, without a forward, for a model that does
    not generate text.

    Raises TaskNotSupported with the part's path for content that is not a page, and for a page
    without a text layer unless only text layers are requested.
    """
    if work.text_layer == "never":
        raise TaskNotSupported(
            f"{model} does not generate text, and the request forbids the text layer",
            field="text.text_layer",
        )
    if work.json_schema:
        raise TaskNotSupported(
            f"{model} does not generate text, so it cannot follow a schema",
            field="text.json_schema",
        )
    if work.turns or work.template_values:
        field = "text.turns" if work.turns else "text.template_values"
        raise TaskNotSupported(
            f"{model} does not generate text, so it cannot continue a conversation", field=field
        )
    found: list[Extraction] = []
    taken = 0
    for index in range(len(work.texts)):
        pages: list[PageText] = []
        lengths: Mapping[bytes, int] = {}
        for part in work.parts.get(index, (Part("", f"items[{index}].text"),)):
            check_cancelled()
            if not isinstance(part.content, Page):
                raise TaskNotSupported(
                    f"{model} does not generate text: it returns only the text layer of documents",
                    field=part.field,
                )
            page = part.content
            text = page.text(part.field)
            has_layer = bool(text.strip())
            if not has_layer and work.text_layer != "only":
                message = (
                    f"page {page.number} has no text layer, and {model} does not generate text"
                )
                raise TaskNotSupported(
                    f"{message}: use a generative model, or request the text layer only",
                    field=part.field,
                )
            taken += len(text.encode())
            if taken > limits.JOB_TEXT_BYTES:
                raise InvalidInput(
                    "the pages have too much text: request fewer at a time", field=part.field
                )
            pages.append(PageText(page.number, text, has_layer))
            lengths = {**lengths, page.document.key: page.document.length}
        found.append(Extraction(pages=tuple(pages), document_pages=sum(lengths.values())))
    return Prepared(replace(work, parts={}), NO_HEAD, [], notes=ExtractResult(found))
