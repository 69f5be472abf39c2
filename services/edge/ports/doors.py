"""Addresses at which all of TEI's paths are one model's.

Some clients drop the path of the URL that they are given (Haystack's ranker asks for `/rerank` at
the host's root), and no request of TEI's names a model: so an address has one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from services.edge.asgi import Receive, Scope, Send


class PrefixApp:
    """The application, with `/tei/{model}` before each path. `model`: a name as callers give it."""

    def __init__(
        self, application: Callable[[Scope, Receive, Send], Awaitable[None]], model: str
    ) -> None:
        self._application = application
        self._prefix = f"/tei/{model}"

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            raw = self._prefix.encode() + scope["raw_path"].rstrip(b"/")
            scope = {**scope, "path": self._prefix + scope["path"].rstrip("/"), "raw_path": raw}
        await self._application(scope, receive, send)
