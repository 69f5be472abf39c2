"""Answers of the `shoal` command to mistakes: they name the option or file that was meant."""

from __future__ import annotations

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


def test_full_disk_behind_stdout_is_one_error(router: FakeRouter) -> None:
    """Short output stays in a buffer until the end, and long output fails at once."""
    for texts in (["a"], ["a"] * 2000):
        command = [sys.executable, "-m", "shoal", "encode", MODEL, *texts, "--json"]
        with open("/dev/full", "wb") as full:
            ran = subprocess.run(
                [*command, "--address", router.address], stdout=full, stderr=subprocess.PIPE
            )
        assert ran.returncode == 1
        assert ran.stderr.decode() == "error: stdout: No space left on device\n"
