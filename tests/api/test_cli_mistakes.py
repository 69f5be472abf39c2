"""Answers of the `shoal` command to mistakes: they name the option or file that was meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.conftest import Run
from tests.api.fake_router import MODEL, FakeRouter


def words(text: str) -> str:
    """Return the words of a message, which a box wraps by the length of paths."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("photo.PNG", "is an image: name it as an argument, with --image"),
        ("report.pdf", "`shoal encode MODEL --document report.pdf --chunk sentences`"),
        ("notes.md", "`shoal extract text notes.md`"),
        ("folder", "is a folder: name a file"),
    ],
)
def test_input_that_another_option_reads_is_refused_with_its_name(
    run: Run,
    router: FakeRouter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    cure: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (Path(name).mkdir if name == "folder" else Path(name).touch)()
    ran = run("encode", MODEL, "--input", name)
    assert (ran.code, cure in words(ran.err)) == (2, True)
    assert not router.calls


def test_column_of_lines_of_json_is_answered_with_the_option_for_fields(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"body": "a"}\n')
    ran = run("encode", MODEL, "--input", tmp_path / "in.jsonl", "--column", "body")
    assert (ran.code, "with --field body" in words(ran.err)) == (2, True)
    assert run("encode", MODEL, "--input", tmp_path / "in.jsonl", "--field", "body").code == 0


@pytest.mark.parametrize(
    ("name", "option"), [("a.png", "--image"), ("a.pdf", "--document"), ("a.jsonl", "--input")]
)
def test_text_that_names_a_file_is_noted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "name of a file" not in run("encode", MODEL, name, "a text").err
    Path(name).touch()
    ran = run("encode", MODEL, name, "a text", "--json")
    assert (ran.code, len(ran.json()["items"])) == (0, 2)
    assert f"{name} is sent as a text, and is also the name of a file: {option} reads" in ran.err


def test_ranking_does_not_advise_options_that_it_lacks(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.pdf").touch()
    assert "name of a file" not in run("score", MODEL, "a query", "a.pdf").err


@pytest.mark.parametrize(
    "arguments",
    [
        ("encode", MODEL, "a", "--json"),
        ("encode", MODEL, *["a"] * 2000, "--json"),
        ("--version",),
        ("--help",),
        ("up", "--help"),
        ("models",),
        ("redis-acl",),
        ("extract", "text", "notes.md"),
        ("--show-completion", "bash"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disk_behind_stdout_is_one_error(
    router: FakeRouter, tmp_path: Path, arguments: tuple[str, ...], unbuffered: str
) -> None:
    """Short output may stay in a buffer until the end, and long output fails at once."""
    (tmp_path / "notes.md").write_text("a text")
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "shoal", *arguments],
            env=os.environ
            | {"SHOAL_ADDRESS": router.address, "PYTHONUNBUFFERED": unbuffered}
            # Otherwise the shell would be the one that runs the tests, such as make's.
            | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert ran.returncode == 1
    assert ran.stderr.decode() == "error: stdout: No space left on device\n"


@pytest.mark.parametrize(
    ("closed", "status", "words"), [(1, 1, "error: stdout is closed\n"), (2, 1, "")]
)
def test_closed_output_is_no_traceback(nobody: str, closed: int, status: int, words: str) -> None:
    command = [sys.executable, "-m", "shoal", "status", "--address", nobody]
    ran = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closed}>&-', "sh", *command], capture_output=True
    )
    assert (ran.returncode, ran.stdout, ran.stderr.decode()) == (status, b"", words)


def test_reader_of_stdout_that_stops_is_no_error_message(router: FakeRouter) -> None:
    command = [sys.executable, "-m", "shoal", "--help"]
    shell = '"$@" | :; exit ${PIPESTATUS[0]}'
    ran = subprocess.run(["/bin/bash", "-c", shell, "bash", *command], capture_output=True)
    assert ran.stderr == b""
