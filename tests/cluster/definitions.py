"""CustomResourceDefinitions for the API server: those that are given, and stand-ins for the rest,
so that overlays apply whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import yaml

from tests.k8s.manifests import ROOT, Object

OURS: Final[tuple[str, ...]] = tuple(
    json.loads((ROOT / "tests/k8s/schemas/custom.json").read_text())["kinds"]
)
"""Custom resources that k8s/ has, as "group/version Kind"."""


def given(files: Iterable[str]) -> list[Object]:
    """The definitions in these files; other objects in them are left alone."""
    documents = [one for file in files for one in yaml.safe_load_all(Path(file).read_text())]
    return [one for one in documents if one and one["kind"] == "CustomResourceDefinition"]


def served(definitions: Iterable[Object]) -> set[str]:
    """Return the served kinds as "group/version Kind"."""
    return {
        f"{one['spec']['group']}/{version['name']} {one['spec']['names']['kind']}"
        for one in definitions
        for version in one["spec"]["versions"]
        if version["served"]
    }


def lacking(definitions: Iterable[Object], kinds: Sequence[str] = OURS) -> list[str]:
    """Return the `kinds` that no definition serves."""
    there = served(definitions)
    return [kind for kind in kinds if kind not in there]


def stand_in(which: str) -> Object:
    """Return a definition for "group/version Kind" that accepts any fields: objects are stored
    without validation.
    """
    api_version, _, kind = which.partition(" ")
    group, _, version = api_version.partition("/")
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{_plural(kind)}.{group}",
            # Asked of groups that end in k8s.io.
            "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in for a check"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": _plural(kind), "singular": kind.lower()},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def _plural(kind: str) -> str:
    word = kind.lower()
    return f"{word[:-1]}ies" if word.endswith("y") and word[-2] not in "aeiou" else f"{word}s"
