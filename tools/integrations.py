"""`python -m tools.integrations [--check]`: generate the tables of docs/integrations.md from the
distributions in integrations/.

The table `tool.shoal` of each pyproject.toml lists the forms of each class, each with the test that
proves it. integrations/results.json has the tests that passed in the last `make integrations`. A
proof that did not pass is an error (`make test`, tests/integrations).
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.distributions import ROOT, read_pins

FOLDER: Final = ROOT / "integrations"
RESULTS: Final = FOLDER / "results.json"
PAGE: Final = ROOT / "docs/integrations.md"
FORMS: Final = ("dense", "sparse", "multi_vector", "split", "rerank", "extract")
NO: Final = "no"
_TABLES: Final = re.compile(r"(<!-- tables -->\n).*?(<!-- /tables -->)", re.DOTALL)


@dataclass(frozen=True)
class Integration:
    """A distribution below integrations/."""

    path: Path

    @property
    def folder(self) -> str:
        return self.path.name

    @property
    def requirements(self) -> Path:
        return self.path / "requirements.txt"

    @cached_property
    def project(self) -> Mapping[str, Any]:
        return tomllib.loads((self.path / "pyproject.toml").read_text())

    @property
    def name(self) -> str:
        return str(self.project["project"]["name"])

    @property
    def framework(self) -> str:
        return str(self.project["tool"]["shoal"]["framework"])

    @property
    def classes(self) -> Mapping[str, Mapping[str, str]]:
        """Forms (of FORMS) of each class, with their tests: `file::test` or `file::Class::test`."""
        found: Mapping[str, Mapping[str, str]] = self.project["tool"]["shoal"].get("classes", {})
        return found

    @property
    def also(self) -> Mapping[str, str]:
        """Further claims ("async", "serialisation") with the tests that prove them."""
        found: Mapping[str, str] = self.project["tool"]["shoal"].get("also", {})
        return found

    @property
    def missing(self) -> Mapping[str, str]:
        """Reasons why forms or claims are missing, by name."""
        found: Mapping[str, str] = self.project["tool"]["shoal"].get("missing", {})
        return found

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its tests."""
        return dict(self.project["tool"]["shoal"].get("environment", {}))

    @property
    def needs(self) -> list[Requirement]:
        """Its requirements, with all extras."""
        project = self.project["project"]
        extras = [
            line for lines in project.get("optional-dependencies", {}).values() for line in lines
        ]
        return [Requirement(line) for line in [*project["dependencies"], *extras]]

    def tested_with(self) -> dict[str, str]:
        """Return the pinned versions of its requirements, by name."""
        pins = read_pins(self.requirements)
        names = [canonicalize_name(need.name) for need in self.needs if need.name != "shoal"]
        return {name: str(pins[name].specifier).removeprefix("==") for name in names}

    def proofs(self) -> Iterator[str]:
        for forms in self.classes.values():
            yield from forms.values()
        yield from self.also.values()


def integrations(folder: Path = FOLDER) -> list[Integration]:
    return [Integration(path.parent) for path in sorted(folder.glob("*/pyproject.toml"))]


def results() -> dict[str, Any]:
    """Read results.json: by folder, the date (`seen`), the pins and the tests that passed."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def faults(one: Integration, result: Mapping[str, Any] | None) -> list[str]:
    """Return the claims that no passed test proves."""
    if result is None:
        return [f"{one.name}: its tests have not passed: run make integrations ARGS={one.folder}"]
    old = (
        []
        if result["pins"] == one.tested_with()
        else [f"{one.name}: its tests passed with versions other than the pinned ones"]
    )
    return old + [
        f"{one.name}: {proof} has not passed"
        for proof in one.proofs()
        if proof not in result["passed"]
    ]


def tables(found: Mapping[str, Any]) -> str:
    lines = [
        (
            "| framework | distribution | dense | sparse | multi-vector | split | rerank | "
            "extract | async | serialisation | seen |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in integrations():
        cells = [
            ", ".join(f"`{name}`" for name, forms in one.classes.items() if form in forms) or NO
            for form in FORMS
        ]
        also = ["yes" if claim in one.also else NO for claim in ("async", "serialisation")]
        result = found.get(one.folder, {"seen": "not yet", "pins": {}, "passed": []})
        pins = ", ".join(f"{name} {version}" for name, version in result["pins"].items())
        seen = f"{result['seen']}: {pins}; {len(result['passed'])} tests"
        lines.append(f"| {' | '.join([one.framework, f'`{one.name}`', *cells, *also, seen])} |")
    lines += ["", "| distribution | claim | proven by |", "| --- | --- | --- |"]
    for one in integrations():
        claims = {
            f"`{name}`, {form.replace('_', '-')}": test
            for name, forms in one.classes.items()
            for form, test in forms.items()
        }
        for claim, test in (claims | dict(one.also)).items():
            file, _, name = test.partition("::")
            lines.append(
                f"| {one.name} | {claim} | [{name}](../integrations/{one.folder}/tests/{file}) |"
            )
    lines += ["", "| distribution | missing | reason |", "| --- | --- | --- |"]
    lines += [
        f"| {one.name} | {what.replace('_', '-')} | {why} |"
        for one in integrations()
        for what, why in one.missing.items()
    ]
    return "\n".join(lines)


def page() -> str:
    """Render the page. Raises ValueError if it does not have exactly one place for the tables."""
    text = tables(results())
    made, places = _TABLES.subn(lambda found: f"{found[1]}{text}\n{found[2]}", PAGE.read_text())
    if places != 1:
        raise ValueError(f"{PAGE} has {places} places for the tables")
    return made


def write_page() -> None:
    PAGE.write_text(page())


def main() -> int:
    said = [fault for one in integrations() for fault in faults(one, results().get(one.folder))]
    if "--check" in sys.argv[1:]:
        said += (
            []
            if page() == PAGE.read_text()
            else ["docs/integrations.md is stale: run python -m tools.integrations"]
        )
    else:
        write_page()
    for line in said:
        print(line, file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
