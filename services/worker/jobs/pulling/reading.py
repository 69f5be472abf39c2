"""Estimates what preparing a pulled job takes, before any of it is read: bytes, pages, pixels and
tokens. Pure.

`intake.py` decides by it on which threads a job is prepared, and `pulls.py` how much is pulled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.v1 import inference_pb2, worker_pb2

from libs.documents import limits
from libs.image_size import size_of
from services.worker.jobs.held import PreparationKind

BYTES_A_TOKEN: Final = 4
"""Estimate for a job that was not tokenised yet; used only to limit pulls (backpressure)."""

PIXELS_A_BYTE: Final = 8
"""Pixels of an image that take as long to decode as one byte of text takes to tokenise."""

PAGE_BYTES: Final = 1 << 19
"""Bytes of text that take as long to tokenise as a page takes to draw: 50 ms."""

UNKNOWN_PIXELS: Final = 50_000_000
"""Of an image whose header does not say its size: the most that is decoded."""

SLOW_PIXELS: Final = 4_000_000
"""A job with an image of more pixels is slow: decoding it takes a tenth of a second or more, in one
call that cannot yield, and may have to wait for memory."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What preparing a job reads."""

    bytes: int
    """The payload, for each further item what is repeated with every item (labels, query,
    instruction, turns), and what the pixels of images come to."""
    pages: int = 0
    """Pages of documents, as far as the job names them."""
    kind: PreparationKind = "quick"
    """`documents` of a job with any, `images` of a job with large ones."""


def reading_of(job: worker_pb2.Job, payload_bytes: int, *, has_images: bool) -> Reading:
    """`has_images`: whether the job's model reads images; else its items are not looked at."""
    read = read_bytes(job, payload_bytes)
    if not has_images:
        return Reading(read)
    pages = pixels = largest = 0
    for part in _files(job):
        if isinstance(part, inference_pb2.Document):
            pages += _pages(part)
            continue
        size = size_of(part.data)
        # A header that hides its size may be that of the largest image: it is treated as one, apart
        # from quick jobs.
        area = UNKNOWN_PIXELS if size is None else size.height * size.width
        pixels, largest = pixels + area, max(largest, area)
    read += pixels // PIXELS_A_BYTE + pages * PAGE_BYTES
    return Reading(
        read, pages, "documents" if pages else "images" if largest > SLOW_PIXELS else "quick"
    )


def _files(job: worker_pb2.Job) -> Iterable[inference_pb2.Document | inference_pb2.Image]:
    """The documents and images of the job's items."""
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


def _pages(document: inference_pb2.Document) -> int:
    """The pages that are asked for; those of a document without a last page as a router prices
    them.
    """
    first, last = document.first_page or 1, document.last_page
    return max(1, min(last - first + 1, limits.PAGES)) if last else limits.UNKNOWN_PAGES


def read_bytes(job: worker_pb2.Job, payload_bytes: int) -> int:
    """The bytes of texts that preparing the job reads: its payload, and for each further item what
    is repeated with every item (labels, query, instruction, turns)."""
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


def estimated_tokens(job: worker_pb2.Job, read: int, max_tokens: int) -> int:
    """Estimates a job's tokens before it is tokenised: from `read_bytes`, at most `max_tokens` for
    each of its sequences (of a text or an image, whichever may be longer), unless texts are
    divided."""
    sequences = 0
    match job.WhichOneof("operation"):
        case "encode" if job.encode.HasField("chunking"):
            return read // BYTES_A_TOKEN + 1
        case "encode":
            sequences = len(job.encode.items)
        case "score":
            sequences = len(job.score.documents) + 1
        case "extract":
            sequences = len(job.extract.items) * max(1, len(job.extract.classify.labels))
    return min(read // BYTES_A_TOKEN, sequences * max_tokens) + 1
