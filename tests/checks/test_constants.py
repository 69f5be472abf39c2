"""A constant of the mesh has one value: a name that stands for two numbers cannot be searched."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PUBLISHED = ("models", "kernels", "kinds", "catalog", "conversion")
"""Libraries with constants of published models and file formats, which keep the names there."""
NUMBERS = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)


def constants(text: str) -> Iterator[tuple[str, float]]:
    """Yield the module's numbers in capitals; a leading underscore does not make another name."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        if (
            isinstance(target, ast.Name)
            and target.id.isupper()
            and all(isinstance(part, NUMBERS) for part in ast.walk(value))
        ):
            number = eval(compile(ast.Expression(value), "constant", "eval"))
            if isinstance(number, int | float):
                yield target.id.lstrip("_"), number


def test_numbers_in_capitals_are_found() -> None:
    text = 'A_BYTES: Final = 1 << 20\n_A_BYTES = -2\nNAME = "a"\nB = A_BYTES\nlow = 3\n'
    assert list(constants(text)) == [("A_BYTES", 1 << 20), ("A_BYTES", -2)]


def test_constant_of_the_mesh_has_one_value() -> None:
    found: defaultdict[str, dict[float, str]] = defaultdict(dict)
    folders = [folder for folder in (ROOT / "libs").iterdir() if folder.name not in PUBLISHED]
    for file in (file for folder in (ROOT / "services", *folders) for file in modules(folder)):
        for name, number in constants(file.read_text("utf-8")):
            found[name].setdefault(number, str(file.relative_to(ROOT)))
    assert {name: values for name, values in found.items() if len(values) > 1} == {}


def modules(path: Path) -> list[Path]:
    return [path] if path.suffix == ".py" else list(path.rglob("*.py"))
