"""A record of the keys read from a checkpoint, for `shoal models check`: within `recorded`, a
Config notes each key that is read.

The parsers themselves are unaware of it. Outside `recorded`, a note costs the lookup of one context
variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Read:
    """A key of a file of the checkpoint and its value; `value` None: the key is missing or null, so
    the default applies.
    """

    file: str
    key: str
    value: object


_READS: ContextVar[list[Read] | None] = ContextVar("reads", default=None)


@contextmanager
def recorded() -> Iterator[list[Read]]:
    """Collect the keys that this thread reads, in order."""
    reads: list[Read] = []
    token = _READS.set(reads)
    try:
        yield reads
    finally:
        _READS.reset(token)


def note(file: str, key: str, value: object) -> None:
    """Add a key to the record, if there is one."""
    reads = _READS.get()
    if reads is not None:
        reads.append(Read(file, key, value))
