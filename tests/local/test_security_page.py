"""docs/security.md names the test that holds each claim: all of them must be there."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/security.md"


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", PAGE.read_text())
    assert len(named) > 30
    missing = [
        (file, name)
        for file, name in named
        if not (ROOT / file).is_file() or (name and name not in functions(ROOT / file))
    ]
    assert missing == []


def test_every_row_of_the_boundaries_names_one() -> None:
    boundaries = (
        PAGE.read_text()
        .partition("## Trust boundaries")[2]
        .partition("## What a stolen credential can do")[0]
    )
    rows = [
        line
        for line in boundaries.splitlines()
        if line.startswith("| ") and not line.startswith(("| an attacker", "| ---"))
    ]
    assert len(rows) > 20
    assert [row for row in rows if "tests/" not in row.split("|")[3]] == []


def test_every_row_of_stolen_credentials_names_one() -> None:
    section = (
        PAGE.read_text().partition("## What a stolen credential can do")[2].partition("\n## ")[0]
    )
    rows = [
        line.split("|")
        for line in section.splitlines()
        if line.startswith("| ") and not line.startswith(("| credential", "| ---"))
    ]
    assert len(rows) > 10
    assert [row[1] for row in rows if "tests/" not in row[4]] == []


PORTS = PAGE.read_text().partition("## Limits of every port")[2].partition("\n## ")[0]
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "seconds": 1}
GUARDED = (
    "libs.serving.server",
    "libs.serving.calls.arrivals",
    "libs.serving.calls.bounds",
    "libs.serving.calls.decode",
    "libs.serving.calls.multiplex",
    "libs.serving.calls.public",
    "services.edge.ports.tei_grpc",
)
NO_LIMITS = {
    ("libs.serving.calls.arrivals", name) for name in ("ARRIVALS_POLL_SECONDS", "RECOVERY_SECONDS")
}
"""Intervals of internal work, not limits for callers."""


def limits() -> dict[tuple[str, str], float]:
    """The table's numbers, by module and constant."""
    found = {}
    for number, unit, module, name in re.findall(
        r"\| ([\d,]+) ?(\w*) \| `([\w.]+):(\w+)` \|", PORTS
    ):
        found[module, name] = float(number.replace(",", "")) * UNITS[unit]
    return found


def test_limits_of_ports_are_those_of_the_code() -> None:
    rows = [line for line in PORTS.splitlines() if line.endswith("` |")]
    assert len(rows) == len(limits()), (
        "each row has a number and a constant: | port | what | 16 KiB | `module:NAME` |"
    )
    for (module, name), number in limits().items():
        assert getattr(import_module(module), name) == number, f"{module}:{name}"


@pytest.mark.parametrize("module", GUARDED)
def test_every_limit_of_a_guarded_port_is_in_the_table(module: str) -> None:
    own = {
        name
        for node in ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()).body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not (name := node.target.id).startswith("_")
        if isinstance(getattr(import_module(module), name), int | float)
    }
    assert {(module, name) for name in own} - NO_LIMITS == {
        pair for pair in limits() if pair[0] == module
    }


def test_every_address_that_a_process_listens_on_is_in_the_table() -> None:
    texts = [
        path.read_text()
        for folder in ("libs", "services")
        for path in (ROOT / folder).rglob("*.py")
    ]
    known = {name for text in texts for name in re.findall(r"SHOAL_[A-Z_]*ADDRESS(?:ES)?\b", text)}
    assert set(re.findall(r"SHOAL_[A-Z_]*ADDRESS(?:ES)?\b", PORTS)) == known


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
