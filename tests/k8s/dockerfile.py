"""docker/Dockerfile as far as tests need it: what each image holds, and how it is started."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from tests.k8s.manifests import ROOT

FILE: Final = ROOT / "docker/Dockerfile"
TARGETS: Final = ("edge", "router", "scheduler", "worker-cpu", "worker-cuda")
Instruction = tuple[str, str]


@dataclass
class Stage:
    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [value for word, value in self.instructions if word == keyword]


@cache
def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    text = re.sub(r"^\s*#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, value = line.partition(" ")
        if word == "FROM":
            base, name = re.split(r"\s+AS\s+", value)
            found[name] = Stage(name, base)
        elif found:
            found[name].instructions.append((word, re.sub(r"\s+", " ", value)))
    return found


def lineage(target: str) -> list[Stage]:
    """Return the stages that the target is built upon, the first one first, and the target."""
    stage = stages()[target]
    return [*(lineage(stage.base) if stage.base in stages() else []), stage]


def last(target: str, keyword: str) -> str:
    return [value for stage in lineage(target) for value in stage.all(keyword)][-1]


def entrypoint(target: str) -> list[str]:
    command: list[str] = json.loads(last(target, "ENTRYPOINT"))
    return command


def variables(target: str) -> dict[str, str]:
    pairs = [value for stage in lineage(target) for value in stage.all("ENV")]
    return dict(pair.split("=", 1) for line in pairs for pair in line.split(" "))


def unpack(target: str, folder: Path) -> None:
    """Copy the project's files of the image below `folder`. Packages are those of the environment
    that the tests run in.
    """
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for source, copied in copies(target):
        if not source.startswith("/app/"):
            continue
        name = source.removeprefix("/app/")
        here, there = (
            ROOT / ("docker/healthcheck.py" if name == "healthcheck.py" else name),
            folder / copied[1:],
        )
        there.parent.mkdir(parents=True, exist_ok=True)
        if here.is_dir():
            shutil.copytree(here, there, ignore=ignored)
        else:
            shutil.copy(here, there)


def copies(target: str) -> list[tuple[str, str]]:
    """Return source and destination of each path that a target copies out of other stages."""
    found = [value for stage in lineage(target) for value in stage.all("COPY")]
    return [(source, there) for _, source, there in (value.split(" ") for value in found)]
