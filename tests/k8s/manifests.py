"""The output of `kubectl kustomize` for k8s/, and the references between its objects."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
K8S: Final = ROOT / "k8s"
NAMESPACE: Final = "shoal"
FETCHED: Final = ROOT / ".cache/kubectl"
"""The folder into which `make k8s-tools` puts kubectl."""
OVERLAYS: Final = tuple(sorted(path.name for path in (K8S / "overlays").iterdir()))
COMPONENTS: Final = tuple(sorted(path.name for path in (K8S / "components").iterdir()))
TOGETHER: Final[Mapping[str, tuple[str, ...]]] = {
    "keda-tls": ("keda", "tls"),
    "load-balancer": ("network-policy", "tls"),
    "gateway": ("tls", "tokens"),
    "tokens": ("tls",),
    "edge-tls": ("tls", "tokens", "edge"),
    "edge-ingress": ("edge",),
    "edge-gateway": ("tls", "tokens", "edge", "edge-tls"),
    "edge-pod-monitor": ("pod-monitor", "edge"),
    "edge-network-policy": ("network-policy", "edge"),
    "edge-otel": ("otel", "edge"),
    "edge-batches-claim": ("edge",),
    "edge-batches-bucket": ("network-policy", "edge", "edge-network-policy"),
    "edge-jobs": ("network-policy", "edge", "edge-network-policy", "edge-batches-bucket"),
    "jwks": ("tls",),
    "redis-sentinel": ("tls",),
    "redis-cluster": ("tls",),
}
"""Components that need others listed before them."""
EVERY: Final = (
    "base",
    *(f"overlays/{name}" for name in OVERLAYS),
    *(f"components/{name}" for name in COMPONENTS),
)
"""All renderings: the base, the overlays, and the base with each component."""
CLUSTER_WIDE: Final = frozenset({"Namespace", "PersistentVolume", "PriorityClass", "StorageClass"})

Object = dict[str, Any]


def rendered(name: str) -> tuple[Object, ...]:
    """One of EVERY."""
    kind, _, which = name.partition("/")
    if kind == "components":
        return with_components(*TOGETHER.get(which, ()), which)
    return _built(K8S / name)


@cache
def with_components(*names: str) -> tuple[Object, ...]:
    """The base with these, in this order."""
    with tempfile.TemporaryDirectory() as directory:
        return build(
            Path(directory), resources=["base"], components=[f"components/{name}" for name in names]
        )


def build(folder: Path, *, resources: Sequence[str], **more: Any) -> tuple[Object, ...]:
    """A kustomization that is written into `folder`. `resources` and `components` are folders of
    k8s/, or of `folder` itself.
    """
    below = {
        key: [_from(folder, name) for name in names]
        for key, names in {"resources": resources, **_lists(more)}.items()
    }
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **more,
        **below,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
    return _built(folder)


def _lists(more: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    return {"components": more["components"]} if "components" in more else {}


def _from(folder: Path, name: str) -> str:
    return name if (folder / name).exists() else os.path.relpath(K8S / name, folder.resolve())


@cache
def _built(folder: Path) -> tuple[Object, ...]:
    kubectl = shutil.which(
        "kubectl", path=os.pathsep.join([str(FETCHED), os.environ.get("PATH", "")])
    )
    assert kubectl is not None, "kubectl is missing, so k8s/ cannot be tested: make k8s-tools"
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "kustomize warns"
    return tuple(
        yaml.load_all(done.stdout, yaml.CSafeLoader)
    )  # the pure Python loader takes most of the tests' time


def objects_of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def named(objects: Sequence[Object], kind: str, name: str) -> Object:
    (found,) = (one for one in objects_of_kind(objects, kind) if one["metadata"]["name"] == name)
    return found


def title(one: Object) -> str:
    return f"{one['kind']} {one['metadata']['name']}"


def workloads(objects: Sequence[Object]) -> list[Object]:
    """Return the objects that make pods."""
    found = [one for one in objects if "template" in one.get("spec", {})]
    assert found
    return found


def template(workload: Object) -> Object:
    pod: Object = workload["spec"]["template"]
    return pod


def containers(workload: Object) -> list[Object]:
    spec = template(workload)["spec"]
    return [*spec["containers"], *spec.get("initContainers", ())]


def component(one: Object) -> str:
    """Return a workload's component: router, scheduler, worker or redis."""
    labels = template(one)["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "shoal"
    found: str = labels["app.kubernetes.io/component"]
    return found


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """A label selector with matchLabels and In."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def selected(objects: Sequence[Object], selector: Mapping[str, Any]) -> list[Object]:
    """Return the workloads with pods that the selector matches."""
    return [
        one for one in workloads(objects) if matches(selector, template(one)["metadata"]["labels"])
    ]


def port_number(workload: Object, port: int | str) -> int:
    """Return a port's number, given by name or number. AssertionError if no container has it."""
    for container in containers(workload):
        for one in container.get("ports", ()):
            if port in (one["name"], one["containerPort"]):
                number: int = one["containerPort"]
                return number
    raise AssertionError(f"{title(workload)} has no port {port}")


def environment(objects: Sequence[Object], container: Object) -> dict[str, Any]:
    """Return variables as a pod receives them: texts, or only the `valueFrom` where the value is
    known in a cluster only.
    """
    found: dict[str, Any] = {}
    for source in container.get("envFrom", ()):
        found |= named(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    for one in container.get("env", ()):
        # An API server leaves out a value that is empty.
        found[one["name"]] = one["valueFrom"] if "valueFrom" in one else one.get("value", "")
    return found


def mounted(workload: Object) -> Iterator[tuple[str, Object]]:
    """Paths, and the volumes that are mounted there."""
    spec = template(workload)["spec"]
    volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
    volumes |= {
        claim["metadata"]["name"]: {"claimTemplate": claim}
        for claim in workload["spec"].get("volumeClaimTemplates", ())
    }
    for container in containers(workload):
        for mount in container.get("volumeMounts", ()):
            assert "subPath" not in mount, "a file of its own is never updated"
            yield mount["mountPath"], volumes[mount["name"]]
