"""Values of charts/shoal that have no counterpart in k8s/: refusals, Secrets, notes, names, and the
package.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from libs.queue.connection.acl import acl_file
from tests.k8s.charts import CHART, ON, Values, chart, comparable, helm, refusal, template, unlike
from tests.k8s.fake_api_server import FakeApiServer
from tests.k8s.manifests import (
    K8S,
    NAMESPACE,
    OVERLAYS,
    ROOT,
    Object,
    containers,
    environment,
    named,
    objects_of_kind,
    rendered,
)
from tools.k8s.chart import rows

VERSION: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
POOL: Final[Values] = {"name": "l4", "accelerator": "l4", "scaling": {"max_workers": 1}}


@pytest.mark.parametrize(
    "file",
    [
        "",
        *(f"values/{name}.yaml" for name in OVERLAYS),
        "ci/everything.yaml",
        "ci/external-redis.yaml",
    ],
)
def test_lint_finds_nothing(file: str) -> None:
    done = helm("lint", "--strict", "--quiet", str(CHART), values=[CHART / file] if file else [])
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replicas": 2}, r"additional propert\w+ '?replicas"),
        ({"router": {"replica": 2}}, r"router\W.*additional propert\w+ '?replica"),
        (
            {"router": {"settings": {"SHOAL_IN_FLIGHT_BYTES": 4294967296}}},
            r"SHOAL_IN_FLIGHT_BYTES\W.*(want|expected:) string",
        ),
        ({"images": {"tag": "latest"}}, "images: the tag latest says no version; name one"),
        (
            {"images": {"redis": {"tag": "latest"}}},
            "images: the tag latest says no version; name one",
        ),
        ({"images": {"router": {"digest": "sha256:123"}}}, r"images.router.digest\W"),
        ({"pools": []}, r"pools\W.*(want|at least) 1"),
        ({"pools": [{"name": "l4", "accelerator": "l4"}]}, r"pools.0\W.*scaling"),
        ({"pools": [POOL | {"scaling": {"min_workers": 1}}]}, r"pools.0.scaling\W.*max_workers"),
        (
            {"pools": [POOL | {"scaling": {"max_workers": 1, "min_worker": 1}}]},
            r"pools.0.scaling\W.*additional propert\w+ '?min_worker\b",
        ),
        (
            {"pools": [POOL | {"accelerator": "l4x"}]},
            'pools: l4 has the accelerator "l4x"; accelerators has a100, cpu, h100, l4',
        ),
        ({"pools": [POOL, POOL]}, "pools: two have the name l4"),
        (
            {"pools": [POOL, POOL | {"name": "other", "nameSuffix": "-l4"}]},
            'pools: two have the nameSuffix "-l4"',
        ),
        (
            {"pools": [POOL | {"scaling": {"max_workers": 1, "min_workers": 2}}]},
            "pools: l4 has more min_workers than max_workers",
        ),
        (
            {"pools": [POOL | {"scaling": {"max_workers": 1, "keep_warm_seconds": 601}}]},
            "last worker of l4 before keep_warm_seconds",
        ),
        (
            {"pools": [POOL | {"scaling": {"max_workers": 1, "fallback_for": "h100"}}]},
            "fallback_for names h100, which is none of them",
        ),
        (
            {"tls": {"issuer": {"kind": "ClusterIssuer"}}},
            "tls.issuer: the one that is made is an Issuer",
        ),
        ({"defaultPool": "l4"}, "defaultPool: l4 is none of pools"),
        ({"modelCache": {"type": "disk"}}, r"modelCache.type\W.*hostPath"),
        ({"keda": {"fallback": {"replicas": 0}}}, r"keda.fallback.replicas\W"),
        ({"redis": {"external": ON}}, "redis.external: say where it is"),
        ({"redis": {"auth": {"passwords": {"router": "one"}}}}, "redis.auth.passwords: give both"),
        ({"auth": {"tokens": ON}}, "tokens would travel in plain text"),
        ({"loadBalancer": ON}, "routers would be open"),
        ({"gateway": ON, "tls": ON}, "gateway: .*callers are known by tokens only"),
        (
            {"edge": {**ON, "gateway": ON}, "tls": ON},
            "edge.gateway: .*callers are known by tokens only",
        ),
        ({"edge": {**ON, "batches": {"type": "bucket"}}}, "edge.batches: say which bucket"),
        (
            {"edge": {**ON, "batches": {"type": "bucket", "url": "s3://id:secret@bucket/a"}}},
            r"edge.batches.url\W",
        ),
        (
            {"edge": {**ON, "batches": {"url": "s3://bucket/a"}}},
            "edge.batches: url is that of type bucket",
        ),
        (
            {"edge": {**ON, "batches": {"serviceAccountAnnotations": {"a": "b"}}}},
            "edge.batches: serviceAccountAnnotations are those of type bucket",
        ),
        (
            {"edge": {**ON, "jobs": {"roots": ["s3://bucket/jobs"]}}},
            "edge.jobs: jobs are recorded in the storage of batches",
        ),
        (
            {"edge": {**ON, "batches": {"type": "claim"}, "jobs": {"roots": ["/data/jobs"]}}},
            "edge.jobs.roots: edges mount no volume for jobs, so /data/jobs would not exist",
        ),
        ({"redis": {"resources": {"memory": "2 GB"}}}, r"redis.resources.memory\W"),
    ],
    ids=str,
)
def test_wrong_value_is_refused_with_words(values: Values, words: str) -> None:
    """The words differ slightly between Helm 4 and Helm 3."""
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
    assert (document["version"], document["appVersion"]) == (VERSION, VERSION)


def test_passwords_are_made_once_and_redis_sees_digests() -> None:
    objects = template({})
    secrets = {one["metadata"]["name"]: _decoded(one) for one in objects_of_kind(objects, "Secret")}
    passwords = [secrets[f"redis-{role}"]["password"] for role in ("router", "scheduler")]
    assert all(re.fullmatch(r"[A-Za-z0-9]{48}", one) for one in passwords)
    assert len(set(passwords)) == 2
    assert secrets["redis-users"] == {
        "users.acl": acl_file(router=passwords[0], scheduler=passwords[1], admin=None).strip()
    }


def test_upgrade_keeps_the_passwords_that_are_there() -> None:
    """The chart reads them from the cluster; a user who may not read them gets an error, not new
    ones.
    """
    there = {"redis-router": "before", "redis-scheduler": "as before"}
    with FakeApiServer(template({}), there, namespace=NAMESPACE) as address:
        words = (
            "--is-upgrade",
            "--dry-run=server",
            "--disable-openapi-validation",
            "--kube-apiserver",
            address,
        )
        done = helm(
            "template",
            "shoal",
            str(CHART),
            "--namespace",
            NAMESPACE,
            "--show-only",
            "templates/secrets.yaml",
            *words,
        )
    assert (done.returncode, done.stderr) == (0, "")
    secrets = {
        one["metadata"]["name"]: _decoded(one)
        for one in yaml.safe_load_all(done.stdout)
        if one is not None
    }
    assert secrets == {
        **{name: {"password": password} for name, password in there.items()},
        "redis-users": {
            "users.acl": acl_file(router="before", scheduler="as before", admin=None).strip()
        },
    }


def test_who_may_not_read_passwords_cannot_upgrade() -> None:
    with FakeApiServer(template({}), {}, namespace=NAMESPACE, status=403) as address:
        done = helm(
            "template",
            "shoal",
            str(CHART),
            "--namespace",
            NAMESPACE,
            "--dry-run=server",
            "--kube-apiserver",
            address,
        )
    assert done.returncode != 0
    assert 'secrets "redis-router" is forbidden' in done.stderr


def _decoded(secret: Object) -> dict[str, str]:
    ((content,),) = [comparable([secret]).values()]
    data: dict[str, str] = content["data"]
    return data


def test_another_namespace_is_named_everywhere() -> None:
    on = dict.fromkeys(("tls", "keda", "networkPolicy", "loadBalancer", "gateway"), ON)
    on["edge"] = {**ON, "gateway": ON}
    values = {
        **on,
        "auth": {"tokens": ON},
        "monitoring": dict.fromkeys(("podMonitors", "alerts", "dashboards"), ON),
    }
    objects = template({**values, "modelCache": {"type": "hostPath"}}, namespace="elsewhere")
    assert {one["metadata"].get("namespace", "elsewhere") for one in objects} == {"elsewhere"}
    text = json.dumps(objects)
    assert (
        re.findall(
            r"[\w.-]*\.shoal(?:\.svc[\w.]*)?(?![\w.])|.{8}\"shoal/[^\"]*|namespace=\W*shoal\W", text
        )
        == []
    )
    assert "scheduler-headless.elsewhere.svc.cluster.local:50053" in text
    assert "router-headless.elsewhere.svc" in text


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ({}, f"shoal-router:{VERSION}"),
        ({"registry": "ghcr.io/somebody/shoal"}, f"ghcr.io/somebody/shoal/shoal-router:{VERSION}"),
        (
            {"registry": "registry.example/shoal", "prefix": "", "tag": "0123456"},
            "registry.example/shoal/router:0123456",
        ),
        (
            {"registry": "registry.example", "tag": "a", "router": {"tag": "b"}},
            "registry.example/shoal-router:b",
        ),
        (
            {"registry": "registry.example", "router": {"repository": "mirror/router"}},
            f"mirror/router:{VERSION}",
        ),
        (
            {"tag": "a", "router": {"digest": f"sha256:{'0' * 64}"}},
            f"shoal-router@sha256:{'0' * 64}",
        ),
    ],
    ids=str,
)
def test_names_of_images(images: Values, expected: str) -> None:
    """The names match those on laptops, in releases and in the guides."""
    (container,) = containers(named(template({"images": images}), "Deployment", "router"))
    assert container["image"] == expected


def test_where_redis_is_may_be_a_secret() -> None:
    objects = template(
        {"redis": {"external": {"enabled": True, "secret": "where", "mutualTls": True}}, "tls": ON}
    )
    for role in ("router", "scheduler"):
        (container,) = containers(named(objects, "Deployment", role))
        variables = environment(objects, container)
        assert variables["SHOAL_REDIS_URL"] == {"secretKeyRef": {"name": "where", "key": role}}
        assert variables["SHOAL_REDIS_CA"] == "/etc/shoal/tls/ca.crt"
    assert [one for one in objects if one["metadata"]["name"].startswith("redis")] == []


def test_jobs_reach_buckets_if_batches_do_not() -> None:
    batches = {"serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn:jobs"}}
    jobs = {"roots": ["s3://bucket/jobs/{tenant}"]}

    def egress(edge: Values) -> list[Object]:
        objects = template({"networkPolicy": ON, "edge": {**ON, **edge}})
        found: list[Object] = named(objects, "NetworkPolicy", "edge")["spec"]["egress"]
        return found

    bucket = {"type": "bucket", "url": "s3://bucket/batches"}
    found = egress({"batches": {"type": "claim", **batches}, "jobs": jobs})
    assert found == egress({"batches": bucket}) != egress({"batches": {"type": "claim"}})


def test_certificates_may_be_external() -> None:
    own, theirs = chart({"tls": ON}), chart({"tls": {"enabled": True, "certManager": False}})
    assert [one for one in own if one["kind"] not in ("Certificate", "Issuer")] == list(theirs)
    issued = chart(
        {
            "tls": {
                "enabled": True,
                "issuer": {"create": False, "name": "corporate", "kind": "ClusterIssuer"},
            }
        }
    )
    assert objects_of_kind(issued, "Issuer") == []
    assert {one["spec"]["issuerRef"]["name"] for one in objects_of_kind(issued, "Certificate")} == {
        "corporate"
    }


def test_callers_may_trust_another_issuer_than_the_mesh() -> None:
    issuer = {"name": "public", "kind": "ClusterIssuer"}
    objects = chart(
        {
            "tls": ON,
            "auth": {"tokens": ON},
            "gateway": {**ON, "issuer": issuer, "names": ["mesh.example"]},
        }
    )
    issuers = {
        one["metadata"]["name"]: one["spec"]["issuerRef"]
        for one in objects_of_kind(objects, "Certificate")
    }
    assert [name for name, one in issuers.items() if one == issuer] == ["gateway"]


def installed(values: Mapping[str, Any], *files: str) -> tuple[tuple[Object, ...], str]:
    """The objects and the notes of an installation."""
    objects = template(values, *files)
    with FakeApiServer(
        objects, {}, namespace=NAMESPACE
    ) as address:  # Helm 3 looks whether there is one
        words = (
            "--namespace",
            NAMESPACE,
            "--dry-run=client",
            "--disable-openapi-validation",
            "--kube-apiserver",
            address,
        )
        more = [
            word
            for key, value in values.items()
            for word in ("--set-json", f"{key}={json.dumps(value)}")
        ]
        done = helm(
            "install", "shoal", str(CHART), *words, *more, values=[CHART / file for file in files]
        )
    assert (done.returncode, done.stderr) == (0, "")
    return objects, done.stdout.partition("\nNOTES:\n")[2]


@pytest.mark.parametrize("files", [(), *((f"values/{name}.yaml",) for name in OVERLAYS)])
def test_notes_name_pools_and_a_first_call_with_the_flags_of_the_meshs_tls(
    files: tuple[str, ...],
) -> None:
    objects, notes = installed({}, *files)
    for name, pool in yaml.safe_load(named(objects, "ConfigMap", "pools")["data"]["pools.yaml"])[
        "pools"
    ].items():
        assert f"  {name}: " in notes
        assert f"at most {pool['max_workers']} workers" in notes
    assert f"kubectl -n {NAMESPACE} port-forward service/router 50051" in notes
    has_tls = bool(objects_of_kind(objects, "Certificate"))
    assert ("--tls-ca" in notes) == has_tls
    assert ("in plain text" in notes) == (not has_tls)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"redis": {"auth": {"generate": False}}},
        {"tls": ON, "keda": ON, "auth": {"tokens": ON, "jwt": {**ON, "secret": "keys"}}},
        {"tls": {**ON, "certManager": False}, "keda": ON},
        {
            "tls": {**ON, "certManager": False},
            "gateway": ON,
            "edge": {**ON, "gateway": ON},
            "auth": {"tokens": ON},
            "redis": {"external": {**ON, "secret": "where"}},
        },
    ],
    ids=str,
)
def test_notes_name_the_secrets_that_pods_wait_for(values: Values) -> None:
    objects, notes = installed(values)
    made = {one["metadata"]["name"] for one in objects_of_kind(objects, "Secret")}
    made |= {one["spec"]["secretName"] for one in objects_of_kind(objects, "Certificate")}
    text = json.dumps(objects)
    used = set(re.findall(r'"secretName": "([^"]+)"|"secretKeyRef": {"name": "([^"]+)"', text))
    used |= {
        (target["name"], "")
        for one in objects_of_kind(objects, "TriggerAuthentication")
        for target in one["spec"]["secretTargetRef"]
    }
    used |= {
        (name, "") for name in re.findall(r'"((?:edge-)?gateway-tls|gateway-client-tls)"', text)
    }
    waited = {first or second for first, second in used} - made - {"authority"}
    said = re.findall(r"It needs Secrets that you create \(docs/kubernetes.md\): (.*)\.\n", notes)
    assert set(said[0].split(", ") if said else ()) == waited


def test_links_lead_to_k8s_and_a_package_has_their_targets(tmp_path: Path) -> None:
    links = [path for path in (CHART / "files").iterdir() if path.is_symlink()]
    assert len(links) == 3
    assert all(path.resolve().is_relative_to(K8S) for path in links)
    assert helm("package", str(CHART), "--destination", str(tmp_path)).returncode == 0
    (package,) = tmp_path.glob("*.tgz")
    done = helm(
        "template",
        "shoal",
        str(package),
        "--namespace",
        NAMESPACE,
        "--set",
        "monitoring.alerts.enabled=true",
    )
    packaged = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    assert (
        unlike(
            tuple(objects_of_kind(packaged, "PrometheusRule")),
            tuple(objects_of_kind(rendered("components/alerts"), "PrometheusRule")),
        )
        == []
    )
