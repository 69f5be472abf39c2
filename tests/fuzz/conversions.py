"""Conversions of files like those in the child process of libs/conversion: tries and
findings.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Final

from safetensors.torch import load_file

from libs.conversion.archive import CheckpointRefused
from tests.fuzz.target import Broken, Try

_FORBIDDEN: Final = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "os.remove",
    "import",
)
"""Python audit events that no conversion causes."""

Convert = Callable[[BinaryIO, mmap.mmap, BinaryIO, Callable[[int, int], None]], Any]
Check = Callable[[bytes, Path], None]
"""Called with the input and the output of the first conversion. Raises Broken."""


@contextmanager
def opened(conversions: Sequence[Convert], sound: bytes, check: Check) -> Iterator[Try]:
    """Yield a function that tries files in a temporary folder.

    Args:
        conversions: Run one after another on each input; each may refuse it.
        sound: A valid input that is converted first, so that libraries have opened their files.
        check: Judges the output of the first conversion.
    """
    is_watched = False

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if is_watched and event in _FORBIDDEN:
            raise Broken(f"reading a file caused {event}{arguments!r:.200}")

    with TemporaryDirectory() as folder:
        for convert in conversions:
            _convert(convert, sound, Path(folder))
        sys.addaudithook(watch)

        def attempt(data: bytes) -> None:
            nonlocal is_watched
            for convert in conversions if data else ():
                is_watched = True
                try:
                    output = _convert(convert, data, Path(folder))
                except CheckpointRefused:
                    continue
                finally:
                    is_watched = False
                if convert is conversions[0]:
                    check(data, output)

        yield attempt


def check_tensors(output: Path, most: int) -> None:
    """Raise Broken unless the output is a safetensors file with tensors and at most `most`
    bytes.
    """
    if output.stat().st_size > most:
        raise Broken(
            f"the output has {output.stat().st_size:,} bytes; at most {most:,} are in proportion "
            "to the input"
        )
    if not load_file(output):
        raise Broken("a file without tensors was written")


def _convert(convert: Convert, data: bytes, place: Path) -> Path:
    source, output = place / "source", place / "output"
    source.write_bytes(data)
    with source.open("rb") as file, output.open("wb") as out:
        # Not closed here: a refusal's traceback has arrays that are views of it.
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        convert(file, mapping, out, lambda done, total: None)
    return output
