"""Decisions of `make cluster-check`: tools found, steps run, and steps reported or left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.cluster import definitions, found
from tests.cluster.drive import Story, scaled_object, wrong
from tests.cluster.objects import COOLDOWN_SECONDS, pod_of, scaled_overlay
from tests.cluster.plan import (
    HOW_TO_GET,
    Found,
    Way,
    lacking,
    left_out,
    steps,
    table,
    too_old,
    ways,
)
from tests.k8s.manifests import (
    EVERY,
    ROOT,
    containers,
    environment,
    named,
    objects_of_kind,
    rendered,
)
from tests.support.keda import Change

NOTHING = Found(kubectl="/bin/kubectl")
ENVTEST = replace(NOTHING, etcd="/a/etcd", api_server="/a/kube-apiserver")
KIND = replace(NOTHING, docker="/bin/docker", docker_daemon="28.2.2", kind="/bin/kind")
BOTH = replace(ENVTEST, docker="/bin/docker", docker_daemon="28.2.2", kind="/bin/kind")


@pytest.mark.parametrize(
    ("there", "only", "chosen"),
    [
        (NOTHING, None, []),
        (ENVTEST, None, ["envtest"]),
        (ENVTEST, "kind", []),
        (replace(ENVTEST, etcd=""), None, []),
        (replace(ENVTEST, kubectl=""), None, []),
        (KIND, None, ["kind"]),
        (replace(KIND, docker_daemon=""), None, []),
        (BOTH, None, ["envtest", "kind"]),
        (BOTH, "envtest", ["envtest"]),
    ],
)
def test_way_is_gone_if_all_that_it_needs_is_there(
    there: Found, only: Way | None, chosen: list[Way]
) -> None:
    assert ways(there, only) == chosen


def test_missing_tool_is_named() -> None:
    assert lacking(NOTHING, "envtest") == ["etcd", "kube-apiserver"]
    assert lacking(NOTHING, "kind") == ["docker", "docker daemon", "kind"]
    said = left_out(NOTHING, [])
    assert said[:2] == [
        "envtest: not run, without etcd, kube-apiserver",
        "kind: not run, without docker, docker daemon, kind",
    ]
    assert said[2] == "the chart: not applied, without helm and charts/shoal"
    assert all(row.how for row in table(NOTHING) if not row.found)


def test_all_that_is_left_out_of_a_run_is_said() -> None:
    whole = replace(
        BOTH, crds=("crds.yaml",), keda_manifest="keda.yaml", helm="/bin/helm", chart="charts/shoal"
    )
    assert left_out(whole, ["envtest", "kind"]) == [
        "envtest: FakeKeda scales; KEDA itself does in kind"
    ]
    assert "envtest: custom resources are applied without a schema (SHOAL_CRDS)" in left_out(
        ENVTEST, ["envtest"]
    )
    assert "kind: nothing is scaled (KEDA_MANIFEST)" in left_out(KIND, ["kind"])


def test_steps_are_ordered_and_each_overlay_is_applied() -> None:
    planned = [step.name for step in steps(ENVTEST, ("a", "b"), ["envtest"])]
    assert planned == ["start", "definitions", "apply a", "apply b", "scale"]
    with_chart = replace(ENVTEST, helm="/bin/helm", chart="charts/shoal", values=("a", "b"))
    named_steps = [step.name for step in steps(with_chart, ("a",), ["envtest"])]
    assert named_steps[2:] == ["apply a", "apply chart a", "apply chart b", "scale"]


def test_kind_is_scaled_by_keda_and_deleted_last() -> None:
    assert [step.name for step in steps(KIND, (), ["kind"])] == [
        "create",
        "images",
        "apply kind-cpu",
        "request",
        "delete",
    ]
    scaled = [step.name for step in steps(replace(KIND, keda_manifest="keda.yaml"), (), ["kind"])]
    assert scaled == ["create", "images", "keda", "apply kind-cpu", "request", "scale", "delete"]


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("v1.20.2", True),
        ("v1.29.9", True),
        ("v1.30.0", False),
        ("v1.36.1", False),
        ("v0.0.0-master+f", False),
    ],
)
def test_api_server_that_k8s_is_not_for_is_refused(version: str, old: bool) -> None:
    assert too_old(version) == old


def test_binaries_are_found_where_the_variables_say(tmp_path: Path) -> None:
    for name in ("etcd", "kube-apiserver"):
        (tmp_path / name).touch(mode=0o755)
    (tmp_path / "crds").mkdir()
    (tmp_path / "crds/keda.yaml").touch()
    there = found.find(
        {
            "PATH": str(tmp_path / "nowhere"),
            "KUBEBUILDER_ASSETS": str(tmp_path),
            "SHOAL_CRDS": f"{tmp_path}/crds",
        }
    )
    assert (there.etcd, there.api_server) == (f"{tmp_path}/etcd", f"{tmp_path}/kube-apiserver")
    assert (there.crds, there.docker, there.kind) == ((f"{tmp_path}/crds/keda.yaml",), "", "")
    with pytest.raises(FileNotFoundError, match="SHOAL_CRDS names"):
        found.find({"PATH": "", "SHOAL_CRDS": f"{tmp_path}/absent"})


def test_where_nothing_can_be_run_it_says_so_and_ends_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cluster", "--json"]
    bare = {"PATH": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'libs/api'}"}
    done = subprocess.run(
        command, env=bare, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.replace("\n", "").endswith(HOW_TO_GET[-40:])
    reported = json.loads(done.stdout)
    assert (reported["status"], reported["steps"], reported["found"]["etcd"]) == (2, [], "")


def test_stand_in_serves_our_kind_until_a_definition_replaces_it(tmp_path: Path) -> None:
    assert definitions.lacking([definitions.stand_in(kind) for kind in definitions.OURS]) == []
    file = tmp_path / "crds.yaml"
    file.write_text(
        yaml.safe_dump_all([definitions.stand_in(definitions.OURS[0]), {"kind": "Namespace"}])
    )
    assert definitions.lacking(definitions.given([str(file)])) == list(definitions.OURS[1:])
    names = {definitions.stand_in(kind)["metadata"]["name"] for kind in definitions.OURS}
    assert {
        "backendtlspolicies.gateway.networking.k8s.io",
        "gateways.gateway.networking.k8s.io",
        "scaledobjects.keda.sh",
    } <= names


def test_every_custom_resource_has_a_stand_in() -> None:
    used = {
        f"{one['apiVersion']} {one['kind']}"
        for name in EVERY
        for one in rendered(name)
        if "." in one["apiVersion"]
    }
    builtin = {
        kind
        for kind in used
        if kind.partition("/")[0].endswith(".k8s.io") and not kind.startswith("gateway.")
    }
    assert used - builtin <= set(definitions.OURS)


def test_scaled_object_is_read_as_keda_reads_it(tmp_path: Path) -> None:
    objects = scaled_overlay(tmp_path)
    (custom,) = objects_of_kind(objects, "ScaledObject")
    (container,) = containers(named(objects, "Deployment", "worker"))
    made = scaled_object(custom, environment(objects, container))
    assert (
        made.cooldown_period,
        made.initial_cooldown_period,
        made.max_replicas,
        made.min_replicas,
    ) == (COOLDOWN_SECONDS, 0, 2, 0)
    assert made.metadata["poolFromEnv"] == "cpu"
    assert made.fallback is not None
    assert made.fallback.replicas == custom["spec"]["fallback"]["replicas"]
    with pytest.raises(ValueError, match="a trigger of type cron"):
        scaled_object({"spec": {"triggers": [{"type": "cron"}]}}, {})


def test_story_is_0_1_many_0() -> None:
    up, more, down = Change(1, 0, 1, "keda"), Change(15, 1, 2, "hpa"), Change(60, 2, 0, "keda")
    assert wrong(Story((up, more, down), 1.0, 9)) == []
    assert "the first change" in wrong(Story((), 1.0, 9))[0]
    assert "never 2 workers" in wrong(Story((up, Change(60, 1, 0, "keda")), 1.0, 9))[0]
    assert "not to zero" in wrong(Story((up, more), 1.0, 9))[0]


def test_pod_of_a_stateful_set_has_its_claims() -> None:
    pod = pod_of(named(rendered("base"), "StatefulSet", "redis"))
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claims == ["data-redis-0"]
    assert "name" not in pod["metadata"]["labels"]
