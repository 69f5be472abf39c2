"""`shoal extract text` without a model: the text layer, read on this computer by the limited
process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from shoal.cli import main
from shoal.cli.inference import pages
from typer.testing import CliRunner

from tests.support import offices, pdfs

READER = EntryPoint("text_layer", "libs.documents.layer:read_text_layer", pages.GROUP)
Run = Callable[..., Any]


def _run(monkeypatch: pytest.MonkeyPatch, nobody: str, entries: Iterable[EntryPoint]) -> Run:
    monkeypatch.setattr(pages, "entry_points", lambda group, name: tuple(entries))
    monkeypatch.setenv("SHOAL_ADDRESS", nobody)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(
        main.build(), ["extract", "text", *map(str, arguments)]
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, where no router answers."""
    return _run(monkeypatch, "127.0.0.1:1", [READER])


@pytest.fixture
def report(tmp_path: Path) -> Path:
    file = tmp_path / "report.pdf"
    file.write_bytes(pdfs.document(["first page", "", "third page"]))
    return file


def test_text_layer_is_read_without_a_model_and_without_a_mesh(
    run: Run, report: Path, tmp_path: Path
) -> None:
    ran = run(report)
    assert (ran.exit_code, ran.stdout) == (
        0,
        "## Page 1\n\nfirst page\n\n## Page 2\n\n## Page 3\n\nthird page\n\n",
    )
    assert (
        "no text on 1 of 3 pages: 2; --model names a model that reads them as images" in ran.stderr
    )
    answer = json.loads(run(report, "--pages", "3-9", "--json").stdout)
    assert answer == {
        "model": None,
        "pages": [{"page": 3, "text": "third page", "is_text_layer": True}],
    }
    ran = run(report, "--output", tmp_path / "report.md", "--pages", "1-2")
    assert (ran.exit_code, (tmp_path / "report.md").read_text()) == (
        0,
        "## Page 1\n\nfirst page\n\n## Page 2\n\n",
    )
    assert re.search(r"2 pages in [\d.]+ s from the text layer -> ", ran.stderr)


@pytest.mark.parametrize(
    ("content", "arguments", "problem"),
    [
        (pdfs.document(["", ""]), (), "report.pdf has no text layer: --model names a model"),
        (pdfs.document(["one"]), ("--pages", "2"), "page 2 does not exist: the document has 1"),
        (b"%PDF-1.7", (), "report.pdf: the bytes are not a readable PDF"),
        (b"\x00", (), "report.pdf: the bytes are not a document of a supported format"),
        (b"<html></html>", (), "report.pdf has no text\n"),
    ],
)
def test_unreadable_document_is_an_error(
    run: Run, report: Path, content: bytes, arguments: tuple[str, ...], problem: str
) -> None:
    report.write_bytes(content)
    ran = run(report, *arguments)
    assert (ran.exit_code, ran.stdout) == (1, "")
    assert problem in ran.stderr


def test_docx_file_is_written_with_its_headings(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.docx"
    file.write_bytes(offices.word())
    ran = run(file)
    assert (ran.exit_code, ran.stdout.startswith("# Annual report\n\n# Sales\n")) == (0, True)
    ran = run(file, "--output", tmp_path / "report.md")
    assert (tmp_path / "report.md").read_text().endswith("## Costs\n\nCosts fell.\n\n")
    assert re.search(r"1 page in [\d.]+ s from the file -> ", ran.stderr)


def test_options_of_models_need_a_model(run: Run, report: Path) -> None:
    for options in (("--text-layer", "never"), ("--dpi", "200")):
        ran = run(report, *options)
        assert (ran.exit_code, "add --model" in ran.stderr) == (2, True)
    ran = run(report, "--model", "org/reader")
    assert (ran.exit_code, "127.0.0.1:1" in ran.stderr) == (1, True)


def test_missing_reader_names_the_package_to_install(
    report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = _run(monkeypatch, "127.0.0.1:1", [])(report)
    assert (
        ran.exit_code,
        "pip install 'shoal-mesh[worker,documents]', or name a model of a mesh with --model"
        in ran.stderr,
    ) == (1, True)
    unloadable = EntryPoint("text_layer", "tests.documents.no_such_module:read", pages.GROUP)
    ran = _run(monkeypatch, "127.0.0.1:1", [unloadable])(report)
    assert (ran.exit_code, "documents cannot be read here: No module named" in ran.stderr) == (
        1,
        True,
    )
    monkeypatch.setattr("libs.documents.reader.find_spec", lambda name: None)
    ran = _run(monkeypatch, "127.0.0.1:1", [READER])(report)
    assert (ran.exit_code, "pypdfium2 is missing. Install shoal-mesh[worker]" in ran.stderr) == (
        1,
        True,
    )
