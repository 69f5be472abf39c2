"""Pinned and installed distributions, and the closure of a requirement, from package metadata."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
# The requirement with the runtime closure of each image and of the client.
ROLES: Mapping[str, str] = {
    "client": "shoal",
    "edge": "shoal-mesh[edge,s3,gs]",
    "router": "shoal-mesh[router]",
    "scheduler": "shoal-mesh[scheduler]",
    "worker": "shoal-mesh[worker,grammar,chunking,documents,s3,gs]",
}
OURS = frozenset({"shoal", "shoal-mesh"})


class SupplyError(Exception):
    """The dependencies are inconsistent; the message says how, and what to
    do.
    """


@dataclass(slots=True)
class Closure:
    """The closure of requirements."""

    installed: dict[str, Distribution] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def read_pins(path: Path = CONSTRAINTS) -> dict[str, Requirement]:
    """Read pins, by canonical name: lines `name==version`, with an optional marker.

    Raises SupplyError for any other line.
    """
    pins: dict[str, Requirement] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            pin = Requirement(line)
        except InvalidRequirement as error:
            raise SupplyError(f"{path}:{number}: {error}") from None
        if not re.fullmatch(r"==[^*,]+", str(pin.specifier)) or pin.extras or pin.url:
            raise SupplyError(f"{path}:{number}: {line!r} is not a pin: write name==version")
        if canonicalize_name(pin.name) in pins:
            raise SupplyError(f"{path}:{number}: {pin.name} is pinned twice")
        pins[canonicalize_name(pin.name)] = pin
    return pins


def pinned_version(pin: Requirement) -> str:
    return str(pin.specifier).removeprefix("==")


def installed_distributions(path: Iterable[Path] | None = None) -> dict[str, Distribution]:
    """Return the installed distributions, by canonical name.

    The current folder is never searched: it may contain an old egg-info.

    Args:
        path: Folders to search; default: the environment's site-packages.
    """
    folders = [*(path or {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")})]
    found: dict[str, Distribution] = {}
    for one in distributions(path=[str(folder) for folder in folders]):
        found.setdefault(canonicalize_name(one.metadata["Name"]), one)
    return found


def closure(wanted: Iterable[str], installed: Mapping[str, Distribution]) -> Closure:
    """Return all that `wanted` (such as "shoal-mesh[router]") needs on this machine, themselves
    included.
    """
    found = Closure()
    seen: set[tuple[str, str]] = set()
    ahead = [(Requirement(one), "the caller") for one in wanted]
    while ahead:
        requirement, asker = ahead.pop()
        name = canonicalize_name(requirement.name)
        fresh = {"", *requirement.extras} - {
            extra for seen_name, extra in seen if seen_name == name
        }
        seen |= {(name, extra) for extra in fresh}
        if name not in installed:
            found.missing.setdefault(name, asker)
            continue
        found.installed[name] = installed[name]
        for text in installed[name].requires or ():
            needed = Requirement(text)
            if any(
                needed.marker is None or needed.marker.evaluate({"extra": extra}) for extra in fresh
            ):
                ahead.append((needed, name))
    return found
