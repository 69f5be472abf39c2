"""A hub on loopback: the two endpoints that the store uses of the real one, with its headers, its
redirect to another host for large files, and its error codes."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LARGE = (".safetensors", ".bin", ".onnx", ".model")


@dataclass
class FakeHub:
    """Serve `models`, directories by id. Faults are counted by path of the file."""

    models: dict[str, Path] = field(default_factory=dict)
    token: str = ""
    """If set, a call without it is refused."""
    is_gated: bool = False
    cut: dict[str, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    """Sizes in bytes after which the next responses for this file end."""
    flip: Counter[str] = field(default_factory=Counter)
    """Number of next responses for this file with one bit wrong."""
    statuses: deque[int] = field(default_factory=deque)
    """The next calls are answered with these."""
    gate: threading.Event = field(default_factory=threading.Event)
    """While it is not set, ranges of large files beyond `free_bytes` wait."""
    free_bytes: int = 1 << 60
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes sent by file, before the cut if it is cut. A response counts in the Counter that was
    set when its call arrived.
    """
    calls: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    """Tokens that the second host received."""
    waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released whenever an answer waits at the gate."""
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def listing(self, model: str) -> dict[str, Any]:
        root = self.models[model]
        files = sorted(path for path in root.rglob("*") if path.is_file())
        return {
            "id": model,
            "sha": COMMIT,
            "siblings": [self._sibling(path, str(path.relative_to(root))) for path in files],
        }

    @staticmethod
    def _sibling(path: Path, name: str) -> dict[str, Any]:
        content = path.read_bytes()
        blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
        if name.endswith(_LARGE):
            entry["lfs"] = {
                "sha256": hashlib.sha256(content).hexdigest(),
                "size": len(content),
                "pointerSize": 130,
            }
        return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *arguments: object) -> None:
        return

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.calls.append(path)
        if self.hub.statuses:
            self._refuse(self.hub.statuses.popleft())
        elif path.startswith("/cdn/"):
            self.hub.tokens.add(self.headers.get("Authorization", ""))
            self._send_file(*path.removeprefix("/cdn/").split("//"))
        elif self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._refuse(401)
        elif path.startswith("/api/models/"):
            self._send_listing(path.removeprefix("/api/models/"))
        else:
            self._resolve(path)

    def _send_listing(self, name: str) -> None:
        model, _, revision = name.partition("/revision/")
        if model not in self.hub.models:
            self._refuse(404, "RepoNotFound")
        elif revision not in ("", "main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            self._send(200, json.dumps(self.hub.listing(model)).encode())

    def _resolve(self, path: str) -> None:
        model, _, rest = path.removeprefix("/").partition("/resolve/")
        commit, _, name = rest.partition("/")
        if self.hub.is_gated:
            self._refuse(403, "GatedRepo")
        elif commit != COMMIT or not (self.hub.models[model] / name).is_file():
            self._refuse(404, "EntryNotFound")
        elif name.endswith(_LARGE):
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.hub.port}/cdn/{model}//{name}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._send_file(model, name)

    def _send_file(self, model: str, name: str) -> None:
        content = (self.hub.models[model] / name).read_bytes()
        sent = self.hub.sent
        start, end = 0, len(content)
        asked = self.headers.get("Range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) + 1
        if name.endswith(_LARGE) and start >= self.hub.free_bytes:
            self.hub.waiting.release()
            self.hub.gate.wait(120)
        body = bytearray(content[start:end])
        if self.hub.flip[name]:
            self.hub.flip[name] -= 1
            body[len(body) // 2] ^= 1
        length = len(body)
        if self.hub.cut[name]:
            del body[self.hub.cut[name].popleft() :]
        sent[name] += len(body)
        self._send(206 if asked else 200, bytes(body), length)

    def _refuse(self, status: int, code: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        if length not in (None, len(body)):
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serves until the block ends."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.port = server.server_address[1]
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
