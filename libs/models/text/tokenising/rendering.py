"""A standalone program that `renderer.py` runs in a subprocess: it renders one chat template within
limits of memory and time.

Templates are part of untrusted checkpoints. Jinja's sandbox protects Python's internals; resource
limits (setrlimit) stop endless loops and texts of gigabytes. The program imports nothing of Shoal.

1. The first line of stdin is the template, as JSON. The program answers with the `names` of the
   values that the template reads, or an `error`.
2. Every further line is a list of values. The program answers with a list of a rendered `text` or
   an `error` for each.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from typing import Any, Final, Never

MEMORY_BYTES: Final = 512 << 20
CPU_SECONDS: Final = 2
"""Limit for one line of values."""
MAX_CHARACTERS: Final = 1 << 20
"""Maximum rendered characters beyond those of the values."""


def main() -> None:
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> Never:
        raise TemplateError(message)

    source = json.loads(sys.stdin.readline())
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        most = MEMORY_BYTES if kind == resource.RLIMIT_AS else 0
        resource.setrlimit(kind, (most, most))
    _limit_time()
    # transformers' settings, which templates rely on.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = _json
    try:
        template = environment.from_string(source)
        tree = environment.parse(source)
        names = meta.find_undeclared_variables(tree) & _read_first(tree)
    except Exception as error:
        _reply({"error": f"invalid Jinja: {_describe(error)}"})
        return
    _reply({"names": sorted(names - environment.globals.keys())})
    for line in sys.stdin:
        _limit_time()
        _reply(
            [_rendered(template, values, len(line) + MAX_CHARACTERS) for values in json.loads(line)]
        )


def _json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise as transformers does. Jinja's filter escapes HTML and sorts keys, which models were
    not trained with.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _read_first(node: Any) -> set[str]:
    """Return names that are read before they are set, the template's possible values. Jinja's
    function also returns names set in one block and read in another."""
    from jinja2 import nodes

    found: dict[str, bool] = {}

    def visit(node: Any) -> None:
        if isinstance(node, nodes.Name):
            found.setdefault(node.name, node.ctx == "load")
        # This part is evaluated before the target, although the target precedes it.
        first = {nodes.Assign: "node", nodes.For: "iter"}.get(type(node))
        if first is not None:
            visit(getattr(node, first))
        for child in node.iter_child_nodes():
            visit(child)

    visit(node)
    return {name for name, is_read in found.items() if is_read}


def _reply(value: object) -> None:
    print(json.dumps(value), flush=True)


def _limit_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(
        resource.RLIMIT_CPU,
        (math.ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS, resource.RLIM_INFINITY),
    )


def _rendered(template: Any, values: dict[str, Any], most: int) -> dict[str, Any]:
    try:
        text: str = template.render(values)
        text.encode()  # a template may emit lone surrogates
    except Exception as error:
        return {"error": f"rendering fails: {_describe(error)}"}
    if len(text) > most:
        return {
            "error": f"it renders {len(text):,} characters from short texts; the maximum is "
            f"{most:,}"
        }
    return {"text": text}


def _describe(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:300]


if __name__ == "__main__":
    main()
