"""charts/shoal makes the objects of k8s/: every overlay, every component and a further pool,
compared field by field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.k8s.charts import CHART, ON, Values, chart, unlike
from tests.k8s.manifests import (
    COMPONENTS,
    NAMESPACE,
    OVERLAYS,
    TOGETHER,
    build,
    rendered,
    with_components,
    workloads,
)

SERVERS: Final = ("router", "scheduler")
ALONE: Final[Mapping[str, Values]] = {
    "network-policy": {"networkPolicy": ON},
    "storage-ebs": {"redis": {"storage": {"createEbsClass": True}}},
    "edge": {"edge": ON},
    "edge-tls": {},
    "edge-pod-monitor": {},
    "edge-ingress": {"edge": {"ingress": ON}},
    "edge-gateway": {"edge": {"gateway": ON}},
    "edge-network-policy": {},
    "edge-otel": {},
    "edge-batches-claim": {"edge": {"batches": {"type": "claim"}}},
    "edge-batches-bucket": {
        "edge": {"batches": {"type": "bucket", "url": "s3://batches.example/shoal"}}
    },
    "edge-jobs": {"edge": {"jobs": {"roots": ["s3://batches.example/jobs/{tenant}"]}}},
    "hpa-router": {"router": {"autoscaling": ON}},
    "pod-monitor": {"monitoring": {"podMonitors": ON}},
    "alerts": {"monitoring": {"alerts": ON}},
    "dashboards": {"monitoring": {"dashboards": ON}},
    "tls": {"tls": ON},
    "keda": {"keda": ON},
    "keda-tls": {},
    "model-cache-pvc": {"modelCache": {"type": "claim"}},
    "model-cache-hostpath": {"modelCache": {"type": "hostPath"}},
    "load-balancer": {"loadBalancer": ON},
    "gateway": {"gateway": ON},
    "tokens": {"auth": {"tokens": ON}},
    "jwks": {"auth": {"jwt": ON}},
    "otel": {"otel": ON},
    "external-redis": {
        "redis": {
            "external": {
                **ON,
                "urls": {role: f"rediss://shoal-{role}@redis.example:6379/0" for role in SERVERS},
            }
        },
    },
    "redis-sentinel": {
        "redis": {
            "external": {
                **ON,
                "urls": {
                    role: f"rediss+sentinel://shoal-{role}@redis.example:26379/mymaster/0"
                    for role in SERVERS
                },
                "mutualTls": True,
                "ports": [6379, 26379],
                "namespaces": ["redis"],
            }
        },
        **{role: {"settings": {"SHOAL_REDIS_SENTINEL_PASSWORD_FILE": ""}} for role in SERVERS},
    },
    "redis-cluster": {
        "redis": {
            "external": {
                **ON,
                "urls": {
                    role: f"rediss+cluster://shoal-{role}@redis.example:6379" for role in SERVERS
                },
                "mutualTls": True,
                "namespaces": ["redis"],
            }
        },
        **{role: {"settings": {"SHOAL_QUEUE_SLOTS": "64"}} for role in SERVERS},
    },
}
"""The names of components among the chart's values, and with those of TOGETHER, as k8s/ combines
them.
"""
OF_POOLS: Final = frozenset({"gpu", "gpu-a100", "gpu-h100", "gpu-l4", "spot-eks", "spot-gke"})
"""Components that change pools.yaml, too, so that they are compared by overlays and as further
pools.
"""
COMBINED: Final = (
    *(
        "network-policy",
        "storage-ebs",
        "hpa-router",
        "pod-monitor",
        "alerts",
        "dashboards",
        "tls",
        "keda",
        "keda-tls",
    ),
    *(
        "model-cache-pvc",
        "load-balancer",
        "tokens",
        "jwks",
        "gateway",
        "otel",
        "edge",
        "edge-tls",
        "edge-gateway",
        "edge-network-policy",
        "edge-pod-monitor",
        "edge-batches-bucket",
        "edge-jobs",
        "edge-otel",
    ),
)


def test_chart_of_no_values_is_the_base() -> None:
    assert unlike(chart(), rendered("base")) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_each_overlay_has_values_that_make_the_same(name: str) -> None:
    assert unlike(chart(file=f"values/{name}.yaml"), rendered(f"overlays/{name}")) == []


@pytest.mark.parametrize("name", [name for name in COMPONENTS if name in ALONE])
def test_each_component_has_values_that_make_the_same(name: str) -> None:
    values = (ALONE[other] for other in (*TOGETHER.get(name, ()), name))
    assert unlike(chart(*values), rendered(f"components/{name}")) == []


def test_components_together_are_values_together() -> None:
    assert unlike(chart(*(ALONE[name] for name in COMBINED)), with_components(*COMBINED)) == []


@pytest.mark.parametrize(
    "names",
    [
        ("network-policy", "external-redis"),
        ("network-policy", "tls", "keda", "keda-tls", "external-redis"),
    ],
)
def test_external_redis_removes_ours(names: tuple[str, ...]) -> None:
    assert unlike(chart(*(ALONE[name] for name in names)), with_components(*names)) == []


def test_no_component_and_no_overlay_is_left_out() -> None:
    assert set(COMPONENTS) <= set(ALONE) | OF_POOLS
    assert {path.stem for path in (CHART / "values").iterdir()} == set(OVERLAYS)


@pytest.mark.parametrize(
    ("accelerator", "spot", "component"),
    [("a100", "", ()), ("l4", "gcp", ("spot-gke",)), ("h100", "aws", ("spot-eks",))],
)
def test_further_pools_are_those_of_the_guide(
    accelerator: str, spot: str, component: tuple[str, ...], tmp_path: Path
) -> None:
    """The guide (docs/kubernetes.md) describes such a pool: a folder with a nameSuffix and these
    components.
    """
    pools = {"cpu": {"device": "cpu", "min_workers": 1, "max_workers": 20}}
    pools[accelerator] = {"device": "cuda", **({"spot": True} if spot else {}), "max_workers": 20}
    pool = tmp_path / accelerator
    pool.mkdir()
    build(
        pool,
        resources=["base/worker"],
        components=[f"components/{name}" for name in (f"gpu-{accelerator}", *component, "keda")],
        configMapGenerator=[
            {"name": "worker-env", "behavior": "merge", "literals": [f"SHOAL_POOL={accelerator}"]}
        ],
        nameSuffix=f"-{accelerator}",
        labels=[
            {
                "pairs": {"app.kubernetes.io/instance": f"worker-{accelerator}"},
                "includeSelectors": True,
            }
        ],
    )
    (tmp_path / "pools.yaml").write_text(yaml.safe_dump({"pools": pools}, sort_keys=False))
    theirs = build(
        tmp_path,
        namespace=NAMESPACE,
        resources=["base", accelerator],
        components=[
            f"components/{name}" for name in ("network-policy", "tls", "keda", "keda-tls", "otel")
        ],
        configMapGenerator=[{"name": "pools", "behavior": "merge", "files": ["pools.yaml"]}],
    )
    further = {
        "name": accelerator,
        "accelerator": accelerator,
        "spot": spot,
        "scaling": {"max_workers": 20},
    }
    on = (ALONE[name] for name in ("network-policy", "tls", "keda", "otel"))
    ours = chart(
        *on, {"pools": [*yaml.safe_load((CHART / "values.yaml").read_text())["pools"], further]}
    )
    found = [one for one in unlike(ours, theirs) if "part-of" not in one]
    assert found == [], "but for the label of the base, which a pool's folder does not give"


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"images": {"tag": "0.1.1"}}, "Deployment router.spec.template.spec.containers[0].image"),
        ({"scheduler": {"replicas": 3}}, "Deployment scheduler.spec.replicas"),
        (
            {"router": {"settings": {"SHOAL_LOG_LEVEL": "DEBUG"}}},
            "ConfigMap router-env.data.SHOAL_LOG_LEVEL",
        ),
        (
            {"worker": {"settings": {"SHOAL_DTYPE": "float16"}}},
            "ConfigMap worker-env.data.SHOAL_DTYPE: only in the chart",
        ),
        ({"keda": {"cooldownPeriod": 601}}, "ScaledObject worker.spec.cooldownPeriod"),
        ({"keda": {"enabled": False}}, "ScaledObject worker: only in k8s/"),
        ({"tls": {"routerNames": ["mesh.example"]}}, "Certificate router.spec.dnsNames"),
        (
            {"networkPolicy": {"kedaNamespace": "other"}},
            "NetworkPolicy scheduler.spec.ingress[0].from[0]",
        ),
        (
            {"monitoring": {"podMonitors": {"interval": "30s"}}},
            "PodMonitor router.spec.podMetricsEndpoints[0].interval",
        ),
        (
            {"accelerators": {"l4": {"resources": {"cpu": 4}}}},
            "Deployment worker.spec.template.spec.containers[0].resources",
        ),
        (
            {"accelerators": {"l4": {"store": {"size": "60Gi"}}}},
            "Deployment worker.spec.template.spec.volumes",
        ),
        ({"modelCache": {"type": "claim"}}, "PersistentVolumeClaim models: only in the chart"),
        ({"priorityClasses": {"create": False}}, "PriorityClass shoal-control: only in k8s/"),
    ],
    ids=json.dumps,
)
def test_value_that_differs_is_found(values: Values, where: str) -> None:
    found = unlike(chart(values, file="values/gke-l4-spot.yaml"), rendered("overlays/gke-l4-spot"))
    assert [one for one in found if one.startswith(f".{where}")], found


def test_pools_in_another_order_are_found() -> None:
    """The first one is the default."""
    first, further = (
        {"name": name, "accelerator": "cpu", "scaling": {"max_workers": 1}} for name in ("a", "b")
    )
    assert unlike(chart({"pools": [first, further]}), chart({"pools": [further, first]})) != []


def test_setting_that_changes_replaces_its_pods_and_no_others() -> None:
    before, after = chart(), chart({"router": {"settings": {"SHOAL_LOG_LEVEL": "DEBUG"}}})
    changed = [
        one["metadata"]["name"]
        for one, other in zip(workloads(before), workloads(after), strict=True)
        if one != other
    ]
    assert changed == ["router"]
