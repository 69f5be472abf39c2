"""The limits of one conversion, and the exception for a file that exceeds one."""

from __future__ import annotations

from dataclasses import dataclass


class ConversionRefused(Exception):
    """The document cannot be converted. The message is for the caller."""


@dataclass(frozen=True, slots=True)
class ConversionLimits:
    """Limits of one conversion. `libs/documents/limits.py` has the values.

    Attributes:
        entries: Files in a ZIP archive.
        archive_bytes: Bytes of all files in a ZIP archive, uncompressed.
        part_bytes: Bytes of one file that is read from a ZIP archive, uncompressed.
        ratio: Uncompressed bytes for each compressed byte of a file of more than 1 MiB.
        depth: Elements of XML or HTML inside one another.
        html_bytes: Bytes of HTML, as UTF-8.
        cells: Cells of a sheet's used area.
        page_bytes: Bytes of one page's Markdown.
        bytes: Bytes of all Markdown.
        pages: Pages.
    """

    entries: int
    archive_bytes: int
    part_bytes: int
    ratio: int
    depth: int
    html_bytes: int
    cells: int
    page_bytes: int
    bytes: int
    pages: int
