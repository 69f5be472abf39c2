"""`python -m tests.integrations [NAME …]`: builds each distribution below integrations/, and runs
its tests against a mesh.

Each has a separate environment below .cache/integrations, because their pins collide: the pins of
its requirements.txt and nothing else, the wheel of shoal and its own wheel. Passed results are
written to integrations/results.json, from which tools/integrations.py makes the tables of
docs/integrations.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from services.local.mesh import running
from services.local.settings import MINILM, Settings, packaged_minilm
from tests.mesh.conftest import CLASSES, LABELS
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.parity.test_hybrid import write_m3
from tools.distributions import ROOT
from tools.integrations import RESULTS, Integration, integrations, write_page

ENVIRONMENTS: Final = ROOT / ".cache/integrations"
PROMPTS: Final = {"query": "find: ", "document": "passage: "}
MODELS: Final = {
    "dense": MINILM,
    "prompted": "random/prompted",
    "hybrid": "random/hybrid",
    "reranker": "random/reranker",
    "entities": "random/entities",
    "classes": "random/classes",
}
MYPY: Final = ROOT / "integrations/mypy.ini"
README_TEST: Final = ROOT / "integrations/test_readme.py"
PIP: Final = ("-m", "pip", "--disable-pip-version-check")


def write_models(root: Path) -> str:
    """Write the tests' models and return their SHOAL_MODELS: the bundled model, and small
    checkpoints with random weights.
    """
    random = root / "random"
    write_checkpoint("bert", random / "prompted", sentence=SentenceFiles(prompts=PROMPTS))
    write_checkpoint("bert", random / "reranker", head="sequence_classification")
    write_checkpoint("bert", random / "entities", head="token_classification", labels=LABELS)
    write_checkpoint("bert", random / "classes", head="sequence_classification", labels=CLASSES)
    settings = write_m3(random / "hybrid") / "config_sentence_transformers.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"prompts": PROMPTS}))
    return f"{MINILM}={packaged_minilm()}:{root}"


def build(sources: Sequence[Path], to: Path) -> list[Path]:
    """Build the wheels of these projects from copies: a folder `build` next to the sources would be
    packed, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder) / source.name for source in sources]
        for source, copy in zip(sources, copies, strict=True):
            shutil.copytree(
                source,
                copy,
                ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "tests"),
            )
        command = [
            sys.executable,
            *PIP,
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(to),
            *map(str, copies),
        ]
        subprocess.run(command, check=True)
    return sorted(to.glob("*.whl"))


def environment(one: Integration) -> Path:
    """Return the Python of its environment, which is rebuilt when its pins have changed."""
    place = ENVIRONMENTS / one.folder
    python, done = place / "bin/python", place / ".done"
    pins = one.requirements.read_text()
    if not done.exists() or done.read_text() != pins:
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run(
            [str(python), *PIP, "install", "-q", "--no-deps", "-r", str(one.requirements)],
            check=True,
        )
        done.write_text(pins)
    return python


def install(one: Integration) -> Path:
    python = environment(one)
    with tempfile.TemporaryDirectory() as folder:
        wheels = build([ROOT / "libs/api", one.path], Path(folder))
        command = [
            str(python),
            *PIP,
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--force-reinstall",
            *map(str, wheels),
        ]
        subprocess.run(command, check=True)
    subprocess.run([str(python), *PIP, "check"], check=True)
    return python


def types_are_right(one: Integration, python: Path) -> bool:
    """Return True if mypy of this environment finds no error in the distribution with its
    framework's types.
    """
    options = [
        "--config-file",
        str(MYPY),
        "--python-executable",
        str(python),
        "--cache-dir",
        str(ENVIRONMENTS / f"{one.folder}.mypy"),
    ]
    source = one.path / "src"
    command = [sys.executable, "-m", "mypy", *options, str(source)]
    return (
        subprocess.run(command, env=os.environ | {"MYPYPATH": str(source)}, check=False).returncode
        == 0
    )


def passed(report: Path) -> list[str]:
    """The tests that passed, as `file::Class::test`, parameters left out."""
    found = set()
    for case in ElementTree.parse(report).iter("testcase"):
        if not {"failure", "error", "skipped"} & {child.tag for child in case}:
            parts = case.attrib["classname"].split(".tests.")[-1].split(".")
            found.add(
                "::".join([f"{parts[0]}.py", *parts[1:], re.sub(r"\[.*", "", case.attrib["name"])])
            )
    return sorted(found)


def run_tests(
    one: Integration, python: Path, address: str, arguments: Sequence[str]
) -> tuple[int, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        variables = {
            "SHOAL_ADDRESS": address,
            "SHOAL_TEST_MODELS": json.dumps(MODELS),
            "SHOAL_INTEGRATION": one.folder,
        }
        variables |= {"HOME": folder} | one.variables
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")
        } | variables
        command = [
            str(python),
            "-m",
            "pytest",
            "-q",
            f"--junitxml={report}",
            str(one.path / "tests"),
            str(README_TEST),
            *arguments,
        ]
        ended = subprocess.run(command, cwd=ROOT / "integrations", env=variables, check=False)
        return ended.returncode, passed(report) if report.exists() else []


async def run(wanted: Sequence[Integration], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the results of each integration with passing tests and correct types, by folder."""
    pythons = {one.folder: await asyncio.to_thread(install, one) for one in wanted}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        models = await asyncio.to_thread(write_models, Path(folder))
        async with running(Settings(port=0, models=models, dtype="float32")) as mesh:
            for one in wanted:
                print(f"== {one.name}", flush=True)
                status, tests = await asyncio.to_thread(
                    run_tests, one, pythons[one.folder], mesh.address, arguments
                )
                if status == 0 and await asyncio.to_thread(
                    types_are_right, one, pythons[one.folder]
                ):
                    found[one.folder] = {
                        "seen": f"{datetime.now(UTC):%Y-%m-%d}",
                        "pins": one.tested_with(),
                        "passed": tests,
                    }
    return found


def main() -> int:
    names = [name for name in sys.argv[1:] if not name.startswith("-")]
    arguments = [argument for argument in sys.argv[1:] if argument.startswith("-")]
    wanted = [one for one in integrations() if not names or one.folder in names]
    if unknown := set(names) - {one.folder for one in wanted}:
        print(f"unknown integration {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    found = asyncio.run(run(wanted, arguments))
    if not arguments:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        for one in wanted:
            results.pop(one.folder, None)
        RESULTS.write_text(json.dumps(results | found, indent=1, sort_keys=True) + "\n")
        write_page()
    failed = [one.name for one in wanted if one.folder not in found]
    print(
        f"{len(found)} of {len(wanted)} integrations "
        f"passed{': not ' + ', '.join(failed) if failed else ''}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
