"""The overlay kind-cpu without kind: its pods as processes, probed, asked, scaled and drained as a
kubelet and KEDA would.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import shoal

from services.local.settings import MINILM, packaged_minilm
from tests.k8s.manifests import Object, named, port_number, rendered
from tests.k8s.pods import Node, Pod
from tests.support.waiting import wait_until


@dataclass
class Mesh:
    """One pod of each; tests may replace one by another of the same workload."""

    node: Node
    router: Pod
    scheduler: Pod
    worker: Pod
    edge: Pod

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.router.ports[50051]}"


def start_worker(pod: Pod) -> None:
    """Start a worker with a model on its disk, because no hub can be reached here."""
    pod.start({"SHOAL_MODELS": f"{MINILM}={packaged_minilm()}", "HF_HUB_OFFLINE": "1"}).wait_ready()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    objects = rendered("overlays/kind-cpu")

    def workload(name: str) -> Object:
        return named(objects, "StatefulSet" if name == "redis" else "Deployment", name)

    with Node(tmp_path_factory.mktemp("node"), objects) as node:
        redis = node.pod(workload("redis")).start()
        redis.wait_ready()
        router = node.pod(workload("router")).start()
        scheduler = node.pod(workload("scheduler")).start()
        router.wait_ready()
        scheduler.wait_ready()
        worker = node.pod(workload("worker"))
        start_worker(worker)
        edge = node.pod(workload("edge")).start()
        edge.wait_ready()
        yield Mesh(node, router, scheduler, worker, edge)


def test_text_is_encoded(mesh: Mesh) -> None:
    with shoal.Client(mesh.address) as client:
        vectors = client.encode(MINILM, ["Hello, mesh", "Hello, mesh"]).dense
    assert vectors is not None
    assert vectors.shape == (2, 384)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)


def test_text_is_encoded_over_http(mesh: Mesh) -> None:
    url = f"http://127.0.0.1:{mesh.edge.ports[8080]}/v1/embeddings"
    request = urllib.request.Request(
        url, json.dumps({"model": MINILM, "input": "Hello, mesh"}).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        (found,) = json.load(answer)["data"]
    assert len(found["embedding"]) == 384


def test_prometheus_scrapes_every_annotated_pod(mesh: Mesh) -> None:
    for pod in (mesh.router, mesh.scheduler, mesh.worker, mesh.edge):
        port = pod.ports[port_number(pod.workload, "metrics")]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            assert b"# TYPE shoal_" in answer.read()


def test_second_worker_joins_and_the_first_one_drains(mesh: Mesh) -> None:
    """Scale to two workers, then back to one, under traffic: no request fails, and the worker ends
    by itself within its grace period.
    """
    with shoal.Client(mesh.address) as client:
        second = mesh.node.pod(mesh.worker.workload)
        start_worker(second)
        wait_until(lambda: len(client.mesh().workers) == 2, 120, "both workers to be seen")
        over = threading.Event()
        failures: list[Exception] = []
        asked = 0

        def ask() -> None:
            nonlocal asked
            while not over.is_set():
                try:
                    client.encode(MINILM, [f"text {asked}"])
                except shoal.ShoalError as error:
                    failures.append(error)
                    return
                asked += 1

        asker = threading.Thread(target=ask)
        asker.start()
        wait_until(lambda: asked > 5 or bool(failures), 120, "answers")
        status = mesh.worker.stop()
        answered = asked
        wait_until(
            lambda: asked > answered + 5 or bool(failures), 120, "answers of the second worker"
        )
        over.set()
        asker.join()
        assert (status, failures) == (0, [])
        wait_until(lambda: len(client.mesh().workers) == 1, 120, "the first worker to be forgotten")
        mesh.worker = second


@pytest.mark.parametrize("name", ["scheduler", "router", "edge"])
def test_further_pod_joins_and_ends_in_order(mesh: Mesh, name: str) -> None:
    first: Pod = getattr(mesh, name)
    pod = mesh.node.pod(first.workload).start()
    pod.wait_ready()
    assert pod.stop() == 0
    assert not pod.probe("livenessProbe")
    assert first.probe("readinessProbe")
