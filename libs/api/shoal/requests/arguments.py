"""From the arguments of verbs to fields of request messages. Pure.

The router validates requests. Only values that a message cannot hold at all are refused here, with the same InvalidInput and field
path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from shoal.errors import InvalidInput
from shoal.requests.images import image_bytes, image_length, is_image
from shoal.results import Entity, Skipped
from shoal.tasks import Given, Item, Items, OnInvalid, Parts, Priority, Truncation
from shoal.v1 import inference_pb2 as pb

E = TypeVar("E")
M = TypeVar("M")
H = TypeVar("H", pb.Item, pb.Part)

_TRUNCATIONS = {"none": pb.TRUNCATION_NONE, "end": pb.TRUNCATION_END, "start": pb.TRUNCATION_START}
_PRIORITIES = {"interactive": pb.PRIORITY_INTERACTIVE, "bulk": pb.PRIORITY_BULK}


@dataclass(slots=True)
class Options:
    """The arguments that all inference verbs have."""

    model: str
    truncation: Truncation | None
    adapter: str
    pool: str
    priority: Priority | None
    on_invalid: OnInvalid

    def message(self, kind: Callable[..., M], /, **values: object) -> M:
        """A request of this kind with these options and `values`. Raises InvalidInput."""
        return message(
            kind,
            model=self.model,
            truncation=enum_value("truncation", self.truncation, _TRUNCATIONS),
            adapter=self.adapter,
            pool=self.pool,
            priority=enum_value("priority", self.priority, _PRIORITIES),
            **values,
        )

    def invalid(self, name: str, items: Sequence[Item]) -> list[Skipped] | None:
        """Items that are invalid without asking a router: the empty ones, and what is neither a text nor an image. None: an invalid
        item fails the call (`on_invalid="raise"`)."""
        if self.on_invalid == "raise":
            return None
        if self.on_invalid != "skip":
            raise InvalidInput(f"on_invalid is {self.on_invalid!r}; it must be one of raise, skip", field="on_invalid")
        found = ((index, _problem(f"{name}[{index}]", item)) for index, item in enumerate(items))
        return [Skipped(index, InvalidInput.reason, problem) for index, problem in found if problem]


def message(kind: Callable[..., M], /, **values: object) -> M:
    """A message. Raises InvalidInput if a value does not fit its field (a negative count, a lone surrogate, a wrong type)."""
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"an argument does not fit the request: {error}") from None


def enum_value(field: str, value: str | None, choices: Mapping[str, E]) -> E | None:
    """The enum value of a name; None leaves the field at its default. Raises InvalidInput."""
    if value is None:
        return None
    if value not in choices:
        raise InvalidInput(f"{field} is {value!r}; it must be one of {', '.join(choices)}", field=field)
    return choices[value]


def item_list(items: Items) -> list[Item]:
    """The items of an argument; a single text or image is a list of one."""
    if isinstance(items, (str, Parts)) or is_image(items):
        return [cast("Item", items)]
    return list(cast("Iterable[Item]", items))


def item_lengths(items: Sequence[Item]) -> list[int]:
    """Characters of texts, bytes of images; other types count 0 here and fail in `item_message`, with their path."""
    return [_length(item) for item in items]


def _length(item: Item) -> int:
    if isinstance(item, Parts):
        return sum(map(_length, item.pieces))
    return len(item) if isinstance(item, str) else image_length(item)


def item_messages(name: str, items: Sequence[Item], places: Sequence[int]) -> list[pb.Item]:
    """The items at these indices. Raises InvalidInput.

    Paths are relative to the request, as the router's are; `ShoalError.move` makes them absolute.
    """
    return [item_message(f"{name}[{number}]", items[index]) for number, index in enumerate(places)]


def item_message(path: str, item: Item) -> pb.Item:
    """A text, an image, or an item of several parts. Raises InvalidInput."""
    if isinstance(item, Parts):
        return pb.Item(parts=[_filled(pb.Part(), f"{path}.parts[{number}]", piece) for number, piece in enumerate(item.pieces)])
    return _filled(pb.Item(), path, item)


def _filled(holder: H, path: str, piece: Item) -> H:
    """The item or part, with a text or an image set."""
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
        raise InvalidInput(f"{path} is not valid Unicode: it contains half of a surrogate pair", field=f"{path}.text") from None
    return holder


def entity_messages(path: str, given: Sequence[Given]) -> list[pb.Entity]:
    """The entities of one item. Raises InvalidInput."""
    return [_entity(f"{path}[{index}]", entity) for index, entity in enumerate(given)]


def _entity(path: str, entity: Given) -> pb.Entity:
    try:
        start, end, label = (entity.start, entity.end, entity.label) if isinstance(entity, Entity) else (*entity, "")[:3]
        return pb.Entity(start=start, end=end, label=label)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{path} does not fit the request: {error}", field=path) from None


def _problem(path: str, item: Item) -> str:
    """Why an item is invalid; empty if nothing is found here."""
    if (isinstance(item, (str, bytes)) and not item) or (isinstance(item, Parts) and not item.pieces):
        return f"{path} is empty"
    try:
        item_message(path, item)
    except InvalidInput as error:
        return error.message
    return ""
