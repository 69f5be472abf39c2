"""Texts that are files: `data:` URIs in base64, as browsers and OpenAI's wire write images. Pure.

The rule, which the Python client, the command line and every wire of the edge share: a text that
begins with `data:<media type>;base64,` is a file. An image or a PDF is sent as one; other files are
refused, because no model reads them. Routers refuse such a text where it was sent as a text, so
that no model embeds base64 as words.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from shoal.errors import InvalidInput
from shoal.v1 import inference_pb2 as pb

_HEADER: Final = re.compile(
    r"data:([a-z0-9.+/-]{0,127})(?:;[a-z0-9_.-]+=[^;,\s]{0,127}){0,8};base64,", re.IGNORECASE
)
_SCHEME: Final = "data:"


def media_type(text: str) -> str | None:
    """Return the media type that a text names if it is a file, such as `image/png`; empty if it
    names none; None for any other text.
    """
    if text[: len(_SCHEME)].lower() != _SCHEME:
        return None
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
            (
                f"{path} is a file of the type {kind or 'text/plain'}: {known}. Send other "
                "contents "
                "as text"
            ),
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
