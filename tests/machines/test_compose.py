"""docker/compose.yaml against the images, settings and manifests that exist; its services run as
processes of this machine.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final

import pytest
import yaml

from services.local.redis_server import find_redis_server
from services.local.settings import MINILM, packaged_minilm
from tests.k8s import dockerfile
from tests.k8s.manifests import ROOT, component, containers, named, rendered, template, workloads
from tests.k8s.test_settings import SETTINGS, declared
from tests.support.cluster import lasting_port
from tests.support.waiting import wait_until

FILE: Final = ROOT / "docker/compose.yaml"
TRITON_CACHE: Final = "TRITON_CACHE_DIR"
"""Read by Triton, not by a worker's settings."""
Service = dict[str, Any]
SERVICES: Final[Mapping[str, Service]] = yaml.safe_load(FILE.read_text())["services"]
OURS: Final = {name: one for name, one in SERVICES.items() if one["image"].startswith("shoal-")}


def role_of(service: Service) -> str:
    """Return a service: edge, router, scheduler or worker."""
    return str(service["build"]["target"].partition("-")[0])


def as_shell(text: str, environ: Mapping[str, str]) -> str:
    """Replace `${NAME-default}` and `${NAME:-default}` as Compose does."""
    return re.sub(r"\$\{(\w+):?-([^}]*)\}", lambda match: environ.get(match[1], match[2]), text)


def test_images_are_built_from_the_targets_of_the_dockerfile() -> None:
    for name, one in OURS.items():
        target = one["build"]["target"]
        assert one["image"].partition(":")[0] == f"shoal-{target}", name
        assert (FILE.parent / one["build"]["context"] / one["build"]["dockerfile"]).samefile(
            dockerfile.FILE
        )
    assert {one["build"]["target"] for one in OURS.values()} == set(dockerfile.TARGETS)


def test_images_have_the_tags_of_the_manifests() -> None:
    objects = [*rendered("base"), *rendered("components/edge"), *rendered("components/gpu-l4")]
    images = {
        container["image"] for workload in workloads(objects) for container in containers(workload)
    }
    assert {one["image"] for one in SERVICES.values()} == images


@pytest.mark.parametrize("name", OURS)
def test_services_read_each_setting_and_take_it(name: str) -> None:
    role = role_of(OURS[name])
    variables = {key: as_shell(value, {}) for key, value in OURS[name]["environment"].items()}
    assert set(variables) <= declared(role) | ({TRITON_CACHE} if role == "worker" else set())
    if role == "worker":
        assert variables[TRITON_CACHE] == f"{variables['SHOAL_STORE_DIR']}/triton"
    settings = SETTINGS[role].from_env(
        variables | dockerfile.variables(OURS[name]["build"]["target"])
    )
    assert settings.metrics_address


def test_services_stop_within_the_grace_of_their_pods() -> None:
    objects = [*rendered("base"), *rendered("components/edge")]
    seconds = {
        component(one): template(one)["spec"]["terminationGracePeriodSeconds"]
        for one in workloads(objects)
    }
    for name, one in SERVICES.items():
        if name != "folders":
            role = "redis" if name == "redis" else role_of(one)
            assert one["stop_grace_period"] == f"{seconds[role]}s", name


def test_nothing_is_published_beyond_this_machine() -> None:
    published = {name: one["ports"] for name, one in SERVICES.items() if "ports" in one}
    assert published == {"router": ["127.0.0.1:50051:50051"], "edge": ["127.0.0.1:8080:8080"]}
    for name, ports in published.items():
        for port in ports:
            assert port.rpartition(":")[2] in dockerfile.last(name, "EXPOSE").split()


def test_redis_keeps_queued_work_as_in_the_cluster() -> None:
    words = SERVICES["redis"]["command"][1:]
    given = dict(zip(words[::2], words[1::2], strict=True))
    config = named(rendered("base"), "ConfigMap", next(
        one["metadata"]["name"] for one in rendered("base")
        if one["kind"] == "ConfigMap" and "redis.conf" in one.get("data", {})
    ))["data"]["redis.conf"]  # fmt: skip
    for key, value in given.items():
        assert re.search(rf'^{key[2:]} "?{re.escape(value)}"?$', config, re.MULTILINE), key


def test_each_profile_has_one_worker_and_the_gpu_is_for_its_own() -> None:
    profiles = {name: one["profiles"] for name, one in SERVICES.items() if "profiles" in one}
    assert profiles == {"worker-cpu": ["cpu"], "worker-gpu": ["gpu"]}
    (device,) = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert SERVICES["worker-gpu"]["environment"]["SHOAL_DEVICE"] == "cuda"


def test_containers_write_only_where_a_volume_is() -> None:
    for name, one in SERVICES.items():
        assert one["cap_drop"] == ["ALL"], name
        assert name == "folders" or one["read_only"] is True, name


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The services of the profile `cpu` as processes; yields the address of the edge."""
    folder = tmp_path_factory.mktemp("compose")
    (folder / "models" / MINILM).parent.mkdir(parents=True)
    model = packaged_minilm()
    assert model is not None
    (folder / "models" / MINILM).symlink_to(model)
    (folder / "data").mkdir()
    ports: dict[str, int] = {}

    def port_of(host: str, port: str) -> str:
        return f"127.0.0.1:{ports.setdefault(f'{host}:{port}', lasting_port())}"

    def here(service: str, text: str) -> str:
        text = text.replace("/models", f"{folder}/models").replace(
            "/var/cache/shoal", f"{folder}/store"
        )
        text = re.sub(
            rf"\b({'|'.join(SERVICES)}):(\d+)", lambda found: port_of(found[1], found[2]), text
        )
        return re.sub(r"0\.0\.0\.0:(\d+)", lambda found: port_of(service, found[1]), text)

    with ExitStack() as stack:

        def start(name: str, command: list[str], variables: Mapping[str, str]) -> None:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            environ = {
                "PATH": os.environ["PATH"],
                "PYTHONPATH": f"{ROOT}:{ROOT / 'libs/api'}",
                **variables,
            }
            process = subprocess.Popen(command, env=environ, cwd=folder, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        words = [
            word.replace("/data", f"{folder}/data") for word in SERVICES["redis"]["command"][1:]
        ]
        port = port_of("redis", "6379").rpartition(":")[2]
        start(
            "redis", [str(find_redis_server()), *words, "--bind", "127.0.0.1", "--port", port], {}
        )
        for name in ("router", "scheduler", "worker-cpu", "edge"):
            given = {
                key: here(name, as_shell(value, {"SHOAL_STORES": ""}))
                for key, value in OURS[name]["environment"].items()
            }
            start(
                name,
                [sys.executable, *dockerfile.entrypoint(OURS[name]["build"]["target"])[1:]],
                given,
            )
        yield f"http://{port_of('edge', '8080')}"


def test_services_of_the_cpu_profile_answer_a_request(http: str) -> None:
    body = json.dumps({"model": MINILM, "input": "Hello, mesh"}).encode()
    found: list[int] = []

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{http}/v1/embeddings", body, timeout=120) as answer:
                found.append(len(json.load(answer)["data"][0]["embedding"]))
        except OSError:
            return False
        return True

    wait_until(answers, 240.0, "an answer over HTTP")
    assert found == [384]
