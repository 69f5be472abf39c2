"""Parse a multipart/form-data body piece by piece: fields, and the content of one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from services.edge.messages.base import HttpError, invalid

FILE: Final = "file"
"""The name of the part with the file."""
MAX_FORM_PARTS: Final = 16
MAX_PART_HEADERS: Final = 8
"""The maximum number of a part's headers."""
MAX_HEADER_BYTES: Final = 4 << 10
"""The maximum size of one."""
MAX_FIELD_BYTES: Final = 4 << 10
MAX_BOUNDARY_CHARACTERS: Final = 70
MAX_FILE_NAME_CHARACTERS: Final = 255
_MAX_CONTENT_TYPE_CHARACTERS: Final = 512


class _Refused(Exception):
    """Ends the parsing. Callbacks of the parser raise it."""


class Form:
    """The state of parsing one body.

    Attributes:
        fields: The texts of fields, by name.
        file_name: The name of the file as the client sent it; None until the file begins.
        is_complete: Whether the whole form has been read.
    """

    def __init__(self, content_type: str) -> None:
        """Raise HttpError for another content type."""
        kind, options = parse_options_header(content_type[:_MAX_CONTENT_TYPE_CHARACTERS])
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= MAX_BOUNDARY_CHARACTERS:
            raise HttpError(
                "UNSUPPORTED_MEDIA", "send a file as multipart/form-data with a boundary"
            )
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self.is_complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_header_name,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_head,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
            max_header_count=MAX_PART_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )
        # The state: the number of parts; of the current one its name, its headers, and the content
        # of a field; and the content of the file that was just parsed.
        self._parts = 0
        self._name = ""
        self._is_file = False
        self._header_name, self._header_value = bytearray(), bytearray()
        self._disposition = b""
        self._content = bytearray()
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Parse the next bytes of the body and yield those of the file. Raises HttpError."""
        try:
            self._parser.write(data)
        except _Refused as refusal:
            raise invalid(str(refusal), self._name) from None
        except FormParserError as error:
            raise invalid(f"the body is not multipart/form-data: {error}", "") from None
        found, self._data = self._data, []
        yield from found

    def finish(self) -> None:
        """Check that the form is complete and has a file. Raises HttpError."""
        if not self.is_complete:
            raise invalid("the body ends before its last part", "")
        if self.file_name is None:
            raise invalid("file is required: send it as a part with a file name", FILE)

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_FORM_PARTS:
            raise _Refused(f"the form has more than {MAX_FORM_PARTS} parts")
        self._name, self._is_file, self._disposition = "", False, b""
        self._content.clear()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_head(self) -> None:
        kind, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")[:100]
        if kind != b"form-data" or not self._name:
            raise _Refused("a part of the form has no name")
        if self._name != FILE:
            return
        if self.file_name is not None:
            raise _Refused("the form has more than one file")
        if b"filename" not in options:
            raise _Refused("file must be a part with a file name")
        name = options[b"filename"].decode("utf-8", "replace")
        self.file_name, self._is_file = name[:MAX_FILE_NAME_CHARACTERS], True

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._data.append(data[start:end])
            return
        self._content += data[start:end]
        if len(self._content) > MAX_FIELD_BYTES:
            raise _Refused(f"{self._name} has more than {MAX_FIELD_BYTES:,} bytes")

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._content.decode("utf-8", "replace")

    def _end(self) -> None:
        self.is_complete = True
