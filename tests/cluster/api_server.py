"""A real etcd and a real kube-apiserver as processes of this machine, and clients of them.

No controller runs.
"""

from __future__ import annotations

import json
import secrets
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.cluster.plan import Found
from tests.k8s.manifests import NAMESPACE, Object
from tests.support.certificates import Certificates
from tests.support.cluster import lasting_port
from tests.support.waiting import wait_until

MERGE: Final = "application/merge-patch+json"
# Without controllers, no tokens of ServiceAccounts are made, and finalizers that protect volumes in
# use are never removed.
WITHOUT_ADMISSION: Final = "ServiceAccount,StorageObjectInUseProtection"
START_SECONDS: Final = 120.0


class Refused(Exception):
    """A refusal by kubectl or the API server, with its message."""


class ApiServer:
    """Runs while its context is open, with its data, keys and logs below `folder`. Nothing listens
    but on loopback.

    Its one user is of system:masters, known by a token made for this run; the certificate is of an
    authority made for it.
    """

    def __init__(self, found: Found, folder: Path) -> None:
        self._found = found
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._token = secrets.token_hex(16)
        self._port, self._client_port, self._peer_port = (lasting_port() for _ in range(3))
        self._context: ssl.SSLContext | None = None
        self.kubeconfig = folder / "kubeconfig"

    def __enter__(self) -> ApiServer:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start("etcd", self._etcd_command())
            self._start("kube-apiserver", self._api_server_command())
            wait_until(self._is_ready, START_SECONDS, "the API server to be ready")
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in reversed(self.processes.values()):
            process.kill()
            process.wait()

    def version(self) -> str:
        reported: str = self.request("GET", "/version")["gitVersion"]
        return reported

    def request(
        self, method: str, path: str, body: object = None, content: str = "application/json"
    ) -> Any:
        """The answer's JSON. Raises Refused with the server's message."""
        data = None if body is None else json.dumps(body).encode()
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": content,
            "Accept": "application/json",
        }
        asked = urllib.request.Request(
            f"https://127.0.0.1:{self._port}{path}", data, headers, method=method
        )
        try:
            with urllib.request.urlopen(asked, timeout=30, context=self._context) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refusal:
            raise Refused(
                f"{method} {path}: {refusal.code} {refusal.read().decode(errors='replace')[:500]}"
            ) from None

    def kubectl(self, *arguments: str, documents: str = "") -> str:
        """Return kubectl's output. `documents` is its standard input. Raises Refused with its
        error.
        """
        return kubectl(self._found.kubectl, self.kubeconfig, *arguments, documents=documents)

    def objects(self, *kinds: str, namespace: str = NAMESPACE) -> list[Object]:
        """Return the stored objects, with the server's defaults."""
        listed = json.loads(
            self.kubectl("get", ",".join(kinds), "--namespace", namespace, "--output", "json")
        )
        found: list[Object] = listed["items"]
        return found

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self._folder, stdout=log, stderr=log
            )

    def _etcd_command(self) -> list[str]:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._client_port, self._peer_port))
        return [
            self._found.etcd,
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]

    def _api_server_command(self) -> list[str]:
        certificates = Certificates(self._folder / "certificates")
        made = certificates.issue("router")  # any party: what counts is that it is of loopback
        self._context = ssl.create_default_context(cafile=str(certificates.ca))
        tokens, accounts = self._folder / "tokens.csv", self._folder / "accounts.key"
        _write(accounts, _signing_key())
        _write(tokens, f'{self._token},check,check,"system:masters"\n')
        _write(self.kubeconfig, json.dumps(_kubeconfig(self._port, certificates.ca, self._token)))
        return [
            self._found.api_server,
            f"--etcd-servers=http://127.0.0.1:{self._client_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--tls-cert-file={made.certificate}",
            f"--tls-private-key-file={made.key}",
            f"--cert-dir={self._folder}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={accounts}",
            f"--service-account-signing-key-file={accounts}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            f"--disable-admission-plugins={WITHOUT_ADMISSION}",
        ]

    def still_runs(self) -> None:
        """Raises Refused with the last words of a process that has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                words = (self._folder / f"{name}.log").read_text(errors="replace")[-2000:]
                raise Refused(f"{name} ended with status {process.returncode}: {words}")

    def _is_ready(self) -> bool:
        self.still_runs()
        asked = urllib.request.Request(
            f"https://127.0.0.1:{self._port}/readyz",
            headers={"Authorization": f"Bearer {self._token}"},
        )
        try:
            with urllib.request.urlopen(asked, timeout=5, context=self._context) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def kubectl(
    program: str,
    kubeconfig: Path | None,
    *arguments: str,
    documents: str = "",
    seconds: float = 120,
) -> str:
    """Run kubectl and return its output. Raises Refused with its standard error."""
    options = ["--kubeconfig", str(kubeconfig)] if kubeconfig is not None else []
    command = [program, *options, *arguments]
    done = subprocess.run(
        command, input=documents, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode:
        raise Refused(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _write(path: Path, text: str) -> None:
    """Write a file that only this user may read: it holds a token."""
    path.touch(mode=0o600)
    path.write_text(text)


def _signing_key() -> str:
    """Return the key of ServiceAccounts' tokens, in the older form, from which the server also
    reads the public key.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(
        Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
    ).decode()


def _kubeconfig(port: int, ca: Path, token: str) -> Mapping[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "check",
                "cluster": {
                    "server": f"https://127.0.0.1:{port}",
                    "certificate-authority": str(ca.resolve()),
                },
            }
        ],
        "users": [{"name": "check", "user": {"token": token}}],
        "contexts": [{"name": "check", "context": {"cluster": "check", "user": "check"}}],
        "current-context": "check",
    }
