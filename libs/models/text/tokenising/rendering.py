"""A standalone program that `chat.py` runs in a subprocess: renders a chat template within limits of memory and time.

Templates come with untrusted checkpoints. Jinja's sandbox keeps them from Python's internals, not from endless loops or texts of
gigabytes; resource limits (setrlimit) do. Imports nothing of Shoal, reads one JSON object from stdin,
`{"template", "values": [...]}`, and prints a list of a rendered `text` or an `error` for each of the values.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any, Final, Never

MEMORY_BYTES: Final = 512 << 20
CPU_SECONDS: Final = 2
MOST_CHARACTERS: Final = 1 << 20


def main() -> None:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> Never:
        raise TemplateError(message)

    asked = json.load(sys.stdin)
    _limit()
    # The settings of transformers, for which templates are written.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = raise_exception
    try:
        template = environment.from_string(asked["template"])
    except Exception as error:
        print(json.dumps([{"error": f"is not Jinja: {_told(error)}"}] * len(asked["values"])))
        return
    print(json.dumps([_rendered(template, values) for values in asked["values"]]))


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _rendered(template: Any, values: dict[str, object]) -> dict[str, str]:
    try:
        text: str = template.render(**values)
    except Exception as error:
        return {"error": f"it cannot be rendered for a pair of a query and a document: {_told(error)}"}
    if len(text) > MOST_CHARACTERS:
        return {"error": f"it makes {len(text):,} characters of a pair of short texts; at most {MOST_CHARACTERS:,} are served"}
    return {"text": text}


def _told(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:300]


if __name__ == "__main__":
    main()
