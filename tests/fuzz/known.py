"""Targets that are known to fail, to test the fuzzing machinery."""

from __future__ import annotations

import ctypes
import faulthandler
from collections.abc import Sequence
from typing import Final

from tests.fuzz.target import Internal, Random, Target, plain


def letters(chance: Random, known: Sequence[bytes]) -> bytes:
    return bytes(chance.choices(b"abcdefgh", k=3))


def fails(data: bytes) -> None:
    if data[0] == ord("a"):
        raise ValueError("begins with a")
    if data[0] == ord("b"):
        raise Internal("begins with b")


def dies(data: bytes) -> None:
    if data.endswith(b"h"):
        faulthandler.disable()
        ctypes.string_at(0)


def hangs(data: bytes) -> None:
    while data.endswith(b"h"):
        pass


def grows(data: bytes) -> None:
    bytearray(1 << 33)


TARGETS: Final = (
    Target("fails", letters, plain(fails)),
    Target("dies", letters, plain(dies)),
    Target("hangs", letters, plain(hangs), hang_seconds=1.0),
    Target("grows", letters, plain(grows)),
)
