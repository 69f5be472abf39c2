"""`python -m tools.k8s.chart [--check]`: generate files of charts/shoal.

- README.md: the table of values, from values.yaml and its comments.
- values.schema.json: the definition of a pool's `scaling`, from libs/catalog/pools.py.
- files/users.acl, with placeholders for password digests, from libs/queue/connection/acl.py.

With --check nothing is written; a stale file is an error.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import yaml

from libs.catalog.schema import pools_text
from libs.queue.connection.acl import acl_file

CHART: Final = Path(__file__).parents[2] / "charts/shoal"
BEGIN: Final = "<!-- values: made by make chart -->\n"
END: Final = "<!-- end of values -->\n"
LONG: Final = 100
"""Characters of a default above which the table refers to values.yaml."""
ELSEWHERE: Final = {"device", "spot"}
"""Keys of pools.yaml that the chart takes from a pool's accelerator and machines."""
ROLES: Final = ("router", "scheduler")


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield path, default and description of each value of values.yaml with a comment.

    Raises ValueError for a value without a comment on itself or on a parent.
    """
    node = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("values.yaml is not a mapping")
    yield from _rows(node, yaml.safe_load(text), text.splitlines(), "")


def _rows(
    node: yaml.MappingNode, values: dict[str, Any], lines: list[str], path: str
) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        name, said = f"{path}{key.value}", comment(lines, key.start_mark.line)
        if said:
            yield name, default(values[key.value]), said
        if (
            isinstance(value, yaml.MappingNode)
            and not value.flow_style
            and _has_comments(value, lines)
        ):
            yield from _rows(value, values[key.value], lines, f"{name}.")
        elif not said:
            raise ValueError(f"values.yaml:{key.start_mark.line + 1}: {name} has no comment")


def _has_comments(node: yaml.MappingNode, lines: list[str]) -> bool:
    return any(comment(lines, key.start_mark.line) for key, _ in node.value)


def comment(lines: list[str], line: int) -> str:
    """Return the comment directly above a line, joined into one line."""
    found: list[str] = []
    while line > 0 and (above := re.fullmatch(r"\s*# ?(.*)", lines[line - 1])):
        found.insert(0, above[1])
        line -= 1
    return " ".join(found)


def default(value: object) -> str:
    """Format a default as Markdown code."""
    text = json.dumps(value, ensure_ascii=False)
    return f"`{text}`" if len(text) <= LONG else "see values.yaml"


def readme() -> str:
    """Render README.md with the current table."""
    path = CHART / "README.md"
    head, _, rest = path.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    table = "".join(
        f"| `{name}` | {value} | {said} |\n"
        for name, value, said in rows((CHART / "values.yaml").read_text())
    )
    return f"{head}{BEGIN}\n| value | default | |\n| --- | --- | --- |\n{table}\n{END}{tail}"


def schema() -> str:
    """Render values.schema.json with the current keys of pools.yaml."""
    document = json.loads((CHART / "values.schema.json").read_text())
    pool = json.loads(pools_text())["properties"]["pools"]["additionalProperties"]
    properties = {key: value for key, value in pool["properties"].items() if key not in ELSEWHERE}
    # Required here, unlike in pools.yaml: KEDA needs it, too.
    document["definitions"]["scaling"] = {
        **pool,
        "properties": properties,
        "required": ["max_workers"],
    }
    return json.dumps(document, indent=2) + "\n"


def users() -> str:
    """Render users.acl with DIGEST-OF-<role> in place of password digests."""
    text = acl_file(router=ROLES[0], scheduler=ROLES[1], admin=None)
    for role in ROLES:
        text = text.replace(sha256(role.encode()).hexdigest(), f"DIGEST-OF-{role}")
    return text


def main() -> int:
    check = "--check" in sys.argv[1:]
    for name, text in {
        "README.md": readme(),
        "values.schema.json": schema(),
        "files/users.acl": users(),
    }.items():
        path = CHART / name
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path} is not current: run make chart", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
