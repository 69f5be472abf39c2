"""`python -m tools.supply.pins`: constraints.txt is what we need, no more and no less.

Everything that we need is installed and pinned at its version, every pin is needed by something,
and every dependency that a pyproject.toml names has a pin. What else is installed, such as
somebody's debugger, is theirs.
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
    read_pins,
    version_of,
)

# Packages whose models are held against ours, with what they import; they ask for older versions of
# what they share with us, and run with ours, without some that they never use here.
REFERENCES = ("gliner", "gliclass", "gliner2", "glirel", "loguru", "seqeval")
NOT_NEEDED = frozenset({"datasets"})
INSTALLERS = ("pip", "setuptools")
# A CUDA build of torch brings its libraries in the versions that it asks for.
BROUGHT_BY_TORCH = ("nvidia-", "cuda-")
PROJECTS = (ROOT / "pyproject.toml", ROOT / "libs/api/pyproject.toml")


def check(
    pins: Mapping[str, Requirement], installed: Mapping[str, Distribution], named: Mapping[str, str]
) -> Iterator[str]:
    """What is wrong, a line each. `named`: the file that names a dependency, by the dependency's
    canonical name.
    """
    needed = closure(("shoal", "shoal-mesh[dev]", *REFERENCES, *INSTALLERS), installed)
    for name, one in sorted(needed.installed.items()):
        if name in OURS or name.startswith(BROUGHT_BY_TORCH):
            continue
        # A local version (2.13.0+cpu) is a build of the pinned one.
        version = one.version.partition("+")[0]
        if name not in pins:
            yield f"{name} {version} is needed and not pinned: add it to constraints.txt"
        elif version != version_of(pins[name]):
            yield (
                f"{name} {version} is installed, constraints.txt has {version_of(pins[name])}: "
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
    """Those of all extras, by canonical name; not our own."""
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
        print(f"{len(pins)} pins are what is needed and installed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
