"""Items of requests: the texts, images and documents of arguments as messages. Pure, except for
files that are read.

Bytes and files are sent as they are. Pixels become a PNG, which loses nothing; Pillow is needed
only for its own images.

A text that begins with `data:<media type>;base64,` is a file, as browsers and OpenAI's wire write
images. The Python client, the command line and every wire of the edge share this rule. An image or
a PDF is sent as one; other files are refused, because no model reads them. Routers refuse such a
text where it was sent as a text, so that no model embeds base64 as words.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from io import BytesIO
from pathlib import Path
from typing import Any, Final, TypeGuard, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InvalidInput
from shoal.extractions import Entity
from shoal.tasks import Document, Given, Item, Items, Parts, PillowImage
from shoal.v1 import inference_pb2 as pb

E = TypeVar("E")
M = TypeVar("M")
H = TypeVar("H", pb.Item, pb.Part)

ANY_NUMBER: Final = sys.maxsize
"""A limit of items that no request reaches. The client limits them as routers do by default."""
MAX_REQUEST_PAGES: Final = 1024
"""Pages of documents that routers take in a request."""
_MAX_SHARED_FILES: Final = 16
_MAX_NAMED_COLUMNS: Final = 16
_UNKNOWN_PAGES: Final = 16
"""Pages that routers count for a document without a last page."""
MAX_IMAGE_BYTES: Final = 64 << 20
"""Maximum bytes of an image; a larger one fits into no request. Routers accept less still, and say
so.
"""
_COLOURS: Final = {1: 0, 3: 2, 4: 6}  # PNG's colour types by the number of channels
_PNG_MODES: Final = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_WIDE_MODES: Final = ("I", "F")
_LEVEL: Final = 1  # of zlib: others take several times as long for a few percent less
_HEADER: Final = re.compile(
    r"data:([a-z0-9.+/-]{0,127})(?:;[a-z0-9_.-]+=[^;,\s]{0,127}){0,8};base64,", re.IGNORECASE
)


def message(kind: Callable[..., M], /, **values: object) -> M:
    """Return a message. Raises InvalidInput if a value does not fit its field (a negative count, a
    lone surrogate, a wrong type), which it names.
    """
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        problem = error
    for name, value in values.items():
        try:
            kind(**{name: value})
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"{name} is {value!r:.80}, which does not fit the request: {error}", field=name
            ) from None
    raise InvalidInput(f"an argument does not fit the request: {problem}")


def enum_value(field: str, value: str | None, choices: Mapping[Any, E]) -> E | None:
    """Return the enum value of a name; None leaves the field at its default. Raises
    InvalidInput.
    """
    if value is None:
        return None
    if value not in choices:
        raise InvalidInput(
            f"{field} is {value!r}; it must be one of {', '.join(choices)}", field=field
        )
    return choices[value]


class SharedFiles:
    """Document files of one request that several of its parts read; they are sent once, apart from
    the items.
    """

    def __init__(self, items: Sequence[Item], places: Sequence[int]) -> None:
        counts = Counter(
            _file_key(document) for index in places for document in _documents(items[index])
        )
        shared = [key for key, count in counts.items() if count > 1][:_MAX_SHARED_FILES]
        self._places = {key: place for place, key in enumerate(shared)}
        self._data: dict[int, bytes] = {}

    def message(self, path: str, document: Document) -> pb.Document:
        """Return the message of a document. Raises InvalidInput."""
        pages = message(
            pb.Document,
            first_page=document.first_page,
            last_page=document.last_page,
            dots_per_inch=document.dots_per_inch,
        )
        place = self._places.get(_file_key(document))
        if place is None:
            pages.data = document_bytes(path, document)
        else:
            pages.file = place
            if place not in self._data:
                self._data[place] = document_bytes(path, document)
        return pages

    def data(self) -> list[bytes]:
        """Once all items were made messages."""
        return [self._data[place] for place in range(len(self._places))]


def _documents(item: Item) -> list[Document]:
    pieces = item.pieces if isinstance(item, Parts) else (item,)
    return [piece for piece in pieces if isinstance(piece, Document)]


def has_document(item: Item) -> bool:
    """Return whether an item, or one of its parts, is a document."""
    if isinstance(item, Parts):
        return any(map(has_document, item.pieces))
    return isinstance(item, Document) or (
        isinstance(item, str) and media_type(item) == "application/pdf"
    )


def _file_key(document: Document) -> object:
    return document.file if isinstance(document.file, Path) else id(document.file)


def max_request_items(items: Sequence[Item]) -> int:
    """Return how many of these items a request may have, by their pages."""
    most = max(map(_item_pages, items), default=0)
    return MAX_REQUEST_PAGES // min(most, MAX_REQUEST_PAGES) if most else ANY_NUMBER


def _item_pages(item: Item) -> int:
    if isinstance(item, Parts):
        return sum(map(_item_pages, item.pieces))
    if isinstance(item, Document):
        return _asked_pages(item)
    return _UNKNOWN_PAGES if has_document(item) else 0


def _asked_pages(document: Document) -> int:
    return (
        document.last_page - max(1, document.first_page) + 1
        if document.last_page > 0
        else _UNKNOWN_PAGES
    )


def item_list(items: Items, name: str = "items") -> list[Item]:
    """Return the items of an argument; a single text or image is a list of one.

    Raises:
        InvalidInput: The argument has no order of items (a mapping, a set), is a table, or cannot
            be iterated.
    """
    if isinstance(items, (str, Parts, Document)) or is_image(items):
        return [cast("Item", items)]
    _refuse_unordered(items, name)
    return list(cast("Iterable[Item]", items))


def _refuse_unordered(items: object, name: str) -> None:
    """Refuse what Python iterates in a way that no caller means: keys of a mapping, names of a
    table's columns.
    """
    kind = type(items).__name__
    columns = _column_names(items)
    if columns is not None:
        named = f'df["{columns[0]}"]' if columns else 'df["column"]'
        listed = f" Its columns are {', '.join(columns[:_MAX_NAMED_COLUMNS])}." if columns else ""
        raise InvalidInput(
            f"{name} is a {kind}, a table: name the column with the items, such as "
            f"{named}.{listed}",
            field=name,
        )
    if isinstance(items, Mapping):
        raise InvalidInput(
            f"{name} is a {kind}: send its values as a list, such as list(d.values())", field=name
        )
    if isinstance(items, Set):
        raise InvalidInput(
            f"{name} is a {kind}, which has no order, so no result could be matched: send a list",
            field=name,
        )
    if not isinstance(items, Iterable) and not hasattr(items, "__getitem__"):
        raise InvalidInput(
            f"{name} is a {kind}; it must be a text, an image, a document, or a list of these",
            field=name,
        )


def _column_names(items: object) -> list[str] | None:
    """Return the column names of a table without importing a library of tables; None for anything
    else.

    DataFrames of pandas and polars have `columns`, pyarrow's tables and Hugging Face's datasets
    `column_names`. A Series has none.
    """
    for attribute in ("column_names", "columns"):
        names = getattr(items, attribute, None)
        if names is not None and not callable(names):
            return [str(one) for one in names]
    return None


def item_lengths(items: Sequence[Item]) -> list[int]:
    """Characters of texts, bytes of images; a document's file counts for the first item that has
    it. Other types count 0 here and fail in `item_message`, with their path."""
    seen: set[object] = set()
    return [_length(item, seen) for item in items]


def _length(item: Item, seen: set[object]) -> int:
    if isinstance(item, Parts):
        return sum(_length(piece, seen) for piece in item.pieces)
    if isinstance(item, Document):
        key, before = _file_key(item), len(seen)
        seen.add(key)
        return image_length(item.file) if len(seen) > before else 1
    return len(item) if isinstance(item, str) else image_length(item)


def item_messages(
    name: str, items: Sequence[Item], places: Sequence[int], files: SharedFiles | None = None
) -> list[pb.Item]:
    """Return the items at these indices. Raises InvalidInput.

    Paths are relative to the request, as the router's are; `ShoalError.move` makes them absolute.
    """
    return [
        item_message(f"{name}[{number}]", items[index], files)
        for number, index in enumerate(places)
    ]


def item_message(path: str, item: Item, files: SharedFiles | None = None) -> pb.Item:
    """Return a text, an image, or an item of several parts. `files`: None where no item shares any.
    Raises InvalidInput.

    A text that begins with `data:<media type>;base64,` is the file in it (`shoal.requests.uris`).
    """
    if isinstance(item, str):
        file = file_item(path, item)
        if file is not None:
            return file
    if not isinstance(item, (Parts, Document)):
        return _filled(pb.Item(), path, item)
    files = SharedFiles((), ()) if files is None else files
    pieces = item.pieces if isinstance(item, Parts) else (item,)
    return pb.Item(
        parts=[
            _part(f"{path}.parts[{number}]", piece, files) for number, piece in enumerate(pieces)
        ]
    )


def _part(path: str, piece: Item, files: SharedFiles) -> pb.Part:
    if isinstance(piece, Document):
        return pb.Part(document=files.message(path, piece))
    file = file_part(path, piece) if isinstance(piece, str) else None
    if file is not None:
        return file
    return _filled(pb.Part(), path, piece)


def _filled(holder: H, path: str, piece: Item) -> H:
    """Return the item or part, with a text or an image set."""
    data = image_bytes(path, piece)
    if data is not None:
        holder.image.data = data
        return holder
    if not isinstance(piece, str):
        kinds = "a str, or an image: a Path, the bytes of a file, a PIL.Image or a uint8 array"
        found = f"a {type(piece).__name__}"
        if _is_missing(piece):
            found = f"{piece!s}, a missing value"
        raise InvalidInput(f"{path} is {found}; it must be {kinds}", field=path)
    try:
        holder.text = piece
    except ValueError:
        raise InvalidInput(
            f"{path} is not valid Unicode: it contains half of a surrogate pair",
            field=f"{path}.text",
        ) from None
    return holder


def _is_missing(item: object) -> bool:
    """Return True for None and for the values by which pandas marks missing ones: NaN, NaT and
    NA.
    """
    return (
        item is None
        or (isinstance(item, (float, np.floating)) and math.isnan(item))
        or type(item).__name__ in ("NAType", "NaTType")
    )


def entity_messages(path: str, given: Sequence[Given]) -> list[pb.Entity]:
    """Return the entities of one item. Raises InvalidInput."""
    return [_entity(f"{path}[{index}]", entity) for index, entity in enumerate(given)]


def _entity(path: str, entity: Given) -> pb.Entity:
    try:
        start, end, label = (
            (entity.start, entity.end, entity.label)
            if isinstance(entity, Entity)
            else (*entity, "")[:3]
        )
        return pb.Entity(start=start, end=end, label=label)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{path} does not fit the request: {error}", field=path) from None


def find_problem(path: str, item: Item) -> str:
    """Why an item is invalid; empty if nothing is found here."""
    if (isinstance(item, (str, bytes)) and not item) or (
        isinstance(item, Parts) and not item.pieces
    ):
        return f"{path} is empty"
    try:
        item_message(path, item)
    except InvalidInput as error:
        return error.message
    return ""


def is_image(item: object) -> bool:
    """Return True for one image, as opposed to a list of items."""
    return isinstance(item, (bytes, Path)) or is_pixels(item) or is_pillow(item)


def is_pixels(item: object) -> TypeGuard[NDArray[Any]]:
    return isinstance(item, np.ndarray) and item.ndim in (2, 3) and item.dtype == np.uint8


def is_pillow(item: object) -> TypeGuard[PillowImage]:
    """Without importing Pillow: whoever has such an image has imported it."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(item, pillow.Image)


def image_bytes(path: str, item: Item) -> bytes | None:
    """Return the file bytes of an image; None for any other item. Raises InvalidInput.

    Args:
        path: The position of the item in the arguments, for errors.
    """
    data: bytes | None = None
    if isinstance(item, bytes):
        data = item
    elif isinstance(item, Path):
        data = _read(path, item)
    elif is_pixels(item):
        data = _png(path, item)
    elif is_pillow(item):
        data = _saved(path, item)
    if data is not None and len(data) > MAX_IMAGE_BYTES:
        message = (
            f"{path} has {len(data):,} bytes; a request has at most {MAX_IMAGE_BYTES:,}. Send a "
            "smaller copy"
        )
        raise InvalidInput(message, field=f"{path}.image.data")
    return data


def document_bytes(path: str, document: Document) -> bytes:
    """Return the file's bytes. `path`: the item's place in the arguments. Raises InvalidInput."""
    file = document.file
    data = _read(path, file, "document") if isinstance(file, Path) else file
    if not isinstance(data, bytes):
        raise InvalidInput(
            f"{path} is a document of a {type(file).__name__}; it must be a Path or bytes",
            field=path,
        )
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidInput(
            f"{path} has {len(data):,} bytes; a request has at most {MAX_IMAGE_BYTES:,}",
            field=f"{path}.document.data",
        )
    return data


def image_length(item: Item) -> int:
    """Return about how many bytes the image will have; 0 for another item, or a file that does not
    exist.
    """
    if isinstance(item, bytes):
        return len(item)
    if is_pixels(item):
        return item.size
    if is_pillow(item):
        return item.width * item.height * 3
    try:
        return item.stat().st_size if isinstance(item, Path) else 0
    except OSError:
        return 0


def _read(path: str, file: Path, what: str = "image") -> bytes:
    try:
        if file.stat().st_size > MAX_IMAGE_BYTES:
            size = file.stat().st_size
            raise InvalidInput(
                f"{path}: {file} has {size:,} bytes; a request has at most {MAX_IMAGE_BYTES:,}",
                field=f"{path}.{what}.data",
            )
        return file.read_bytes()
    except FileNotFoundError:
        raise InvalidInput(f"{path}: the file {file} does not exist", field=path) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(f"{path}: {file} cannot be read: {reason}", field=path) from None


def _saved(path: str, image: PillowImage) -> bytes:
    """Save the current frame of a Pillow image with its EXIF data, which holds a photo's
    orientation.
    """
    if image.mode in _WIDE_MODES:
        raise InvalidInput(
            f"{path} is an image of mode {image.mode}, 32 bits a pixel; 8 and 16 are supported",
            field=path,
        )
    out = BytesIO()
    try:
        image = image if image.mode in _PNG_MODES else image.convert("RGB")
        image.save(out, "PNG", exif=image.getexif(), compress_level=_LEVEL)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput(
            f"{path} is an image of Pillow that cannot be written as PNG: {error}", field=path
        ) from None
    return out.getvalue()


def _png(path: str, pixels: NDArray[Any]) -> bytes:
    """Encode uint8 pixels [height, width], or [height, width, 1, 3 or 4]."""
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    height, width, channels = pixels.shape
    if channels not in _COLOURS or not height or not width:
        shape = "height x width x 3 (colours), or 1 (grey), or 4 (with transparency)"
        raise InvalidInput(
            f"{path} is an array of shape {pixels.shape}; images have {shape}", field=path
        )
    rows = np.concatenate(
        [np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1
    )  # each begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), _LEVEL)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def media_type(text: str) -> str | None:
    """Return the media type that a text names if it is a file, such as `image/png`; empty if it
    names none; None for any other text.
    """
    found = _HEADER.match(text)
    return None if found is None else found[1].lower()


def file_part(path: str, text: str) -> pb.Part | None:
    """Return the image or document that a text is; None for any other text.

    Args:
        path: The text's place in the request, for errors.
        text: A text that a caller gave.

    Raises:
        InvalidInput: The file is neither an image nor a PDF, or is not base64.
    """
    kind = media_type(text)
    if kind is None:
        return None
    is_image, is_document = kind.startswith("image/"), kind == "application/pdf"
    if not (is_image or is_document):
        known = "data:image/…;base64, and data:application/pdf;base64, are read"
        raise InvalidInput(
            f"{path} is a file of the type {kind or 'text/plain'}: {known}. Send other contents "
            "as text",
            field=path,
        )
    try:
        data = base64.b64decode(text[text.index(",") + 1 :], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(
            f"{path} begins like a file, data:{kind};base64, and is not base64 after that",
            field=path,
        ) from None
    return (
        pb.Part(image=pb.Image(data=data)) if is_image else pb.Part(document=pb.Document(data=data))
    )


def file_item(path: str, text: str) -> pb.Item | None:
    """Return the same as an item of a request. Raises InvalidInput."""
    part = file_part(path, text)
    if part is None:
        return None
    return pb.Item(image=part.image) if part.HasField("image") else pb.Item(parts=[part])
