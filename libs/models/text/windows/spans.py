"""Divide a text into overlapping windows by tokens, for models that tokenise it as a whole. Models
of words divide it by words (`processing/extraction/words.py`).
"""

from __future__ import annotations

from typing import Final

from libs.errors import InvalidInput
from libs.models.interface.work import CancelCheck, Span
from libs.models.text.processing.chunking.token_chunks import by_tokens
from libs.models.text.tokenising.text import TextProcessor

MAX_WINDOWS: Final = 2048
"""Maximum windows of one text. The router (services/router/admission/validation/limits.py) has the
same limit but only an estimate.
"""
MAX_SEQUENCES: Final = 16_384
"""Maximum sequences of one text: its windows, times the labels that each is paired with."""
MAX_OUTPUT_BYTES: Final = 256 << 20
"""Maximum bytes of the model's outputs for a job with windows: they stay in the worker's memory
until the job's last window is computed.
"""
OVERLAP_TOKENS: Final = 256
"""Default overlap of two windows; at most a quarter of a window. Late chunking has the same."""
_DOUBT_TOKENS: Final = 8
"""Tokens by which a window, alone, may differ from its tokens in the text."""


def resolve_overlap(asked: int | None, room: int) -> int:
    """Return the tokens that a window repeats of the one before.

    Raises InvalidInput for more than half of a window.

    Args:
        asked: The request's overlap; None for the default.
        room: Tokens of a window, without those of labels, query and prompt.
    """
    if asked is None:
        return min(OVERLAP_TOKENS, room // 4)
    if 2 * asked > room:
        raise InvalidInput(
            f"window_overlap is {asked}; a window has {room} tokens of a text here, and at most "
            f"half of them, {room // 2}, may be repeated",
            field="window_overlap",
        )
    return asked


def too_many_windows(path: str, most: int = MAX_WINDOWS, what: str = "windows") -> InvalidInput:
    """Return the error for a text of too many windows. The caller raises it."""
    message = (
        f"{path} would be read in more than {most:,} {what}: send its parts as items, or fewer "
        "labels with it"
    )
    return InvalidInput(message, field=path)


def check_outputs(size: int, path: str) -> None:
    """Raise InvalidInput if a job's outputs have too many bytes.

    Args:
        path: The job's longest text.
    """
    if size > MAX_OUTPUT_BYTES:
        raise InvalidInput(
            f"{path} and the other texts of its job have outputs of {size >> 20:,} MiB in windows; "
            f"at most {MAX_OUTPUT_BYTES >> 20:,} MiB are allowed: send shorter texts, fewer labels,"
            " or several requests",
            field=path,
        )


def token_windows(
    text: TextProcessor,
    own: str,
    room: int,
    overlap: int | None,
    path: str,
    check_cancelled: CancelCheck,
) -> list[Span]:
    """Return the windows of a text, in order. None begins or ends with white space, and none ends
    within a word that a window holds, if the text has words.

    A window alone has at most `room` tokens with hardly any exception: a piece of a text is
    tokenised as within the text, except at its ends.
    """
    repeated = resolve_overlap(overlap, room)
    most = max(1, room - min(_DOUBT_TOKENS, room // 16))
    whole = text.encode_whole(own, check_cancelled=check_cancelled)
    check_cancelled()
    if len(whole.starts) > MAX_WINDOWS * (most - min(repeated, most // 2)):
        raise too_many_windows(path)
    return by_tokens(own, whole, most, min(repeated, most // 2), whole_words=True)


def halves(text: TextProcessor, piece: str, check_cancelled: CancelCheck) -> list[Span]:
    """Return two or more parts of a piece that has more tokens than a window holds; one for a
    single character.
    """
    whole = text.encode_whole(piece, check_cancelled=check_cancelled)
    parts = by_tokens(piece, whole, max(1, len(whole.starts) // 2), whole_words=True)
    if len(parts) > 1 or len(piece) < 2:
        return parts
    half = len(piece) // 2
    return [Span(0, half), Span(half, len(piece))]
