"""Started processes are ended, and failures keep their own words: with fake programs that only log
their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from tests.cluster import envtest, kind
from tests.cluster.api_server import ApiServer, Refused, kubectl
from tests.cluster.plan import Found, Way, steps
from tests.cluster.progress import MAX_FAILURE_CHARACTERS, Progress


@dataclass
class FakePrograms:
    """Shell scripts in `folder` that log their arguments to `calls` and run a given body."""

    folder: Path

    def make(self, name: str, script: str = "exit 0") -> str:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.folder}/calls\n{script}\n')
        path.chmod(0o755)
        return str(path)

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def programs(tmp_path: Path) -> FakePrograms:
    return FakePrograms(tmp_path)


def progress(found: Found, way: Way) -> Progress:
    return Progress(Console(quiet=True), len(steps(found, (), [way])))


@pytest.mark.parametrize("keep", [False, True])
def test_cluster_of_kind_is_deleted_whatever_failed_unless_it_is_kept(
    programs: FakePrograms, tmp_path: Path, keep: bool
) -> None:
    docker = programs.make("docker", "echo 'no space left on device' >&2; exit 1")
    found = Found(kubectl=programs.make("kubectl"), docker=docker, kind=programs.make("kind"))
    said = progress(found, "kind")
    assert not kind.check(found, steps(found, (), ["kind"]), tmp_path, said, keep=keep)
    assert [(one.name, one.ok) for one in said.done] == [("create", True), ("images", False)] + [
        ("delete", True)
    ] * (not keep)
    assert "no space left on device" in said.done[1].said
    made = [call.split()[:5] for call in programs.calls if call.startswith("kind")]
    assert made == [
        ["kind", verb, "cluster", "--name", kind.NAME]
        for verb in ("create", "delete")[: 1 if keep else 2]
    ]


def test_server_that_ends_says_why_and_takes_the_others_with_it(
    programs: FakePrograms, tmp_path: Path
) -> None:
    etcd = programs.make("etcd", "exec sleep 600")
    api_server = programs.make("kube-apiserver", "echo 'unknown flag: --endpoint' >&2; exit 1")
    server = ApiServer(Found(etcd=etcd, api_server=api_server), tmp_path / "server")
    with (
        pytest.raises(
            Refused, match="kube-apiserver ended with status 1: unknown flag: --endpoint"
        ),
        server,
    ):
        pass
    assert [process.poll() is not None for process in server.processes.values()] == [True, True]
    private = [
        path.name
        for path in (tmp_path / "server").iterdir()
        if path.is_file() and path.stat().st_mode & 0o077 == 0
    ]
    assert {"tokens.csv", "kubeconfig", "accounts.key"} <= set(private)


def test_without_a_server_no_overlay_is_tried(programs: FakePrograms, tmp_path: Path) -> None:
    found = Found(
        kubectl="kubectl",
        etcd=programs.make("etcd", "exit 3"),
        api_server=programs.make("kube-apiserver", "exec sleep 600"),
    )
    said = progress(found, "envtest")
    assert not envtest.check(found, steps(found, ("a",), ["envtest"]), tmp_path, said)
    assert [(one.name, one.ok) for one in said.done] == [("start", False)]
    assert said.done[0].said.startswith("Refused: etcd ended with status 3")
    assert len(said.done[0].said) <= MAX_FAILURE_CHARACTERS


def test_error_of_kubectl_is_raised(programs: FakePrograms) -> None:
    program = programs.make(
        "kubectl", "cat > /dev/null; echo 'strict decoding error: unknown field' >&2; exit 1"
    )
    with pytest.raises(Refused, match="kubectl apply: strict decoding error: unknown field"):
        kubectl(program, None, "apply", documents="{}")


def test_error_of_apply_is_raised_rather_than_that_of_the_removal(
    programs: FakePrograms, tmp_path: Path
) -> None:
    says = (
        'case "$*" in *apply*) echo "no matches for kind PodDisruptionBudget";; *) echo "not to '
        'be deleted";; esac >&2; exit 1'
    )
    server = ApiServer(
        Found(kubectl=programs.make("kubectl", f"cat > /dev/null; {says}")), tmp_path
    )
    with (
        pytest.raises(Refused, match="no matches for kind PodDisruptionBudget"),
        envtest.applied(server, [{"kind": "Namespace"}]),
    ):
        pass
    assert [" apply " in f" {call} " for call in programs.calls] == [True, False]
