"""Serve TEI's HTTP API of one fixed model at an address.

Some clients drop the path of their base URL (Haystack's ranker calls `/rerank` at the host's root),
and TEI's requests do not name a model, so the address determines it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from services.edge.asgi import Receive, Scope, Send


class PrefixApp:
    """An ASGI application that adds `/tei/{model}` before each path.

    Args:
        application: The edge's application, which serves the longer paths.
        model: The id or alias of the model.
    """

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
