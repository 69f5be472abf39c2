"""Build the OpenAPI 3.1 document of a table of routes from the msgspec Structs of their bodies.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from shoal.version import VERSION

from services.edge.messages.base import Route
from services.edge.routes import PARAMETER

_PARAMETERS: Final = {
    "model": "A model id, org/name, with its slash as it is or as %2F; or an alias.",
    "file_id": "The id of a file.",
    "batch_id": "The id of a batch.",
    "job_id": "The id of a submitted job.",
}
"""Descriptions of the parameters in paths."""
_ERROR: Final = {
    "description": "An error in the form of the path's dialect. Retry-After and x-should-retry say "
    "whether to retry.",
    "content": {"application/json": {"schema": {"type": "object"}}},
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document as values that JSON can represent."""
    given = [kind for route in routes for kind in (route.body, route.answer) if kind is not None]
    types: list[Any] = list(
        dict.fromkeys(
            one for kind in given for one in (kind if isinstance(kind, tuple) else (kind,))
        )
    )
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schema_of: dict[Any, Any] = dict(zip(types, schemas, strict=True))
    schema_of |= {
        kind: {"anyOf": [schema_of[one] for one in kind]}
        for kind in given
        if isinstance(kind, tuple)
    }
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Shoal over HTTP",
            "version": VERSION,
            "description": "Small models in the wire formats of existing clients (docs/http.md).",
        },
        # Relative to the document's address, because a proxy may change the path.
        "servers": [{"url": "/", "description": "The edge that serves this document."}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _operation(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    identity = "".join(
        part if part.isalnum() else "_" for part in f"{route.method.lower()}{route.path}"
    ).strip("_")
    content = {"schema": schema_of[route.answer]} if route.answer is not None else {}
    kind = {str: "text/plain", bytes: "application/octet-stream"}.get(
        route.answer, "application/json"
    )
    contents = {kind: content}
    if route.stream_media_type:
        contents[route.stream_media_type.decode().partition(";")[0]] = {
            "schema": {"type": "string"}
        }
    operation: dict[str, Any] = {
        "operationId": identity,
        "summary": route.summary,
        "tags": [route.dialect.name],
        "responses": {
            "200": {"description": "The answer.", "content": contents},
            "default": _ERROR,
        },
    }
    operation["parameters"] = [
        *(_parameter(name, "path", _PARAMETERS[name]) for name in PARAMETER.findall(route.path)),
        *(_parameter(name, "query", text) for name, text in route.query.items()),
    ]
    if not operation["parameters"]:
        del operation["parameters"]
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {route.body_media_type: {"schema": schema_of[route.body]}},
        }
    return operation


def _parameter(name: str, place: str, description: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "schema": {"type": "string"},
        "description": description,
    }
