"""Pods as processes of this machine: the same command, variables, files, ports and probes, without
a cluster.

A `Node` has folders for volumes, and ports of loopback for those of pods. Only paths of volumes and
addresses (0.0.0.0:port and those of Services) are rewritten. The code is that which the image's
stage of docker/Dockerfile copies.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.queue.connection.acl import acl_file
from services.local.redis_server import find_redis_server
from tests.k8s import dockerfile
from tests.k8s.manifests import (
    Object,
    component,
    containers,
    environment,
    matches,
    mounted,
    named,
    objects_of_kind,
    port_number,
    template,
    title,
)
from tests.support.certificates import Certificates, Issuer
from tests.support.cluster import lasting_port
from tests.support.waiting import wait_until

CREDENTIALS: Final[Mapping[str, Mapping[str, str]]] = {
    "tokens": {
        "tokens.yaml": "tokens: "
        f"[{{sha256: {'a' * 64}, subject: search, role: client, tenant: search}}]"
    },
    "jwks": {"jwks.json": json.dumps({"keys": [Issuer.make().jwk()]})},
}
PASSWORDS: Final = {"redis-router": "a router's", "redis-scheduler": "a scheduler's"}

MIN_PROBE_SECONDS: Final = 30.0
"""The minimum time for the answer to a probe. A kubelet repeats a probe before it acts; tests ask
once.
"""


class Node:
    """The machine on which pods of `objects` run. Leaving the context kills those still running."""

    def __init__(self, folder: Path, objects: Sequence[Object]) -> None:
        self.folder = folder
        self.objects = objects
        self.pods: list[Pod] = []
        self._certificates: Certificates | None = None

    def pod(self, workload: Object) -> Pod:
        """One more of the workload, not started."""
        pod = Pod(self, workload, f"{workload['metadata']['name']}-{len(self.pods)}")
        self.pods.append(pod)
        return pod

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pod in reversed(self.pods):
            pod.kill()
            if kind is not None and pod.log.exists():
                print(f"--- {pod.name}\n{pod.log.read_text()[-4000:]}")

    def addresses(self, service: str, port: int) -> list[str]:
        """Return the addresses of a Service's pods, for one of its ports."""
        spec = named(self.objects, "Service", service)["spec"]
        (target,) = (one["targetPort"] for one in spec["ports"] if one["port"] == port)
        selector = {"matchLabels": spec["selector"]}
        chosen = [
            pod
            for pod in self.pods
            if matches(selector, template(pod.workload)["metadata"]["labels"])
        ]
        return [f"127.0.0.1:{pod.ports[port_number(pod.workload, target)]}" for pod in chosen]

    def secret(self, name: str) -> Mapping[str, str | bytes]:
        """Return a Secret of the manifests, or one that cert-manager or an operator creates."""
        for one in objects_of_kind(self.objects, "Secret"):
            if one["metadata"]["name"] == name:
                return {key: base64.b64decode(value) for key, value in one["data"].items()}
        if name == "redis-users":
            return {
                "users.acl": acl_file(
                    router=PASSWORDS["redis-router"],
                    scheduler=PASSWORDS["redis-scheduler"],
                    admin=None,
                )
            }
        if name in PASSWORDS:
            return {"password": PASSWORDS[name]}
        if name in ("tokens", "jwks"):
            return CREDENTIALS[name]
        if self._certificates is None:
            self._certificates = Certificates(self.folder / "certificates")
        made = self._certificates.issue(name.removesuffix("-tls"))
        files = {"ca.crt": self._certificates.ca, "tls.crt": made.certificate, "tls.key": made.key}
        return {key: file.read_bytes() for key, file in files.items()}


class Pod:
    """A pod with one container, as all our pods have."""

    def __init__(self, node: Node, workload: Object, name: str) -> None:
        self.workload = workload
        self.name = name
        (self.container,) = containers(workload)
        self.ports = {port["containerPort"]: lasting_port() for port in self.container["ports"]}
        self.grace_seconds: float = template(workload)["spec"]["terminationGracePeriodSeconds"]
        self._node = node
        self._folder = node.folder / name
        self._paths = sorted((path for path, _ in mounted(workload)), key=len, reverse=True)
        self._process: subprocess.Popen[bytes] | None = None
        for path, volume in mounted(workload):
            self._mount(path, volume)

    @property
    def log(self) -> Path:
        return self._folder / "log"

    def environment(self) -> dict[str, str]:
        """Return the container's variables, without those of this process."""
        found = environment(self._node.objects, self.container)
        return {
            key: self._here(value) if isinstance(value, str) else self._known(value)
            for key, value in found.items()
        }

    def remount(self, path: str) -> None:
        """Replace the folder's files atomically, as a kubelet does after a Secret has changed."""
        _publish(
            Path(f"{self._folder}{path}"),
            self._node.secret(dict(mounted(self.workload))[path]["secret"]["secretName"]),
        )

    def start(self, more: Mapping[str, str] | None = None) -> Pod:
        """Start the pod and return at once. `more` adds variables."""
        image = self._image()
        variables = {"PATH": os.environ["PATH"], **image, **self.environment(), **(more or {})}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), env=variables, cwd=self._folder, stdout=log, stderr=log
            )
        return self

    def wait_ready(self) -> None:
        """Wait as a kubelet does: first for the startup probe, then for the others."""
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            self.wait_for(kind)

    def wait_for(self, kind: str) -> None:
        """Wait until a probe succeeds. The time bounds a hang: a start takes longer where other
        tests use the cores.
        """

        def answers() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, (
                f"{self.name} ended: {self.log.read_text()[-2000:]}"
            )
            return self.probe(kind)

        wait_until(answers, 240.0, f"the {kind} of {self.name}")

    def probe(self, kind: str) -> bool:
        """Return True if the container's probe succeeds, on a machine that is busier than a
        node.
        """
        probe = self.container[kind]
        seconds: float = max(MIN_PROBE_SECONDS, probe.get("timeoutSeconds", 1))
        try:
            if "grpc" in probe:
                return self._serves(probe["grpc"]["port"], probe["grpc"]["service"], seconds)
            if "exec" in probe:
                command = [self._here(word) for word in probe["exec"]["command"]]
                return subprocess.run(command, timeout=seconds, check=False).returncode == 0
            port = self.ports[port_number(self.workload, probe["tcpSocket"]["port"])]
            socket.create_connection(("127.0.0.1", port), seconds).close()
        except (grpc.RpcError, OSError, subprocess.TimeoutExpired):
            return False
        return True

    def stop(self) -> int:
        """Stop the pod as a kubelet does: the preStop pause, SIGTERM, SIGKILL at the end of the
        grace period. Returns the exit status.
        """
        assert self._process is not None
        time.sleep(
            self.container.get("lifecycle", {})
            .get("preStop", {})
            .get("sleep", {})
            .get("seconds", 0)
        )
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(self.grace_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _serves(self, port: int, service: str, seconds: float) -> bool:
        with grpc.insecure_channel(f"127.0.0.1:{self.ports[port]}") as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _mount(self, path: str, volume: Object) -> None:
        folder = Path(f"{self._folder}{path}")
        if "configMap" in volume:
            data = named(self._node.objects, "ConfigMap", volume["configMap"]["name"]).get(
                "data", {}
            )
            texts = {key: self._here(text) for key, text in data.items()}
            _publish(
                folder,
                {
                    key: _as_redis(text) if key == "redis.conf" else text
                    for key, text in texts.items()
                },
            )
        elif "secret" in volume:
            _publish(folder, self._node.secret(volume["secret"]["secretName"]))
        else:
            folder.mkdir(parents=True)

    def _here(self, text: str) -> str:
        """Replace the manifest's paths and addresses with those of this machine."""

        def replaced(found: re.Match[str]) -> str:
            if found["path"]:
                return f"{self._folder}{found['path']}"
            if found["host"] == "0.0.0.0":
                return f"127.0.0.1:{self.ports[int(found['port'])]}"
            return (
                ",".join(self._node.addresses(found["host"], int(found["port"])))
                or f"127.0.0.1:{found['port']}"
            )

        hosts = [
            "0.0.0.0",
            *(one["metadata"]["name"] for one in objects_of_kind(self._node.objects, "Service")),
        ]
        path, host = ("|".join(map(re.escape, names)) for names in (self._paths, hosts))
        return re.sub(
            rf"(?<![\w./])(?P<path>{path})(?![\w.])|(?<![\w.-])(?P<host>{host}):(?P<port>\d+)",
            replaced,
            text,
        )

    def _known(self, source: Mapping[str, Any]) -> str:
        if "fieldRef" in source:
            fields = {"metadata.name": self.name, "metadata.namespace": "shoal"}
            return fields[source["fieldRef"]["fieldPath"]]
        kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
        amount: str = self.container["resources"][kind][resource]
        return str(
            math.ceil(float(amount.removesuffix("m")) / (1000 if amount.endswith("m") else 1))
        )

    def _image(self) -> dict[str, str]:
        """Lays out the image's files, and returns its variables."""
        if component(self.workload) == "redis":
            return {}
        target = self._target()
        if not (self._folder / "app").exists():
            dockerfile.unpack(target, self._folder)
        reported = {
            key: value for key, value in dockerfile.variables(target).items() if key != "PATH"
        }
        return {
            key: re.sub(r"/(?=app\b|tmp\b)", f"{self._folder}/", value)
            for key, value in reported.items()
        }

    def _target(self) -> str:
        name = self.container["image"].rpartition("/")[2].partition(":")[0]
        return str(name.removeprefix("shoal-"))

    def _command(self) -> list[str]:
        command: list[str] = self.container.get("command") or dockerfile.entrypoint(self._target())
        program, *arguments = map(self._here, [*command, *self.container.get("args", ())])
        if component(self.workload) == "redis":
            words = [
                word.replace("valkey-server", str(find_redis_server()))
                for word in (program, *arguments)
            ]
            port = "--tls-port" if "--tls-port" in words else "--port"
            return [*words, "--bind", "127.0.0.1", port, str(self.ports[6379])]
        assert program == "python", f"{title(self.workload)} starts {program}"
        return [sys.executable, *arguments]


def _publish(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files as a kubelet mounts a ConfigMap or a Secret: links to a folder that is replaced
    as a whole.
    """
    data = folder / f"..{uuid.uuid4()}"
    data.mkdir(parents=True)
    for key, content in files.items():
        (data / key).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "..next").symlink_to(data.name)
    (folder / "..next").rename(folder / "..data")
    for key in files:
        if not (folder / key).is_symlink():
            (folder / key).symlink_to(f"..data/{key}")


def _as_redis(text: str) -> str:
    """Remove the lines of redis.conf that only Valkey knows: a redis-server of this machine may
    refuse them.
    """
    reported = subprocess.run(
        [find_redis_server(), "--version"], capture_output=True, text=True, check=True
    ).stdout
    lines = text.splitlines()
    return "\n".join(
        line for line in lines if "Valkey" in reported or not line.startswith("commandlog-")
    )
