"""The text of a document, for `shoal extract text` without a model. No mesh is needed."""

from __future__ import annotations

from libs.documents.reader import DocumentReader
from libs.errors import ShoalError


def read_text_layer(data: bytes, first: int, last: int) -> tuple[int, list[str]]:
    """Read pages `first` to `last` in the limited process that workers use.

    Args:
        data: A PDF file, or a document of another format, which is converted to Markdown.
        first: The first page; pages count from 1.
        last: The last page; 0, or one beyond the end, is the document's last.

    Returns:
        How many pages the document has, and the text of each of the pages, empty where a page has
            none.

    Raises:
        ValueError: The file cannot be read, has no such page, or this installation lacks the
            modules that read it.
    """
    reader = DocumentReader(1)
    try:
        document = reader.open(data, "")
        if first > document.length:
            raise ValueError(f"page {first} does not exist: the document has {document.length:,}")
        end = min(last or document.length, document.length)
        return document.length, [document.text(page) for page in range(first, end + 1)]
    except ShoalError as error:
        raise ValueError(error.message) from None
    finally:
        reader.close()
