"""k8s/model-folder makes what components/model-cache-hostpath mounts, with no more of the node than
that takes.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from tests.k8s.manifests import (
    ROOT,
    Object,
    component,
    containers,
    named,
    objects_of_kind,
    rendered,
    template,
    with_components,
    workloads,
)
from tests.k8s.test_renders import check


@pytest.fixture
def objects() -> tuple[Object, ...]:
    return rendered("model-folder")


@pytest.fixture
def pod(objects: tuple[Object, ...]) -> Object:
    spec: Object = template(named(objects, "DaemonSet", "model-folder"))["spec"]
    return spec


def test_objects_are_valid_and_in_a_separate_namespace(
    objects: tuple[Object, ...],
) -> None:
    for one in objects:
        check(one)
        assert one["kind"] == "Namespace" or one["metadata"]["namespace"] == "shoal-nodes"
    (namespace,) = objects_of_kind(objects, "Namespace")
    assert namespace["metadata"]["name"] == "shoal-nodes", "the mesh's own is `restricted`"


def test_it_makes_the_folder_of_the_volume_for_the_workers_user(pod: Object) -> None:
    cached = with_components("model-cache-hostpath")
    wanted = named(cached, "PersistentVolume", "shoal-models")["spec"]["hostPath"]
    (worker,) = (one for one in workloads(cached) if component(one) == "worker")
    user, group = (
        str(template(worker)["spec"]["securityContext"][key]) for key in ("runAsUser", "runAsGroup")
    )
    (make,) = pod["initContainers"]
    (mount,) = make["volumeMounts"]
    (volume,) = pod["volumes"]
    assert volume["name"] == mount["name"]
    made = PurePosixPath(wanted["path"])
    assert made.parent == PurePosixPath(volume["hostPath"]["path"])
    here = PurePosixPath(mount["mountPath"], made.name)
    assert make["command"] == ["sh", "-c", f"mkdir -p {here} && chown {user}:{group} {here}"]
    assert wanted["type"] == volume["hostPath"]["type"] == "Directory", (
        "a kubelet would make it for root"
    )


def test_it_may_change_an_owner_and_nothing_else(pod: Object) -> None:
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert pod["automountServiceAccountToken"] is False
    daemon = {"spec": {"template": {"spec": pod}}}
    for container in containers(daemon):
        context = container["securityContext"]
        assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (
            False,
            True,
        )
        assert context["capabilities"] == {"drop": ["ALL"]} | (
            {"add": ["CHOWN"]} if container["name"] == "make" else {}
        )
        assert (
            container["resources"]["requests"]["memory"]
            == container["resources"]["limits"]["memory"]
        )
        assert not container["image"].endswith(":latest")
    (wait,) = pod["containers"]
    assert wait["securityContext"]["runAsNonRoot"] is True
    assert "volumeMounts" not in wait, "what stays has nothing of the node"


def test_guide_has_it_applied_where_the_overlay_needs_it() -> None:
    assert objects_of_kind(rendered("overlays/gke-h100"), "PersistentVolume")
    assert "kubectl apply -k k8s/model-folder" in (ROOT / "docs/deploy-gcp.md").read_text()
