"""Validate long texts that a model reads in overlapping windows, and estimate their cost. Pure.

A worker knows the number of a text's windows once it has tokenised it; routers have no tokenizer.
So their number is estimated from the text's bytes, as its tokens are, and a worker refuses texts
with too many (libs/models/text/windows/spans.py). The estimate is too low for a model with a
maximum of words, because cards do not report that.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Final

from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from libs.errors import InvalidInput, TaskNotSupported
from services.router.admission.validation import limits
from services.router.admission.validation.chunking import BYTES_PER_TOKEN
from services.router.admission.validation.sizes import Sizes, tokens_per_byte

DEFAULT_MAX_TOKENS: Final = 512
"""Tokens of a window of a model that no worker has read yet."""
OVERLAP_TOKENS: Final = 256
"""Default overlap, at most a quarter of a window: the worker's own default."""
SPECIAL_TOKENS: Final = 2
_FIELD: Final = "truncation"


def refuse(truncation: int, instead: str) -> None:
    """Raise InvalidInput if a request that cuts no text into windows asks for them."""
    if truncation == pb.TRUNCATION_WINDOWS:
        raise InvalidInput(
            f"truncation WINDOWS is for Score and Extract of texts: {instead}", field=_FIELD
        )


def divided(
    request: pb.ScoreRequest | pb.ExtractRequest,
    sizes: Sizes,
    card: models_pb2.ModelCard | None,
    name: str,
) -> Sizes:
    """Return the sizes with the windows of each text, if the request asks for them.

    Raises InvalidInput for texts of too many windows, and for options that do not apply;
    TaskNotSupported for tasks and models without windows.

    Args:
        sizes: Sizes of whole texts.
        name: The request's list, `items` or `documents`.
    """
    overlap = request.window_overlap if request.HasField("window_overlap") else None
    if request.truncation != pb.TRUNCATION_WINDOWS:
        if overlap is not None:
            raise InvalidInput("window_overlap is for truncation WINDOWS", field="window_overlap")
        return sizes
    limits.WINDOW_OVERLAP.check(overlap or 0, "window_overlap")
    if isinstance(request, pb.ExtractRequest) and request.WhichOneof("task") in ("regions", "text"):
        refuse(request.truncation, f"task {request.WhichOneof('task')} has none")
    if card is not None and models_pb2.INPUT_KIND_IMAGE in card.inputs:
        raise TaskNotSupported(
            f"{card.model} reads images: windows are for models of text only", field=_FIELD
        )
    _refuse_images(sizes, name)
    rate = tokens_per_byte(card, 1 / BYTES_PER_TOKEN)
    most = card.max_tokens if card is not None and card.max_tokens else DEFAULT_MAX_TOKENS
    room = max(1, most - int(rate * sizes.per_sequence_bytes) - SPECIAL_TOKENS)
    repeated = min(OVERLAP_TOKENS, room // 4) if overlap is None else min(overlap, room // 2)
    items: list[int] = []
    windows: list[int] = []
    for index, size in enumerate(sizes.items):
        path = f"{name}[{index}].text"
        limits.WINDOWED.check(size, path, "send its parts as items")
        count = 1 + max(0, ceil((rate * size - room) / (room - repeated)))
        _check_count(count, limits.WINDOWS, path)
        _check_count(count * sizes.sequences_per_item, limits.REQUEST_WINDOWS, path)
        windows.append(count)
        items.append(size + int((count - 1) * repeated / rate))
    total = sum(windows)
    _check_count(total * sizes.sequences_per_item, limits.REQUEST_WINDOWS, name)
    read = sum(items) + total * sizes.per_sequence_bytes * sizes.sequences_per_item
    if read > limits.READ.most:
        raise InvalidInput(
            f"{name} make a worker read {read:,} bytes in windows, including the texts repeated for"
            f" each; at most {limits.READ.most:,} are allowed: send less",
            field=name,
        )
    return replace(sizes, items=items, chunks=windows)


def _refuse_images(sizes: Sizes, name: str) -> None:
    for index in sizes.images:
        raise InvalidInput(
            f"{name}[{index}] has an image or a document, and only a text is read in windows",
            field=f"{name}[{index}]",
        )


def _check_count(windows: int, limit: limits.Limit, path: str) -> None:
    if windows > limit.most:
        raise InvalidInput(
            f"{path} would be read in about {windows:,} windows, each counted for each label that"
            f" is paired with it; at most {limit.most:,} are allowed: send less, or fewer labels",
            field=path,
        )
