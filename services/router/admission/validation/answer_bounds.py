"""Bounds of answers, known before any work is done: refusals, and the share of each item that
workers keep to. Pure.

1. A size that the request alone decides (labels, scores, dense vectors, tokens to generate) is
  refused here if it is too large.
2. Where the size depends on the results, the worker cuts it
  (`libs/models/runtime/answer_budget.py`) to the item's share, which is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from google.protobuf.message import Message
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, tensor_pb2

from libs import tokens
from libs.errors import InvalidInput
from libs.serving.calls.call import ANSWER_HEADER
from services.router.admission.validation import limits
from services.router.admission.validation.limits import Limit
from services.router.admission.validation.sizes import Sizes

BOUNDS: Final[Mapping[str, tuple[Limit, ...]]] = {
    "encode.dense": (limits.ENCODED, limits.STREAMED),
    "encode.sparse": (limits.SPARSE,),
    "encode.multi_vector": (limits.ENCODED, limits.STREAMED),
    "encode.chunks": (limits.CHUNKS, limits.REQUEST_CHUNKS),
    "score": (limits.ITEMS,),
    "extract.entities": (limits.ANSWERED, limits.SHARED),
    "extract.classify": (limits.ANSWERED,),
    "extract.relations": (limits.ANSWERED, limits.SHARED),
    "extract.regions": (limits.GENERATED, limits.SHARED),
    "extract.text": (limits.GENERATED, limits.SHARED),
    "extract.structure": (limits.ANSWERED, limits.SHARED),
    "tokenize": (limits.TOKENIZED,),
    "detokenize": (limits.TOKENIZED,),
}
"""The limits of every kind of answer: a verb with its representation or task. Scores take nine
bytes per document.
"""

FRAME_BYTES: Final = 512
"""Bytes of an answer in addition to its results: the revision, usage, timings and the shape of a
tensor.
"""

STREAM_ADVICE: Final = "; over gRPC, EncodeStream has a larger limit"
"""It is last, because callers over HTTP cannot follow it."""
MIN_CHUNK_ROW_BYTES: Final = 4
"""Minimum bytes of a chunk's position, token count and page."""

_NUMBER_BITS: Final[Mapping[int, int]] = {
    tensor_pb2.DATA_TYPE_FLOAT16: 16,
    tensor_pb2.DATA_TYPE_BFLOAT16: 16,
    tensor_pb2.DATA_TYPE_INT8: 8,
    tensor_pb2.DATA_TYPE_UINT8: 8,
    tensor_pb2.DATA_TYPE_BINARY: 1,
}
"""Bits of a vector's number; 32 for any other type."""


def item_share(request: Message, request_bytes: int, readable: int) -> int:
    """Return the maximum bytes of one item in the answer.

    Args:
        request_bytes: Size of the request.
        readable: Maximum bytes that the client reads.
    """
    match request:
        case pb.ExtractRequest():
            most = min(limits.SHARED.most + request_bytes, max(0, readable - FRAME_BYTES))
            return most // len(request.items)
        case pb.EncodeRequest():
            return limits.SPARSE.most // len(request.items)
    return 0


def check_generated(counts: Sequence[int], tokens: int, instead: str) -> list[int]:
    """Return the tokens that may be generated for each item. Raises InvalidInput if they are more
    than one answer holds.

    Args:
        counts: Texts to generate for each item.
        tokens: The longest answer; 0 if none is generated.
        instead: What to do instead of sending fewer items.
    """
    texts, most = sum(counts), limits.GENERATED.most
    if texts * tokens > most:
        message = f"items has {texts:,} texts to generate, of up to {tokens:,} tokens each:"
        raise InvalidInput(
            f"{message} send at most {most // tokens:,} at a time, or {instead}",
            field="items",
        )
    return [count * tokens for count in counts]


def divided_bytes(
    request: pb.EncodeRequest,
    card: models_pb2.ModelCard | None,
    *,
    is_streamed: bool,
    readable: int,
) -> int:
    """Return the maximum bytes of all answers to the jobs of a request with chunks. Their number is
    an estimate until workers have read the items, so the router adds up the answers as they
    arrive (`in_flight.py`).
    """
    forms = requested_forms(request, card)
    sparse = limits.SPARSE.most if not forms or pb.REPRESENTATION_SPARSE in forms else 0
    if is_streamed:
        return limits.STREAMED.most + sparse
    return min(limits.ENCODED.most + sparse, readable)


def requested_forms(
    request: pb.EncodeRequest, card: models_pb2.ModelCard | None
) -> Sequence[pb.Representation]:
    """Return the representations of the answer: by default the model's first; none if it is
    unknown.
    """
    return request.representations or (card.representations[:1] if card is not None else ())


def max_chunks(
    request: pb.EncodeRequest, card: models_pb2.ModelCard | None, answer_bytes: int
) -> int:
    """Return how many chunks a job of a request may have, by the bytes of all its answers."""
    forms = requested_forms(request, card)
    row = MIN_CHUNK_ROW_BYTES
    bits = _NUMBER_BITS.get(request.data_type, 32)
    if card is not None and pb.REPRESENTATION_DENSE in forms:
        row += (request.dimensions or card.dimensions) * bits // 8
    if card is not None and pb.REPRESENTATION_MULTI_VECTOR in forms:
        row += card.multi_vector_dimensions * bits // 8  # each chunk has at least one token
    return max(1, min(answer_bytes // row, limits.REQUEST_CHUNKS.most))


def check_divided(size: int, most: int, *, is_streamed: bool = False) -> None:
    """Raise InvalidInput for answers of more than `most` bytes, because the items have many more
    chunks than estimated.
    """
    if size > most:
        streamed = "" if is_streamed else STREAM_ADVICE
        raise InvalidInput(
            f"the answer has at least {size:,} bytes, more than the {most:,} that it may have,"
            " because the items have many chunks: set a larger chunking.max_tokens, or send fewer"
            f" items or fewer pages of documents{streamed}",
            field="items",
        )


def check_encoded(
    request: pb.EncodeRequest,
    card: models_pb2.ModelCard | None,
    tokens: Sequence[int],
    *,
    is_streamed: bool,
    readable: int,
    chunks: int = 0,
    text_bytes: int = 0,
) -> None:
    """Check the size of a request's vectors.

    Args:
        request: The request.
        card: Its model's card; None if no worker has read it.
        tokens: Estimates for each item.
        is_streamed: Many messages answer it (EncodeStream) instead of one.
        readable: Maximum bytes that the client reads in one message.
        chunks: The estimated number of all items' chunks; 0 if they are not divided.
        text_bytes: The estimated bytes of the chunks' texts, if the answer has them.

    Raises InvalidInput if the vectors exceed the maximum of an answer.
    """
    if card is None:
        return
    rows = chunks or len(request.items)
    numbers = (
        rows * (request.dimensions or card.dimensions) + sum(tokens) * card.multi_vector_dimensions
    )
    whole = min(limits.ENCODED.most, max(0, readable - FRAME_BYTES))
    if 4 * numbers + text_bytes <= whole:  # most requests stop here
        return
    forms = requested_forms(request, card)
    bits = _NUMBER_BITS.get(request.data_type, 32)
    size = text_bytes
    if pb.REPRESENTATION_DENSE in forms:
        size += rows * (request.dimensions or card.dimensions) * bits // 8
    if pb.REPRESENTATION_MULTI_VECTOR in forms:
        size += (
            sum(tokens) // max(1, request.pooling_factor) * card.multi_vector_dimensions * bits // 8
        )
    most = limits.STREAMED.most if is_streamed else whole
    if size > most:
        allowed = max(1, len(request.items) * most // size)
        message = (
            f"items has {len(request.items):,} entries with vectors of about {size:,} bytes;"
            f" one answer has at most {most:,}:"
        )
        instead = (
            f"send about {allowed:,} items at a time, or request fewer dimensions or a smaller data"
            f" type{'' if is_streamed else STREAM_ADVICE}"
        )
        if not is_streamed and whole < limits.ENCODED.most:
            instead += _raise_limit(limits.ENCODED.most)
        raise InvalidInput(f"{message} {instead}", field="items")


def check_divided_texts(
    request: pb.EncodeRequest,
    card: models_pb2.ModelCard | None,
    costs: Sequence[int],
    sizes: Sizes,
    *,
    is_streamed: bool,
    readable: int,
) -> None:
    """Check the size of the vectors of a request with chunks, as `check_encoded` does.

    A document counts as one chunk without text here, because the estimate of its text may be many
    times too large: for a file with images. Workers count its chunks before the forward pass
    (`max_chunks`), and the router adds up the answers (`divided_bytes`).
    """
    documents = {index for index, budget in enumerate(sizes.budgets) if budget.pages}
    known = [index for index in range(len(sizes.items)) if index not in documents]
    check_encoded(
        request,
        card,
        [costs[index] for index in known],
        is_streamed=is_streamed,
        readable=readable,
        chunks=sum(sizes.chunks[index] for index in known) + len(documents),
        text_bytes=sum(sizes.items[index] for index in known)
        if request.chunking.return_text
        else 0,
    )


def check_tokens(
    request: pb.TokenizeRequest | pb.DetokenizeRequest,
    card: models_pb2.ModelCard | None,
    *,
    readable: int,
) -> None:
    """Check the size of the answer to Tokenize or Detokenize. Its worker keeps to the same bound
    (`libs/tokens.py`).

    Args:
        request: The request.
        card: Its model's card; None if no worker has read it.
        readable: Maximum bytes that the client reads in one message.

    Raises InvalidInput if the answer may exceed the maximum.
    """
    if isinstance(request, pb.TokenizeRequest):
        field, instead, size = (
            "texts",
            "set count_only, or send less text at a time",
            _tokenized_bytes(request, card),
        )
    else:
        field, instead = "sequences", "send fewer ids at a time"
        size = tokens.max_text_bytes(
            sum(len(one.ids) for one in request.sequences), len(request.sequences)
        )
    most = min(limits.TOKENIZED.most, max(0, readable - FRAME_BYTES))
    if size <= most:
        return
    message = (
        f"the answer to {field} may have {size:,} bytes; one answer has at most {most:,}: {instead}"
    )
    if most < limits.TOKENIZED.most:
        message += _raise_limit(limits.TOKENIZED.most)
    raise InvalidInput(message, field=field)


def _raise_limit(most: int) -> str:
    return (
        "; or raise grpc.max_receive_message_length of the client and declare it in the metadata"
        f" {ANSWER_HEADER} (-1: unlimited), which allows {most:,} bytes"
    )


def _tokenized_bytes(request: pb.TokenizeRequest, card: models_pb2.ModelCard | None) -> int:
    """Return the maximum bytes of an answer to Tokenize."""
    size = tokens.RESULT_BYTES * len(request.texts)
    if request.count_only:
        return size
    is_cut = request.truncation in (pb.TRUNCATION_NONE, pb.TRUNCATION_END, pb.TRUNCATION_START)
    longest = card.max_tokens if card is not None and is_cut else 0
    for text in request.texts:
        text_bytes = len(text) if text.isascii() else len(text.encode())
        made = tokens.max_tokens(text_bytes, 1)
        size += tokens.TOKEN_BYTES * (min(made, longest) if longest else made)
        if request.return_tokens:
            size += tokens.max_name_bytes(text_bytes, 1)
    return size
