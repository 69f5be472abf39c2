"""The pages of docs/operations name existing versions, images, commands, alerts and objects."""

from __future__ import annotations

import re
from typing import Final

import pytest
import yaml

from libs.versions import LAYOUT_VERSION, OLDEST_WIRE_VERSION, WIRE_VERSION
from tests.k8s.manifests import K8S, ROOT, containers, named, rendered, title, workloads

FOLDER: Final = ROOT / "docs/operations"
PAGES: Final = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
RULES: Final = {
    rule["alert"]: rule
    for group in yaml.safe_load((K8S / "components/alerts/rules.yaml").read_text())["spec"][
        "groups"
    ]
    for rule in group["rules"]
}


def commands(page: str) -> str:
    """Return the commands on a page, one per line."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGES[page], re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", PAGES[page])])


def test_navigation_lists_each_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [name for name in PAGES if f"- operations/{name}.md" not in navigation] == []


def test_upgrade_table_has_the_versions_of_the_code() -> None:
    wanted = {
        "WIRE_VERSION": WIRE_VERSION,
        "OLDEST_WIRE_VERSION": OLDEST_WIRE_VERSION,
        "LAYOUT_VERSION": LAYOUT_VERSION,
    }
    found = {
        name: int(number)
        for name, number in re.findall(r"`(\w+_VERSION)` (\d+)", PAGES["upgrading"])
    }
    assert found == wanted


@pytest.mark.parametrize("page", PAGES)
def test_workloads_and_secrets_of_commands_exist(page: str) -> None:
    objects = [*rendered("overlays/eks-g6-spot"), *rendered("components/edge")]
    known = {title(one).lower().replace(" ", "/") for one in workloads(objects)}
    names = re.findall(r"\b((?:deployment|statefulset)/[a-z-]+)\b", commands(page))
    assert [name for name in names if name not in known] == []


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_make_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?m)(?:^|[;&] *)make ([a-z0-9-]+)", commands(page))) <= targets


@pytest.mark.parametrize("page", ["quickstart", *(f"operations/{name}" for name in PAGES)])
def test_mesh_is_installed_with_the_tested_versions(page: str) -> None:
    """Wheels that were downloaded before (--no-index) need no pins."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL)
    for line in "".join(blocks).splitlines():
        if re.search(r"pip (install|download) .*shoal-mesh", line) and "--no-index" not in line:
            assert "--constraint constraints.txt" in line, line


def test_air_gapped_list_has_every_image_that_is_run() -> None:
    objects = [*rendered("base"), *rendered("components/edge"), *rendered("components/gpu-l4")]
    images = {
        container["image"] for workload in workloads(objects) for container in containers(workload)
    }
    images |= set(re.findall(r"image: (\S+)", (K8S / "model-folder/folder.yaml").read_text()))
    section = PAGES["air-gapped"]
    table = section[section.index("## Images") : section.index("On a machine with the internet")]
    others = {
        "docker/Dockerfile",
        "external-redis",
        "redis-sentinel",
        "redis-cluster",
        "k8s/model-folder",
    }
    listed = set(re.findall(r"`([a-z0-9./-]+(?::[\w.-]+)?)`", table)) - others
    assert listed == {
        image.removesuffix(":0.1.0") if image.startswith("shoal-") else image for image in images
    }


def test_loops_of_the_air_gapped_guide_transfer_every_image() -> None:
    loops = re.findall(r"for target in (.*?); do", PAGES["air-gapped"])
    assert loops == ["edge router scheduler worker-cuda"] * 2


def test_compose_commands_name_the_file_and_its_profiles() -> None:
    lines = [
        line
        for line in commands("single-machine").splitlines()
        if line.startswith("docker compose ")
    ]
    assert lines
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    profiles = {
        name for service in compose["services"].values() for name in service.get("profiles", ())
    }
    for line in lines:
        assert line.startswith("docker compose -f docker/compose.yaml ")
        assert set(re.findall(r"--profile (\w+)", line)) <= profiles


@pytest.mark.parametrize("name", [name for name in RULES if "BudgetBurns" in name])
def test_objectives_page_has_windows_and_factor_of_each_alert(name: str) -> None:
    (row,) = (line for line in PAGES["slo"].splitlines() if f"[{name}]" in line)
    _, _, windows, factor, _, severity, _ = (cell.strip() for cell in row.split("|"))
    expression, labels = RULES[name]["expr"], RULES[name]["labels"]
    assert set(re.findall(r"\[(\w+)\]", expression)) == set(windows.split(", "))
    assert set(re.findall(r"> ([\d.]+) \* ", expression)) == {factor}
    assert severity.partition(":")[0] == labels["severity"]
    assert re.search(r"> [\d.]+ \* (0\.001|0\.01)\b", expression)


def test_route_to_several_meshes_names_a_service_and_a_gateway() -> None:
    (written,) = re.findall(r"```yaml\n(.*?)```", PAGES["several-meshes"], re.DOTALL)
    route = yaml.safe_load(written)
    objects = rendered("components/edge-gateway")
    assert {key: route[key] for key in ("apiVersion", "kind")} == {
        key: named(objects, "HTTPRoute", "edge")[key] for key in ("apiVersion", "kind")
    }
    (parent,) = route["spec"]["parentRefs"]
    assert named(objects, "Gateway", parent["name"])
    first, second = route["spec"]["rules"][0]["backendRefs"]
    ports = [one["port"] for one in named(objects, "Service", first["name"])["spec"]["ports"]]
    assert ports == [first["port"]] == [second["port"]]
