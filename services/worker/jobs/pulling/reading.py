"""Estimates the cost of preparing a pulled job before reading it: bytes, pages, pixels and tokens.
Pure.

`intake.py` uses it to choose the threads that prepare a job, `pulls.py` to limit pulls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.v1 import inference_pb2, worker_pb2

from libs.documents import limits
from libs.documents.text_size import estimated_text_bytes
from libs.image_size import read_image_size
from libs.work_estimate import answer_tokens
from services.worker.jobs.held import PreparationKind

BYTES_A_TOKEN: Final = 4
"""Estimate for a job that is not tokenised yet. Only used to limit pulls (backpressure)."""

PIXELS_A_BYTE: Final = 8
"""Pixels of an image that take as long to decode as tokenising one byte of text."""

PAGE_BYTES: Final = 1 << 19
"""Bytes of text that take as long to tokenise as drawing a page: 50 ms."""

UNKNOWN_PIXELS: Final = 50_000_000
"""Assumed for an image without a size in its header: the maximum that is decoded."""

SLOW_PIXELS: Final = 4_000_000
"""A job with a larger image is slow: decoding takes a tenth of a second or more in one call that
cannot yield, and may wait for memory.
"""


@dataclass(frozen=True, slots=True)
class InputSizes:
    """The input sizes of a job's preparation."""

    bytes: int
    """The payload, plus the shared parts once for each further item (labels, query, instruction,
    turns), plus the equivalent of image pixels and pages.
    """
    pages: int = 0
    """Pages of documents, as far as the job specifies them."""
    kind: PreparationKind = "quick"
    """`documents` for a job with any, else `images` for one with large images."""


def estimate_input_sizes(
    job: worker_pb2.Job, payload_bytes: int, *, has_images: bool
) -> InputSizes:
    """Estimate a job's preparation. Files count only if the job's model reads images
    (`has_images`), or if their text is divided into chunks.
    """
    read = read_bytes(job, payload_bytes)
    if job.WhichOneof("operation") == "encode" and job.encode.HasField("chunking"):
        return _reading_of_texts(job.encode, read)
    if not has_images:
        return InputSizes(read)
    pages = pixels = largest = 0
    for part in _files(job):
        if isinstance(part, inference_pb2.Document):
            pages += _pages(part)
            continue
        size = read_image_size(part.data)
        # A header may hide the size of a very large image: assume the maximum, away from quick
        # jobs.
        area = UNKNOWN_PIXELS if size is None else size.height * size.width
        pixels, largest = pixels + area, max(largest, area)
    read += pixels // PIXELS_A_BYTE + pages * PAGE_BYTES
    return InputSizes(
        read, pages, "documents" if pages else "images" if largest > SLOW_PIXELS else "quick"
    )


def _reading_of_texts(request: inference_pb2.EncodeRequest, read: int) -> InputSizes:
    """Estimate the preparation of texts in chunks. Of documents their estimated text counts, not
    their files.

    Args:
        read: The bytes of the job, with files.
    """
    read -= sum(map(len, request.files))
    pages = 0
    for item in request.items:
        for part in item.parts:
            if part.WhichOneof("content") == "document":
                asked = part.document
                pages += _pages(asked, limits.CHUNKED_PAGES)
                read += _text_bytes(asked, request.files) - len(asked.data)
    return InputSizes(max(0, read), pages, "documents" if pages else "quick")


def _text_bytes(document: inference_pb2.Document, files: Sequence[bytes]) -> int:
    """Estimate the text of the requested pages; without a last page, of all that are read."""
    is_shared = document.WhichOneof("source") == "file"
    if is_shared and document.file >= len(files):
        return 0  # refused when it is read
    data = files[document.file] if is_shared else document.data
    count = _pages(document, limits.CHUNKED_PAGES) if document.last_page else limits.CHUNKED_PAGES
    return estimated_text_bytes(data, count)


def _files(job: worker_pb2.Job) -> Iterable[inference_pb2.Document | inference_pb2.Image]:
    """Yield the documents and images of the job's items."""
    items: Sequence[inference_pb2.Item] = ()
    match job.WhichOneof("operation"):
        case "encode":
            items = job.encode.items
        case "score":
            items = [job.score.query, *job.score.documents]
        case "extract":
            items = job.extract.items
    for item in items:
        if item.WhichOneof("content") == "image":
            yield item.image
        for part in item.parts:
            match part.WhichOneof("content"):
                case "image":
                    yield part.image
                case "document":
                    yield part.document


def _pages(document: inference_pb2.Document, most: int = limits.PAGES) -> int:
    """Return the requested pages, at most those of an item. Without a last page, assume the
    router's price.
    """
    first, last = document.first_page or 1, document.last_page
    return max(1, min(last - first + 1, most)) if last else limits.UNKNOWN_PAGES


def read_bytes(job: worker_pb2.Job, payload_bytes: int) -> int:
    """Return the bytes of text that preparation reads: the payload, plus shared parts again for
    each further item (labels, query, instruction, turns).
    """
    items, shared = 1, 0
    match job.WhichOneof("operation"):
        case "encode":
            items, shared = len(job.encode.items), len(job.encode.instruction)
        case "score":
            items, shared = (
                len(job.score.documents),
                len(job.score.query.text) + len(job.score.instruction),
            )
        case "extract":
            task, text = job.extract.classify, job.extract.text
            items, shared = (
                len(job.extract.items),
                sum(map(len, task.labels)) + len(task.hypothesis) * len(task.labels),
            )
            shared += len(text.instruction) + sum(len(turn.text) for turn in text.turns)
    return payload_bytes + max(0, items - 1) * shared


def estimated_tokens(job: worker_pb2.Job, read: int, max_tokens: int, pages: int = 0) -> int:
    """Estimate a job's tokens from `read_bytes`, at most `max_tokens` per sequence unless texts are
    chunked or read in windows; and the tokens of generated texts, one of each item or page.
    """
    sequences = 0
    match job.WhichOneof("operation"):
        case "encode" if job.encode.HasField("chunking"):
            return read // BYTES_A_TOKEN + 1
        case "encode":
            sequences = len(job.encode.items)
        case "score" | "extract" as operation if (
            getattr(job, operation).truncation == inference_pb2.TRUNCATION_WINDOWS
        ):
            pairs = max(1, len(job.extract.classify.labels))
            return pairs * read // BYTES_A_TOKEN + 1
        case "score":
            sequences = len(job.score.documents) + 1
        case "extract":
            sequences = len(job.extract.items) * max(1, len(job.extract.classify.labels))
    return min(read // BYTES_A_TOKEN, sequences * max_tokens) + 1 + _answer_tokens(job, pages)


def _answer_tokens(job: worker_pb2.Job, pages: int) -> int:
    task = job.extract.text
    if (
        not job.extract.HasField("text")
        or task.text_layer == inference_pb2.TextTask.TEXT_LAYER_ONLY
    ):
        return 0
    return max(len(job.extract.items), pages) * answer_tokens(task.max_tokens)
