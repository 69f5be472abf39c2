"""Whatever a mesh answers, no terminal obeys it, and programs get it exactly."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text
from shoal.cli import console, main, text
from typer.testing import CliRunner

import libs.text
from tests.api.fake_router import MODEL, FakeRouter, Refusal, serving
from tests.api.hostile import CONTROLS, WORDS, Spoiling

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("encode", MODEL, "x", "-r", "dense", "-r", "sparse", "-r", "multi_vector"),
    ("score", MODEL, "x", "x y"),
    ("extract", "entities", MODEL, "in Bern"),
    ("extract", "classify", MODEL, "x", "-l", "x"),
    ("extract", "relations", MODEL, "Ada met Bob", "-l", "met"),
    ("models",),
    ("models", "show", MODEL),
    ("models", "load", MODEL),
    ("models", "evict", MODEL),
    ("models", "pin", MODEL),
    ("models", "unpin", MODEL),
    ("status",),
    ("explain", MODEL),
    ("top", "--once", "--interval", "0.2"),
)
NAMES = [" ".join(words[:2]) for words in COMMANDS]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def hostile() -> Iterator[FakeRouter]:
    with serving(FakeRouter(), interceptors=[Spoiling()]) as running:
        yield running


@pytest.fixture
def run(hostile: FakeRouter, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("SHOAL_ADDRESS", hostile.address)
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(main.build(), arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout + result.stderr

    return invoke


def controls(output: str) -> set[str]:
    return set(output) & set(CONTROLS)


def texts(value: Any) -> Iterator[str]:
    """All of a JSON document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts(part)


@pytest.mark.parametrize("words", COMMANDS, ids=NAMES)
def test_no_command_prints_control_characters_of_a_response(
    run: Run, words: tuple[str, ...]
) -> None:
    code, output = run(*words)
    assert (code, controls(output)) == (0, set())
    # The tables of these two show no text that the mesh supplies.
    if words[0] not in ("encode", "score"):
        assert "�" in output


@pytest.mark.parametrize("words", COMMANDS, ids=NAMES)
def test_json_has_all_and_is_escaped(run: Run, words: tuple[str, ...]) -> None:
    code, output = run(*words, "--json")
    assert (code, controls(output)) == (0, set())
    assert any(found.endswith(WORDS) for found in texts(json.loads(output)))


@pytest.mark.parametrize("words", COMMANDS, ids=NAMES)
def test_no_refusal_steers_the_terminal(
    run: Run, hostile: FakeRouter, words: tuple[str, ...]
) -> None:
    refusal = Refusal(
        grpc.StatusCode.INVALID_ARGUMENT, f"R{WORDS}", f"no: {WORDS}", f"items[0]{WORDS}"
    )
    hostile.refusals = [refusal]
    code, output = run(*words)
    assert (code, controls(output)) == (1, set())
    assert "error: no: " in output


def test_lines_of_json_have_all_and_are_escaped(run: Run, tmp_path: Path) -> None:
    words = ("extract", "entities", MODEL, "in Bern", "--output")
    run(*words, str(tmp_path / "out.jsonl"))
    written = (tmp_path / "out.jsonl").read_text("utf-8")
    assert written in run(*words, "-")[1]
    assert controls(written) == set()
    assert json.loads(written)["entities"][0]["text"] == f"Bern{WORDS}"


def test_live_screen_moves_the_cursor_and_texts_do_not() -> None:
    table = Table("name", title=WORDS)
    table.add_row(WORDS, style="red")
    table.add_row(Text(WORDS, style="bold"))
    for part in (table, Text.assemble((WORDS, "bold"), WORDS), WORDS):
        terminal = console.SafeConsole(
            file=io.StringIO(),
            force_terminal=True,
            width=400,
            color_system="truecolor",
            highlight=False,
        )
        with Live(part, console=terminal, screen=True, auto_refresh=False) as live:
            live.refresh()
        drawn = terminal.file.getvalue()  # type: ignore[attr-defined]
        assert "\x1b[?1049h" in drawn  # rich's own
        assert controls(drawn) == {"\x1b"}
        assert "\x1b]0;" not in drawn
        assert "�]0;owned" in drawn


def test_cell_keeps_its_width() -> None:
    file = io.StringIO()
    made = Table("name", "other")
    made.add_row("NVIDIA\x1b L4", "end")
    console.SafeConsole(file=file, width=80).print(made)
    lines = file.getvalue().splitlines()
    assert "NVIDIA� L4" in lines[3]
    assert len({len(line) for line in lines}) == 1


def test_both_distributions_know_the_same_control_characters() -> None:
    points = map(chr, range(0x3000))
    for point in points:
        word = f"a{point}b"
        assert (text.printable(word) != word) == (point in CONTROLS)
        assert (libs.text.without_controls(word) != word) == (point in CONTROLS + "\t\n")
        assert (libs.text.without_controls(word, lines=True) != word) == (point in CONTROLS)
        assert bool(libs.text.control_character(word)) == (libs.text.without_controls(word) != word)
        assert json.loads(text.document([word])) == [word]
        assert not controls(text.document([word]))
    assert libs.text.control_character("a\x9b") == "U+009B"
    assert libs.text.control_character("a\r\n\tb", lines=True) == ""
    assert libs.text.control_character("a\rb", lines=True) == "U+000D"
