"""The page of HTTP: routes and bodies of the OpenAPI document that an edge serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from services.edge.batches.routes import ROUTES as BATCH_ROUTES
from services.edge.jobs.routes import ROUTES as JOB_ROUTES
from services.edge.openapi import document
from services.edge.routes import ROUTES
from tools.docs.markdown import code, table

REF: Final = "#/components/schemas/"
DIALECTS: Final = {
    "openai": "OpenAI, Jina, Voyage and rerankers",
    "models": "Models",
    "sie": "SIE and Shoal",
    "tei": "TEI",
    "cohere": "Cohere",
    "ollama": "Ollama",
    "vllm": "vLLM and Infinity",
    "kserve": "KServe v2",
}
"""Titles of dialects. A route belongs to the dialect that its errors have."""
HEAD: Final = """# HTTP routes

Generated from the OpenAPI document of the edge (`GET /openapi.json`) by `python -m tools.docs`.
[HTTP](../http.md) explains dialects, names, errors and limits with examples; `GET /docs` of an edge sends requests from a page.
`{model}` is a model id, with its slash as it is or as `%2F`, or an alias.
Routes of files and batches exist if [SHOAL_BATCHES_URL](settings.md#edge) is set, and those of jobs if [SHOAL_JOBS_ROOTS](settings.md#edge) is, too.
A section has the routes with errors in that dialect's form.
"""


def page() -> str:
    described = document((*ROUTES, *BATCH_ROUTES, *JOB_ROUTES))
    dialects: dict[str, list[tuple[str, str, str, str]]] = {}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            bodies = operation.get("requestBody", {}).get("content", {}).values()
            body = next((content.get("schema") for content in bodies), None)
            answer = next(iter(operation["responses"]["200"]["content"].values())).get("schema")
            row = (
                code(f"{method.upper()} {path}"),
                operation["summary"],
                schema_type(body),
                schema_type(answer),
            )
            dialects.setdefault(operation["tags"][0], []).append(row)
    parts = [HEAD]
    for dialect, rows in dialects.items():
        parts.append(
            f"\n## {DIALECTS.get(dialect, dialect)}\n\n"
            + table(("route", "purpose", "body", "answer"), rows)
        )
    parts.append("\n## Bodies\n")
    for name, schema in sorted(described["components"]["schemas"].items()):
        parts += _schema(name, schema)
    return "".join(parts)


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    text = " ".join(schema.get("description", "").split())
    yield f"\n### {name}\n\n" + (f"{text}\n\n" if text else "")
    if "properties" not in schema:
        yield schema_type(schema) + "\n"
        return
    required = schema.get("required", ())
    rows = [
        (code(field), schema_type(kind), "required" if field in required else code(_default(kind)))
        for field, kind in schema["properties"].items()
    ]
    yield table(("field", "type", "default"), rows) if rows else "No fields.\n"


def schema_type(schema: dict[str, Any] | None) -> str:
    """Return the type that a JSON schema describes, with links to the bodies of the page."""
    if not schema:
        return ""
    if ref := schema.get("$ref"):
        name = ref.removeprefix(REF)
        return f"[{name}](#{name.lower()})"
    if kinds := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(filter(None, map(schema_type, kinds)))) or "anything"
    if "enum" in schema:
        return " or ".join(code(str(value)) for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {schema_type(schema.get('items')) or 'anything'}"
    if kind == "object" and isinstance(values := schema.get("additionalProperties"), dict):
        return f"object of {schema_type(values) or 'anything'}"
    return str(kind)


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    return "" if value is None else str(value)
