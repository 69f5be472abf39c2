"""The commands of docs/deploy-*.md install releases that work with k8s/, as far as can be checked
without a cluster.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.k8s.charts import CHART, template
from tests.k8s.manifests import (
    K8S,
    ROOT,
    TOGETHER,
    Object,
    build,
    containers,
    matches,
    named,
    objects_of_kind,
    rendered,
    title,
    workloads,
)

GUIDES: Mapping[str, tuple[str, ...]] = {
    "deploy-aws": ("overlays/eks-g6-spot", "overlays/eks-p5"),
    "deploy-gcp": ("overlays/gke-l4-spot", "overlays/gke-h100"),
}
SELECTED: Mapping[str, str] = {
    "PodMonitor": "prometheus.prometheusSpec.podMonitorSelectorNilUsesHelmValues",
    "PrometheusRule": "prometheus.prometheusSpec.ruleSelectorNilUsesHelmValues",
}
"""The value of kube-prometheus-stack that makes its Prometheus take all objects of the kind. Else
it takes those of its release.
"""

PROGRAMS: Mapping[str, str] = {
    "aws": "AWS CLI",
    "docker": "Docker",
    "gcloud": "gcloud",
    "git": "git",
    "curl": "curl",
    "helm": "Helm",
    "kubectl": "kubectl",
    "openssl": "openssl",
    "shoal": "shoal",
    "terraform": "Terraform",
}
"""Programs of the guides' commands, with the word by which the prerequisites name them."""


@dataclass(frozen=True)
class Release:
    """A `helm upgrade --install` of a guide."""

    name: str
    chart: str
    namespace: str
    values: Mapping[str, str]


def releases(guide: str) -> list[Release]:
    """Return the releases in the order in which the guide installs them."""
    text = (ROOT / f"docs/{guide}.md").read_text().replace("\\\n", " ")
    return [
        _release(line) for line in text.splitlines() if line.startswith("helm upgrade --install")
    ]


def _release(line: str) -> Release:
    words = shlex.split(line)
    values = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    return Release(
        name=words[3],
        chart=words[4].rpartition("/")[2],
        namespace=words[words.index("--namespace") + 1],
        values={key: value for key, _, value in (one.partition("=") for one in values)},
    )


def selector(prometheus: Release, kind: str) -> Object:
    """Return the selector for objects of a kind that the chart's Prometheus takes: all, or those
    with the label of its release.
    """
    return (
        {}
        if prometheus.values.get(SELECTED[kind]) == "false"
        else {"matchLabels": {"release": prometheus.name}}
    )


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("kind", SELECTED)
def test_prometheus_of_the_guides_selects_our_objects(guide: str, kind: str) -> None:
    (prometheus,) = (one for one in releases(guide) if one.chart == "kube-prometheus-stack")
    for overlay in GUIDES[guide]:
        ours = objects_of_kind(rendered(overlay), kind)
        assert ours
        for one in ours:
            assert matches(selector(prometheus, kind), one["metadata"].get("labels", {})), (
                f"{title(one)} of {overlay}"
            )


def test_overlay_that_opens_a_mesh_builds_and_opens_it(tmp_path: Path) -> None:
    page = (ROOT / "docs/kubernetes.md").read_text()
    (written,) = re.findall(
        r"```yaml\n(components:.*?)```", page[page.index("## Access to the routers") :], re.DOTALL
    )
    document = yaml.safe_load(written)
    components = [one.removeprefix("../../") for one in document["components"]]
    objects = build(
        tmp_path, resources=["base"], components=components, patches=document["patches"]
    )
    assert "mesh.example" in named(objects, "Certificate", "router")["spec"]["dnsNames"]
    service = named(objects, "Service", "router-external")
    assert "networking.gke.io/load-balancer-type" not in service["metadata"]["annotations"]
    *_, rule = named(objects, "NetworkPolicy", "router")["spec"]["ingress"]
    assert [each["ipBlock"]["cidr"] for each in rule["from"]] == service["spec"][
        "loadBalancerSourceRanges"
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("edge-gateway", "external-redis", "gateway", "jwks", "load-balancer"),
        *("redis-cluster", "redis-sentinel"),
    ],
)
def test_patches_at_the_head_of_a_component_can_be_built(name: str, tmp_path: Path) -> None:
    head = (K8S / f"components/{name}/kustomization.yaml").read_text().partition("\napiVersion:")[0]
    (written,) = re.findall(r"^#   (patches:\n(?:#   .*\n?)+)", head, re.MULTILINE)
    patches = yaml.safe_load(re.sub(r"^#   ", "", written, flags=re.MULTILINE))["patches"]
    components = [f"components/{one}" for one in (*TOGETHER.get(name, ("tls",)), name)]
    before = build(tmp_path, resources=["base"], components=components)
    (tmp_path / "patched").mkdir()
    after = build(tmp_path / "patched", resources=["base"], components=components, patches=patches)
    assert sum(one not in before for one in after) >= len(patches)


@pytest.mark.parametrize("guide", GUIDES)
def test_operators_live_where_policies_and_settings_look_for_them(guide: str) -> None:
    """KEDA and Prometheus by the namespaces of the network policies."""
    where = {one.chart: one.namespace for one in releases(guide)}
    for overlay in GUIDES[guide]:
        policies = objects_of_kind(rendered(overlay), "NetworkPolicy")
        for policy, chart in (("scheduler", "keda"), ("metrics", "kube-prometheus-stack")):
            (peer, *_) = named(policies, "NetworkPolicy", policy)["spec"]["ingress"][0]["from"]
            assert peer["namespaceSelector"]["matchLabels"] == {
                "kubernetes.io/metadata.name": where[chart]
            }


@pytest.mark.parametrize("guide", GUIDES)
def test_prometheus_hears_of_certificates(guide: str) -> None:
    """The PodMonitor of cert-manager needs the definition from Prometheus' chart, which is
    therefore installed first.
    """
    found = releases(guide)
    charts = [one.chart for one in found]
    (certificates,) = (one for one in found if one.chart == "cert-manager")
    assert certificates.values["prometheus.podmonitor.enabled"] == "true"
    assert charts.index("kube-prometheus-stack") < charts.index("cert-manager")


@pytest.mark.parametrize("guide", GUIDES)
def test_chart_values_of_a_guide_render_its_overlay(guide: str, tmp_path: Path) -> None:
    text = _as_a_shell_would((ROOT / f"docs/{guide}.md").read_text())
    (values,) = re.findall(r"cat > mesh.yaml <<END\n(.*?)END\n", text, re.DOTALL)
    (overlay,) = re.findall(r"cat > mesh/kustomization.yaml <<END\n(.*?)END\n", text, re.DOTALL)
    (release,) = (
        one for one in text.splitlines() if one.startswith("helm upgrade --install shoal ")
    )
    words = shlex.split(release)
    assert (ROOT / words[4]).samefile(CHART)
    files = [words[place + 1] for place, word in enumerate(words) if word == "--values"]
    assert files[1:] == ["mesh.yaml"]
    ours = template(yaml.safe_load(values), str(Path(files[0]).relative_to("charts/shoal")))
    document = yaml.safe_load(overlay)
    places = {key: [one.removeprefix("../k8s/") for one in document[key]] for key in ("resources",)}
    theirs = build(tmp_path, **{**document, **places})
    assert _images(ours) == _images(theirs)
    settings = [
        one["data"]
        for one in objects_of_kind(theirs, "ConfigMap")
        if one["metadata"]["name"].startswith("worker-env-")
    ]
    assert [named(ours, "ConfigMap", "worker-env")["data"]] == settings
    assert objects_of_kind(ours, "Secret") == [], "they are those that the guide has made before"


def _as_a_shell_would(text: str) -> str:
    for name, value in {
        "REGISTRY": "registry.mine/shoal",
        "STORE": "s3://models",
        "TAG": "0123456",
    }.items():
        text = text.replace(f"${name}", value)
    return text


def _images(objects: tuple[Object, ...]) -> set[str]:
    return {
        container["image"] for workload in workloads(objects) for container in containers(workload)
    }


def test_values_of_the_page_are_taken() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text()
    (written,) = re.findall(
        r"```yaml\n(.*?)```",
        page[page.index("## With Helm") : page.index("## Probes and shutdown of pods")],
        re.DOTALL,
    )
    objects = template(yaml.safe_load(written), "values/gke-l4-spot.yaml")
    assert [one["metadata"]["name"] for one in objects_of_kind(objects, "ScaledObject")] == [
        "worker",
        "worker-h100",
    ]


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_push_each_image_that_their_overlay_runs(guide: str) -> None:
    """The guide's loop builds the overlay's images, and Terraform makes a repository for each."""
    text = (ROOT / f"docs/{guide}.md").read_text()
    (targets,) = re.findall(r"for target in (.*?); do", text)
    overlay, _ = GUIDES[guide]
    images = {
        name.partition(":")[0].rpartition("/")[2]
        for name in _images(rendered(overlay))
        if "shoal/" in name
    }
    assert set(targets.split()) == images
    assert "edge" in images, "the guide ends with a request over HTTP"
    for target in targets.split():
        assert f"$REGISTRY/{target}, newTag" in text


@pytest.mark.parametrize("page", [*GUIDES, "kubernetes"])
def test_namespace_has_its_label_before_helm_installs(page: str) -> None:
    """The chart makes no namespace; in Kustomize's base it has the label."""
    text = (ROOT / f"docs/{page}.md").read_text()
    labels = named(rendered("base"), "Namespace", "shoal")["metadata"]["labels"]
    name = "pod-security.kubernetes.io/enforce"
    assert f"{name}={labels[name]}" in text[: text.index("helm upgrade --install shoal ")]


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_wait_before_they_forward_a_port(guide: str) -> None:
    text = (ROOT / f"docs/{guide}.md").read_text()
    first = text.index("port-forward")
    assert re.search(
        r"kubectl -n shoal wait --for=condition=Available .*deployment/router deployment/edge",
        text[:first],
    )


@pytest.mark.parametrize("page", [*GUIDES, "kubernetes"])
def test_requests_over_http_wait_for_the_port_that_is_forwarded(page: str) -> None:
    """A request that follows at once fails: kubectl takes a second to listen. `shoal` waits."""
    text = (ROOT / f"docs/{page}.md").read_text()
    forwarded = text[text.index("port-forward service/edge") :].splitlines()
    assert re.match(r"curl .*--retry 5 --retry-connrefused ", forwarded[1])


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_read_terraform_outputs_that_exist_where_they_are(guide: str) -> None:
    """Step 1 ends with the return to the repository, so later steps name the example's folder."""
    text = (ROOT / f"docs/{guide}.md").read_text()
    first, _, later = text.partition("cd ../../..")
    (example,) = re.findall(r"cd (terraform/examples/\S+)", first)
    read = {(example, name) for name in re.findall(r"terraform output (?:-raw )?(\w+)", first)}
    assert not re.search(r"terraform output ", later)
    read.update(re.findall(r"terraform -chdir=(\S+) output (?:-raw )?(\w+)", later))
    assert len(read) > 3
    for folder, name in read:
        assert f'output "{name}"' in (ROOT / folder / "outputs.tf").read_text(), (folder, name)


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_list_their_prerequisites_before_the_first_step(guide: str) -> None:
    """Each program that a command of the guide starts is named there, or is a part of every
    shell.
    """
    text = (ROOT / f"docs/{guide}.md").read_text()
    head = text[: text.index("## 1.")]
    commands = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    for program, name in PROGRAMS.items():
        if re.search(rf"(?m)(?:^|[|(;&] *){re.escape(program)} ", commands):
            assert re.search(rf"\b{re.escape(name)}\b", head), program
    assert "## What has been run where" in head
