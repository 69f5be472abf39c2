"""A Kubernetes API server that has only Secrets, for Helm's `lookup` where no cluster exists."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.k8s.manifests import CLUSTER_WIDE, Object

Answer = tuple[int, dict[str, Any]]


@contextmanager
def FakeApiServer(
    objects: Sequence[Object], passwords: Mapping[str, str], *, namespace: str, status: int = 404
) -> Iterator[str]:
    """Run a fake API server that knows the kinds of `objects`, and yield its address.

    Args:
        passwords: The passwords of the namespace's Secrets by their names.
        status: The answer for any other Secret.
    """
    answers = _discovery(objects) | {
        f"/api/v1/namespaces/{namespace}/secrets/{name}": (200, _secret(name, text))
        for name, text in passwords.items()
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            code, document = answers.get(path) or _failure(
                status if "/secrets/" in path else 404, path.rpartition("/")[2]
            )
            body = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _discovery(objects: Sequence[Object]) -> dict[str, Answer]:
    kinds: dict[str, set[str]] = {}
    for one in objects:
        kinds.setdefault(one["apiVersion"], set()).add(one["kind"])
    groups = [_group(version) for version in kinds if "/" in version]
    lists = {
        f"/api/{version}" if version == "v1" else f"/apis/{version}": (
            200,
            _resources(version, names),
        )
        for version, names in kinds.items()
    }
    return {
        "/version": (200, {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}),
        "/api": (200, {"kind": "APIVersions", "versions": ["v1"]}),
        "/apis": (200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}),
        **lists,
    }


def _group(version: str) -> dict[str, Any]:
    name, _, short = version.partition("/")
    this = {"groupVersion": version, "version": short}
    return {"name": name, "versions": [this], "preferredVersion": this}


def _resources(version: str, kinds: set[str]) -> dict[str, Any]:
    resources = [
        {
            "name": f"{kind.lower()}s",
            "kind": kind,
            "namespaced": kind not in CLUSTER_WIDE,
            "verbs": ["get"],
        }
        for kind in sorted(kinds)
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def _secret(name: str, password: str) -> dict[str, Any]:
    data = {"password": b64encode(password.encode()).decode()}
    return {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": name}, "data": data}


def _failure(code: int, name: str) -> Answer:
    reason, words = {403: ("Forbidden", "is forbidden"), 404: ("NotFound", "not found")}[code]
    document = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
    }
    return code, document | {
        "message": f'secrets "{name}" {words}',
        "details": {"name": name, "kind": "secrets"},
    }
