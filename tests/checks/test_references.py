"""`make check` finds references to what does not exist (tools/references.py)."""

from __future__ import annotations

import re
from pathlib import Path

from tools import references

PAGE = """# One page

See [the other](docs/other.md), [its part](docs/other.md#a-part-of-it), \
[no part](docs/other.md#of-it), [above](#one-page),
[nothing](docs/nothing.md), [the web](https://example.org/x.md), `libs/a.py`, `a.py`, \
`libs/b.py`, `b.py`, `config.json`.

```
`fenced.py` and [fenced](fenced.md)
```
"""
MODULE = '''"""Reads `a.py`, docs/other.md and docs/gone.md."""

A = "docs/text.md"  # of `gone.py`
'''


def test_broken_reference_is_named_with_its_line(tmp_path: Path) -> None:
    texts = {"README.md": PAGE, "docs/other.md": "## A part of it\n", "libs/a.py": MODULE}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(references.dead(frozenset(texts), tmp_path)) == [
        "README.md:3: no file or heading docs/other.md#of-it",
        "README.md:4: no file or heading docs/nothing.md",
        "README.md:4: no file libs/b.py",
        "README.md:4: no file b.py",
        "libs/a.py:1: no file docs/gone.md",
        "libs/a.py:3: no file gone.py",
    ]


def test_arguments_of_commands_have_capital_names() -> None:
    """A user types names in lower case as they are shown, and replaces the others."""
    page = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()
    names = re.findall(r"^\* `(?!-)(\S+) <", page, re.MULTILINE)
    assert len(names) > 20
    assert not [name for name in names if re.fullmatch(r"[a-z_]+", name)]
