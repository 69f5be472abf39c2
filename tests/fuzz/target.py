"""A fuzzing target generates inputs (bytes) and tries them on Shoal's code."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Final, TypeAlias

Random: TypeAlias = random.Random
Make: TypeAlias = Callable[[Random, Sequence[bytes]], bytes]
"""Returns an input from a random source and the corpus, which may be empty."""

Try: TypeAlias = Callable[[bytes], object]
"""Returns for an accepted input, or one that is refused as it should be. Any exception is a
finding.
"""

HANG_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Target:
    """A target.

    Attributes:
        name: Its name, and that of its folder in the corpus.
        open: Provides resources shared by the tries of a process, such as a running mesh.
        guided: The code is pure Python, so that coverage can guide atheris to new inputs.
        share: The weight of its time in a run.
        memory_bytes: Memory that a process may take in addition to its size after `open`.
    """

    name: str
    make: Make
    open: Callable[[], AbstractContextManager[Try]]
    guided: bool = False
    share: float = 1.0
    memory_bytes: int = 1 << 30
    hang_seconds: float = HANG_SECONDS

    @property
    def module(self) -> str:
        """Return the defining module: a process that tries one target imports no others."""
        return self.make.__module__


def plain(attempt: Try) -> Callable[[], AbstractContextManager[Try]]:
    """Return `open` for a target that needs only its input."""
    return lambda: nullcontext(attempt)


class Broken(AssertionError):
    """A failed check of the target: the input was accepted with a wrong result. `data` is the input
    if it is not the last one.
    """

    def __init__(self, reported: str, data: bytes | None = None) -> None:
        super().__init__(reported)
        self.data = data


class Internal(Broken):
    """A call returned INTERNAL or UNKNOWN although its input was at fault."""


def all_targets(names: Collection[str] = ()) -> Mapping[str, Target]:
    """Return targets by name, importing only the modules needed for `names`, since importing all
    takes a while.
    """
    found: dict[str, Target] = {}
    for module in (
        "stores",
        "decoders",
        "images",
        "documents",
        "torch_files",
        "foreign_files",
        "dialects",
        "wire",
        "checkpoints",
        "calls",
        "amplification",
    ):
        if names and set(names) <= found.keys():
            break
        for target in targets_of(f"tests.fuzz.{module}"):
            assert target.name not in found, f"two targets are called {target.name}"
            found[target.name] = target
    return found


def targets_of(module: str) -> Sequence[Target]:
    found: Sequence[Target] = import_module(module).TARGETS
    return found
