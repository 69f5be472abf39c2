"""From the arguments of verbs to fields of request messages. Pure.

The router validates requests. Only values that a message cannot hold at all are refused here, with
the same InvalidInput and field path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, cast

from shoal.errors import InvalidInput
from shoal.requests.images import document_bytes, image_bytes, image_length, is_image
from shoal.requests.plan import ANY_NUMBER
from shoal.requests.uris import file_part, media_type
from shoal.results import Entity, Skipped
from shoal.tasks import Document, Given, Item, Items, LongText, OnInvalid, Parts, Priority
from shoal.v1 import inference_pb2 as pb

E = TypeVar("E")
M = TypeVar("M")
H = TypeVar("H", pb.Item, pb.Part)

TRUNCATIONS = {
    "none": pb.TRUNCATION_NONE,
    "end": pb.TRUNCATION_END,
    "start": pb.TRUNCATION_START,
    "windows": pb.TRUNCATION_WINDOWS,
}
PRIORITIES = {"interactive": pb.PRIORITY_INTERACTIVE, "bulk": pb.PRIORITY_BULK}


@dataclass(slots=True)
class Options:
    """The arguments that all inference verbs have."""

    model: str
    truncation: LongText | None
    adapter: str
    pool: str
    priority: Priority | None
    on_invalid: OnInvalid
    window_overlap: int | None = None

    def message(self, kind: Callable[..., M], /, **values: object) -> M:
        """Return a request of this kind with these options and `values`. Raises InvalidInput."""
        if self.window_overlap is not None:
            values["window_overlap"] = self.window_overlap
        return message(
            kind,
            model=self.model,
            truncation=enum_value("truncation", self.truncation, TRUNCATIONS),
            adapter=self.adapter,
            pool=self.pool,
            priority=enum_value("priority", self.priority, PRIORITIES),
            **values,
        )

    def invalid(self, name: str, items: Sequence[Item]) -> list[Skipped] | None:
        """Return the items that are invalid without asking a router: empty ones, and those that are
        neither text nor image. None: an invalid item fails the call (`on_invalid="raise"`).
        """
        if self.on_invalid == "raise":
            return None
        if self.on_invalid != "skip":
            raise InvalidInput(
                f"on_invalid is {self.on_invalid!r}; it must be one of raise, skip",
                field="on_invalid",
            )
        found = ((index, _problem(f"{name}[{index}]", item)) for index, item in enumerate(items))
        return [Skipped(index, InvalidInput.reason, problem) for index, problem in found if problem]


def message(kind: Callable[..., M], /, **values: object) -> M:
    """Return a message. Raises InvalidInput if a value does not fit its field (a negative count, a
    lone surrogate, a wrong type).
    """
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"an argument does not fit the request: {error}") from None


def enum_value(field: str, value: str | None, choices: Mapping[str, E]) -> E | None:
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


MAX_REQUEST_PAGES: Final = 1024
"""Pages of documents that routers take in a request."""
_MAX_SHARED_FILES: Final = 16
_MAX_NAMED_COLUMNS: Final = 16
_UNKNOWN_PAGES: Final = 16
"""What routers count for a document without a last page."""


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
        """Raises InvalidInput."""
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


def most_items(items: Sequence[Item]) -> int:
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
            (
                f"{name} is a {kind}, a table: name the column with the items, such as "
                f"{named}.{listed}"
            ),
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
        file = file_part(path, item)
        if file is not None:
            return pb.Item(parts=[file]) if file.HasField("document") else pb.Item(image=file.image)
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
        raise InvalidInput(f"{path} is a {type(piece).__name__}; it must be {kinds}", field=path)
    try:
        holder.text = piece
    except ValueError:
        raise InvalidInput(
            f"{path} is not valid Unicode: it contains half of a surrogate pair",
            field=f"{path}.text",
        ) from None
    return holder


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


def _problem(path: str, item: Item) -> str:
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
