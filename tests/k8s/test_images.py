"""The images by their Dockerfile: hadolint's rules and our own. Building them needs a registry,
which is not here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.k8s.dockerfile import (
    FILE,
    TARGETS,
    copies,
    entrypoint,
    last,
    lineage,
    stages,
    unpack,
    variables,
)
from tests.k8s.manifests import ROOT, containers, rendered, workloads


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", FILE],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_image_runs_unprivileged_and_starts_one_process(target: str) -> None:
    assert last(target, "USER") == "65532:65532"
    assert entrypoint(target) == ["python", "-m", f"services.{target.partition('-')[0]}"]
    assert not any(stage.all("CMD") for stage in lineage(target))
    assert variables(target)["HOME"] == "/tmp"
    assert variables(target)["PYTHONDONTWRITEBYTECODE"] == "1"
    assert "healthcheck.py" in last(target, "HEALTHCHECK")


@pytest.mark.parametrize("target", TARGETS)
def test_installed_packages_are_locked_by_hash(target: str) -> None:
    packages = {name: f"{name}-packages" for name in ("edge", "router", "scheduler")}.get(
        target, f"{target}-packages"
    )
    assert ("/venv", "/venv") in copies(target)
    runs = [run for stage in lineage(packages) for run in stage.all("RUN") if "pip install" in run]
    role = target.partition("-")[0]
    assert runs[0] == f"pip install --no-deps --require-hashes -r /locks/{role}.txt"
    assert (ROOT / f"locks/{role}.txt").is_file()
    # torch: the hash is its index'.
    assert all("'^torch==' /locks/constraints.txt" in run for run in runs[1:])
    assert len(runs) == (1 if role in ("edge", "router", "scheduler") else 2)
    assert variables(packages)["PIP_ONLY_BINARY"] == ":all:"


@pytest.mark.parametrize("target", TARGETS)
def test_only_the_image_for_triton_has_a_compiler_and_none_has_pip(target: str) -> None:
    runs = " ".join(run for stage in lineage(target) for run in stage.all("RUN"))
    assert ("gcc" in runs) == (target == "worker-cuda")
    assert "rm -rf /usr/local/bin/pip* /usr/local/lib/python3.11/site-packages" in runs


def test_base_images_are_arguments_to_be_pinned() -> None:
    bases = {stage.base for stage in stages().values()} - set(stages())
    assert bases == {"${PYTHON_IMAGE}"}
    (default,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", FILE.read_text(), re.MULTILINE)
    # The locks are of CPython 3.11 and the glibc of Debian 12.
    assert re.fullmatch(
        r"docker\.io/library/python:3\.11[\d.]*-slim-bookworm(@sha256:[0-9a-f]{64})?", default
    )


def test_build_context_has_little_more_than_the_copied_files() -> None:
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    values = [
        value for stage in stages().values() for value in stage.all("COPY") if "--from" not in value
    ]
    copied = {source for value in values for source in value.split()[:-1]}
    for source in copied:
        assert (ROOT / source).exists()
        assert any(source == one or source.startswith(f"{one}/") for one in allowed), source
    assert [
        one
        for one in allowed
        if not any(source == one or source.startswith(f"{one}/") for source in copied)
    ] == []


@pytest.mark.parametrize("target", TARGETS)
def test_image_has_the_code_of_its_service_alone(target: str, tmp_path: Path) -> None:
    unpack(target, tmp_path)
    services = {path.name for path in (tmp_path / "app/services").iterdir()}
    assert services == {"__init__.py", target.partition("-")[0]}


def test_ports_are_those_of_the_pods() -> None:
    objects = [*rendered("base"), *rendered("components/gpu-l4"), *rendered("components/edge")]
    reported = {}
    for workload in workloads(objects):
        for container in containers(workload):
            reported[container["image"].partition(":")[0]] = {
                str(port["containerPort"]) for port in container["ports"]
            }
    for target in TARGETS:
        assert set(last(target, "EXPOSE").split()) == reported[f"shoal-{target}"]
