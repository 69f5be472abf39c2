"""The console's files, read once at start. The paths of assets contain a digest of all of them, so
browsers cache them indefinitely and fetch a new version as a whole. The page itself is revalidated
each time by its ETag.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.edge.messages.base import Answer, Headers

STATIC: Final = Path(__file__).parent / "static"
ASSETS: Final = "/console/static/"
_ASSETS_PLACEHOLDER: Final = b"{assets}"
"""The placeholder of the assets' folder in the page."""
_KINDS: Final = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
POLICY: Final = (
    "default-src 'self'; base-uri 'none'; connect-src 'self'; form-action 'none'; "
    "frame-ancestors 'none'; img-src 'self' data:; "
    "object-src 'none'; require-trusted-types-for 'script'"
)
PROTECTION: Final[Headers] = (
    (b"content-security-policy", POLICY.encode()),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)
"""Headers of every answer of the console."""


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: bytes
    tag: bytes
    caching: bytes


class StaticFiles:
    """The files of `folder` by path. `digest` covers all of them."""

    def __init__(self, folder: Path = STATIC) -> None:
        read = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        whole = hashlib.sha256()
        for name, content in read.items():
            whole.update(b"%d %b %d " % (len(name), name.encode(), len(content)) + content)
        self.digest = whole.hexdigest()[:16]
        base = f"{ASSETS}{self.digest}/"
        self._files = {
            f"{base}{name}": _file(name, content, b"public, max-age=31536000, immutable")
            for name, content in read.items()
            if name != "index.html" and Path(name).suffix in _KINDS
        }
        page = read["index.html"].replace(_ASSETS_PLACEHOLDER, base.rstrip("/").encode())
        self._files["/"] = _file("index.html", page, b"no-cache")

    def get(self, path: str, headers: Mapping[str, str]) -> Answer | None:
        """Return the file, a 304 without a body if the browser has it, or None."""
        found = self._files.get(path)
        if found is None:
            return None
        response_headers = (
            (b"etag", found.tag),
            (b"cache-control", found.caching),
            *PROTECTION,
        )
        if found.tag in [
            tag.strip().removeprefix("W/").encode()
            for tag in headers.get("if-none-match", "").split(",")
        ]:
            return Answer(b"", 304, found.kind, response_headers)
        return Answer(found.content, 200, found.kind, response_headers)


def _file(name: str, content: bytes, caching: bytes) -> _File:
    return _File(
        content,
        _KINDS[Path(name).suffix],
        f'"{hashlib.sha256(content).hexdigest()[:32]}"'.encode(),
        caching,
    )
