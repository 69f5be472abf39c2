"""Inflate request bodies as they arrive, within limits, and compress answers if it pays off. Pure.

The encodings are gzip and deflate (zlib's format; raw deflate is accepted in requests). Work is
done in steps of about one millisecond, so that the event loop can serve other requests in between.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Literal

from services.edge.messages.base import Answer, HttpError, invalid

Compression = Literal["auto", "on", "off"]
"""Whether answers are compressed for clients that accept it. auto: for callers beyond this machine.
"""
ENCODINGS: Final = ("gzip", "deflate")
STEP_BYTES: Final = 64 << 10
"""Bytes inflated per step: a quarter of a millisecond, and at most the amount that an unidentified
caller may send.
"""
MAX_RATIO: Final = 100
"""The maximum ratio of inflated to compressed bytes. JSON texts reach 3 to 20; deflate can reach
1,032.
"""
MIN_RATIO_BYTES: Final = 1 << 20
"""Any ratio is allowed up to this size: a body may consist of many equal short texts."""
MIN_COMPRESSED_BYTES: Final = 1 << 10
"""Smaller answers are not compressed."""
SLICE_BYTES: Final = 32 << 10
"""Bytes of an answer compressed per step."""
SAMPLE_BYTES: Final = 8 << 10
MAX_COMPRESSED_RATIO: Final = 0.7
"""Answers with a first sample that does not shrink to this ratio are sent uncompressed: base64 of
float32 shrinks to 0.76, JSON to 0.45.
"""
_LEVEL: Final = 1
"""Level 6 takes four to eight times as long and saves another 5 %."""
_GZIP, _ZLIB, _BARE = 31, 15, -15
_ZLIB_HEAD_BYTES: Final = 2


class Inflater:
    """Inflates one body. Raises HttpError UNSUPPORTED_MEDIA for an encoding that is not in
    ENCODINGS.
    """

    def __init__(self, encoding: str) -> None:
        self._is_gzip = encoding in ("gzip", "x-gzip")
        if not self._is_gzip and encoding != "deflate":
            text = (
                f"content-encoding {encoding[:40]!r} is not supported: "
                "send gzip, deflate, or an uncompressed body"
            )
            raise HttpError("UNSUPPORTED_MEDIA", text)
        # The state: zlib's object (None before the first bytes), bytes that wait for it, and the
        # counts of bytes in and out.
        self._zlib = zlib.decompressobj(_GZIP) if self._is_gzip else None
        self._waiting = b""
        self._taken = 0
        self._given = 0

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Yield the inflated bytes in pieces of at most STEP_BYTES. Raises HttpError INVALID_INPUT
        or TOO_LARGE.
        """
        if self._zlib is None:
            self._waiting += part
            if len(self._waiting) < _ZLIB_HEAD_BYTES:
                return
            part, self._waiting = self._waiting, b""
            self._zlib = zlib.decompressobj(_ZLIB if _is_zlib(part) else _BARE)
        piece = b""
        while part or len(piece) == STEP_BYTES:  # a whole step: zlib may hold more
            if self._zlib.eof:
                if part:
                    raise invalid("the compressed body continues after its end", "")
                return
            try:
                piece = self._zlib.decompress(part, STEP_BYTES)
            except zlib.error as error:
                raise invalid(f"the body cannot be decompressed: {error}", "") from None
            rest = self._zlib.unconsumed_tail or self._zlib.unused_data
            self._taken += len(part) - len(rest)
            self._given += len(piece)
            if self._given > max(MIN_RATIO_BYTES, MAX_RATIO * self._taken):
                text = (
                    f"the body inflates to more than {MAX_RATIO} times its size: send it "
                    "uncompressed"
                )
                raise HttpError("TOO_LARGE", text)
            part = rest
            yield piece

    def end(self) -> None:
        """Raise HttpError INVALID_INPUT if the body ended before its compressed data did."""
        if self._zlib is None or not self._zlib.eof:
            raise invalid("the compressed body is truncated", "")


def _is_zlib(begin: bytes) -> bool:
    """Return whether deflate data starts with zlib's header (RFC 1950), as HTTP requires; some
    clients omit it.
    """
    return (
        begin[0] & 0x0F == zlib.DEFLATED
        and int.from_bytes(begin[:_ZLIB_HEAD_BYTES], "big") % 31 == 0
    )


def negotiate_encoding(accepted: str) -> str:
    """Return the encoding in ENCODINGS that an Accept-Encoding header prefers; empty for none."""
    found = {}
    for part in accepted.lower().split(","):
        name, _, parameters = part.partition(";")
        found[name.strip()] = _quality(parameters)
    best = max(ENCODINGS, key=lambda name: found.get(name, 0.0))
    return best if found.get(best, 0.0) > 0 else ""


def _quality(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def compress(answer: Answer, encoding: str) -> Answer:
    """Return the answer in that encoding, or unchanged if compression does not pay off."""
    if not encoding:
        return answer
    rest: Iterator[bytes] = iter(())
    begin, rest = (
        (answer.body, rest) if isinstance(answer.body, bytes) else _take_sample(answer.body)
    )
    headers = (*answer.headers, (b"vary", b"accept-encoding"))
    if len(begin) < MIN_COMPRESSED_BYTES or not _is_worth_it(begin[:SAMPLE_BYTES]):
        body = begin if isinstance(answer.body, bytes) else itertools.chain((begin,), rest)
        return replace(answer, body=body, headers=headers)
    headers = (*headers, (b"content-encoding", encoding.encode()))
    pieces = _compressed_pieces(
        itertools.chain((begin,), rest), _GZIP if encoding == "gzip" else _ZLIB
    )
    if isinstance(answer.body, bytes) and len(begin) <= SLICE_BYTES:
        return replace(answer, body=b"".join(pieces), headers=headers)
    return replace(answer, body=pieces, headers=headers)


def _take_sample(pieces: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return the first SAMPLE_BYTES or more, and an iterator of the remaining pieces."""
    begin = b""
    for piece in pieces:
        begin += piece
        if len(begin) >= SAMPLE_BYTES:
            break
    return begin, pieces


def _is_worth_it(sample: bytes) -> bool:
    return len(zlib.compress(sample, _LEVEL)) <= MAX_COMPRESSED_RATIO * len(sample)


def _compressed_pieces(parts: Iterator[bytes], window: int) -> Iterator[bytes]:
    """Yield one piece per slice, even if empty, so that other tasks run after each."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, window)
    for part in parts:
        view = memoryview(part)
        for first in range(0, len(view), SLICE_BYTES):
            yield packer.compress(view[first : first + SLICE_BYTES])
    yield packer.flush()
