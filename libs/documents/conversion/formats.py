"""Recognize a document's format and convert it."""

from __future__ import annotations

from . import books, mails, markup, sheets, slides, word
from .archive import ZipArchive, local
from .limits import ConversionLimits, ConversionRefused
from .paging import DocumentPages
from .sniffing import READ_FORMATS, Family, text_kind

_CONTENT_TYPES = "[Content_Types].xml"
_MAIN_PARTS = {
    "wordprocessingml": "DOCX",
    "ms-word": "DOCX",
    "spreadsheetml": "XLSX",
    "ms-excel": "XLSX",
    "presentationml": "PPTX",
    "ms-powerpoint": "PPTX",
}
"""Parts of the content type of an Office file's main part. The second of each are files with
macros, which are not read.
"""


def load(family: Family) -> None:
    """Load all modules that conversions of a family need, while files can still be opened."""
    markup.load()
    if family == "archive":
        word.load()
        sheets.load()
    else:
        mails.load()


def convert(data: bytes, family: Family, limits: ConversionLimits) -> tuple[str, list[bytes]]:
    """Return the format's name and the document's pages as Markdown in UTF-8. Raises
    ConversionRefused.
    """
    pages = DocumentPages(limits)
    kind = "ZIP archive" if family == "archive" else "text file"
    try:
        if family == "archive":
            archive = ZipArchive(data, limits)
            kind, part = _archive_format(archive)
            _convert_archive(archive, kind, part, limits, pages)
        else:
            text = markup.decoded(data)
            kind = text_kind(text)
            _convert_text(data, text, kind, limits, pages)
    except ConversionRefused as error:
        raise ConversionRefused(f"the {kind} cannot be read: {error}") from None
    except MemoryError:
        raise ConversionRefused(
            f"the {kind} cannot be read: it needs more memory than allowed"
        ) from None
    except RecursionError:
        raise ConversionRefused(f"the {kind} cannot be read: it is nested too deeply") from None
    except Exception as error:
        # The text of an OSError has the path of a file of this machine.
        text = "" if isinstance(error, OSError) else f" {str(error)[:100]}"
        raise ConversionRefused(
            f"the {kind} cannot be read: it is damaged ({type(error).__name__}{text})"
        ) from None
    return kind, pages.texts


def _convert_archive(
    archive: ZipArchive, kind: str, part: str, limits: ConversionLimits, pages: DocumentPages
) -> None:
    if kind == "DOCX file":
        word.convert(archive, part, limits, pages)
    elif kind == "XLSX file":
        sheets.convert(archive, limits, pages)
    elif kind == "PPTX file":
        slides.convert(archive, part, limits, pages)
    else:
        books.convert(archive, limits, pages)


def _convert_text(
    data: bytes, text: str, kind: str, limits: ConversionLimits, pages: DocumentPages
) -> None:
    if kind == "e-mail":
        mails.convert(data, limits, pages)
    elif kind == "HTML file":
        pages.add(markup.from_html(text, "it", limits))
    else:
        pages.add(text)


def _archive_format(archive: ZipArchive) -> tuple[str, str]:
    """Return the format of an archive, and the name of an Office file's main part."""
    if _CONTENT_TYPES in archive.names:
        types, extensions = _content_types(archive)
        main = [to for kind, to in archive.relations("").values() if kind == "officeDocument"]
        for part in [*main, *types]:
            extension = part.rpartition(".")[2].lower()
            content = types.get(part.lower(), extensions.get(extension, ""))
            for words, kind in _MAIN_PARTS.items():
                if content.endswith("main+xml") and words in content:
                    return f"{kind} file", _with_case(archive, part)
    elif books.CONTAINER in archive.names:
        return "EPUB file", ""
    raise ConversionRefused(f"it is not a document of a supported format: {READ_FORMATS}")


def _content_types(archive: ZipArchive) -> tuple[dict[str, str], dict[str, str]]:
    """Return the content types by name of a part and by extension, both in lower case."""
    types: dict[str, str] = {}
    extensions: dict[str, str] = {}
    for one in archive.xml(_CONTENT_TYPES):
        content = one.get("ContentType", "")
        if local(one.tag) == "Override":
            types[one.get("PartName", "").lstrip("/").lower()] = content
        elif local(one.tag) == "Default":
            extensions[one.get("Extension", "").lower()] = content
    return types, extensions


def _with_case(archive: ZipArchive, part: str) -> str:
    """Return the name of a part as the archive spells it."""
    if part in archive.names:
        return part
    return next((name for name in archive.names if name.lower() == part.lower()), part)
