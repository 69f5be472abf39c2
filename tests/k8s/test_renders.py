"""Everything under k8s/ renders, with nothing deprecated, and its objects are what Kubernetes and
the operators know.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.k8s.charts import CHARTS, made
from tests.k8s.manifests import (
    CLUSTER_WIDE,
    COMPONENTS,
    EVERY,
    K8S,
    NAMESPACE,
    Object,
    build,
    named,
    objects_of_kind,
    rendered,
    title,
)

if TYPE_CHECKING:
    import jsonschema

# jsonschema and kubernetes_validate take three seconds to import, so only the process that
# validates imports them.
KUBERNETES = "1.32"
CUSTOM: dict[str, Any] = json.loads((Path(__file__).parent / "schemas/custom.json").read_text())
DEPRECATED = {
    "bases",
    "commonLabels",
    "patchesJson6902",
    "patchesStrategicMerge",
    "vars",
    "imageTags",
}
KUSTOMIZATIONS = sorted(K8S.rglob("kustomization.yaml"))


def check(one: Object) -> None:
    """Raises ValidationError, for keys that are not known, too."""
    _check(json.dumps(one))


@cache
def _check(text: str) -> None:
    """Renderings have most objects in common."""
    one = json.loads(text)
    kind = CUSTOM["kinds"].get(f"{one['apiVersion']} {one['kind']}")
    if kind is None:
        import kubernetes_validate

        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    else:
        validator(kind).validate(one)


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    import jsonschema

    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": CUSTOM["$defs"]})


@pytest.mark.parametrize("name", [*EVERY, *CHARTS])
def test_every_object_matches_its_schema(name: str) -> None:
    for one in made(name):
        check(one)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0, "livenesProbe"), {}),
        ("Deployment", ("spec", "replicas"), "two"),
        ("ScaledObject", ("spec", "poolingInterval"), 5),
        ("ScaledObject", ("spec", "fallback", "behavior"), "sometimes"),
        (
            "ScaledObject",
            (
                "spec",
                "advanced",
                "horizontalPodAutoscalerConfig",
                "behavior",
                "scaleUp",
                "policies",
            ),
            {},
        ),
        ("TriggerAuthentication", ("spec", "secretTargetRef", 0, "keys"), "ca.crt"),
        ("Certificate", ("spec", "usages"), ["signing things"]),
        ("Certificate", ("spec", "uri"), "spiffe://shoal/router/default"),
        ("Issuer", ("spec", "ca", "secret"), "authority"),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "intervals"), "15s"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "expression"), "up"),
    ],
)
def test_invalid_object_is_found(kind: str, path: tuple[str | int, ...], value: object) -> None:
    import jsonschema
    import kubernetes_validate

    one = json.loads(json.dumps(objects_of_kind(rendered("overlays/gke-l4-spot"), kind)[-1]))
    check(one)
    place: Any = one
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(one)


@pytest.mark.parametrize("name", [*EVERY, *CHARTS])
def test_everything_is_in_the_namespace_and_there_once(name: str) -> None:
    objects = made(name)
    astray = [
        title(one)
        for one in objects
        if one["kind"] not in CLUSTER_WIDE and one["metadata"].get("namespace") != NAMESPACE
    ]
    assert astray == []
    titles = [title(one) for one in objects]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("file", KUSTOMIZATIONS, ids=lambda file: str(file.parent.relative_to(K8S)))
def test_kustomizations_are_of_today_and_name_all_that_is_there(file: Path) -> None:
    document = yaml.safe_load(file.read_text())
    is_component = file.parent.parent.name == "components"
    assert document["kind"] == ("Component" if is_component else "Kustomization")
    assert (
        document["apiVersion"]
        == f"kustomize.config.k8s.io/{'v1alpha1' if is_component else 'v1beta1'}"
    )
    assert not DEPRECATED & set(document)
    text = file.read_text()
    other_files = [path.name for path in file.parent.iterdir() if path != file]
    assert [name for name in other_files if name not in text] == [], "files that nothing uses"
    assert all(not one.get("includeSelectors") for one in document.get("labels", ()))


def test_each_component_is_in_an_overlay_or_on_the_page() -> None:
    page = (K8S.parent / "docs/kubernetes.md").read_text()
    assert [name for name in COMPONENTS if f"`{name}`" not in page] == []


def test_further_pool_is_a_folder_of_a_few_lines(tmp_path: Path) -> None:
    """The guide (docs/kubernetes.md) describes such a pool: it shares with the first pool only the
    resources that all pools share.
    """
    pool = tmp_path / "h100"
    pool.mkdir()
    selector = {"pairs": {"app.kubernetes.io/instance": "worker-h100"}, "includeSelectors": True}
    build(
        pool,
        resources=["base/worker"],
        components=["components/gpu-h100", "components/keda"],
        configMapGenerator=[
            {"name": "worker-env", "behavior": "merge", "literals": ["SHOAL_POOL=h100"]}
        ],
        nameSuffix="-h100",
        labels=[selector],
    )
    objects = build(
        tmp_path,
        namespace=NAMESPACE,
        resources=["base", "h100"],
        components=[
            "components/network-policy",
            "components/tls",
            "components/keda",
            "components/keda-tls",
            "components/otel",
        ],
    )
    first, further = (named(objects, "Deployment", name) for name in ("worker", "worker-h100"))
    assert first["spec"]["selector"] != further["spec"]["selector"]
    assert (
        further["spec"]["selector"]["matchLabels"].items()
        <= further["spec"]["template"]["metadata"]["labels"].items()
    )
    volumes = [volume["name"] for volume in further["spec"]["template"]["spec"]["volumes"]]
    assert sorted(volumes) == ["catalog", "shm", "store", "tls", "tmp"]
    assert named(objects, "ScaledObject", "worker-h100")["spec"]["scaleTargetRef"] == {
        "name": "worker-h100"
    }
    assert named(objects, "ScaledObject", "worker")["spec"]["scaleTargetRef"] == {"name": "worker"}
    settings = further["spec"]["template"]["spec"]["containers"][0]["envFrom"][0]["configMapRef"][
        "name"
    ]
    assert settings.startswith("worker-env-h100")
    assert named(objects, "ConfigMap", settings)["data"]["SHOAL_POOL"] == "h100"
    for one in objects:
        check(one)


def test_overlay_sets_the_address_of_an_external_redis(tmp_path: Path) -> None:
    """Patches set it, because a kustomization applies its generators before its components."""

    def says(role: str, url: str) -> dict[str, str]:
        return {
            "patch": json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": role},
                    "data": {"SHOAL_REDIS_URL": url},
                }
            )
        }

    urls = {
        f"{role}-env": f"rediss://shoal-{role}@cache.internal:6379/0"
        for role in ("router", "scheduler")
    }
    objects = build(
        tmp_path,
        resources=["base"],
        components=["components/tls", "components/external-redis"],
        patches=[says(role, url) for role, url in urls.items()],
    )
    reported = {
        one["metadata"]["name"].rpartition("-")[0]: one.get("data", {})
        for one in objects_of_kind(objects, "ConfigMap")
    }
    assert {name: reported[name]["SHOAL_REDIS_URL"] for name in urls} == urls
    assert {reported[name]["SHOAL_REDIS_CA"] for name in urls} == {""}
    assert [title(one) for one in objects if one["metadata"]["name"].startswith("redis")] == []
