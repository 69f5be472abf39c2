"""Validate requests to tokenize and detokenize. Pure."""

from __future__ import annotations

from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from libs.errors import InvalidInput, TaskNotSupported
from services.router.admission.validation import limits, windows
from services.router.admission.validation.requests import (
    Card,
    check_common,
    check_model,
    takes,
)
from services.router.admission.validation.sizes import Sizes


def check_tokenize(request: pb.TokenizeRequest, card: Card | None) -> Sizes:
    """Check a Tokenize request and return its sizes. Raises InvalidInput or TaskNotSupported."""
    _check_shared(request, card)
    _check_count(len(request.texts), "texts")
    sizes = [len(text) if text.isascii() else len(text.encode()) for text in request.texts]
    for index, size in enumerate(sizes):
        limits.TOKENIZED_TEXT.check(size, f"texts[{index}]")
    return Sizes(sizes)


def check_detokenize(request: pb.DetokenizeRequest, card: Card | None) -> Sizes:
    """Check a Detokenize request and return its sizes. Raises InvalidInput or TaskNotSupported."""
    _check_shared(request, card)
    _check_count(len(request.sequences), "sequences")
    limits.IDS.check(sum(len(one.ids) for one in request.sequences), "sequences")
    return Sizes([one.ByteSize() for one in request.sequences])


def _check_shared(request: pb.TokenizeRequest | pb.DetokenizeRequest, card: Card | None) -> None:
    check_model(request.model)
    truncation = (
        request.truncation if isinstance(request, pb.TokenizeRequest) else pb.TRUNCATION_UNSPECIFIED
    )
    check_common(truncation, request.priority)
    windows.refuse(truncation, "use END, START or NONE to count tokens")
    if not takes(card, models_pb2.INPUT_KIND_TEXT):
        raise TaskNotSupported(
            f"{request.model} reads no texts, so it has no tokenizer", field="model"
        )


def _check_count(count: int, field: str) -> None:
    if not count:
        raise InvalidInput(f"{field} is empty: 1..{limits.ITEMS.most:,} are allowed", field=field)
    limits.ITEMS.check(count, field)
