"""Decide from a `Found` which tools exist, which are missing, and so which steps run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Way = Literal["envtest", "kind"]
WAYS: Final[tuple[Way, ...]] = ("envtest", "kind")
HOW_TO_GET: Final = (
    "nothing can be run: `go run sigs.k8s.io/controller-runtime/tools/setup-envtest@latest use "
    "-p path 1.32.x` prints a folder for "
    "KUBEBUILDER_ASSETS; or install Docker and kind (https://kind.sigs.k8s.io)"
)
OLDEST: Final = (1, 30)
"""Kubernetes that k8s/ is for (docs/kubernetes.md)."""


@dataclass(frozen=True, slots=True)
class Found:
    """Tools of this machine: paths and versions as texts, "" for absent ones.

    Args:
        crds: files of CustomResourceDefinitions.
        keda_manifest: the manifest that installs KEDA in a cluster.
        chart: the folder of the Helm chart.
        values: names of the chart's files of values, one for each overlay.
    """

    kubectl: str = ""
    etcd: str = ""
    api_server: str = ""
    crds: tuple[str, ...] = ()
    docker: str = ""
    docker_daemon: str = ""
    kind: str = ""
    keda_manifest: str = ""
    helm: str = ""
    chart: str = ""
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a thing, where it is, what for, and how to get it."""

    name: str
    found: str
    purpose: str
    how: str


@dataclass(frozen=True, slots=True)
class Step:
    """`name` is what progress and the report call it."""

    way: Way
    name: str


def table(found: Found) -> list[Row]:
    """All that would be of use, in the order in which it is needed."""
    crds = f"{len(found.crds)} files" if found.crds else ""
    return [
        Row("kubectl", found.kubectl, "renders and applies", "make k8s-tools"),
        Row("etcd", found.etcd, "envtest", "KUBEBUILDER_ASSETS"),
        Row("kube-apiserver", found.api_server, "envtest", "KUBEBUILDER_ASSETS"),
        Row("CRDs", crds, "schemas of custom resources (envtest)", "SHOAL_CRDS=FILE:FOLDER:…"),
        Row("docker", found.docker, "kind", "https://docs.docker.com/engine/install"),
        Row("docker daemon", found.docker_daemon, "kind", "start it"),
        Row("kind", found.kind, "kind", "https://kind.sigs.k8s.io"),
        Row(
            "KEDA manifest",
            found.keda_manifest,
            "scales to zero (kind)",
            "KEDA_MANIFEST=FILE or URL of keda-2.20.2.yaml",
        ),
        Row("helm", found.helm, "renders the chart", "make k8s-tools, or https://helm.sh"),
        Row("charts/shoal", found.chart, "the chart itself", "a checkout that has it"),
    ]


def lacking(found: Found, way: Way) -> list[str]:
    """Names of what `way` cannot do without."""
    needed = {
        "envtest": {
            "kubectl": found.kubectl,
            "etcd": found.etcd,
            "kube-apiserver": found.api_server,
        },
        "kind": {
            "kubectl": found.kubectl,
            "docker": found.docker,
            "docker daemon": found.docker_daemon,
            "kind": found.kind,
        },
    }[way]
    return [name for name, where in needed.items() if not where]


def ways(found: Found, only: Way | None = None) -> list[Way]:
    """Return the possible ways, of `only` or of both."""
    return [way for way in WAYS if only in (None, way) and not lacking(found, way)]


def steps(found: Found, overlays: Sequence[str], chosen: Sequence[Way]) -> list[Step]:
    """Return the steps in order. A chart is checked only if it and a helm to render it exist."""
    charts = [f"apply chart {name}" for name in found.values] if found.helm and found.chart else []
    scaled = bool(found.keda_manifest)
    names: dict[Way, list[str]] = {
        "envtest": [
            "start",
            "definitions",
            *(f"apply {name}" for name in overlays),
            *charts,
            "scale",
        ],
        "kind": [
            "create",
            "images",
            *["keda"] * scaled,
            "apply kind-cpu",
            "request",
            *["scale"] * scaled,
            "delete",
        ],
    }
    return [Step(way, name) for way in chosen for name in names[way]]


def left_out(found: Found, chosen: Sequence[Way]) -> list[str]:
    """Return a sentence for each thing that a run of these ways does not test."""
    absent = {way: lacking(found, way) for way in WAYS if way not in chosen}
    said = [f"{way}: not run, without {', '.join(names)}" for way, names in absent.items() if names]
    if without := [
        name for name, where in (("helm", found.helm), ("charts/shoal", found.chart)) if not where
    ]:
        said.append(f"the chart: not applied, without {' and '.join(without)}")
    if "envtest" in chosen and not found.crds:
        said.append("envtest: custom resources are applied without a schema (SHOAL_CRDS)")
    if "envtest" in chosen:
        said.append("envtest: FakeKeda scales; KEDA itself does in kind")
    if "kind" in chosen and not found.keda_manifest:
        said.append("kind: nothing is scaled (KEDA_MANIFEST)")
    return said


def too_old(version: str) -> bool:
    """Return True if k8s/ does not support an API server of this version, such as "v1.32.4". An
    unknown version is supported.
    """
    parts = version.removeprefix("v").split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()) or parts[0] == "0":
        return False
    return (int(parts[0]), int(parts[1])) < OLDEST
