"""Parse a body into a Struct. Every fault becomes an HttpError with the field's name. Pure."""

from __future__ import annotations

import base64
import binascii
import re
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
from shoal.errors import InvalidInput
from shoal.requests.items import file_item, file_part
from shoal.requests.words import ROLES
from shoal.v1 import inference_pb2 as pb

from services.edge.messages.base import HttpError, Received, invalid
from services.edge.messages.limits import too_many
from services.edge.messages.names import AliasTarget, Role

S = TypeVar("S", bound=msgspec.Struct)
_AT: Final = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_MAX_LENGTH: Final = re.compile(r"Expected `array` of length <= (\d+)")
_FIELD: Final = re.compile(r"field `([^`]+)`")


def read(kind: type[S], received: Received) -> S:
    """Return the body as a Struct. Raises HttpError with the field's path."""
    if not received.body:
        raise invalid("the request has no body: send JSON", "")
    decoder = _decoder(kind, received.is_msgpack)
    try:
        found: S = decoder.decode(received.body)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = "msgpack" if received.is_msgpack else "JSON in UTF-8"
        raise invalid(f"the body is not {what}: {error}", "") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", "") from None
    return found


@lru_cache(maxsize=256)
def _decoder(kind: type[Any], is_msgpack: bool) -> Any:
    return msgspec.msgpack.Decoder(kind) if is_msgpack else msgspec.json.Decoder(kind)


def _misfit(text: str) -> HttpError:
    """Return the error of a value of the wrong type or of a missing field, from msgspec's message:
    "Expected `str`, got `int` - at `$.input[0]`".
    """
    found = _AT.search(text)
    parent = found[1] if found else ""
    message = text[: found.start()] if found else text
    if longest := _MAX_LENGTH.fullmatch(message):
        return too_many(parent, int(longest[1]))
    missing = _FIELD.search(message)
    if missing and "missing" in message:
        path = f"{parent}.{missing[1]}" if parent else missing[1]
        return invalid(f"{path} is required", path)
    message = message[:1].lower() + message[1:].replace("`", "")
    return invalid(f"{parent or 'the body'}: {message}", parent)


def target(received: Received, name: str, field: str = "model") -> AliasTarget:
    """Return the target of a model's name. Raises HttpError MODEL_NOT_FOUND for an invalid name."""
    found = received.names.find(name)
    if found is None:
        shown = name if len(name) <= 200 else f"{name[:200]}…"
        raise HttpError(
            "MODEL_NOT_FOUND",
            f"the model {shown!r} does not exist: use org/name, org/name@revision, or an alias of "
            "the edge's file SHOAL_ALIASES; GET /v1/models lists the models",
            field=field,
        )
    return found


_WORDS: Final[dict[str, Role]] = {
    "": "",
    "query": "query",
    "search_query": "query",
    "retrieval.query": "query",
    "code.query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
    "retrieval.passage": "document",
    "code.passage": "document",
}
"""The dialects' words for the two sides of a search."""
_NEITHER: Final = ("classification", "clustering", "image")
"""Cohere's words for texts on neither side of a search."""


def is_role_word(word: str) -> bool:
    """Return whether a dialect uses this word for a side of a search."""
    return word in _WORDS


def read_role(target: AliasTarget, **words: str | None) -> pb.Role:
    """Return the role that a request's fields name, or else the alias's. Raises HttpError for an
    unknown word or two different roles.
    """
    found: dict[Role, str] = {}
    for field, word in words.items():
        if word is None or (field == "input_type" and word in _NEITHER):
            continue
        if word not in _WORDS:
            known = ", ".join(filter(None, _WORDS))
            raise invalid(f"{field} is {word!r}; it must be one of {known}, or be left out", field)
        found[_WORDS[word]] = field
    found.pop("", None)
    if len(found) > 1:
        fields = " and ".join(found.values())
        raise invalid(
            f"{fields} name different roles: send one of them", next(iter(found.values()))
        )
    role = next(iter(found), target.role)
    return ROLES[role] if role else pb.ROLE_UNSPECIFIED


def read_truncation(
    word: bool | str | None, field: str, *, side: str | None = None
) -> pb.Truncation:
    """Parse a truncation: true or false, or NONE, START (LEFT), END (RIGHT) or WINDOWS in any case.

    Args:
        word: The caller's value.
        field: Its name.
        side: Where to cut if `word` is true or None; None for the side that the model's files
            specify.
    """
    sides = {
        "end": pb.TRUNCATION_END,
        "right": pb.TRUNCATION_END,
        "start": pb.TRUNCATION_START,
        "left": pb.TRUNCATION_START,
    }
    if word is None or word is True:
        found = sides.get(side.lower()) if side else pb.TRUNCATION_UNSPECIFIED
    elif word is False:
        found = pb.TRUNCATION_NONE
    else:
        others = {
            "none": pb.TRUNCATION_NONE,
            "": sides["end"],
            "windows": pb.TRUNCATION_WINDOWS,
        }
        found = (others | sides).get(word.lower())
    if found is None:
        message = f"{field} must be true or false, or one of NONE, START, END and WINDOWS"
        raise invalid(message, field)
    return found


def read_priority(value: str | int | None) -> pb.Priority:
    """Parse `interactive` or `bulk`. Numbers, vLLM's order within its queue, are ignored."""
    if value is None or isinstance(value, int):
        return pb.PRIORITY_UNSPECIFIED
    known = {"interactive": pb.PRIORITY_INTERACTIVE, "bulk": pb.PRIORITY_BULK}
    if value not in known:
        raise invalid(f"priority is {value!r}; it must be interactive or bulk", "priority")
    return known[value]


def read_count(value: int | None, field: str) -> int:
    """Return a number that fits the wire; 0, the default there, for None."""
    if value is None:
        return 0
    if not 1 <= value < 1 << 31:
        raise invalid(f"{field} is {value}; it must be at least 1", field)
    return value


def text_item(text: str, field: str) -> pb.Item:
    """Return the item of a text, or of the file in a text that begins with `data:<media
    type>;base64,` (`shoal.requests.items`). Raises HttpError for a file type that no model reads,
    and as `plain_text_item`.
    """
    try:
        return file_item(field, text) or plain_text_item(text, field)
    except InvalidInput as error:
        raise invalid(error.message, error.field) from None


def plain_text_item(text: str, field: str) -> pb.Item:
    """Return the item of an uninterpreted text. Raises HttpError for invalid Unicode: half of a
    surrogate pair, written as \\ud800.
    """
    try:
        return pb.Item(text=text)
    except (UnicodeEncodeError, ValueError):
        raise invalid(
            f"{field} is not valid Unicode: it contains half of a surrogate pair", field
        ) from None


def image_item(uri: str, field: str) -> pb.Item:
    """Return the item of a `data:` URI with an image or a PDF, or of an image in plain base64. URLs
    are never fetched. Raises HttpError.
    """
    part = image_part(uri, field)
    return pb.Item(image=part.image) if part.HasField("image") else pb.Item(parts=[part])


def image_part(uri: str, field: str) -> pb.Part:
    """Return the same as a part of an item. Raises HttpError."""
    if re.match(r"[a-z][a-z0-9+.-]*://", uri, re.IGNORECASE):
        raise invalid(
            f"{field} is a URL, and URLs are not fetched: send data:image/png;base64,…",
            field,
        )
    try:
        return file_part(field, uri) or pb.Part(
            image=pb.Image(data=base64.b64decode(uri, validate=True))
        )
    except InvalidInput as error:
        raise invalid(error.message, error.field) from None
    except (binascii.Error, ValueError):
        raise invalid(
            f"{field} is not an image in base64: send data:image/png;base64,…", field
        ) from None


def named_or_default(received: Received, name: str | None, default: str) -> AliasTarget:
    """Return the target of a model's name, or of the alias `default` if a request names none.
    Raises HttpError.
    """
    if name:
        return target(received, name)
    found = received.names.aliases.get(default)
    if found is None:
        raise invalid(
            "model is required: name one in the request (for TEI in the path, "
            "/tei/org/name/embed), or set a default by `shoal up org/name` or the alias "
            f"`{default}` of SHOAL_ALIASES",
            "model",
        )
    return found
