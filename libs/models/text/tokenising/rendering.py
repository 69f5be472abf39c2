"""A standalone program that `renderer.py` runs in a subprocess: renders one chat template within
limits of memory and time.

Templates come with untrusted checkpoints. Jinja's sandbox keeps them from Python's internals, not
from endless loops or texts of gigabytes; resource limits (setrlimit) do. Imports nothing of Shoal.
The first line of stdin is the template, as JSON; every further line is a list of values, which is
answered by a line: a list of a rendered `text` or an `error` for each of them. The first line of
stdout has the `names` of the values that the template looks for, or its `error`.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from typing import Any, Final, Never

MEMORY_BYTES: Final = 512 << 20
CPU_SECONDS: Final = 2
"""Of one line of values."""
MAX_CHARACTERS: Final = 1 << 20
"""More than this may not be rendered, beside what was given."""


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
    # The settings of transformers, for which templates are written.
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
        _answer({"error": f"is not Jinja: {_told(error)}"})
        return
    _answer({"names": sorted(names - environment.globals.keys())})
    for line in sys.stdin:
        _limit_time()
        _answer(
            [_rendered(template, values, len(line) + MAX_CHARACTERS) for values in json.loads(line)]
        )


def _json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own escapes HTML and sorts keys, which models are not trained
    with.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _read_first(node: Any) -> set[str]:
    """Names that are read before they are set: values that the template is given, or may be. Jinja
    counts others beside them, which are set in one block and read in another."""
    from jinja2 import nodes

    found: dict[str, bool] = {}

    def visit(node: Any) -> None:
        if isinstance(node, nodes.Name):
            found.setdefault(node.name, node.ctx == "load")
        first = {nodes.Assign: "node", nodes.For: "iter"}.get(
            type(node)
        )  # is evaluated before the target that stands before it
        if first is not None:
            visit(getattr(node, first))
        for child in node.iter_child_nodes():
            visit(child)

    visit(node)
    return {name for name, is_read in found.items() if is_read}


def _answer(value: object) -> None:
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
        text.encode()  # a template may write halves of characters
    except Exception as error:
        return {"error": f"it cannot be rendered: {_told(error)}"}
    if len(text) > most:
        return {
            "error": f"it makes {len(text):,} characters of short texts; at most {most:,} are served"
        }
    return {"text": text}


def _told(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:300]


if __name__ == "__main__":
    main()
