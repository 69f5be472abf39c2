"""`python -m tools.supply.release [TAG]`: check that all versions in the repository, and TAG
(v0.1.0), are equal.

A release has one commit and one version: wheels, images, the chart, and the image tags in k8s/.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from tools.distributions import ROOT

_IMAGE = re.compile(r"\bimage: shoal-[a-z-]+:(\S+)")
_PLACES = (
    ("pyproject.toml", re.compile(r'^version = "([^"]+)"$', re.MULTILINE)),
    ("pyproject.toml", re.compile(r'"shoal==([^"]+)"')),
    ("libs/api/shoal/version.py", re.compile(r'^VERSION = "([^"]+)"$', re.MULTILINE)),
)
_INTEGRATION = (
    re.compile(r'^version = "([^"]+)"$', re.MULTILINE),
    re.compile(r'"shoal>=([^",]+),'),
)
_CHART = ("version", "appVersion")


def versions(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield the places of our version, with its value. Raises ValueError if a file has none."""
    places = [*_PLACES]
    for file in sorted((root / "integrations").glob("*/pyproject.toml")):
        places += [(str(file.relative_to(root)), pattern) for pattern in _INTEGRATION]
    for name, pattern in places:
        if (found := pattern.search((root / name).read_text())) is None:
            raise ValueError(f"{name} has no version")
        yield name, found[1]
    chart = root / "charts/shoal/Chart.yaml"
    if chart.exists():
        document = yaml.safe_load(chart.read_text())
        yield from ((f"charts/shoal/Chart.yaml, {key}", str(document[key])) for key in _CHART)
    for file in sorted((root / "k8s").rglob("*.yaml")):
        yield from ((str(file.relative_to(root)), tag) for tag in _IMAGE.findall(file.read_text()))


def wrong(tag: str, root: Path = ROOT) -> list[str]:
    """Return the versions that differ from the tag, or from the first version if it is empty."""
    found = list(versions(root))
    wanted = tag.removeprefix("v") if tag else found[0][1]
    said = [] if not tag or tag.startswith("v") else [f"the tag {tag} is not v<version>"]
    return said + [
        f"{where}: {version}, not {wanted}" for where, version in found if version != wanted
    ]


def main() -> int:
    tag = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        said = wrong(tag)
    except ValueError as error:
        said = [str(error)]
    for line in said:
        print(line, file=sys.stderr)
    if not said:
        print(f"{len(list(versions()))} places say {next(versions())[1]}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
