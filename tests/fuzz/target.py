"""What is fuzzed: a target makes inputs, which are bytes, and tries them on real code of ours."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Final, TypeAlias

Random: TypeAlias = random.Random
Make: TypeAlias = Callable[[Random, Sequence[bytes]], bytes]
"""An input from chance and what the corpus holds, which may be nothing."""

Try: TypeAlias = Callable[[bytes], object]
"""Returns for an input that was taken, or refused as it should be. Whatever it raises is a
finding.
"""

HANG_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Target:
    """`name`: also its folder of the corpus. `open`: what the tries of one process share, such as a
    running mesh.

    `guided`: Python code alone, so that coverage can guide atheris to new inputs. `share`: of the
    time of a run, beside others. `memory_bytes`: what a process of it may take beyond what it has
    when it is open.
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
        """Where it is defined: a process that tries one target imports no others."""
        return self.make.__module__


def plain(attempt: Try) -> Callable[[], AbstractContextManager[Try]]:
    """Of a target that needs nothing but its input."""
    return lambda: nullcontext(attempt)


class Broken(AssertionError):
    """A target's own judgement: the input was taken, and what came of it is wrong. `data`: the
    input, if it is not the last one.
    """

    def __init__(self, told: str, data: bytes | None = None) -> None:
        super().__init__(told)
        self.data = data


class Internal(Broken):
    """A call was answered with INTERNAL or UNKNOWN, though its input was at fault."""


def all_targets(names: Collection[str] = ()) -> Mapping[str, Target]:
    """By name; no more than are needed to have those of `names`, since importing all of them takes
    a while.
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
