"""A standalone program that `renderer.py` runs in a subprocess: renders one chat template within limits of memory and time.

Templates come with untrusted checkpoints. Jinja's sandbox keeps them from Python's internals, not from endless loops or texts of
gigabytes; resource limits (setrlimit) do. Imports nothing of Shoal. The first line of stdin is the template, as JSON; every further
line is a list of values, which is answered by a line: a list of a rendered `text` or an `error` for each of them.
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
MOST_CHARACTERS: Final = 1 << 20
"""More than this may not be rendered, beside what was given."""


def main() -> None:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> Never:
        raise TemplateError(message)

    source = json.loads(sys.stdin.readline())
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        most = MEMORY_BYTES if kind == resource.RLIMIT_AS else 0
        resource.setrlimit(kind, (most, most))
    _limit_time()
    # The settings of transformers, for which templates are written.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = raise_exception
    template, broken = None, ""
    try:
        template = environment.from_string(source)
    except Exception as error:
        broken = f"is not Jinja: {_told(error)}"
    for line in sys.stdin:
        _limit_time()
        most = len(line) + MOST_CHARACTERS
        print(json.dumps([_rendered(template, values, most) if template else {"error": broken} for values in json.loads(line)]))
        sys.stdout.flush()


def _limit_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS, resource.RLIM_INFINITY))


def _rendered(template: Any, values: dict[str, Any], most: int) -> dict[str, Any]:
    try:
        text: str = template.render(values)
        text.encode()  # a template may write halves of characters
    except Exception as error:
        return {"error": f"it cannot be rendered: {_told(error)}"}
    if len(text) > most:
        return {"error": f"it makes {len(text):,} characters of short texts; at most {most:,} are served"}
    return {"text": text}


def _told(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:300]


if __name__ == "__main__":
    main()
