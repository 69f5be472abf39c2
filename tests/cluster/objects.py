"""Objects for an API server, how they are applied, and whether their pods would be admitted."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tests.cluster.api_server import ApiServer, Refused
from tests.k8s.manifests import NAMESPACE, Object, build, rendered, template, workloads
from tests.support.waiting import wait_until

MANAGER: Final = "cluster-check"
Apply = Callable[..., str]
"""kubectl with some cluster: arguments, and `documents` for its standard input."""
POOLS: Final = {
    "pools": {
        "cpu": {
            "device": "cpu",
            "max_workers": 2,
            "cold_start_seconds": 10,
            "keep_warm_seconds": 5,
            "drain_seconds": 1,
        },
    }
}
COOLDOWN_SECONDS: Final = 15


def overlay(name: str) -> tuple[Object, ...]:
    return rendered(f"overlays/{name}")


def scaled_overlay(folder: Path) -> tuple[Object, ...]:
    """Return kind-cpu with KEDA's ScaledObject, of at most two workers that end after 20 s without
    requests.
    """
    numbers = {"cooldownPeriod": COOLDOWN_SECONDS, "initialCooldownPeriod": 0, "maxReplicaCount": 2}
    changes = [
        {"op": "replace", "path": f"/spec/{key}", "value": value} for key, value in numbers.items()
    ]
    return build(
        folder,
        namespace=NAMESPACE,
        resources=["overlays/kind-cpu"],
        components=["components/keda"],
        configMapGenerator=[
            {"name": "pools", "behavior": "merge", "literals": [f"pools.yaml={json.dumps(POOLS)}"]}
        ],
        generatorOptions={"disableNameSuffixHash": True},
        patches=[{"target": {"kind": "ScaledObject"}, "patch": json.dumps(changes)}],
    )


def chart(helm: str, folder: str, values: str) -> list[Object]:
    """Render the chart with the file `values`/<name>.yaml. Raises Refused with helm's error."""
    command = [
        helm,
        "template",
        "shoal",
        folder,
        "--namespace",
        NAMESPACE,
        "--values",
        f"{folder}/values/{values}.yaml",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Refused(f"{' '.join(command)}: {done.stderr.strip()}")
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def apply(kubectl: Apply, objects: Sequence[Object]) -> int:
    """All of them, by server-side apply with strict validation; returns how many. A warning of the
    server's is an error.
    """
    options = [
        "--server-side",
        "--validate=strict",
        "--warnings-as-errors",
        f"--field-manager={MANAGER}",
    ]
    reported = kubectl(
        "apply",
        *options,
        "--namespace",
        NAMESPACE,
        "--filename",
        "-",
        documents=yaml.safe_dump_all(objects),
    )
    return len(reported.splitlines())


def remove(kubectl: Apply, objects: Sequence[Object]) -> None:
    """All but namespaces: those wait for a controller that is not there."""
    gone = [one for one in objects if one["kind"] != "Namespace"]
    options = ["--ignore-not-found", "--wait", "--timeout=60s", "--namespace", NAMESPACE]
    kubectl("delete", *options, "--filename", "-", documents=yaml.safe_dump_all(gone))


def define(server: ApiServer, definitions: Sequence[Object]) -> None:
    """Returns once the API server serves them all."""
    apply(server.kubectl, definitions)
    names = [one["metadata"]["name"] for one in definitions]
    server.kubectl(
        "wait", "--for=condition=Established", "--timeout=60s", *(f"crd/{name}" for name in names)
    )

    def known() -> bool:
        kinds = {
            line.split()[-1]
            for line in server.kubectl(
                "api-resources", "--no-headers", "--cached=false"
            ).splitlines()
        }
        return {one["spec"]["names"]["kind"] for one in definitions} <= kinds

    wait_until(known, 60, "the API server to serve all definitions")


def admit(server: ApiServer, objects: Sequence[Object]) -> int:
    """Has the API server admit a pod of each workload, as its namespace's pod security and its
    priority classes say, and make none. Returns how many. Raises Refused."""
    made = workloads(objects)
    for workload in made:
        server.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", pod_of(workload))
    return len(made)


def pod_of(workload: Object) -> dict[str, Any]:
    """Return the pod that a controller would request; a StatefulSet's also has its claims."""
    made = template(workload)
    spec = dict(made["spec"])
    claims = [
        claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())
    ]
    name = f"{workload['metadata']['name']}-0"
    volumes = [
        {"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{name}"}}
        for claim in claims
    ]
    spec["volumes"] = [*spec.get("volumes", ()), *volumes]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": made["metadata"]["labels"]},
        "spec": spec,
    }
