"""`python -m tools.supply.pins`: check that constraints.txt pins exactly our dependencies.

Every dependency must be installed at its pinned version, every pin must be needed, and every
dependency in a pyproject.toml must have a pin. Other installed packages, such as a debugger, are
ignored.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.distributions import (
    OURS,
    ROOT,
    SupplyError,
    closure,
    installed_distributions,
    pinned_version,
    read_pins,
)

# Reference implementations for parity tests, with their imports. They require older versions of
# shared dependencies, but run with ours and without NOT_NEEDED.
REFERENCES = ("gliner", "gliclass", "gliner2", "glirel", "loguru", "seqeval")
NOT_NEEDED = frozenset({"datasets"})
INSTALLERS = ("pip", "setuptools")
# A CUDA build of torch installs its libraries at the versions that it requires.
BROUGHT_BY_TORCH = ("nvidia-", "cuda-")
PROJECTS = (ROOT / "pyproject.toml", ROOT / "libs/api/pyproject.toml")


def check(
    pins: Mapping[str, Requirement], installed: Mapping[str, Distribution], named: Mapping[str, str]
) -> Iterator[str]:
    """Yield the faults, one line each.

    Args:
        pins: The pins of constraints.txt.
        installed: The installed distributions.
        named: The files that declare dependencies. All three are by canonical name.
    """
    needed = closure(("shoal", "shoal-mesh[dev]", *REFERENCES, *INSTALLERS), installed)
    for name, one in sorted(needed.installed.items()):
        if name in OURS or name.startswith(BROUGHT_BY_TORCH):
            continue
        # A local version (2.13.0+cpu) is a build of the pinned one.
        version = one.version.partition("+")[0]
        if name not in pins:
            yield f"{name} {version} is needed and not pinned: add it to constraints.txt"
        elif version != pinned_version(pins[name]):
            yield (
                f"{name} {version} is installed, constraints.txt has {pinned_version(pins[name])}: "
                "make clean, then make test"
            )
    for name, asker in sorted(needed.missing.items()):
        if name not in NOT_NEEDED and not name.startswith(BROUGHT_BY_TORCH):
            yield f"{name} is needed by {asker} and not installed: pin it in constraints.txt"
    for name, pin in sorted(pins.items()):
        if name not in needed.installed and (pin.marker is None or pin.marker.evaluate()):
            yield f"{pin} is pinned and nothing needs it: remove it from constraints.txt"
    for name, file in sorted(named.items()):
        if name not in pins:
            yield f"{name} of {file} has no pin in constraints.txt"


def named_dependencies(projects: Iterable[Path] = PROJECTS) -> dict[str, str]:
    """Return the files of all declared dependencies, extras included, by canonical name."""
    named: dict[str, str] = {}
    for file in projects:
        project = tomllib.loads(file.read_text())["project"]
        lines = [
            *project.get("dependencies", ()),
            *(
                line
                for extra in project.get("optional-dependencies", {}).values()
                for line in extra
            ),
        ]
        named |= {
            canonicalize_name(Requirement(line).name): str(file.relative_to(ROOT)) for line in lines
        }
    return {name: file for name, file in named.items() if name not in OURS}


def main() -> int:
    try:
        pins = read_pins()
        wrong = list(check(pins, installed_distributions(), named_dependencies()))
    except SupplyError as error:
        wrong = [str(error)]
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        print(f"{len(pins)} pins match the installed dependencies")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
