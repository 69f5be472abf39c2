"""The page `/docs` and its files, read once at start. Their paths contain a digest of all of them,
so browsers cache them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from services.edge.console.files import POLICY, PROTECTION
from services.edge.messages.base import Answer, Headers

STATIC: Final = Path(__file__).parent / "static"
PAGE: Final = "/docs"
_ASSETS: Final = {
    "docs.css": b"text/css; charset=utf-8",
    "docs.js": b"text/javascript; charset=utf-8",
    "vendor/rapidoc-min.js": b"text/javascript; charset=utf-8",
}
_ASSETS_PLACEHOLDER: Final = b"{assets}"
"""The placeholder of the assets' folder in the page."""
_DOCS_POLICY: Final = f"{POLICY}; style-src 'self' 'unsafe-inline'".encode()
"""The console's policy plus inline styles, which RapiDoc writes. Only the edge's scripts run."""


def reference_answers(folder: Path = STATIC) -> Mapping[str, Callable[[], Answer]]:
    """Return the answers to GET of the page and of its files, by path."""
    read = {name: (folder / name).read_bytes() for name in _ASSETS}
    page = (folder / "index.html").read_bytes()
    digest = hashlib.sha256(b"\0".join([page, *read.values()])).hexdigest()[:16]
    # Relative to the page, because a proxy may serve it below another path.
    page = page.replace(_ASSETS_PLACEHOLDER, f"docs/{digest}".encode())
    assets = {
        f"{PAGE}/{digest}/{name}": _asset(content, _ASSETS[name]) for name, content in read.items()
    }
    return {PAGE: _static_answer(page, b"text/html; charset=utf-8", b"no-cache"), **assets}


def _asset(content: bytes, kind: bytes) -> Callable[[], Answer]:
    return _static_answer(content, kind, b"public, max-age=31536000, immutable")


def _static_answer(content: bytes, kind: bytes, caching: bytes) -> Callable[[], Answer]:
    protection = dict(PROTECTION) | {
        b"content-security-policy": _DOCS_POLICY,
        b"cache-control": caching,
    }
    headers: Headers = tuple(protection.items())
    return lambda: Answer(content, 200, kind, headers)
