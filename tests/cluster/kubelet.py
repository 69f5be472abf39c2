"""`FakeKubelet`: Deployments and StatefulSets of an API server as processes of this machine
(tests/k8s/pods.py), and their status.

Replaces the controllers that make pods, and a kubelet: they cannot run here without containers.
Everything that it starts is read from the API server, with the server's defaults.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tests.cluster.api_server import MERGE, ApiServer
from tests.k8s.manifests import NAMESPACE, Object, component, named, objects_of_kind
from tests.k8s.pods import Node, Pod

KINDS: Final = (
    "configmaps",
    "secrets",
    "services",
    "serviceaccounts",
    "deployments",
    "statefulsets",
)
BEFORE: Final = ("redis", "router", "scheduler")
"""Components in the order in which processes of a machine without a resolver must start: who is
called before who calls.
"""
LOOK_SECONDS: Final = 0.2


def deployment_path(deployment: str) -> str:
    return f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{deployment}"


class Scale:
    """The scale subresource of a Deployment, which is what KEDA and an HPA read and write."""

    def __init__(self, server: ApiServer, deployment: str) -> None:
        self._server = server
        self._path = f"{deployment_path(deployment)}/scale"

    @property
    def replicas(self) -> int:
        found: int = self._server.request("GET", self._path)["spec"].get("replicas", 0)
        return found

    def scale(self, replicas: int) -> None:
        self._server.request("PATCH", self._path, {"spec": {"replicas": replicas}}, MERGE)


class FakeKubelet:
    """Runs pods while its context is open: those of BEFORE from the start, and of the Deployment
    `scaled` the number of its spec.

    `more`: further variables of its pods.
    """

    def __init__(
        self, server: ApiServer, folder: Path, scaled: str, more: Mapping[str, str]
    ) -> None:
        self._server = server
        self._scaled = scaled
        self._more = more
        self.node = Node(folder, server.objects(*KINDS))
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        self._leaving: list[threading.Thread] = []
        # The state.
        self._pods: list[Pod] = []
        self.statuses: list[int] = []
        """Exit statuses of the pods that were scaled in."""
        self.started_at = 0.0
        """The time at which those of BEFORE were ready, by the monotonic clock."""
        self.most_ready = 0
        """Maximum number of ready pods of the scaled Deployment at one time."""
        self.failure: Exception | None = None

    def __enter__(self) -> FakeKubelet:
        self.node.__enter__()
        try:
            for which in BEFORE:
                for pod in [
                    pod for workload in self._workloads(which) for pod in self._replicas(workload)
                ]:
                    pod.start().wait_ready()
        except BaseException as error:
            self.node.__exit__(type(error), error, None)
            raise
        self.started_at = time.monotonic()
        self._keeper.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._keeper.join()
        for thread in self._leaving:
            thread.join()
        self.node.__exit__(kind, error, trace)

    @property
    def running(self) -> int:
        """Pods of the scaled Deployment, those that are ending included."""
        return len(self._pods) + sum(thread.is_alive() for thread in self._leaving)

    def address(self, service: str, port: int) -> str:
        (found,) = self.node.addresses(service, port)
        return found

    def _workloads(self, which: str) -> list[Object]:
        return [
            one
            for one in objects_of_kind(self.node.objects, "Deployment", "StatefulSet")
            if component(one) == which
        ]

    def _replicas(self, workload: Object) -> list[Pod]:
        return [self.node.pod(workload) for _ in range(workload["spec"]["replicas"])]

    def _keep(self) -> None:
        try:
            while not self._stop.wait(LOOK_SECONDS):
                self._reconcile(self._server.request("GET", deployment_path(self._scaled)))
        except Exception as failure:  # the main thread looks at it
            self.failure = failure

    def _reconcile(self, deployment: Mapping[str, Any]) -> None:
        wanted = deployment["spec"].get("replicas", 0)
        workload = named(self.node.objects, "Deployment", self._scaled)
        while len(self._pods) < wanted:
            self._pods.append(self.node.pod(workload).start(self._more))
        while len(self._pods) > wanted:
            self._leaving.append(threading.Thread(target=self._end, args=(self._pods.pop(0),)))
            self._leaving[-1].start()
        ready = sum(pod.probe("readinessProbe") for pod in self._pods)
        self.most_ready = max(self.most_ready, ready)
        status = {
            "replicas": len(self._pods),
            "readyReplicas": ready,
            "observedGeneration": deployment["metadata"]["generation"],
        }
        if {key: deployment.get("status", {}).get(key, 0) for key in status} != status:
            self._server.request(
                "PATCH", f"{deployment_path(self._scaled)}/status", {"status": status}, MERGE
            )

    def _end(self, pod: Pod) -> None:
        self.statuses.append(pod.stop())
