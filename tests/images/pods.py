"""Pods as containers: podman runs a workload of k8s/ as a kubelet would.

Each pod has an address on one network, where the names of Services are names of their
pods. User, capabilities, root file system, memory and volumes are the manifest's; `applied` reads
them back from the kernel and from podman.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.images.engine import Engine
from tests.k8s.manifests import Object, matches, mounted, objects_of_kind, port_number, template
from tests.k8s.pods import Node, Pod
from tests.support.waiting import wait_until

NETWORK: Final = "shoal-images"
UNITS: Final = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
SMALL: Final = 1 << 30
"""Folders of at most this size lie in memory, larger ones on the disk."""


def amount(text: str) -> int:
    """Bytes of a Kubernetes quantity such as 512Mi."""
    found = re.fullmatch(r"(\d+)(Ki|Mi|Gi)", text)
    assert found is not None, text
    return int(found[1]) * UNITS[found[2]]


class ContainerPod(Pod):
    """A pod with a container of podman. `image` replaces the manifest's, which no registry has."""

    def __init__(self, node: Node, workload: Object, name: str, engine: Engine, image: str) -> None:
        super().__init__(node, workload, name)
        self.image = image
        self._engine = engine
        node.pods.append(self)

    def _here(self, text: str) -> str:
        """Return the text unchanged: the pod has its addresses and paths."""
        return text

    def start(
        self, more: Mapping[str, str] | None = None, volumes: Sequence[str] = ()
    ) -> ContainerPod:
        """Start the pod and return at once.

        Args:
            more: further variables.
            volumes: further mounts, in podman's form.
        """
        names = [one["metadata"]["name"] for one in self._services()]
        words = [
            "run",
            "--detach",
            "--name",
            self.name,
            "--hostname",
            self.name,
            "--network",
            NETWORK,
        ]
        words += [word for name in names for word in ("--network-alias", name)]
        words += self._confinement()
        for path, volume in mounted(self.workload):
            words += self._volume(path, volume)
        words += [word for volume in volumes for word in ("--volume", volume)]
        for key, value in {**self.environment(), **(more or {})}.items():
            words += ["--env", f"{key}={value}"]
        command: list[str] = self.container.get("command", [])
        if command:
            words += ["--entrypoint", command[0]]
        self._engine.podman(*words, self.image, *command[1:], *self.container.get("args", ()))
        return self

    @property
    def address(self) -> str:
        return str(
            self._engine.inspect(self.name)["NetworkSettings"]["Networks"][NETWORK]["IPAddress"]
        )

    def is_running(self) -> bool:
        return bool(self._engine.inspect(self.name)["State"]["Running"])

    def logs(self) -> str:
        return self._engine.podman("logs", self.name)

    def wait_for(self, kind: str) -> None:
        def answers() -> bool:
            assert self.is_running(), f"{self.name} ended: {self.logs()[-3000:]}"
            return self.probe(kind)

        wait_until(answers, 240.0, f"the {kind} of {self.name}")

    def probe(self, kind: str) -> bool:
        probe = self.container[kind]
        seconds: float = probe.get("timeoutSeconds", 1)
        try:
            if "grpc" in probe:
                return self._serves(probe["grpc"]["port"], probe["grpc"]["service"], seconds)
            port = port_number(self.workload, probe["tcpSocket"]["port"])
            socket.create_connection((self.address, port), seconds).close()
        except (grpc.RpcError, OSError):
            return False
        return True

    def stop(self) -> int:
        """Stop the pod as a kubelet does: the preStop pause, SIGTERM, SIGKILL at the end of the
        grace period. Returns the exit status.
        """
        time.sleep(
            self.container.get("lifecycle", {})
            .get("preStop", {})
            .get("sleep", {})
            .get("seconds", 0)
        )
        self._engine.podman(
            "stop",
            "--time",
            str(int(self.grace_seconds)),
            self.name,
            seconds=self.grace_seconds + 60,
        )
        return int(self._engine.inspect(self.name)["State"]["ExitCode"])

    def kill(self) -> None:
        self._engine.podman("rm", "--force", "--time", "0", "--ignore", self.name)

    def applied(self) -> dict[str, str]:
        """Return the container's restrictions as the kernel and podman report them; `asked` returns
        those of the manifest.
        """
        reported = self._engine.inspect(self.name)
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{reported['State']['Pid']}/status").read_text().splitlines()
            if ":\t" in line
        )
        tree = Path(f"/proc/{reported['State']['Pid']}/mounts").read_text().splitlines()
        (root,) = (line.split()[3] for line in tree if line.split()[1] == "/")
        return {
            "user": f"{status['Uid'].split()[0]}:{status['Gid'].split()[0]}",
            "capabilities": status["CapEff"].strip() if int(status["CapEff"], 16) else "none",
            "new privileges": "no" if status["NoNewPrivs"].strip() == "1" else "yes",
            "seccomp": "filtered" if status["Seccomp"].strip() == "2" else "none",
            "root file system": "read-only" if "ro" in root.split(",") else "writable",
            "memory": f"{reported['HostConfig']['Memory'] >> 20} MiB",
        }

    def asked(self) -> dict[str, str]:
        """The same of the manifest."""
        pod = template(self.workload)["spec"]["securityContext"]
        own = self.container["securityContext"]
        return {
            "user": f"{pod['runAsUser']}:{pod['runAsGroup']}",
            "capabilities": "none" if own["capabilities"] == {"drop": ["ALL"]} else "some",
            "new privileges": "yes" if own["allowPrivilegeEscalation"] else "no",
            "seccomp": "filtered"
            if pod["seccompProfile"] == {"type": "RuntimeDefault"}
            else "none",
            "root file system": "read-only" if own["readOnlyRootFilesystem"] else "writable",
            "memory": f"{amount(self.container['resources']['limits']['memory']) >> 20} MiB",
        }

    def _services(self) -> list[Object]:
        """Return the Services that select this pod."""
        labels = template(self.workload)["metadata"]["labels"]
        return [
            one
            for one in objects_of_kind(self._node.objects, "Service")
            if matches({"matchLabels": one["spec"]["selector"]}, labels)
        ]

    def _confinement(self) -> list[str]:
        pod = template(self.workload)["spec"]["securityContext"]
        own = self.container["securityContext"]
        words = ["--user", f"{pod['runAsUser']}:{pod['runAsGroup']}"]
        words += ["--memory", str(amount(self.container["resources"]["limits"]["memory"]))]
        words += [
            word for name in own["capabilities"]["drop"] for word in ("--cap-drop", name.lower())
        ]
        if own["readOnlyRootFilesystem"]:
            words += ["--read-only", "--read-only-tmpfs=false"]
        if not own["allowPrivilegeEscalation"]:
            words += ["--security-opt", "no-new-privileges"]
        return words

    def _volume(self, path: str, volume: Object) -> list[str]:
        folder = Path(f"{self._folder}{path}")
        group: int = template(self.workload)["spec"]["securityContext"]["fsGroup"]
        size = amount(volume.get("emptyDir", {}).get("sizeLimit", "1024Gi"))
        if "configMap" in volume or "secret" in volume:
            for parent, _, files in os.walk(folder):
                os.chown(parent, 0, group)
                for name in files:
                    os.chown(Path(parent) / name, 0, group)
                    (Path(parent) / name).chmod(volume.get("secret", {}).get("defaultMode", 0o644))
            return ["--volume", f"{folder}:{path}:ro"]
        if size <= SMALL:
            return ["--tmpfs", f"{path}:rw,size={size},mode=1777"]
        os.chown(folder, 0, group)
        folder.chmod(0o2775)
        return ["--volume", f"{folder}:{path}:rw"]

    def _serves(self, port: int, service: str, seconds: float) -> bool:
        with grpc.insecure_channel(f"{self.address}:{port}") as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _image(self) -> dict[str, str]:
        raise AssertionError("an image has its own variables")
