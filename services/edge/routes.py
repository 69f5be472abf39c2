"""The table of routes: the dialect of each method and path. Pure.

`{model}` in a path matches the rest including slashes, because model ids contain one, and so does
any other name in braces; a path has at most one. Paths are matched after decoding (`%2F` is a
slash). To add a dialect, add its module's ROUTES here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from services.edge.dialects import (
    cohere,
    huggingface,
    jina,
    kserve,
    models,
    ollama,
    openai,
    rerank,
    sie,
    tei,
    tokens,
    vllm,
)
from services.edge.dialects.generation import chat, completions, ollama_chat
from services.edge.messages.base import Dialect, HttpError, Route

PARAMETER: Final = re.compile(r"\{(\w+)\}")
"""The part of a path that matches any text."""
ROUTES: Final[tuple[Route, ...]] = (
    *openai.ROUTES,
    *chat.ROUTES,
    *completions.ROUTES,
    *rerank.ROUTES,
    *sie.ROUTES,
    *tei.ROUTES,
    *tokens.ROUTES,
    *huggingface.ROUTES,
    *cohere.ROUTES,
    *jina.ROUTES,
    *ollama.ROUTES,
    *ollama_chat.ROUTES,
    *vllm.ROUTES,
    *kserve.ROUTES,
    *models.ROUTES,
)
DEFAULT: Final[Dialect] = openai.OPENAI
"""The dialect of errors for paths without a route."""


class RouteTable:
    """Finds the route of a request. Paths without a parameter take precedence, then longer ones."""

    def __init__(self, routes: Iterable[Route] = ROUTES) -> None:
        self.routes: Sequence[Route] = tuple(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        self._open: list[tuple[str, str, dict[str, Route]]] = []
        for route in self.routes:
            self._methods(route.path).setdefault(route.method, route)
        self._open.sort(key=lambda row: -len(row[0]) - len(row[1]))

    def find(self, method: str, path: str) -> tuple[Route, str]:
        """Return the route and the text that its parameter matches. Raises HttpError NO_SUCH_ROUTE,
        or WRONG_METHOD with the allowed methods.
        """
        methods, model = self._match(path)
        if methods is None:
            problem = HttpError(
                "NO_SUCH_ROUTE",
                f"{method} {path[:200]} does not exist; GET /openapi.json lists all routes",
            )
            if path.startswith("/api/"):
                problem.dialect = ollama.OLLAMA
            raise problem
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            raise HttpError(
                "WRONG_METHOD", f"{path[:200]} takes {allowed}, not {method}", allow=allowed
            )
        return route, model

    def _match(self, path: str) -> tuple[dict[str, Route] | None, str]:
        found = self._exact.get(path) or self._exact.get(path.rstrip("/"))
        if found is not None:
            return found, ""
        for start, end, methods in self._open:
            if path.startswith(start) and path.endswith(end) and len(path) > len(start) + len(end):
                return methods, path[len(start) : len(path) - len(end)]
        return None, ""

    def _methods(self, path: str) -> dict[str, Route]:
        found = PARAMETER.search(path)
        if found is None:
            return self._exact.setdefault(path, {})
        start, end = path[: found.start()], path[found.end() :]
        for known_start, known_end, methods in self._open:
            if (known_start, known_end) == (start, end):
                return methods
        self._open.append((start, end, {}))
        return self._open[-1][2]
