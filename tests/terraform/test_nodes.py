"""The pods of k8s/overlays fit the nodes that terraform/examples make for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.manifests import (
    NAMESPACE,
    Object,
    build,
    containers,
    environment,
    named,
    rendered,
    workloads,
)
from tests.terraform.configuration import MODULES, ROOT, TERRAFORM, blocks, values


@dataclass(frozen=True)
class Pool:
    """A pool of an example, and the overlay with workers that run there."""

    overlay: str
    example: str
    name: str
    accelerator: str
    is_spot: bool

    @property
    def cloud(self) -> str:
        return self.example.partition("-")[0]


POOLS = (
    Pool("eks-g6-spot", "eks-l4-spot", "l4-spot", "L4", True),
    Pool("eks-p5", "eks-h100", "h100", "H100", False),
    Pool("gke-l4-spot", "gke-l4-spot", "l4-spot", "L4", True),
    Pool("gke-h100", "gke-h100", "h100", "H100", True),
)


def labels(pool: Pool) -> dict[str, str]:
    """Return the labels of a pool's nodes: those from the module and those that the cloud adds."""
    (written,) = re.findall(
        r"^ +labels = {\n(.*?)}\n",
        (TERRAFORM / f"modules/{pool.cloud}/nodes.tf").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    known = {
        "name": pool.name,
        "lower(pool.accelerator)": pool.accelerator.lower(),
        '"nvidia-${lower(pool.accelerator)}"': f"nvidia-{pool.accelerator.lower()}",
        '"true"': "true",
    }
    ours = {
        key: known[value] for key, value in re.findall(r'^ +"(.+)" += (.+)$', written, re.MULTILINE)
    }
    said = values(f"modules/{pool.cloud}")
    if pool.cloud == "eks":
        return ours | {
            "eks.amazonaws.com/capacityType": said["capacity_types"][
                "spot" if pool.is_spot else "on-demand"
            ]
        }
    return (
        ours
        | {"cloud.google.com/gke-accelerator": said["accelerators"][pool.accelerator]}
        | ({"cloud.google.com/gke-spot": "true"} if pool.is_spot else {})
    )


def selects(pod: Object, node: dict[str, str]) -> bool:
    """Match as Kubernetes does, by `nodeSelector` and the required node affinity."""
    affinity = (
        pod.get("affinity", {})
        .get("nodeAffinity", {})
        .get("requiredDuringSchedulingIgnoredDuringExecution", {})
    )
    terms: list[dict[str, Any]] = affinity.get("nodeSelectorTerms", [{"matchExpressions": []}])
    assert {one["operator"] for term in terms for one in term["matchExpressions"]} <= {
        "In",
        "Exists",
    }
    is_near = any(
        all(
            one["key"] in node
            if one["operator"] == "Exists"
            else node.get(one["key"]) in one["values"]
            for one in term["matchExpressions"]
        )
        for term in terms
    )
    return is_near and pod.get("nodeSelector", {}).items() <= node.items()


def tolerates(pod: Object, taint: dict[str, str]) -> bool:
    return any(
        one.get("key", taint["key"]) == taint["key"]
        and one.get("effect", taint["effect"]) == taint["effect"]
        and one.get("value") in ([None] if one["operator"] == "Exists" else [taint["value"]])
        for one in pod["tolerations"]
    )


def worker(overlay: str) -> Object:
    pod: Object = named(rendered(f"overlays/{overlay}"), "Deployment", "worker")["spec"][
        "template"
    ]["spec"]
    return pod


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.overlay)
def test_workers_find_their_nodes(pool: Pool) -> None:
    pod = worker(pool.overlay)
    assert selects(pod, labels(pool))
    assert tolerates(pod, values(f"modules/{pool.cloud}")["gpu_taint"])


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.overlay)
def test_workers_do_not_find_nodes_of_another_accelerator(pool: Pool) -> None:
    other = Pool(pool.overlay, pool.example, pool.name, "A100", pool.is_spot)
    assert not selects(worker(pool.overlay), labels(other))


@pytest.mark.parametrize(
    "pool", [pool for pool in POOLS if pool.cloud == "gke"], ids=lambda pool: pool.overlay
)
def test_models_folder_is_made_on_every_node_that_workers_run_on(pool: Pool) -> None:
    pod = named(rendered("model-folder"), "DaemonSet", "model-folder")["spec"]["template"]["spec"]
    assert selects(pod, labels(pool))
    assert tolerates(pod, values(f"modules/{pool.cloud}")["gpu_taint"])


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.overlay)
def test_pools_are_called_alike(pool: Pool) -> None:
    objects = rendered(f"overlays/{pool.overlay}")
    (container,) = containers(named(objects, "Deployment", "worker"))
    (module,) = blocks(f"examples/{pool.example}", "module").values()
    assert environment(objects, container)["SHOAL_POOL"] == pool.name
    assert list(module["gpu_pools"]) == [pool.name]
    assert module["gpu_pools"][pool.name]["accelerator"] == pool.accelerator


@pytest.mark.parametrize("module", MODULES)
def test_bucket_is_for_the_workers_service_account(module: str) -> None:
    written = str(blocks(f"modules/{module}", "variable")["worker_service_accounts"]["type"])
    (account,) = {worker(pool.overlay)["serviceAccountName"] for pool in POOLS}
    assert f'"{NAMESPACE}"' in written
    assert f'"{account}"' in written


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_overlay_that_the_guide_writes_can_be_built(cloud: str, tmp_path: Path) -> None:
    guide = (ROOT / f"docs/deploy-{cloud}.md").read_text()
    (written,) = re.findall(r"mesh/kustomization.yaml <<END\n(.*?)END\n", guide, re.DOTALL)
    known = {"REGISTRY": "registry.mine/shoal", "TAG": "1234567", "STORE": "s3://mine"}
    document = yaml.safe_load(re.sub(r"\$(\w+)", lambda match: known[match[1]], written))
    places = {key: [one.removeprefix("../k8s/") for one in document[key]] for key in ("resources",)}
    objects = build(tmp_path, **document | places)
    assert {
        container["image"]
        for one in workloads(objects)
        for container in containers(one)
        if "valkey" not in container["image"]
    } == {
        f"registry.mine/shoal/{name}:1234567"
        for name in ("edge", "router", "scheduler", "worker-cuda")
    }
    (container,) = containers(named(objects, "Deployment", "worker"))
    assert environment(objects, container)["SHOAL_STORES"] == "s3://mine,hf"
    reached = {
        to["ipBlock"]["cidr"]
        for rule in named(objects, "NetworkPolicy", "worker")["spec"]["egress"]
        for to in rule["to"]
        if "ipBlock" in to
    }
    assert {"aws": "169.254.170.23/32", "gcp": "169.254.169.252/32"}[cloud] in reached
