"""docs/security.md names the test that holds each claim: all of them must be there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/security.md"


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", PAGE.read_text())
    assert len(named) > 30
    missing = [(file, name) for file, name in named if not (ROOT / file).is_file() or (name and name not in functions(ROOT / file))]
    assert missing == []


def test_every_row_of_the_boundaries_names_one() -> None:
    boundaries = PAGE.read_text().partition("## Trust boundaries")[2].partition("## What is not protected")[0]
    rows = [line for line in boundaries.splitlines() if line.startswith("| ") and not line.startswith(("| somebody", "| ---"))]
    assert len(rows) > 20
    assert [row for row in rows if "tests/" not in row.split("|")[3]] == []


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
