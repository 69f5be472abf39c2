"""The workflows in .github run what there is, with no more rights than they need, and a release has
one version.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from tools.distributions import ROOT
from tools.supply import release

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
README = (ROOT / "README.md").read_text()


def jobs(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text())["jobs"]
    return found


def steps(file: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(file).values():
        yield from job["steps"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that have a version, at 1.2.3."""
    (tmp_path / "libs/api/shoal").mkdir(parents=True)
    (tmp_path / "charts/shoal").mkdir(parents=True)
    (tmp_path / "k8s/base").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(
        'version = "1.2.3"\ndependencies = [\n  "shoal==1.2.3",\n]\n'
    )
    (tmp_path / "libs/api/shoal/version.py").write_text('VERSION = "1.2.3"\n')
    (tmp_path / "charts/shoal/Chart.yaml").write_text("version: 1.2.3\nappVersion: 1.2.3\n")
    (tmp_path / "k8s/base/router.yaml").write_text("        image: shoal-router:1.2.3\n")
    return tmp_path


def test_zizmor_finds_nothing() -> None:
    zizmor = Path(sys.executable).parent / "zizmor"
    command: list[str | Path] = [
        zizmor,
        "--offline",
        "--no-progress",
        "--persona",
        "pedantic",
        "--min-severity",
        "low",
    ]
    done = subprocess.run(
        [*command, ROOT / ".github"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_workflow_runs_targets_that_there_are(file: Path) -> None:
    asked = {
        target
        for step in steps(file)
        for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))
    }
    assert asked
    assert asked - TARGETS == set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_actions_are_pinned_by_commit_and_say_their_version(file: Path) -> None:
    lines = [line.strip() for line in file.read_text().splitlines() if "uses:" in line]
    assert [
        line
        for line in lines
        if not re.search(r"uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+(\.\d+)*$", line)
    ] == []


def test_action_is_of_one_commit_everywhere() -> None:
    used = {step["uses"] for file in FILES for step in steps(file) if "uses" in step}
    assert len({one.partition("@")[0] for one in used}) == len(used)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_job_has_its_own_rights_a_limit_and_no_secret(file: Path) -> None:
    assert yaml.safe_load(file.read_text())["permissions"] == {}
    for name, job in jobs(file).items():
        assert "permissions" in job, name
        assert job["timeout-minutes"] <= 90, name
    assert "secrets." not in file.read_text()


def test_only_a_release_may_write() -> None:
    for file in FILES:
        writes = {
            job: [right for right, how in one["permissions"].items() if how == "write"]
            for job, one in jobs(file).items()
        }
        if file.name != "release.yml":
            assert not any(writes.values()), file.name
    contents = [
        job
        for job, one in jobs(ROOT / ".github/workflows/release.yml").items()
        if one["permissions"].get("contents") == "write"
    ]
    assert contents == ["github"]


def test_wheels_and_tests_are_tried_on_the_pythons_of_the_readme() -> None:
    (first, last) = re.findall(r"Python (3\.\d+) to (3\.\d+);", README)[0]
    promised = [f"3.{minor}" for minor in range(int(first[2:]), int(last[2:]) + 1)]
    ci = jobs(ROOT / ".github/workflows/ci.yml")
    assert {name: ci[name]["strategy"]["matrix"]["python"] for name in ("test", "wheels")} == {
        "test": promised,
        "wheels": promised,
    }
    for project in ("pyproject.toml", "libs/api/pyproject.toml"):
        needed = SpecifierSet(
            tomllib.loads((ROOT / project).read_text())["project"]["requires-python"]
        )
        assert [version for version in ("3.10", *promised) if version in needed] == promised


def test_each_image_is_built_signed_and_attested() -> None:
    job = jobs(ROOT / ".github/workflows/release.yml")["images"]
    stages = re.findall(
        r"^FROM runtime AS (\S+)$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE
    )
    assert [one["target"] for one in job["strategy"]["matrix"]["include"]] == stages
    text = str(job["steps"])
    assert all(
        word in text
        for word in ("cosign sign --yes", "attest-build-provenance", "'sbom': True", "mode=max")
    )


def test_everything_says_one_version() -> None:
    assert release.wrong("") == []


def test_tag_is_the_version(checkout: Path) -> None:
    assert release.wrong("v1.2.3", checkout) == []
    assert release.wrong("1.2.3", checkout) == ["the tag 1.2.3 is not v<version>"]
    assert len(release.wrong("v1.2.4", checkout)) == 6


@pytest.mark.parametrize(
    "text", ['version = "1.2.2"\n"shoal>=1.2.3,<1.3"\n', 'version = "1.2.3"\n"shoal>=1.2.2,<1.3"\n']
)
def test_integration_has_the_version(checkout: Path, text: str) -> None:
    file = checkout / "integrations/langchain/pyproject.toml"
    file.parent.mkdir(parents=True)
    file.write_text('version = "1.2.3"\n"shoal>=1.2.3,<1.3"\n')
    assert release.wrong("v1.2.3", checkout) == []
    file.write_text(text)
    assert release.wrong("v1.2.3", checkout) == [
        "integrations/langchain/pyproject.toml: 1.2.2, not 1.2.3"
    ]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pyproject.toml", 'version = "1.2.3"\ndependencies = [\n  "shoal==1.2.2",\n]\n'),
        ("libs/api/shoal/version.py", 'VERSION = "1.2.2"\n'),
        ("charts/shoal/Chart.yaml", "version: 1.2.3\nappVersion: 1.2.2\n"),
        ("k8s/base/router.yaml", "        image: shoal-router:1.2.2\n"),
    ],
)
def test_forgotten_version_is_named(checkout: Path, file: str, text: str) -> None:
    (checkout / file).write_text(text)
    (said,) = release.wrong("v1.2.3", checkout)
    assert said.startswith(file)
    assert said.endswith("1.2.2, not 1.2.3")
