"""The way with containers: a cluster of kind, our images in it, KEDA if it is given, and real
nodes, probes and policies.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import shoal

from services.local.settings import MINILM
from tests.cluster import objects
from tests.cluster.api_server import Refused, kubectl
from tests.cluster.plan import Found, Step
from tests.cluster.progress import Progress
from tests.k8s.manifests import NAMESPACE, ROOT
from tests.support.cluster import lasting_port
from tests.support.waiting import wait_until

NAME: Final = "shoal-check"
TARGETS: Final = ("edge", "router", "scheduler", "worker-cpu")
VERSION: Final = "0.1.0"
MINUTES: Final = 60.0
KEDA: Final = "keda"
MANY: Final = 2
# A first request fetches its model from the hub.
REQUEST_SECONDS: Final = 10 * MINUTES


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of kind, by its kubeconfig."""

    found: Found
    folder: Path

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kind.kubeconfig"

    def create(self) -> None:
        run(
            self.found.kind,
            "create",
            "cluster",
            "--name",
            NAME,
            "--kubeconfig",
            str(self.kubeconfig),
            "--wait",
            "300s",
        )

    def delete(self) -> None:
        run(
            self.found.kind,
            "delete",
            "cluster",
            "--name",
            NAME,
            "--kubeconfig",
            str(self.kubeconfig),
        )

    def load_images(self) -> None:
        """Built from the checkout, for this machine."""
        images = [f"shoal-{target}:{VERSION}" for target in TARGETS]
        for target, image in zip(TARGETS, images, strict=True):
            run(
                self.found.docker,
                "buildx",
                "build",
                "-f",
                "docker/Dockerfile",
                "--target",
                target,
                "-t",
                image,
                "--load",
                ".",
            )
        run(self.found.kind, "load", "docker-image", "--name", NAME, *images)

    def kubectl(self, *arguments: str, documents: str = "") -> str:
        return kubectl(
            self.found.kubectl,
            self.kubeconfig,
            *arguments,
            documents=documents,
            seconds=15 * MINUTES,
        )

    def install_keda(self) -> None:
        self.kubectl("apply", "--server-side", "--filename", self.found.keda_manifest)
        self.kubectl("rollout", "status", "deployment", "--namespace", KEDA, "--timeout=300s")

    def apply(self, *, scaled: bool) -> int:
        """Apply kind-cpu, and its ScaledObject once the schedulers are ready. Return the number of
        objects.
        """
        count = objects.apply(self.kubectl, objects.overlay("kind-cpu"))
        for which in (
            "statefulset/redis",
            "deployment/scheduler",
            "deployment/router",
            "deployment/edge",
            "deployment/worker",
        ):
            self.kubectl("rollout", "status", which, "--namespace", NAMESPACE, "--timeout=600s")
        if scaled:
            (self.folder / "overlay").mkdir()
            self.kubectl("scale", "deployment/worker", "--namespace", NAMESPACE, "--replicas=0")
            count = objects.apply(self.kubectl, objects.scaled_overlay(self.folder / "overlay"))
        return count

    def replicas(self) -> int:
        path = "jsonpath={.spec.replicas}"
        return int(
            self.kubectl("get", "deployment/worker", "--namespace", NAMESPACE, "--output", path)
        )

    @contextmanager
    def router(self) -> Iterator[str]:
        """An address at which the routers can be asked, while the context is open."""
        port = lasting_port()
        options = ["--kubeconfig", str(self.kubeconfig), "--namespace", NAMESPACE]
        command = [self.found.kubectl, *options, "port-forward", "service/router", f"{port}:50051"]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield f"127.0.0.1:{port}"
            finally:
                process.terminate()


def check(
    found: Found, steps: Sequence[Step], folder: Path, progress: Progress, *, keep: bool
) -> bool:
    """Run the steps and return True if all succeeded. The first failure ends them, except for the
    deletion, which `keep` leaves out.
    """
    mine = {step.name: step for step in steps if step.way == "kind"}
    cluster = Cluster(found, folder)
    with ExitStack() as stack:
        if not keep:
            stack.callback(_tried, progress, mine["delete"], cluster.delete)
        acts: dict[str, Callable[[], object]] = {
            "create": cluster.create,
            "images": cluster.load_images,
            "keda": cluster.install_keda,
            "apply kind-cpu": lambda: f"{cluster.apply(scaled='scale' in mine)} objects",
            "request": lambda: request(cluster),
            "scale": lambda: scale(cluster),
        }
        return all(_tried(progress, mine[name], act) for name, act in acts.items() if name in mine)


def request(cluster: Cluster) -> str:
    """One, through a router. With a ScaledObject no worker is there for it, and KEDA brings one."""
    began = time.monotonic()
    with cluster.router() as address, shoal.Client(address) as client:
        dense = client.encode(MINILM, ["Hello, mesh"], timeout=REQUEST_SECONDS).dense
        assert dense is not None
        assert dense.shape == (1, 384)
    return f"answered after {time.monotonic() - began:.1f} s by {cluster.replicas()} workers"


def scale(cluster: Cluster) -> str:
    """Wait for these events: the first request's worker ends, one starts for the next request, a
    second for many, and both end.
    """
    seen = [cluster.replicas()]

    def reached(replicas: int) -> bool:
        if (now := cluster.replicas()) != seen[-1]:
            seen.append(now)
        return now == replicas

    # A scheduler that has just started keeps the workers that it finds for five minutes.
    wait_until(lambda: reached(0), 10 * MINUTES, "no worker")
    with cluster.router() as address, shoal.Client(address) as client:
        end = time.monotonic() + 5 * MINUTES
        while not reached(MANY) and time.monotonic() < end:
            client.encode(
                MINILM,
                [f"text {number} of many" * 40 for number in range(512)],
                timeout=REQUEST_SECONDS,
            )
    assert MANY in seen, f"never {MANY} workers: {seen}"
    wait_until(lambda: reached(0), 5 * MINUTES, "no worker again")
    return " → ".join(map(str, seen))


def run(*command: str) -> None:
    """Run a command. Raises Refused with its output."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ, check=False
    )
    if done.returncode:
        raise Refused(f"{' '.join(command)}: {done.stderr.strip()[-1000:]}")


def _tried(progress: Progress, step: Step, act: Callable[[], object]) -> bool:
    try:
        with progress.step(step) as done:
            done.said = str(act() or "")
    except Exception:  # it was said
        return False
    return True
