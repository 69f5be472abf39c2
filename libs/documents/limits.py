"""Limits on reading documents. Constants only: routers check some of them, workers all."""

from __future__ import annotations

from typing import Final

BYTES: Final = 32 << 20
"""Maximum size of a file."""
LENGTH: Final = 10_000
"""Pages of a document, read or not: finding a page takes longer the more there are."""
PAGES: Final = 64
"""Pages of one item, as many as it may have parts."""
UNKNOWN_PAGES: Final = 16
"""Assumed pages of a document part that names no last page, for its price: the number is unknown
before parsing.
"""
DPI: Final = 144
"""Dots per inch of a page, where a request names none: 1,191 x 1,684 pixels of A4."""
MAX_DPI: Final = 600
PIXELS: Final = 16_000_000
"""Maximum pixels of one page at the requested dots per inch: A4 at 400."""
ITEM_PIXELS: Final = 256_000_000
"""Maximum pixels of all pages of one item. They are drawn one after another, so this bounds time,
not memory.
"""
REQUEST_PAGES: Final = 1024
"""Pages of all items of a request."""
FILES: Final = 16
"""Files that the items of a request share."""
TEXT_BYTES: Final = 256 << 10
"""Maximum size of one page's text, as UTF-8. A page that is full of small print has 10 KB."""
JOB_TEXT_BYTES: Final = 32 << 20
"""Maximum size of the texts of all pages of a job."""
CHUNKED_BYTES: Final = 1 << 20
"""Maximum size of an item's text that is divided into chunks, as UTF-8, unless it is a document's;
documents of a request that have no larger share may have it together.
"""
DIVIDED_BYTES: Final = 8 << 20
"""Maximum size of the text of a document that is divided into chunks, as UTF-8: as it is divided,
parts of it are in memory.
"""
CHUNKED_PAGES: Final = 1024
"""Pages of one item of which the text is divided into chunks. Reading a text takes milliseconds,
where drawing a page takes a tenth of a second.
"""
PAGE_SECONDS: Final = 10
"""Processor time for one step: opening the document, drawing a page, or reading its text."""
ITEM_SECONDS: Final = 60.0
"""Maximum wall-clock time for all steps of one item, without waiting for a process."""
MEMORY_BYTES: Final = 1 << 30
"""Address space of a process that reads documents."""
ARCHIVE_FILES: Final = 10_000
"""Files in a document that is a ZIP archive (DOCX, XLSX, PPTX, EPUB)."""
ARCHIVE_BYTES: Final = 128 << 20
"""Maximum size of all files in a ZIP archive, uncompressed."""
ARCHIVE_FILE_BYTES: Final = 64 << 20
"""Maximum size of one file that is read from a ZIP archive, uncompressed."""
ARCHIVE_RATIO: Final = 200
"""Uncompressed bytes for each compressed byte of a file of more than 1 MiB in a ZIP archive."""
DEPTH: Final = 256
"""Elements of XML or HTML inside one another."""
HTML_BYTES: Final = 16 << 20
"""Maximum size of the HTML of a web page, a chapter, or a DOCX file. 15 MB take 370 MB of
memory.
"""
SHEET_CELLS: Final = 4_000_000
"""Maximum cells of the used area of a sheet, with or without a value."""
CONVERTED_BYTES: Final = 32 << 20
"""Maximum size of all Markdown of a document."""
