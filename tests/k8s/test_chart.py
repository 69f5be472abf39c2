"""charts/shoal makes the objects of k8s/: every overlay, every component and a further pool, compared field by field."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from libs.queue.acl import acl_file
from tests.k8s.charts import AS_KUSTOMIZE, CHART, comparable, differences, helm, refusal, template
from tests.k8s.fake_api_server import FakeApiServer
from tests.k8s.manifests import (
    COMPONENTS,
    K8S,
    NAMESPACE,
    OVERLAYS,
    ROOT,
    TOGETHER,
    Object,
    build,
    containers,
    environment,
    named,
    of_kind,
    rendered,
    with_components,
    workloads,
)
from tools.chart import rows

Values = dict[str, Any]

ON: Final[Values] = {"enabled": True}
SERVERS: Final = ("router", "scheduler")
ALONE: Final[Mapping[str, Values]] = {
    "network-policy": {"networkPolicy": ON},
    "storage-ebs": {"redis": {"storage": {"createEbsClass": True}}},
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
        "redis": {"external": {**ON, "urls": {role: f"rediss://shoal-{role}@redis.example:6379/0" for role in SERVERS}}},
    },
    "redis-sentinel": {
        "redis": {
            "external": {
                **ON,
                "urls": {role: f"rediss+sentinel://shoal-{role}@redis.example:26379/mymaster/0" for role in SERVERS},
                "mutualTls": True,
                "ports": [6379, 26379],
                "namespaces": ["redis"],
            }
        },
        **{role: {"settings": {"SHOAL_REDIS_SENTINEL_PASSWORD_FILE": ""}} for role in SERVERS},
    },
}
"""What a component is called among the values. Together with those of TOGETHER, as k8s/ has them."""
POOL: Final[Values] = {"name": "l4", "accelerator": "l4", "scaling": {"max_workers": 1}}
OF_POOLS: Final = frozenset({"gpu", "gpu-a100", "gpu-h100", "gpu-l4", "spot-eks", "spot-gke"})
"""Components that change pools.yaml, too, so that they are compared by overlays and as further pools."""
COMBINED: Final = (
    *("network-policy", "storage-ebs", "hpa-router", "pod-monitor", "alerts", "dashboards", "tls", "keda", "keda-tls"),
    *("model-cache-pvc", "load-balancer", "tokens", "jwks", "gateway", "otel"),
)


def merged(*all_values: Mapping[str, Any]) -> Values:
    """As Helm merges values: mappings by key, anything else as a whole."""
    found: Values = {}
    for values in all_values:
        for key, value in values.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = merged(found[key], value) if both else value
    return found


def chart(*all_values: Mapping[str, Any], file: str = "") -> tuple[Object, ...]:
    return template(merged(AS_KUSTOMIZE, *all_values), *([file] if file else []))


def unlike(ours: tuple[Object, ...], theirs: tuple[Object, ...]) -> list[str]:
    return list(differences(comparable(ours), comparable(theirs)))


def test_the_chart_of_no_values_is_the_base() -> None:
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
    "names", [("network-policy", "external-redis"), ("network-policy", "tls", "keda", "keda-tls", "external-redis")]
)
def test_somebody_elses_redis_takes_ours_away(names: tuple[str, ...]) -> None:
    assert unlike(chart(*(ALONE[name] for name in names)), with_components(*names)) == []


def test_no_component_and_no_overlay_is_left_out() -> None:
    assert set(COMPONENTS) <= set(ALONE) | OF_POOLS
    assert {path.stem for path in (CHART / "values").iterdir()} == set(OVERLAYS)


@pytest.mark.parametrize(
    ("accelerator", "spot", "component"), [("a100", "", ()), ("l4", "gcp", ("spot-gke",)), ("h100", "aws", ("spot-eks",))]
)
def test_further_pools_are_those_of_the_guide(accelerator: str, spot: str, component: tuple[str, ...], tmp_path: Path) -> None:
    """Of docs/kubernetes.md: a folder with a nameSuffix, whose components stand in it."""
    pools = {"cpu": {"device": "cpu", "min_workers": 1, "max_workers": 20}}
    pools[accelerator] = {"device": "cuda", **({"spot": True} if spot else {}), "max_workers": 20}
    pool = tmp_path / accelerator
    pool.mkdir()
    build(
        pool,
        resources=["base/worker"],
        components=[f"components/{name}" for name in (f"gpu-{accelerator}", *component, "keda")],
        configMapGenerator=[{"name": "worker-env", "behavior": "merge", "literals": [f"SHOAL_POOL={accelerator}"]}],
        nameSuffix=f"-{accelerator}",
        labels=[{"pairs": {"app.kubernetes.io/instance": f"worker-{accelerator}"}, "includeSelectors": True}],
    )
    (tmp_path / "pools.yaml").write_text(yaml.safe_dump({"pools": pools}, sort_keys=False))
    theirs = build(
        tmp_path,
        namespace=NAMESPACE,
        resources=["base", accelerator],
        components=[f"components/{name}" for name in ("network-policy", "tls", "keda", "keda-tls", "otel")],
        configMapGenerator=[{"name": "pools", "behavior": "merge", "files": ["pools.yaml"]}],
    )
    further = {"name": accelerator, "accelerator": accelerator, "spot": spot, "scaling": {"max_workers": 20}}
    on = (ALONE[name] for name in ("network-policy", "tls", "keda", "otel"))
    ours = chart(*on, {"pools": [*yaml.safe_load((CHART / "values.yaml").read_text())["pools"], further]})
    found = [one for one in unlike(ours, theirs) if "part-of" not in one]
    assert found == [], "but for the label of the base, which a pool's folder does not give"


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"images": {"tag": "0.1.1"}}, "Deployment router.spec.template.spec.containers[0].image"),
        ({"scheduler": {"replicas": 3}}, "Deployment scheduler.spec.replicas"),
        ({"router": {"settings": {"SHOAL_LOG_LEVEL": "DEBUG"}}}, "ConfigMap router-env.data.SHOAL_LOG_LEVEL"),
        ({"worker": {"settings": {"SHOAL_DTYPE": "float16"}}}, "ConfigMap worker-env.data.SHOAL_DTYPE: only in the chart"),
        ({"keda": {"cooldownPeriod": 601}}, "ScaledObject worker.spec.cooldownPeriod"),
        ({"keda": {"enabled": False}}, "ScaledObject worker: only in k8s/"),
        ({"tls": {"routerNames": ["mesh.example"]}}, "Certificate router.spec.dnsNames"),
        ({"networkPolicy": {"kedaNamespace": "other"}}, "NetworkPolicy scheduler.spec.ingress[0].from[0]"),
        ({"monitoring": {"podMonitors": {"interval": "30s"}}}, "PodMonitor router.spec.podMetricsEndpoints[0].interval"),
        ({"accelerators": {"l4": {"resources": {"cpu": 4}}}}, "Deployment worker.spec.template.spec.containers[0].resources"),
        ({"accelerators": {"l4": {"store": {"size": "60Gi"}}}}, "Deployment worker.spec.template.spec.volumes"),
        ({"modelCache": {"type": "claim"}}, "PersistentVolumeClaim models: only in the chart"),
        ({"priorityClasses": {"create": False}}, "PriorityClass shoal-control: only in k8s/"),
    ],
    ids=json.dumps,
)
def test_a_value_that_differs_is_found(values: Values, where: str) -> None:
    found = unlike(chart(values, file="values/gke-l4-spot.yaml"), rendered("overlays/gke-l4-spot"))
    assert [one for one in found if one.startswith(f".{where}")], found


def test_pools_in_another_order_are_found() -> None:
    """The first one is the default."""
    first, further = ({"name": name, "accelerator": "cpu", "scaling": {"max_workers": 1}} for name in ("a", "b"))
    assert unlike(chart({"pools": [first, further]}), chart({"pools": [further, first]})) != []


def test_a_setting_that_changes_replaces_its_pods_and_no_others() -> None:
    before, after = chart(), chart({"router": {"settings": {"SHOAL_LOG_LEVEL": "DEBUG"}}})
    changed = [one["metadata"]["name"] for one, other in zip(workloads(before), workloads(after), strict=True) if one != other]
    assert changed == ["router"]


@pytest.mark.parametrize(
    "file", ["", *(f"values/{name}.yaml" for name in OVERLAYS), "ci/everything.yaml", "ci/external-redis.yaml"]
)
def test_lint_finds_nothing(file: str) -> None:
    done = helm("lint", "--strict", "--quiet", str(CHART), values=[CHART / file] if file else [])
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicas": 2}, r"additional propert\w+ '?replicas"),
        ({"router": {"replica": 2}}, r"router\W.*additional propert\w+ '?replica"),
        ({"router": {"settings": {"SHOAL_IN_FLIGHT_BYTES": 4294967296}}}, r"SHOAL_IN_FLIGHT_BYTES\W.*(want|expected:) string"),
        ({"images": {"tag": "latest"}}, "images: the tag latest says no version; name one"),
        ({"images": {"redis": {"tag": "latest"}}}, "images: the tag latest says no version; name one"),
        ({"images": {"router": {"digest": "sha256:123"}}}, r"images.router.digest\W"),
        ({"pools": []}, r"pools\W.*(want|at least) 1"),
        ({"pools": [{"name": "l4", "accelerator": "l4"}]}, r"pools.0\W.*scaling"),
        ({"pools": [POOL | {"scaling": {"min_workers": 1}}]}, r"pools.0.scaling\W.*max_workers"),
        (
            {"pools": [POOL | {"scaling": {"max_workers": 1, "min_worker": 1}}]},
            r"pools.0.scaling\W.*additional propert\w+ '?min_worker\b",
        ),
        ({"pools": [POOL | {"accelerator": "l4x"}]}, 'pools: l4 has the accelerator "l4x"; accelerators has a100, cpu, h100, l4'),
        ({"pools": [POOL, POOL]}, "pools: two have the name l4"),
        ({"pools": [POOL, POOL | {"name": "other", "nameSuffix": "-l4"}]}, 'pools: two have the nameSuffix "-l4"'),
        ({"pools": [POOL | {"scaling": {"max_workers": 1, "min_workers": 2}}]}, "pools: l4 has more min_workers than max_workers"),
        (
            {"pools": [POOL | {"scaling": {"max_workers": 1, "keep_warm_seconds": 601}}]},
            "last worker of l4 before keep_warm_seconds",
        ),
        (
            {"pools": [POOL | {"scaling": {"max_workers": 1, "fallback_for": "h100"}}]},
            "fallback_for names h100, which is none of them",
        ),
        ({"tls": {"issuer": {"kind": "ClusterIssuer"}}}, "tls.issuer: the one that is made is an Issuer"),
        ({"defaultPool": "l4"}, "defaultPool: l4 is none of pools"),
        ({"modelCache": {"type": "disk"}}, r"modelCache.type\W.*hostPath"),
        ({"keda": {"fallback": {"replicas": 0}}}, r"keda.fallback.replicas\W"),
        ({"redis": {"external": ON}}, "redis.external: say where it is"),
        ({"redis": {"auth": {"passwords": {"router": "one"}}}}, "redis.auth.passwords: give both"),
        ({"auth": {"tokens": ON}}, "tokens would travel in plain text"),
        ({"loadBalancer": ON}, "routers would be open"),
        ({"gateway": ON, "tls": ON}, "callers are known by tokens only"),
        ({"redis": {"resources": {"memory": "2 GB"}}}, r"redis.resources.memory\W"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_words(values: Values, words: str) -> None:
    """Of Helm 4, or a little different of Helm 3."""
    assert re.search(words, refusal(values), re.IGNORECASE)


def test_each_value_has_words_for_the_table() -> None:
    """README.md's, which `make check` holds to values.yaml."""
    assert list(rows("# One.\n# Two.\na: {b: 1}\nc:\n  # Of c.\n  d: x\n")) == [
        ("a", '`{"b": 1}`', "One. Two."),
        ("c.d", '`"x"`', "Of c."),
    ]
    with pytest.raises(ValueError, match=r"values.yaml:4: c.d has no comment"):
        list(rows("c:\n  # Of c.\n  b: 1\n  d: x\n"))


def test_its_version_is_that_of_everything() -> None:
    document = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (document["version"], document["appVersion"]) == (version, version)


def test_passwords_are_made_once_and_redis_sees_digests() -> None:
    objects = template({})
    secrets = {one["metadata"]["name"]: _decoded(one) for one in of_kind(objects, "Secret")}
    passwords = [secrets[f"redis-{role}"]["password"] for role in ("router", "scheduler")]
    assert all(re.fullmatch(r"[A-Za-z0-9]{48}", one) for one in passwords)
    assert len(set(passwords)) == 2
    assert secrets["redis-users"] == {"users.acl": acl_file(router=passwords[0], scheduler=passwords[1], admin=None).strip()}


def test_an_upgrade_keeps_the_passwords_that_are_there() -> None:
    """The cluster is asked for them; whoever may not ask is told so, rather than given others."""
    there = {"redis-router": "before", "redis-scheduler": "as before"}
    with FakeApiServer(template({}), there, namespace=NAMESPACE) as address:
        words = ("--is-upgrade", "--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", address)
        done = helm("template", "shoal", str(CHART), "--namespace", NAMESPACE, "--show-only", "templates/secrets.yaml", *words)
    assert (done.returncode, done.stderr) == (0, "")
    secrets = {one["metadata"]["name"]: _decoded(one) for one in yaml.safe_load_all(done.stdout) if one is not None}
    assert secrets == {
        **{name: {"password": password} for name, password in there.items()},
        "redis-users": {"users.acl": acl_file(router="before", scheduler="as before", admin=None).strip()},
    }


def test_who_may_not_read_passwords_cannot_upgrade() -> None:
    with FakeApiServer(template({}), {}, namespace=NAMESPACE, status=403) as address:
        done = helm("template", "shoal", str(CHART), "--namespace", NAMESPACE, "--dry-run=server", "--kube-apiserver", address)
    assert done.returncode != 0
    assert 'secrets "redis-router" is forbidden' in done.stderr


def _decoded(secret: Object) -> dict[str, str]:
    ((content,),) = [comparable([secret]).values()]
    data: dict[str, str] = content["data"]
    return data


def test_another_namespace_is_named_everywhere() -> None:
    on = dict.fromkeys(("tls", "keda", "networkPolicy", "loadBalancer", "gateway"), ON)
    values = {**on, "auth": {"tokens": ON}, "monitoring": dict.fromkeys(("podMonitors", "alerts", "dashboards"), ON)}
    objects = template({**values, "modelCache": {"type": "hostPath"}}, namespace="elsewhere")
    assert {one["metadata"].get("namespace", "elsewhere") for one in objects} == {"elsewhere"}
    text = json.dumps(objects)
    assert re.findall(r"[\w.-]*\.shoal(?:\.svc[\w.]*)?(?![\w.])|.{8}\"shoal/[^\"]*|namespace=\W*shoal\W", text) == []
    assert "scheduler-headless.elsewhere.svc.cluster.local:50053" in text
    assert "router-headless.elsewhere.svc" in text


def test_where_redis_is_may_be_a_secret() -> None:
    objects = template({"redis": {"external": {"enabled": True, "secret": "where", "mutualTls": True}}, "tls": ON})
    for role in ("router", "scheduler"):
        (container,) = containers(named(objects, "Deployment", role))
        variables = environment(objects, container)
        assert variables["SHOAL_REDIS_URL"] == {"secretKeyRef": {"name": "where", "key": role}}
        assert variables["SHOAL_REDIS_CA"] == "/etc/shoal/tls/ca.crt"
    assert [one for one in objects if one["metadata"]["name"].startswith("redis")] == []


def test_certificates_may_be_those_of_somebody_else() -> None:
    own, theirs = chart({"tls": ON}), chart({"tls": {"enabled": True, "certManager": False}})
    assert [one for one in own if one["kind"] not in ("Certificate", "Issuer")] == list(theirs)
    issued = chart({"tls": {"enabled": True, "issuer": {"create": False, "name": "corporate", "kind": "ClusterIssuer"}}})
    assert of_kind(issued, "Issuer") == []
    assert {one["spec"]["issuerRef"]["name"] for one in of_kind(issued, "Certificate")} == {"corporate"}


def test_callers_may_trust_another_issuer_than_the_mesh() -> None:
    issuer = {"name": "public", "kind": "ClusterIssuer"}
    objects = chart(ALONE["tls"], ALONE["tokens"], {"gateway": {**ON, "issuer": issuer, "names": ["mesh.example"]}})
    issuers = {one["metadata"]["name"]: one["spec"]["issuerRef"] for one in of_kind(objects, "Certificate")}
    assert [name for name, one in issuers.items() if one == issuer] == ["gateway"]


@pytest.mark.parametrize("file", ["", *(f"values/{name}.yaml" for name in OVERLAYS)])
def test_notes_name_what_is_there(file: str) -> None:
    """Pools, and a first call with the flags of the mesh's TLS."""
    values = [CHART / file] if file else []
    with FakeApiServer(
        template({}, *([file] if file else [])), {}, namespace=NAMESPACE
    ) as address:  # Helm 3 looks whether there is one
        words = ("--namespace", NAMESPACE, "--dry-run=client", "--disable-openapi-validation", "--kube-apiserver", address)
        done = helm("install", "shoal", str(CHART), *words, values=values)
    assert (done.returncode, done.stderr) == (0, "")
    manifests, _, notes = done.stdout.partition("\nNOTES:\n")
    (pools,) = (one["data"]["pools.yaml"] for one in yaml.safe_load_all(manifests.partition("---\n")[2]) if _is_pools(one))
    for name, pool in yaml.safe_load(pools)["pools"].items():
        assert f"  {name}: " in notes
        assert f"at most {pool['max_workers']} workers" in notes
    assert f"kubectl -n {NAMESPACE} port-forward service/router 50051" in notes
    has_tls = "kind: Certificate" in manifests
    assert ("--tls-ca" in notes) == has_tls
    assert ("in plain text" in notes) == (not has_tls)


def _is_pools(one: Object | None) -> bool:
    return one is not None and (one["kind"], one["metadata"]["name"]) == ("ConfigMap", "pools")


def test_links_lead_to_k8s_and_a_package_has_what_they_lead_to(tmp_path: Path) -> None:
    links = [path for path in (CHART / "files").iterdir() if path.is_symlink()]
    assert len(links) == 3
    assert all(path.resolve().is_relative_to(K8S) for path in links)
    assert helm("package", str(CHART), "--destination", str(tmp_path)).returncode == 0
    (package,) = tmp_path.glob("*.tgz")
    done = helm("template", "shoal", str(package), "--namespace", NAMESPACE, "--set", "monitoring.alerts.enabled=true")
    packaged = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    assert unlike(tuple(of_kind(packaged, "PrometheusRule")), tuple(of_kind(rendered("components/alerts"), "PrometheusRule"))) == []
