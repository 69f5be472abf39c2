"""Hot reload of files by servers and callers: not while they are being written, and never when they
are gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from shoal.transport import trust

from libs.errors import InvalidInput
from libs.serving import watched
from libs.serving.watched import Watched

SETTLE = 0.5
PARTS = ("one\n", "two\n", "three\n")


class Reader:
    """Reads lines of a file. Has the clock by which the file's age is judged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0
        self.during: Callable[[], object] = lambda: None

    def clock(self) -> float:
        return self.now

    def __call__(self) -> list[str]:
        try:
            found = self.path.read_text().split()
        except OSError:
            raise InvalidInput("gone") from None
        self.during()
        if not found:
            raise InvalidInput("empty")
        return found

    def touched(self, seconds: float) -> None:
        """Set the clock to `seconds` after the file's change, rounded as in production: `st_ctime`
        may be 2.4e-7 s less.
        """
        self.now = os.stat(self.path).st_ctime_ns / 1e9 + seconds


class Callers(Reader):
    """A reader for `shoal.transport.trust`, which raises other errors."""

    def __call__(self) -> list[str]:
        try:
            return super().__call__()
        except InvalidInput as error:
            raise ValueError(str(error)) from None


def served(reader: Reader) -> Callable[[], list[str]]:
    held = Watched([reader.path], reader, clock=reader.clock)

    def get() -> list[str]:
        held.refresh()
        return held.content

    return get


def called(reader: Reader) -> Callable[[], list[str]]:
    looks = iter(range(1_000_000))  # every call polls
    return trust.WatchedCredential(
        [reader.path], reader, clock=lambda: 10.0 * next(looks), wall=reader.clock
    ).get


KINDS = pytest.mark.parametrize(("kind", "get"), [(Reader, served), (Callers, called)])


@pytest.fixture(autouse=True)
def _settle(monkeypatch: pytest.MonkeyPatch, _files_count_at_once: None) -> None:
    for module in (watched, trust):
        monkeypatch.setattr(module, "SETTLE_SECONDS", SETTLE)


@KINDS
def test_slowly_written_file_is_read_when_complete(
    kind: type[Reader], get: Callable[[Reader], Callable[[], list[str]]], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("".join(PARTS))
    reader = kind(path)
    look = get(reader)
    for count in range(len(PARTS)):
        path.write_text(
            "".join(PARTS[: count + 1]) if count < len(PARTS) - 1 else "one\ntwo\nfour\n"
        )
        reader.touched(0.1)
        assert look() == ["one", "two", "three"]
    reader.touched(SETTLE)
    assert look() == ["one", "two", "four"]


@KINDS
def test_file_that_changes_during_the_read_is_ignored(
    kind: type[Reader], get: Callable[[Reader], Callable[[], list[str]]], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("one\n")
    reader = kind(path)
    look = get(reader)
    path.write_text("one\ntwo\n")
    reader.touched(SETTLE)
    reader.during = lambda: path.write_text("one\ntwo\nthree\n")
    assert look() == ["one"]
    reader.during = lambda: None
    reader.touched(SETTLE)
    assert look() == ["one", "two", "three"]


@KINDS
def test_content_is_kept_and_logged_once_if_the_file_is_broken_or_gone(
    kind: type[Reader],
    get: Callable[[Reader], Callable[[], list[str]]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "file"
    path.write_text("one\n")
    reader = kind(path)
    look = get(reader)
    for damage in (lambda: path.write_text(""), path.unlink):
        caplog.clear()
        damage()
        reader.now = 4e9  # long after
        assert [look() for _ in range(3)] == [["one"]] * 3
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    path.write_text("two\n")
    reader.touched(SETTLE)
    assert look() == ["two"]


@KINDS
def test_file_with_a_future_time_is_read_when_observed_twice(
    kind: type[Reader], get: Callable[[Reader], Callable[[], list[str]]], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("one\n")
    reader = kind(path)
    look = get(reader)
    path.write_text("two two\n")
    reader.touched(-3600.0)
    assert look() == ["one"]
    reader.now += SETTLE
    assert look() == ["two", "two"]
