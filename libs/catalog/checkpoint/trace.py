"""What was read of a checkpoint, for `shoal models check`: a Config notes each key that is looked at while `recorded` lasts.

Readers know nothing of it. Where nobody records, a note costs one look at a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Read:
    """A key of a file of the checkpoint and its value; `value` None: the key is missing or null, so that a default counts."""

    file: str
    key: str
    value: object


_READS: ContextVar[list[Read] | None] = ContextVar("reads", default=None)


@contextmanager
def recorded() -> Iterator[list[Read]]:
    """Collects what this thread reads, in order."""
    reads: list[Read] = []
    token = _READS.set(reads)
    try:
        yield reads
    finally:
        _READS.reset(token)


def note(file: str, key: str, value: object) -> None:
    reads = _READS.get()
    if reads is not None:
        reads.append(Read(file, key, value))
